"""The `gmm` kernel on Hopper: each row times its weight, forward and for the gradient of the rows.

A persistent, warp-specialised kernel. The producer warpgroup fills a ring buffer several steps
ahead, across tiles. One or two consumer warpgroups compute 64 rows each, with as many columns as
fit in registers, and store a result while the next tile is computed.
"""

from collections.abc import Callable, Iterable, Iterator

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
    SWIZZLE_BYTES,
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
    TILE_FIELDS,
    for_each_tile,
    schedule_tiles,
    specialise_over_tiles,
    thread_blocks,
    tile_coordinates,
)
from ejkernel.ops.platform import Device


def gmm(
    rows: jax.Array,
    weights: jax.Array,
    axis: int,
    layout: GroupLayout,
    dtype: np.dtype,
    tiles: HopperTileConfig,
    device: Device,
) -> jax.Array:
    """Each row times its weight, contracted with this axis of it; 0 for rows without a weight."""
    schedule = schedule_tiles(layout.starts, layout.ends, rows.shape[0], tiles.block_m)
    kernel = _ForwardKernel(rows, weights, axis == 2, dtype, tiles, schedule.tiles.shape[0], device)
    run = gpu.kernel(
        kernel.body,
        out_type=jax.ShapeDtypeStruct((rows.shape[0], kernel.n), dtype),
        scratch_types=allocate(kernel.buffers, tiles, kernel.copies, kernel.interpreted),
        blocks=kernel.blocks,
        warpgroups=tiles.consumers + 1,
        interpreted=kernel.interpreted,
    )
    return run(rows, weights, schedule.tiles.reshape(-1), schedule.tile_ends)


