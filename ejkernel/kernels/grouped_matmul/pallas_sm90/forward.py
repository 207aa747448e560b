"""Rows times the weight of their group on Hopper: one kernel that stays and walks a list of tiles.

One warpgroup copies, one or two compute, 64 rows each, with as many columns as fit in registers.
The copies run several steps ahead, across tiles, and results leave while the next tile is computed.
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
    Plan,
    Tiles,
    each_tile,
    place,
    thread_blocks,
)
from ejkernel.ops.platform import Device


def rows_times_weights(
    rows: jax.Array,
    weights: jax.Array,
    plan: Plan,
    transposed: bool,
    dtype: Any,
    tiles: Tiles,
    device: Device,
) -> jax.Array:
    """Each row times its weight, [m, n]; 0 for rows without one.

    Args:
        rows: [m, k].
        weights: [e, k, n], or [e, n, k] if `transposed`.
        plan: the tiles of rows.
        transposed: which of the two.
        dtype: of the result.
        tiles: how to cut.
        device: of the call.
    """
    work = _Forward(rows, weights, transposed, dtype, tiles, plan.tiles.shape[0], device)
    scratch = {name: memory.allocate() for name, memory in work.memory.items()}
    if work.interpreted:
        scratch["sums"] = gpu.plgpu.SMEM((tiles.consumers, ROWS, tiles.block_n), jnp.float32)
    run = gpu.kernel(
        work.body,
        out_type=jax.ShapeDtypeStruct((rows.shape[0], work.n), dtype),
        scratch_types={**scratch, **barriers(tiles, work.copies)},
        blocks=work.blocks,
        warpgroups=tiles.consumers + 1,
        interpreted=work.interpreted,
    )
    return run(rows, weights, plan.tiles.reshape(-1), plan.passed)


class _Forward:
    """The kernel: its static numbers, and the programs of its warpgroups."""

    rows: Any  # references, known inside the kernel
    weights: Any
    plan: Any
    passed: Any
    out: Any
    shared: dict[str, Any]
    pipe: Pipe

    def __init__(self, rows, weights, transposed, dtype, tiles, most, device):
        self.tiles, self.transposed, self.dtype = tiles, transposed, dtype
        self.experts, k, n = weights.shape
        self.k, self.n = (n, k) if transposed else (k, n)
        self.steps = -(-self.k // STEP)
        self.columns = -(-self.n // tiles.block_n)
        self.blocks = thread_blocks(most * self.columns, device)
        self.interpreted = gpu.is_interpreted(device)
        self.engine = EMULATION if self.interpreted else HARDWARE
        # A copy can cut the weights into the tiles of the tensor cores if it meets whole ones.
        self.whole = not transposed and self.n % STEP == 0
        self.strips = 1 if self.whole or transposed else tiles.block_n // STEP
        self.few = tiles.block_m < ROWS
        self.apart = tiles.consumers if self.interpreted else 1  # copies for the rows of a step
        self.copies = self.apart + self.strips
        self.memory = self._memory(rows.dtype)

    def _memory(self, dtype) -> dict[str, Memory]:
        tiles, stages = self.tiles, self.tiles.stages
        all_rows = (stages, tiles.consumers * ROWS, STEP)
        by_warpgroup = (stages, tiles.consumers, ROWS, STEP)
        left = Memory(
            interleaved(dtype, *all_rows),
            tiled(dtype, *by_warpgroup),
            interpreted=self.interpreted,
        )
        if self.whole:
            right = Memory(None, tiled(dtype, stages, STEP, tiles.block_n))
        else:
            shape = (tiles.block_n, STEP) if self.transposed else (self.strips, STEP, STEP)
            right = Memory(
                interleaved(dtype, stages, *shape),
                tiled(dtype, stages, *shape),
                interpreted=self.interpreted,
            )
        width = 128 // jnp.dtype(self.dtype).itemsize
        results = (tiles.consumers, tiles.buffers, ROWS, width)
        result = Memory(
            interleaved(self.dtype, *results),
            tiled(self.dtype, *results),
            interpreted=self.interpreted,
        )
        return {"left": left, "right": right, "result": result}

    def body(self, rows, weights, plan, passed, out, here, free, **shared: Any) -> None:
        """What every warpgroup does."""
        self.rows, self.weights, self.plan, self.passed, self.out = rows, weights, plan, passed, out
        for name, memory in self.memory.items():
            shared[name] = memory.bind(shared[name])
        self.shared = shared
        self.pipe = Pipe(self.tiles.stages, self.engine, here, free)
        gpu.specialise_warpgroups(
            self.tiles.consumers,
            lambda: self.each_tile(self.copy_tile),
            lambda warpgroup: self.each_tile(lambda *tile: self.compute_tile(warpgroup, *tile)),
        )

    def each_tile(self, program) -> None:
        """`step = program(step, column, group, at, own, stop)` for the tiles of this block."""
        lines = self.passed[self.experts + 1]

        def find(index):
            line, column = place(index, lines, self.columns, self.tiles.band)
            return column, *(self.plan[line * 4 + i] for i in range(4))

        each_tile(lines * self.columns, self.blocks, find, program)

    def steps_of(self, group) -> Any:
        """How many steps a tile of this group takes: none where rows have no weight."""
        return jnp.where(group < self.experts, self.steps, 0)

    def copy_tile(self, step, column, group, at, own, stop):
        """Bring rows and weights of a tile, as room becomes free."""
        first = column * self.tiles.block_n
        return lax.fori_loop(
            0,
            self.steps_of(group),
            lambda i, step: self.pipe.fill(step, self.sources(i * STEP, group, at, first)),
            step,
        )

    def sources(self, k, group, at, first):
        """What to copy for a step, and where to."""
        ds = gpu.pl.ds
        left, right = self.shared["left"][0], self.shared["right"][0]
        depth = ds(k, STEP)
        if self.interpreted:
            for w in range(self.apart):
                rows = self.rows.at[ds(at + w * ROWS, ROWS), depth]
                yield Copy(rows, lambda slot, w=w: left.at[slot, w])
        else:
            # Of the rows in a matmul, those that are not there need not be anything.
            count = self.tiles.block_m
            room = lambda slot: left.at[slot, ds(0, count)] if self.few else left.at[slot]
            yield Copy(self.rows.at[ds(at, count), depth], room)
        if self.transposed:
            weights = self.weights.at[group, ds(first, self.tiles.block_n), depth]
            yield Copy(weights, lambda slot: right.at[slot])
            return
        for strip in range(self.strips):
            width = self.tiles.block_n // self.strips
            weights = self.weights.at[group, depth, ds(first + strip * width, width)]
            place = (strip,) if self.strips > 1 or not self.whole else ()
            room = lambda slot, place=place: right.at[(slot, *place)]
            yield Copy(weights, room)

    def compute_tile(self, warpgroup, step, column, group, at, own, stop):
        """Compute and store the part of a tile that a warpgroup has."""
        tiles, count = self.tiles, self.steps_of(group)
        row = at + warpgroup * ROWS
        span = min(ROWS, tiles.block_m)
        # Of a tile that was moved back, all may have been computed by others.
        active = (row < stop) & (row + span > own)
        rows = jnp.minimum(stop - row, span)
        wide, narrow = tiles.block_n, tiles.block_n // 2
        has_narrow = self.n - (self.columns - 1) * wide <= narrow
        if has_narrow and self.strips == 1:
            last = column == self.columns - 1
            gpu.pl.when(active & last)(
                lambda: self.compute_part(warpgroup, step, count, row, rows, column, narrow)
            )
            gpu.pl.when(active & ~last)(
                lambda: self.compute_part(warpgroup, step, count, row, rows, column, wide)
            )
        else:
            gpu.pl.when(active)(
                lambda: self.compute_part(warpgroup, step, count, row, rows, column, wide)
            )
        gpu.pl.when(~active)(lambda: self._skip(step, count))
        return step + count

    def _skip(self, step, count) -> None:
        self.pipe.skip(step, count)

    def compute_part(self, warpgroup, step, count, row, rows, column, columns) -> None:
        left, right = self.shared["left"][1], self.shared["right"][1]
        whole = columns == self.tiles.block_n

        def use(i, slot, sums):
            mine = left.at[slot, warpgroup]
            if self.strips > 1:
                for strip in range(self.strips):
                    part = slice(strip * STEP, (strip + 1) * STEP)
                    self.engine.multiply(sums, mine, right.at[slot, strip], part)
            elif self.transposed:
                weights = right.at[slot] if whole else right.at[slot, gpu.pl.ds(0, columns)]
                self.engine.multiply(sums, mine, self.engine.transposed(weights))
            else:
                index = (slot,) if self.whole else (slot, 0)
                weights = right.at[index]
                if not whole:
                    weights = right.at[(*index, slice(None), gpu.pl.ds(0, columns))]
                self.engine.multiply(sums, mine, weights)

        held = self.shared["sums"].at[warpgroup] if self.interpreted else None
        value = self.engine.accumulate(
            columns,
            held,
            lambda sums: self.pipe.empty(
                step, count, lambda i, slot: use(i, slot, sums), self.strips
            ),
        )
        room, cut = (x.at[warpgroup] for x in self.shared["result"])
        first = column * self.tiles.block_n

        def target(which, piece):
            return self.out.at[
                gpu.pl.ds(row + which.start, which.size), gpu.pl.ds(first + piece.start, piece.size)
            ]

        store(
            self.engine,
            room,
            cut,
            self.tiles.buffers,
            value,
            self.dtype,
            target,
            rows,
            min(ROWS, self.tiles.block_m),
        )
