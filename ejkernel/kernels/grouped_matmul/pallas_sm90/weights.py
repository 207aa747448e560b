"""The gradient of the weights on Hopper: for each group the product of its rows with its rows.

Both sides of the product stand with the rows that are summed over in lines, as they lie in memory;
the tensor cores read them across. Copies begin at multiples of 8 rows, so that they meet the tiles
of the tensor cores; what they bring of other groups, at both ends, is set to 0 in shared memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.grouped_matmul.pallas_sm90.memory import (
    EMULATION,
    HARDWARE,
    Copy,
    Memory,
    Pipe,
    barriers,
    interleaved,
    store,
    tiled,
)
from ejkernel.kernels.grouped_matmul.pallas_sm90.plan import (
    ROWS,
    STEP,
    Tiles,
    each_tile,
    place,
    thread_blocks,
)
from ejkernel.ops.platform import Device

# Rows of a tile of the tensor cores, and the numbers in it.
LINES, NUMBERS = 8, 8 * STEP


def rows_times_rows(
    left: jax.Array,
    right: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    tiles: Tiles,
    device: Device,
) -> jax.Array:
    """For each group the sum over its rows of `left[r] right[r]^T`, [e, c, d]; 0 for no rows.

    Args:
        left: [m, c].
        right: [m, d].
        starts: the first row of each group.
        ends: the row after its last.
        tiles: how to cut; `block_m` columns of `left`, `block_n` of `right`.
        device: of the call.
    """
    c, d = left.shape[1], right.shape[1]
    # Whole tiles of the tensor cores are what copies can bring.
    left, right = (_padded(x, LINES, STEP) for x in (left, right))
    work = _Weights(left, right, starts.shape[0], tiles, device)
    scratch = {name: memory.allocate() for name, memory in work.memory.items()}
    if work.interpreted:
        scratch["sums"] = gpu.plgpu.SMEM((tiles.consumers, ROWS, tiles.block_n), jnp.float32)
    run = gpu.kernel(
        work.body,
        out_type=jax.ShapeDtypeStruct((starts.shape[0], left.shape[1], right.shape[1]), left.dtype),
        scratch_types={
            **scratch,
            **barriers(tiles, tiles.consumers + 1),
            "masked": gpu.barriers(1, tiles.consumers),
        },
        blocks=work.blocks,
        warpgroups=tiles.consumers + 1,
        interpreted=work.interpreted,
    )
    return run(left, right, starts, ends)[:, :c, :d]


def _padded(x: jax.Array, *multiples: int) -> jax.Array:
    pads = [(0, -size % multiple) for size, multiple in zip(x.shape, multiples, strict=True)]
    return jnp.pad(x, pads) if any(after for _, after in pads) else x


class _Weights:
    """The kernel: its static numbers, and the programs of its warpgroups."""

    left: Any  # references, known inside the kernel
    right: Any
    starts: Any
    ends: Any
    out: Any
    shared: dict[str, Any]
    pipe: Pipe
    masked: Any

    def __init__(self, left, right, experts, tiles, device):
        self.tiles, self.experts, self.dtype = tiles, experts, left.dtype
        self.c, self.d = left.shape[1], right.shape[1]
        self.lines, self.columns = -(-self.c // tiles.block_m), -(-self.d // tiles.block_n)
        self.total = experts * self.lines * self.columns
        self.blocks = thread_blocks(self.total, device)
        self.interpreted = gpu.is_interpreted(device)
        self.engine = EMULATION if self.interpreted else HARDWARE
        self.memory = self._memory()

    def _memory(self) -> dict[str, Memory]:
        tiles, dtype, stages = self.tiles, self.dtype, self.tiles.stages
        plain = lambda *shape: gpu.plgpu.SMEM((*shape, NUMBERS), dtype)
        strips = tiles.block_n // STEP
        results = (tiles.consumers, tiles.buffers, ROWS, STEP)
        sides = {
            "ours": ((tiles.consumers, STEP, ROWS), (tiles.consumers, STEP // LINES)),
            "theirs": ((STEP, tiles.block_n), (STEP // LINES, strips)),
        }
        memory = {
            name: Memory(
                None,
                tiled(dtype, stages, *shape),
                plain(stages, *blocks),
                interpreted=self.interpreted,
            )
            for name, (shape, blocks) in sides.items()
        }
        memory["result"] = Memory(
            interleaved(dtype, *results), tiled(dtype, *results), interpreted=self.interpreted
        )
        return memory

    def body(self, left, right, starts, ends, out, here, free, masked, **shared: Any) -> None:
        """What every warpgroup does."""
        self.left, self.right, self.starts, self.ends, self.out = left, right, starts, ends, out
        for name, memory in self.memory.items():
            shared[name] = memory.bind(shared[name])
        self.shared, self.masked = shared, masked
        self.pipe = Pipe(self.tiles.stages, self.engine, here, free)
        gpu.specialise_warpgroups(
            self.tiles.consumers,
            lambda: self.each_tile(self.copy_tile),
            lambda warpgroup: self.each_tile(lambda *tile: self.compute_tile(warpgroup, *tile)),
        )

    def each_tile(self, program) -> None:
        """`step = program(step, group, line, column, start, end)` for the tiles of this block."""
        each = self.lines * self.columns

        def find(index):
            group = lax.div(index, each)
            line, column = place(index - group * each, self.lines, self.columns, self.tiles.band)
            return group, line, column, self.starts[group], self.ends[group]

        each_tile(self.total, self.blocks, find, program)

    def walk(self, start, end) -> tuple[Any, Any]:
        """Where the first step begins, and how many steps there are."""
        first = lax.div(start, LINES) * LINES
        count = lax.div(end - first + STEP - 1, STEP)
        return first, jnp.where(end > start, count, 0)

    def copy_tile(self, step, group, line, column, start, end):
        """Bring the rows of a group, as room becomes free."""
        ds, tiles = gpu.pl.ds, self.tiles
        first, count = self.walk(start, end)
        left, right = self.shared["ours"][0], self.shared["theirs"][0]

        def one(i, step):
            rows = ds(gpu.pl.multiple_of(first + i * STEP, LINES), STEP)
            copies = []
            for w in range(tiles.consumers):
                columns = ds(self.line(line, w), ROWS)
                room = lambda slot, w=w: left.at[slot, w]
                copies.append(Copy(self.left.at[rows, columns], room))
            columns = ds(column * tiles.block_n, tiles.block_n)
            room = lambda slot: right.at[slot]
            copies.append(Copy(self.right.at[rows, columns], room))
            return self.pipe.fill(step, copies)

        return lax.fori_loop(0, count, one, step)

    def line(self, line, warpgroup) -> Any:
        """The first line of the result that a warpgroup computes."""
        return line * self.tiles.block_m + warpgroup * ROWS

    def compute_tile(self, warpgroup, step, group, line, column, start, end):
        """Compute and store the part of a tile that a warpgroup has."""
        wide, narrow = self.tiles.block_n, self.tiles.block_n // 2
        part = lambda columns: self.compute_part(
            warpgroup, step, group, line, column, start, end, columns
        )
        if self.d - (self.columns - 1) * wide <= narrow:
            last = column == self.columns - 1
            gpu.pl.when(last)(lambda: part(narrow))
            gpu.pl.when(~last)(lambda: part(wide))
        else:
            part(wide)
        return step + self.walk(start, end)[1]

    def compute_part(self, warpgroup, step, group, line, column, start, end, columns) -> None:
        tiles, engine = self.tiles, self.engine
        left, right = self.shared["ours"][0], self.shared["theirs"][0]
        first, count = self.walk(start, end)

        def use(i, slot, sums):
            low, high = start - first - i * STEP, end - first - i * STEP
            gpu.pl.when((low > 0) | (high < STEP))(lambda: self.mask(warpgroup, slot, low, high))
            mine, other = left.at[slot, warpgroup], right.at[slot]
            if columns < tiles.block_n:
                other = right.at[slot, :, gpu.pl.ds(0, columns)]
            engine.multiply(sums, engine.transposed(mine), other)

        held = self.shared["sums"].at[warpgroup] if self.interpreted else None
        value = engine.accumulate(
            columns,
            held,
            lambda sums: self.pipe.empty(step, count, lambda i, slot: use(i, slot, sums)),
        )
        room, cut = (x.at[warpgroup] for x in self.shared["result"])
        row = self.line(line, warpgroup)
        at = column * tiles.block_n

        def target(which, piece):
            ds = gpu.pl.ds
            return self.out.at[
                group, ds(row + which.start, which.size), ds(at + piece.start, piece.size)
            ]

        rows = jnp.where(row < self.c, ROWS, 0)
        store(engine, room, cut, tiles.buffers, value, self.dtype, target, rows)

    def mask(self, warpgroup, slot, low, high) -> None:
        """Set to 0 what is not of rows `low` to `high` of a step, each warpgroup a part of it."""
        plgpu, strips = gpu.plgpu, self.tiles.block_n // STEP
        own = strips // self.tiles.consumers
        if self.interpreted:
            self._mask_plainly(warpgroup, slot, low, high, own * STEP)
        else:
            layout = plgpu.Layout.WG_STRIDED((NUMBERS,), vec_size=4)
            index = plgpu.layout_cast(lax.iota(jnp.int32, NUMBERS), layout)
            left, right = self.shared["ours"][1], self.shared["theirs"][1]

            def block(i, carry):
                from_row, to_row = low - i * LINES, high - i * LINES

                @gpu.pl.when((from_row > 0) | (to_row < LINES))
                def _():
                    inside = (index >= from_row * STEP) & (index < to_row * STEP)
                    parts = [left.at[slot, warpgroup, i]]
                    parts += [right.at[slot, i, warpgroup * own + j] for j in range(own)]
                    for part in parts:
                        value = gpu.load(part, layout)
                        part[...] = jnp.where(inside, value, jnp.zeros_like(value))

                return carry

            lax.fori_loop(0, STEP // LINES, block, 0)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.masked.at[0])
        plgpu.barrier_wait(self.masked.at[0])

    def _mask_plainly(self, warpgroup, slot, low, high, columns) -> None:
        row = lax.broadcasted_iota(jnp.int32, (STEP, 1), 0)
        inside = (row >= low) & (row < high)
        left, right = self.shared["ours"][0], self.shared["theirs"][0]
        mine = gpu.pl.ds(warpgroup * columns, columns)
        left[slot, warpgroup] = jnp.where(inside, left[slot, warpgroup], 0)
        right[slot, :, mine] = jnp.where(inside, right[slot, :, mine], 0)