class _ForwardKernel:
    """The kernel: its static sizes, and the programs of its warpgroups.

    `transposed` weights are [e, n, k]. `body` sets the references.
    """

    rows: Ref
    weights: Ref
    schedule: Ref
    tile_ends: Ref
    out: Ref
    smem: dict[str, BufferViews]
    acc_smem: Ref | None
    ring: RingBuffer

    def __init__(
        self,
        rows: jax.Array,
        weights: jax.Array,
        transposed: bool,
        dtype: np.dtype,
        tiles: HopperTileConfig,
        max_tiles: int,
        device: Device,
    ):
        self.tiles, self.transposed, self.dtype = tiles, transposed, dtype
        self.weight_count, k, n = weights.shape
        self.k, self.n = (n, k) if transposed else (k, n)
        self.steps = -(-self.k // BLOCK_K)
        self.column_tiles = -(-self.n // tiles.block_n)
        self.blocks = thread_blocks(max_tiles * self.column_tiles, device)
        self.interpreted = gpu.is_interpreted(device)
        self.engine = INTERPRETED if self.interpreted else WGMMA
        # A copy can tile the weights for the tensor cores if n consists of whole tiles. Otherwise
        # they come in panels of 64 columns, whose layout is the same tiled and untiled.
        self.whole_tiles = not transposed and self.n % BLOCK_K == 0
        self.panels = 1 if self.whole_tiles or transposed else tiles.block_n // BLOCK_K
        self.few_rows = tiles.block_m < WARPGROUP_ROWS
        row_copies = tiles.consumers if self.interpreted else 1
        self.copies = row_copies + self.panels
        self.buffers = self._buffers(rows.dtype)

    def _buffers(self, dtype: np.dtype) -> dict[str, SharedBuffer]:
        tiles, stages, interpreted = self.tiles, self.tiles.stages, self.interpreted
        all_rows = (stages, tiles.consumers * WARPGROUP_ROWS, BLOCK_K)
        by_warpgroup = (stages, tiles.consumers, WARPGROUP_ROWS, BLOCK_K)
        left = SharedBuffer(
            tiled_memory(dtype, *by_warpgroup),
            untiled=untiled_memory(dtype, *all_rows),
            interpreted=interpreted,
        )
        if self.whole_tiles:
            shape = (stages, BLOCK_K, tiles.block_n)
            right = SharedBuffer(tiled_memory(dtype, *shape), interpreted=interpreted)
        else:
            panels = (self.panels, BLOCK_K, BLOCK_K)
            shape = (stages, *((tiles.block_n, BLOCK_K) if self.transposed else panels))
            right = SharedBuffer(
                tiled_memory(dtype, *shape),
                untiled=untiled_memory(dtype, *shape),
                interpreted=interpreted,
            )
        width = SWIZZLE_BYTES // jnp.dtype(self.dtype).itemsize
        results = (tiles.consumers, tiles.out_buffers, WARPGROUP_ROWS, width)
        out = SharedBuffer(
            tiled_memory(self.dtype, *results),
            untiled=untiled_memory(self.dtype, *results),
            interpreted=interpreted,
        )
        return {"left_smem": left, "right_smem": right, "out_smem": out}

    def body(
        self,
        rows: Ref,
        weights: Ref,
        schedule: Ref,
        tile_ends: Ref,
        out: Ref,
        full: Ref,
        empty: Ref,
        acc_smem: Ref | None = None,
        **smem: Ref | Iterable[Ref],
    ) -> None:
        """What every warpgroup runs."""
        self.rows, self.weights, self.out = rows, weights, out
        self.schedule, self.tile_ends = schedule, tile_ends
        self.smem = {name: buffer.bind(smem[name]) for name, buffer in self.buffers.items()}
        self.acc_smem = acc_smem
        self.ring = RingBuffer(self.tiles.stages, self.engine, full, empty)
        consumers, tiles = self.tiles.consumers, self.for_each_tile
        specialise_over_tiles(consumers, tiles, self.load_tile, self.compute_tile)

    def for_each_tile(self, process: Callable[..., jax.Array]) -> None:
        """`step = process(step, column, group, start, own_start, end)` for this block's tiles."""
        row_tiles = self.tile_ends[self.weight_count + 1]

        def read(index: jax.Array) -> tuple[jax.Array, ...]:
            row, column = tile_coordinates(
                index, row_tiles, self.column_tiles, self.tiles.raster_band
            )
            fields = (self.schedule[row * TILE_FIELDS + i] for i in range(TILE_FIELDS))
            return column, *fields

        for_each_tile(row_tiles * self.column_tiles, self.blocks, read, process)

    def step_count(self, group: Index) -> jax.Array:
        """The steps of a tile of this group: none where rows have no weight."""
        return jnp.where(group < self.weight_count, self.steps, 0)

    def load_tile(
        self,
        step: jax.Array,
        column: jax.Array,
        group: jax.Array,
        start: jax.Array,
        own_start: jax.Array,
        end: jax.Array,
    ) -> jax.Array:
        """The producer's part of a tile: copy its rows and weights, step by step."""
        first = column * self.tiles.block_n
        return lax.fori_loop(
            0,
            self.step_count(group),
            lambda i, step: self.ring.produce(
                step, self.step_copies(i * BLOCK_K, group, start, first)
            ),
            step,
        )

    def step_copies(self, k: Index, group: Index, start: Index, first: Index) -> Iterator[TmaCopy]:
        """The copies of a step: rows from `start`, columns of the weight from `first`."""
        ds = gpu.pl.ds
        left, right = self.smem["left_smem"].untiled, self.smem["right_smem"].untiled
        depth = ds(k, BLOCK_K)
        if self.interpreted:
            for w in range(self.tiles.consumers):
                rows = self.rows.at[ds(start + w * WARPGROUP_ROWS, WARPGROUP_ROWS), depth]
                yield TmaCopy(rows, lambda stage, w=w: left.at[stage, w])
        else:
            # WGMMA computes 64 rows; what it reads for those that do not exist does not matter.
            count = self.tiles.block_m
            destination = lambda stage: (
                left.at[stage, ds(0, count)] if self.few_rows else left.at[stage]
            )
            yield TmaCopy(self.rows.at[ds(start, count), depth], destination)
        if self.transposed:
            weights = self.weights.at[group, ds(first, self.tiles.block_n), depth]
            yield TmaCopy(weights, lambda stage: right.at[stage])
            return
        for panel in range(self.panels):
            width = self.tiles.block_n // self.panels
            weights = self.weights.at[group, depth, ds(first + panel * width, width)]
            index = (panel,) if self.panels > 1 or not self.whole_tiles else ()
            yield TmaCopy(weights, lambda stage, index=index: right.at[(stage, *index)])

    def compute_tile(
        self,
        warpgroup: jax.Array,
        step: jax.Array,
        column: jax.Array,
        group: jax.Array,
        start: jax.Array,
        own_start: jax.Array,
        end: jax.Array,
    ) -> jax.Array:
        """A consumer's part of a tile: compute and store its 64 rows."""
        tiles, count = self.tiles, self.step_count(group)
        row = start + warpgroup * WARPGROUP_ROWS
        span = min(WARPGROUP_ROWS, tiles.block_m)
        # Of a tile that was moved back, these rows may all belong to the tile before.
        active = (row < end) & (row + span > own_start)
        rows = jnp.minimum(end - row, span)
        wide, narrow = tiles.block_n, tiles.block_n // 2
        has_narrow = self.n - (self.column_tiles - 1) * wide <= narrow

        def compute(columns: int) -> None:
            self.compute_rows(warpgroup, step, count, row, rows, column, columns)

        if has_narrow and self.panels == 1:
            last = column == self.column_tiles - 1
            gpu.pl.when(active & last)(lambda: compute(narrow))
            gpu.pl.when(active & ~last)(lambda: compute(wide))
        else:
            gpu.pl.when(active)(lambda: compute(wide))

        @gpu.pl.when(~active)
        def _():
            self.ring.skip(step, count)

        return step + count

    def compute_rows(
        self,
        warpgroup: jax.Array,
        step: jax.Array,
        count: jax.Array,
        row: jax.Array,
        rows: jax.Array,
        column: jax.Array,
        columns: int,
    ) -> None:
        """Compute 64 rows and `columns` columns, and store the first `rows` of them."""
        left, right = self.smem["left_smem"].tiled, self.smem["right_smem"].tiled
        is_full = columns == self.tiles.block_n

        def start_matmuls(stage: jax.Array, acc: Ref) -> None:
            a = left.at[stage, warpgroup]
            if self.panels > 1:
                for panel in range(self.panels):
                    part = slice(panel * BLOCK_K, (panel + 1) * BLOCK_K)
                    self.engine.matmul(acc, a, right.at[stage, panel], part)
            elif self.transposed:
                b = right.at[stage] if is_full else right.at[stage, gpu.pl.ds(0, columns)]
                self.engine.matmul(acc, a, self.engine.transposed(b))
            else:
                index = (stage,) if self.whole_tiles else (stage, 0)
                b = right.at[index]
                if not is_full:
                    b = right.at[(*index, slice(None), gpu.pl.ds(0, columns))]
                self.engine.matmul(acc, a, b)

        acc_smem = None if self.acc_smem is None else self.acc_smem.at[warpgroup]
        value = self.engine.accumulate(
            columns,
            acc_smem,
            lambda acc: self.ring.consume(
                step, count, lambda i, stage: start_matmuls(stage, acc), self.panels
            ),
        )
        out = self.smem["out_smem"]
        untiled, tiled = out.untiled.at[warpgroup], out.tiled.at[warpgroup]
        epilogue = Epilogue(self.engine, untiled, tiled, self.tiles.out_buffers, self.dtype)
        first = column * self.tiles.block_n

        def target(rows: Slice, columns: Slice) -> Ref:
            return self.out.at[
                gpu.pl.ds(row + rows.start, rows.size),
                gpu.pl.ds(first + columns.start, columns.size),
            ]

        epilogue.store(value, target, rows, min(WARPGROUP_ROWS, self.tiles.block_m))
