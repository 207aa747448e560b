"""The `tgmm` kernel on Hopper: for each weight the sum of the outer products of its rows.

Persistent and warp-specialised as the forward kernel. The sum runs over the rows of both operands,
so that the left operand is read transposed. Copies begin at multiples of 8 rows, the height of the
tiles of the tensor cores; rows of other groups that they load at both ends of a group are set to 0
in shared memory.
"""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import Slice

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.common.refs import Index, Ref
from ejkernel.kernels.grouped_matmul.layout import GroupLayout
from ejkernel.kernels.grouped_matmul.pallas_sm90.configs import (
    BLOCK_K,
    WARPGROUP_ROWS,
    HopperTileConfig,
)
from ejkernel.kernels.grouped_matmul.pallas_sm90.pipeline import (
    INTERPRETED,
    WGMMA,
    BufferViews,
    Epilogue,
    RingBuffer,
    SharedBuffer,
    TmaCopy,
    allocate,
    tiled_memory,
    untiled_memory,
)
from ejkernel.kernels.grouped_matmul.pallas_sm90.schedule import (
    for_each_tile,
    specialise_over_tiles,
    thread_blocks,
    tile_coordinates,
)
from ejkernel.ops.platform import Device

# Rows of a tile of the tensor cores, and the numbers in it.
_TILE_ROWS = 8
_TILE_SIZE = _TILE_ROWS * BLOCK_K


def tgmm(
    left: jax.Array,
    right: jax.Array,
    layout: GroupLayout,
    dtype: np.dtype,
    tiles: HopperTileConfig,
    device: Device,
) -> jax.Array:
    """For each weight the sum over its rows of `left[r] right[r]^T`, [e, c, d]; 0 without rows.

    A tile of the result has `block_m` columns of `left` [m, c] and `block_n` of `right` [m, d]. The
    result has the dtype of both, which `dtype` must be.
    """
    c, d = left.shape[1], right.shape[1]
    # Copies load whole tiles of the tensor cores.
    left, right = (_pad(x, _TILE_ROWS, BLOCK_K) for x in (left, right))
    weights = layout.starts.shape[0]
    kernel = _WeightGradKernel(left, right, weights, tiles, device)
    scratch = allocate(kernel.buffers, tiles, tiles.consumers + 1, kernel.interpreted)
    run = gpu.kernel(
        kernel.body,
        out_type=jax.ShapeDtypeStruct((weights, left.shape[1], right.shape[1]), left.dtype),
        scratch_types={**scratch, "is_masked": gpu.barriers(1, tiles.consumers)},
        blocks=kernel.blocks,
        warpgroups=tiles.consumers + 1,
        interpreted=kernel.interpreted,
    )
    return run(left, right, layout.starts, layout.ends)[:, :c, :d]


def _pad(x: jax.Array, *multiples: int) -> jax.Array:
    pads = [(0, -size % multiple) for size, multiple in zip(x.shape, multiples, strict=True)]
    return jnp.pad(x, pads) if any(after for _, after in pads) else x


