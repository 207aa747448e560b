"""A backward kernel on Hopper: what it sums, its memory, and the programs of its warpgroups."""

import dataclasses
import functools
import itertools
import operator
import types
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.kernels.flash_attention.pallas_sm90.backward_tiles import Walked
from ejkernel.kernels.flash_attention.pallas_sm90.forward import whole_tiles
from ejkernel.kernels.flash_attention.pallas_sm90.logits import ROWS, Operands, Tile
from ejkernel.kernels.flash_attention.pallas_sm90.staged_bias import Brought

SHARED_BYTES = gpu.SHARED_MEMORY - gpu.BARRIER_RESERVE


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a kernel is cut: computing warpgroups, columns of a tile, tiles kept in flight.

    There are at most `stages` of these, as many as memory holds. With `overlap`, the sums of a tile
    run while the next one's gradients are computed, which takes more registers.
    """

    consumers: int
    columns: int
    stages: int
    overlap: bool

    @property
    def rows(self) -> int:
        return ROWS * self.consumers


@dataclasses.dataclass(frozen=True)
class Part:
    """What one kernel computes, where 0 stands for queries and keys, 1 for values and outputs.

    A warpgroup holds 64 keys with their values (or queries with the gradients of their outputs) and
    walks the others. Product 0 of the two gives logits, product 1 the gradients of weights.

    Attributes:
        for_keys: whether keys are held, and the tiles stand transposed.
        summed: the gradients that are summed, in order: that of values from weights, that of
            keys or queries from the gradients of logits.
        logits: whether the gradients of logits are a result themselves, tile by tile.
        rows: what of each row held, of each query head, is summed to a number: gradients of
            logits, or weights times their gradients.
    """

    for_keys: bool
    summed: tuple[int, ...]
    logits: bool = False
    rows: Literal["logits", "weights"] | None = None

    @property
    def products(self) -> tuple[int, ...]:
        """Which products it needs: weights alone take no gradients."""
        return (0,) if self.summed == (1,) else (0, 1)

    def rooms(self, dims: tuple[int, int]) -> dict[int, int]:
        """Where each sum lies before it is written: where its rows lay, or rows of that size."""
        at_hand = lambda i: i in self.products or dims[0] != dims[1]
        return {i: i if at_hand(i) else 0 for i in self.summed}

    def held(self, dims: tuple[int, int]) -> list[int]:
        """The matrices that have memory for rows held."""
        return sorted({*self.products, *self.rooms(dims).values()})

    def stages(self, tiles: Tiles, dims: tuple[int, int]) -> tuple[int, int] | None:
        """How many tiles of either matrix there is memory for; None if it is too few.

        A matrix that is also summed from stays for longer, so that it has two at least, and more
        where there is a choice.
        """
        fits = lambda stages: self.room_beside(tiles, dims, stages) >= 0
        least = [2 if i in self.summed else 1 for i in range(2)]
        first, second = (range(low, max(tiles.stages, low) + 1) for low in least)
        both = itertools.product(first, second)
        fit = [x for x in both if abs(x[0] - x[1]) <= 1 and fits(x)]
        kept = self.summed[-1] if self.summed else 0
        return max(fit, key=lambda x: (min(x), x[kept], sum(x)), default=None)

    def room_beside(self, tiles: Tiles, dims: tuple[int, int], stages: tuple[int, int]) -> int:
        """Bytes of shared memory that so many tiles leave."""
        held = 2 * tiles.rows * sum(dims[i] for i in self.held(dims))
        terms = 2 * 4 * tiles.columns * stages[0] if self.for_keys else 0
        moving = sum(2 * tiles.columns * dim * n for dim, n in zip(dims, stages, strict=True))
        return SHARED_BYTES - (gpu.REDUCTION_RESERVE if self.rows else 0) - held - terms - moving

    def brought(self, tiles: Tiles, inputs: Inputs) -> Brought:
        """How the bias comes through shared memory, if it does."""
        dims = dims_of(inputs)
        stages = self.stages(tiles, dims)
        room = 0 if stages is None else self.room_beside(tiles, dims, stages)
        return Brought.of(inputs.bias, tiles.consumers, tiles.columns, room, self.for_keys)


def dims_of(inputs: Inputs) -> tuple[int, int]:
    """Head and value dim as the tensor cores see them."""
    head_dim, value_dim = (-(-x.shape[3] // 16) * 16 for x in (inputs.query, inputs.value))
    return head_dim, value_dim


OF_KEYS_AND_VALUES = Part(True, (1, 0))
OF_VALUES = Part(True, (1,))
OF_KEYS = Part(True, (0,))
OF_QUERIES = Part(False, (0,))


class Kernel:
    """A kernel: its static numbers, and the programs of its warpgroups."""

    # Global memory by name, results, and shared memory with its barriers: known inside the kernel.
    refs: dict[str, Any]
    results: Any
    shared: Any

    def __init__(
        self,
        spec: Spec,
        part: Part,
        tiles: Tiles,
        operands: Operands,
        inputs: Inputs,
        lists: tuple[int, ...],
        interpreted: bool,
    ):
        self.spec, self.part, self.tiles, self.operands = spec, part, tiles, operands
        self.dtype, self.interpreted = inputs.query.dtype, interpreted
        # Products can begin with lse, which then needs no registers of its own.
        self.lse_first = starts_with_lse(spec)
        heads, key_heads = inputs.query.shape[2], inputs.key.shape[2]
        self.group, self.sizes = heads // key_heads, (inputs.query.shape[0], heads)
        self.heads = key_heads if part.for_keys else heads  # of a unit
        self.list_rows, self.list_heads, self.lines, self.blocks = lists
        self.engine = gpu.INTERPRETED if interpreted else gpu.WGMMA
        whole = whole_tiles(inputs)
        of = lambda i, count, rows: gpu.SharedMatrices(
            self.dtype, count, rows, (inputs.query, inputs.value)[i].shape[3], whole
        )
        self.dims = dims_of(inputs)
        stages = part.stages(tiles, self.dims)
        if stages is None:
            raise ValueError(f"flash_attention: no memory for {tiles} with dims of {self.dims}.")
        self.stages, self.brought = stages, part.brought(tiles, inputs)
        self.rooms = part.rooms(self.dims)
        self.held = {i: of(i, tiles.consumers, ROWS) for i in part.held(self.dims)}
        self.moving = {i: of(i, stages[i], tiles.columns) for i in range(2)}

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        consumers, barriers = self.tiles.consumers, gpu.barriers
        take = lambda matrices: tuple(x.allocate(self.interpreted) for x in matrices.values())
        scratch = {
            "held": take(self.held),
            "moving": take(self.moving),
            "held_here": barriers(consumers, sum(self.held[i].panels for i in self.part.products)),
            "held_free": barriers(consumers),
            "moving_here": tuple(
                barriers(self.stages[i], one.panels + (self.part.for_keys and i == 0))
                for i, one in self.moving.items()
            ),
            "moving_free": tuple(barriers(count, consumers) for count in self.stages),
        }
        if self.part.for_keys:
            shape = (self.stages[0], 2, self.tiles.columns)
            scratch["terms"] = gpu.plgpu.SMEM(shape, jnp.float32)
        return scratch | self.brought.scratch(self.interpreted)

    def body(self, refs: dict[str, Any], results: Any, shared: dict[str, Any]) -> None:
        """What every warpgroup does."""
        self.refs, self.results = refs, results
        for name, matrices in (("held", self.held), ("moving", self.moving)):
            pairs = zip(matrices.items(), shared[name], strict=True)
            shared[name] = {i: one.bind(ref, self.interpreted) for (i, one), ref in pairs}
        self.shared = types.SimpleNamespace(**shared)

        gpu.specialise_warpgroups(
            self.tiles.consumers,
            lambda: gpu.for_each_work_item(self.refs["order"], self.copy_unit),
            lambda warpgroup: gpu.for_each_work_item(
                self.refs["order"], functools.partial(self.compute_unit, warpgroup)
            ),
        )

    def unpack(self, unit):
        """Batch row, head and line of a unit."""
        line, where = lax.rem(unit, self.lines), lax.div(unit, self.lines)
        return lax.div(where, self.heads), lax.rem(where, self.heads), line

    def each_head(self, row, head, line, program, carry):
        """`carry = program(query head, key head, list, carry)` for the query heads of a unit."""

        def one(query_head, carry):
            key_head = lax.div(query_head, self.group)
            list_row = row if self.list_rows > 1 else 0
            list_head = query_head if self.list_heads > 1 else 0
            lists = (list_row * self.list_heads + list_head) * self.lines + line
            return program(query_head, key_head, lists, carry)

        if not self.part.for_keys or self.group == 1:
            return one(head, carry)
        first = head * self.group
        return lax.fori_loop(first, first + self.group, one, carry)

    @property
    def names(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """What a warpgroup holds, and what comes and goes."""
        of_keys, of_queries = ("key", "value"), ("query", "d_out")
        return (of_keys, of_queries) if self.part.for_keys else (of_queries, of_keys)

    def copy_unit(self, lap, step, unit):
        """Bring what the warpgroups hold, then what they walk as room becomes free."""
        row, head, line = self.unpack(unit)
        plgpu, tiles, shared = gpu.plgpu, self.tiles, self.shared
        held, moving = self.names
        for w in range(tiles.consumers):
            gpu.pl.when(lap > 0)(lambda w=w: plgpu.barrier_wait(shared.held_free.at[w]))
            first = line * tiles.rows + w * ROWS
            for i in self.part.products:
                here = shared.held_here.at[w]
                shared.held[i].load(self.refs[held[i]], row, first, head, w, here)

        def of_head(query_head, key_head, lists, step):
            moving_head = query_head if self.part.for_keys else key_head

            def tile(j, step):
                at = self.refs["index"][lists * self.blocks + j] * tiles.columns
                for i, count in enumerate(self.stages):
                    slot = lax.rem(step, count)
                    free, here = shared.moving_free[i].at[slot], shared.moving_here[i].at[slot]
                    gpu.pl.when(step >= count)(lambda free=free: plgpu.barrier_wait(free))
                    room, array = shared.moving[i], self.refs[moving[i]]
                    room.load(array, row, at, moving_head, slot, here)
                    if self.part.for_keys and i == 0:
                        source = self.refs["terms"].at[
                            row, query_head, :, gpu.pl.ds(at, tiles.columns)
                        ]
                        plgpu.copy_gmem_to_smem(source, shared.terms.at[slot], here)
                place = row, query_head, line * tiles.rows, at
                self.brought.copy(shared, self.refs, step, *place)
                return step + 1

            return lax.fori_loop(0, self.refs["count"][lists], tile, step)

        return self.each_head(row, head, line, of_head, step)

    def compute_unit(self, warpgroup, lap, step, unit):
        """The gradients of 64 keys, or of 64 queries."""
        row, head, line = self.unpack(unit)
        first_row = line * self.tiles.rows + warpgroup * ROWS
        gpu.plgpu.barrier_wait(self.shared.held_here.at[warpgroup])
        sums = tuple(gpu.full((ROWS, self.dims[i]), 0.0) for i in self.part.summed)

        def of_head(query_head, key_head, lists, carry):
            tile = Tile(
                self.spec,
                self.operands,
                self.brought.others(self.refs),
                row,
                query_head,
                first_row,
                self.tiles.columns,
                self.part.for_keys,
            )
            walked = Walked(self, warpgroup, tile, row, query_head, lists)
            step, sums, taken = walked.over_tiles((*carry, gpu.full((ROWS,), 0.0)))
            if self.part.rows:
                self.results[-1][row, query_head, gpu.pl.ds(first_row, ROWS)] = taken
            if self.part.logits:
                walked.over_empty_tiles(self.put_logits)
            return step, sums

        step, sums = self.each_head(row, head, line, of_head, (step, sums))
        # Unpacked again, so that only one number stays in a register meanwhile.
        row, head, line = self.unpack(lax.optimization_barrier(unit))
        self.write(warpgroup, row, head, line * self.tiles.rows + warpgroup * ROWS, sums)
        return step

    def write(self, warpgroup, row, head, first_row, sums) -> None:
        """Sums to global memory, through the memory that held the rows they belong to."""
        plgpu, shared = gpu.plgpu, self.shared
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # all threads have done their products
        for i, total in zip(self.part.summed, sums, strict=True):
            scale = self.spec.softmax_scale if i == 0 else 1.0
            total = (total * (scale / (1.0 - self.spec.dropout_prob))).astype(self.dtype)
            shared.held[self.rooms[i]].write(warpgroup, total)
        plgpu.commit_smem()
        for result, i in zip(self.results, self.part.summed, strict=False):
            shared.held[self.rooms[i]].store(result, row, first_row, head, warpgroup)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(shared.held_free.at[warpgroup])

    def put_logits(self, tile: Tile, at: Any, d_logits: Any) -> None:
        """Gradients of a tile's logits to the gradient of the bias; None where there are none.

        What batch rows or heads share is added to what the first of them has written: the same
        threads have all of them, one after the other.
        """
        ref = self.results[-1]
        row, head = tile.broadcast(ref)
        place = ref.at[row, head, gpu.pl.ds(tile.first_row, ROWS), gpu.pl.ds(at, tile.shape[1])]
        sizes = zip((tile.row, tile.head), ref.shape[:2], self.sizes, strict=True)
        others = [x for x, size, whole in sizes if size < whole]
        first = functools.reduce(lax.bitwise_and, [x == 0 for x in others]) if others else True
        zero = lambda: gpu.full(tile.shape, 0.0)
        put = lambda x: operator.setitem(place, ..., x.astype(ref.dtype))
        if d_logits is None:
            gpu.pl.when(first)(lambda: put(zero()))
            return
        if tile.drops:
            d_logits = d_logits * (1.0 / (1.0 - self.spec.dropout_prob))
        if others:
            load = lambda: gpu.load(place, gpu.plgpu.Layout.WGMMA)
            d_logits = d_logits + lax.cond(first, zero, load)
        put(d_logits)


def starts_with_lse(spec: Spec) -> bool:
    """Whether products can begin with lse: they cannot if something curved comes between."""
    return spec.logits_soft_cap is None