class _WeightGradKernel:
    """The kernel: its static sizes, and the programs of its warpgroups; `body` sets the references.

    The consumers meet at the barrier `is_masked` after rows of other groups were set to 0.
    """

    left: Ref
    right: Ref
    starts: Ref
    ends: Ref
    out: Ref
    smem: dict[str, BufferViews]
    acc_smem: Ref | None
    ring: RingBuffer
    is_masked: Ref

    def __init__(
        self,
        left: jax.Array,
        right: jax.Array,
        weights: int,
        tiles: HopperTileConfig,
        device: Device,
    ):
        self.tiles, self.dtype = tiles, left.dtype
        self.c, self.d = left.shape[1], right.shape[1]
        self.row_tiles, self.column_tiles = -(-self.c // tiles.block_m), -(-self.d // tiles.block_n)
        self.total = weights * self.row_tiles * self.column_tiles
        self.blocks = thread_blocks(self.total, device)
        self.interpreted = gpu.is_interpreted(device)
        self.engine = INTERPRETED if self.interpreted else WGMMA
        self.buffers = self._buffers()

    def _buffers(self) -> dict[str, SharedBuffer]:
        tiles, dtype, stages = self.tiles, self.dtype, self.tiles.stages
        plain = lambda *shape: gpu.plgpu.SMEM((*shape, _TILE_SIZE), dtype)
        panels = tiles.block_n // BLOCK_K
        results = (tiles.consumers, tiles.out_buffers, WARPGROUP_ROWS, BLOCK_K)
        left, right = (
            SharedBuffer(
                tiled_memory(dtype, stages, *shape),
                plain=plain(stages, *blocks),
                interpreted=self.interpreted,
            )
            for shape, blocks in (
                (
                    (tiles.consumers, BLOCK_K, WARPGROUP_ROWS),
                    (tiles.consumers, BLOCK_K // _TILE_ROWS),
                ),
                ((BLOCK_K, tiles.block_n), (BLOCK_K // _TILE_ROWS, panels)),
            )
        )
        out = SharedBuffer(
            tiled_memory(dtype, *results),
            untiled=untiled_memory(dtype, *results),
            interpreted=self.interpreted,
        )
        return {"left_smem": left, "right_smem": right, "out_smem": out}

    def body(
        self,
        left: Ref,
        right: Ref,
        starts: Ref,
        ends: Ref,
        out: Ref,
        full: Ref,
        empty: Ref,
        is_masked: Ref,
        acc_smem: Ref | None = None,
        **smem: Ref | Iterable[Ref],
    ) -> None:
        """What every warpgroup runs."""
        self.left, self.right, self.out = left, right, out
        self.starts, self.ends = starts, ends
        self.smem = {name: buffer.bind(smem[name]) for name, buffer in self.buffers.items()}
        self.acc_smem, self.is_masked = acc_smem, is_masked
        self.ring = RingBuffer(self.tiles.stages, self.engine, full, empty)
        consumers, tiles = self.tiles.consumers, self.for_each_tile
        specialise_over_tiles(consumers, tiles, self.load_tile, self.compute_tile)

    def for_each_tile(self, process: Callable[..., jax.Array]) -> None:
        """`step = process(step, group, row, column, start, end)` for this block's tiles."""
        tiles_per_weight = self.row_tiles * self.column_tiles

        def read(index: jax.Array) -> tuple[jax.Array, ...]:
            group = lax.div(index, tiles_per_weight)
            row, column = tile_coordinates(
                index - group * tiles_per_weight,
                self.row_tiles,
                self.column_tiles,
                self.tiles.raster_band,
            )
            return group, row, column, self.starts[group], self.ends[group]

        for_each_tile(self.total, self.blocks, read, process)

    def steps(self, start: Index, end: Index) -> tuple[jax.Array, jax.Array]:
        """The row at which the first step of a group begins, and the number of its steps."""
        first = lax.div(start, _TILE_ROWS) * _TILE_ROWS
        count = lax.div(end - first + BLOCK_K - 1, BLOCK_K)
        return first, jnp.where(end > start, count, 0)

    def warpgroup_row(self, row: Index, warpgroup: Index) -> Index:
        """The first row of the result that a warpgroup computes."""
        return row * self.tiles.block_m + warpgroup * WARPGROUP_ROWS

    def load_tile(
        self,
        step: jax.Array,
        group: jax.Array,
        row: jax.Array,
        column: jax.Array,
        start: jax.Array,
        end: jax.Array,
    ) -> jax.Array:
        """The producer's part of a tile: copy the rows of its group, step by step."""
        ds, tiles = gpu.pl.ds, self.tiles
        first, count = self.steps(start, end)
        left, right = self.smem["left_smem"].tiled, self.smem["right_smem"].tiled

        def one_step(i: jax.Array, step: jax.Array) -> Index:
            rows = ds(gpu.pl.multiple_of(first + i * BLOCK_K, _TILE_ROWS), BLOCK_K)
            copies = []
            for w in range(tiles.consumers):
                columns = ds(self.warpgroup_row(row, w), WARPGROUP_ROWS)
                destination = lambda stage, w=w: left.at[stage, w]
                copies.append(TmaCopy(self.left.at[rows, columns], destination))
            columns = ds(column * tiles.block_n, tiles.block_n)
            copies.append(TmaCopy(self.right.at[rows, columns], lambda stage: right.at[stage]))
            return self.ring.produce(step, copies)

        return lax.fori_loop(0, count, one_step, step)

    def compute_tile(
        self,
        warpgroup: jax.Array,
        step: jax.Array,
        group: jax.Array,
        row: jax.Array,
        column: jax.Array,
        start: jax.Array,
        end: jax.Array,
    ) -> jax.Array:
        """A consumer's part of a tile: compute and store its 64 rows."""
        wide, narrow = self.tiles.block_n, self.tiles.block_n // 2
        compute = lambda columns: self.compute_rows(
            warpgroup, step, group, row, column, start, end, columns
        )
        if self.d - (self.column_tiles - 1) * wide <= narrow:
            last = column == self.column_tiles - 1
            gpu.pl.when(last)(lambda: compute(narrow))
            gpu.pl.when(~last)(lambda: compute(wide))
        else:
            compute(wide)
        return step + self.steps(start, end)[1]

    def compute_rows(
        self,
        warpgroup: jax.Array,
        step: jax.Array,
        group: jax.Array,
        row: jax.Array,
        column: jax.Array,
        start: jax.Array,
        end: jax.Array,
        columns: int,
    ) -> None:
        """Compute and store 64 rows and `columns` columns."""
        tiles, engine = self.tiles, self.engine
        left, right = self.smem["left_smem"].tiled, self.smem["right_smem"].tiled
        first, count = self.steps(start, end)

        def start_matmul(i: jax.Array, stage: jax.Array, acc: Ref) -> None:
            low, high = start - first - i * BLOCK_K, end - first - i * BLOCK_K
            gpu.pl.when((low > 0) | (high < BLOCK_K))(
                lambda: self.mask(warpgroup, stage, low, high)
            )
            a, b = left.at[stage, warpgroup], right.at[stage]
            if columns < tiles.block_n:
                b = right.at[stage, :, gpu.pl.ds(0, columns)]
            engine.matmul(acc, engine.transposed(a), b)

        acc_smem = None if self.acc_smem is None else self.acc_smem.at[warpgroup]
        value = engine.accumulate(
            columns,
            acc_smem,
            lambda acc: self.ring.consume(
                step, count, lambda i, stage: start_matmul(i, stage, acc)
            ),
        )
        out = self.smem["out_smem"]
        untiled, tiled = out.untiled.at[warpgroup], out.tiled.at[warpgroup]
        epilogue = Epilogue(engine, untiled, tiled, tiles.out_buffers, self.dtype)
        first_row = self.warpgroup_row(row, warpgroup)
        first_column = column * tiles.block_n

        def target(rows: Slice, columns: Slice) -> Ref:
            ds = gpu.pl.ds
            return self.out.at[
                group,
                ds(first_row + rows.start, rows.size),
                ds(first_column + columns.start, columns.size),
            ]

        rows = jnp.where(first_row < self.c, WARPGROUP_ROWS, 0)
        epilogue.store(value, target, rows)

    def mask(self, warpgroup: jax.Array, stage: jax.Array, low: Index, high: Index) -> None:
        """Set rows of a stage outside of [low, high) to 0; each warpgroup does a part of it."""
        plgpu, panels = gpu.plgpu, self.tiles.block_n // BLOCK_K
        own = panels // self.tiles.consumers
        if self.interpreted:
            self._mask_interpreted(warpgroup, stage, low, high, own * BLOCK_K)
        else:
            layout = plgpu.Layout.WG_STRIDED((_TILE_SIZE,), vec_size=4)
            index = plgpu.layout_cast(lax.iota(jnp.int32, _TILE_SIZE), layout)
            left, right = self.smem["left_smem"].plain, self.smem["right_smem"].plain

            def mask_tiles(i: jax.Array, carry: jax.Array) -> jax.Array:
                from_row, to_row = low - i * _TILE_ROWS, high - i * _TILE_ROWS

                @gpu.pl.when((from_row > 0) | (to_row < _TILE_ROWS))
                def _():
                    inside = (index >= from_row * BLOCK_K) & (index < to_row * BLOCK_K)
                    parts = [left.at[stage, warpgroup, i]]
                    parts += [right.at[stage, i, warpgroup * own + j] for j in range(own)]
                    for part in parts:
                        value = gpu.load(part, layout)
                        part[...] = jnp.where(inside, value, jnp.zeros_like(value))

                return carry

            lax.fori_loop(0, BLOCK_K // _TILE_ROWS, mask_tiles, 0)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.is_masked.at[0])
        plgpu.barrier_wait(self.is_masked.at[0])

    def _mask_interpreted(
        self, warpgroup: jax.Array, stage: jax.Array, low: Index, high: Index, columns: int
    ) -> None:
        row = lax.broadcasted_iota(jnp.int32, (BLOCK_K, 1), 0)
        inside = (row >= low) & (row < high)
        left, right = self.smem["left_smem"].tiled, self.smem["right_smem"].tiled
        own = gpu.pl.ds(warpgroup * columns, columns)
        left[stage, warpgroup] = jnp.where(inside, left[stage, warpgroup], 0)
        right[stage, :, own] = jnp.where(inside, right[stage, :, own], 0)
