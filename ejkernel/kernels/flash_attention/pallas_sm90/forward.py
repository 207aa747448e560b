"""Forward on Hopper: asynchronous copies, warpgroup matmuls, a softmax hidden behind them.

The shape of the pipeline is that of FlashAttention-3 (https://arxiv.org/abs/2407.08608). One
warpgroup copies, two or three compute, 64 queries each. A computing warpgroup starts the logits of
tile j and the product of tile j - 1's weights with its values, and takes the softmax of tile j
while the latter runs; the warpgroups take turns, so that one computes its softmax while another
feeds the tensor cores. Blocks of threads stay and draw units of work from a list, the longest
first.
"""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import logsumexp

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.common.constants import LOG2_E
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.pallas_sm90.deal import Units
from ejkernel.kernels.flash_attention.pallas_sm90.logits import ROWS, Operands, Tile, Tiles
from ejkernel.kernels.flash_attention.pallas_sm90.schedule import tile_counts, visibility, walk
from ejkernel.kernels.flash_attention.pallas_sm90.staged_bias import Brought
from ejkernel.ops.platform import Device
from ejkernel.types.rules import Everything

# The peak of a row that has seen nothing: finite, so that -inf less than it is -inf and not NaN.
LEAST = -1e30
# By how many powers of two the peak of a row may be too low.
SLACK = 8.0
# Logits known to lie between plus and minus so many powers of two need no peak at all: sums over
# all keys, times any value that a model has, are still numbers. Weights are, too, in bfloat16.
BOUND = 80.0
# Nothing here is reduced through shared memory.
_SHARED_BYTES = gpu.SHARED_MEMORY - gpu.BARRIER_RESERVE


def whole_tiles(inputs: Inputs) -> bool:
    """Whether lengths and dims are multiples of what the tensor cores' tiles have."""
    lengths = inputs.query.shape[1], inputs.key.shape[1]
    dims = inputs.query.shape[3], inputs.value.shape[3]
    return not any(x % 8 for x in lengths) and not any(x % 16 for x in dims)


def forward(
    inputs: Inputs,
    spec: Spec,
    tiles: Tiles,
    device: Device,
    queries: int | None = None,
) -> Outputs:
    """Output and log-sum-exp.

    `queries` is how many there are for the mask, where they come again and again in one tile.
    """
    b, t, n, _ = inputs.query.shape
    s, v = inputs.value.shape[1], inputs.value.shape[3]
    interpreted = gpu.is_interpreted(device)
    rule = inputs.mask or Everything()
    lines, blocks = -(-t // tiles.block_q), -(-s // tiles.block_k)
    q_size, kv_size = lines * tiles.block_q, blocks * tiles.block_k
    units = Units(
        batch=b,
        heads=n,
        group=1,
        pairs=b * inputs.key.shape[2],
        shared_bytes=(inputs.key.nbytes + inputs.value.nbytes) // (b * inputs.key.shape[2]),
        workers=min(gpu.multiprocessors(device), b * n * lines),
    )
    plan = walk(rule, units, queries or t, s, tiles.block_q, tiles.block_k)
    seen = visibility(rule, queries or t, s, queries or q_size, kv_size)
    if seen is not None and queries is not None:
        seen = seen.repeated(q_size)
    operands = Operands.of(inputs, seen, q_size, kv_size)
    sinks = None
    if inputs.sinks is not None:
        sinks = logsumexp(inputs.sinks.astype(jnp.float32), axis=-1) * LOG2_E
        sinks = jnp.broadcast_to(sinks, (n,))
    arrays = {
        "query": inputs.query,
        "key": inputs.key,
        "value": inputs.value,
        "order": plan.order,
        "tiles": plan.tiles,
        "index": plan.index.reshape(-1),
        **operands.arrays,
        **({} if sinks is None else {"sinks": sinks}),
    }
    work = _Forward(spec, tiles, operands, inputs, plan.index.shape, interpreted)
    matrices, stages, consumers = work.matrices, tiles.stages, tiles.consumers
    scratch = {name: matrix.allocate(interpreted) for name, matrix in matrices.items()}

    def body(*refs: Any, **shared: Any) -> None:
        work.body(dict(zip(arrays, refs, strict=False)), *refs[len(arrays) :], **shared)

    run = gpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((b, t, n, v), inputs.query.dtype),
            jax.ShapeDtypeStruct((b, n, q_size), jnp.float32),
        ),
        scratch_types={
            **scratch,
            **work.brought.scratch(interpreted),
            "query_here": gpu.barriers(matrices["queries"].count, matrices["queries"].panels),
            "query_free": gpu.barriers(matrices["queries"].count),
            "key_here": gpu.barriers(stages, matrices["keys"].panels),
            "key_free": gpu.barriers(stages, consumers),
            "value_here": gpu.barriers(stages, matrices["values"].panels),
            "value_free": gpu.barriers(stages, consumers),
            "turn": gpu.barriers(consumers),
        },
        blocks=units.workers,
        warpgroups=consumers + 1,
        interpreted=interpreted,
    )
    out, lse = run(*arrays.values())
    return Outputs(out, lse[..., :t])


class _Forward:
    """The kernel: its static numbers, and the programs of its warpgroups."""

    # Global memory by name, and shared memory with its barriers: known inside the kernel.
    refs: dict[str, Any]
    out: Any
    lse: Any
    shared: Any

    def __init__(self, spec, tiles, operands, inputs, lists, interpreted):
        self.spec, self.tiles, self.operands = spec, tiles, operands
        self.heads = inputs.query.shape[2]
        self.group = self.heads // inputs.key.shape[2]
        self.dtype = inputs.query.dtype
        self.list_rows, self.list_heads, self.lines, self.blocks = lists
        self.engine = gpu.INTERPRETED if interpreted else gpu.WGMMA
        whole = whole_tiles(inputs)
        matrices = functools.partial(gpu.SharedMatrices, self.dtype, whole_tiles=whole)
        keys = matrices(tiles.stages, tiles.block_k, inputs.key.shape[3])
        values = matrices(tiles.stages, tiles.block_k, inputs.value.shape[3])
        self.value_columns = values.columns
        self.rooms = tiles.rooms(keys.columns, values.columns)
        self.apart = keys.columns != values.columns
        count = tiles.consumers * self.rooms
        queries = matrices(count, ROWS, inputs.query.shape[3])
        self.matrices = {"queries": queries, "keys": keys, "values": values}
        if self.apart:
            self.matrices["results"] = matrices(count, ROWS, inputs.value.shape[3])
        room = _SHARED_BYTES - tiles.shared_bytes(keys.columns, values.columns)
        bias = operands.arrays.get("bias")
        self.brought = Brought.of(bias, tiles.consumers, tiles.block_k, room, transposed=False)
        self.interpreted = interpreted
        cap = spec.logits_soft_cap
        self.bounded = (
            cap is not None and cap * LOG2_E <= BOUND and self.dtype == jnp.dtype(jnp.bfloat16)
        )

    @property
    def turns(self) -> bool:
        """Whether warpgroups take turns at the tensor cores.

        Three of them do better without, and so do two that capping keeps busier than the products.
        """
        return self.tiles.consumers == 2 and self.spec.logits_soft_cap is None

    def body(self, refs: dict[str, Any], out, lse, **shared: Any) -> None:
        """What every warpgroup does."""
        self.refs, self.out, self.lse = refs, out, lse
        for name, matrix in self.matrices.items():
            shared[name] = matrix.bind(shared[name], self.interpreted)
        self.shared = types.SimpleNamespace(**{"results": shared["queries"]} | shared)

        gpu.specialise_warpgroups(
            self.tiles.consumers, lambda: self.each_unit(self.copy_unit), self.compute_units
        )

    def compute_units(self, warpgroup) -> None:
        """The units of this block, as one computing warpgroup does them."""
        if self.turns:
            gpu.pl.when(warpgroup == self.tiles.consumers - 1)(
                lambda: gpu.plgpu.barrier_arrive(self.shared.turn.at[0])
            )
        self.each_unit(functools.partial(self.compute_unit, warpgroup))

    def each_unit(self, program) -> None:
        """`step = program(lap, step, unit, tiles)` for the units of this block."""
        gpu.for_each_work_item(self.refs["order"], program, self.refs["tiles"])

    def unpack(self, unit):
        """Batch row, head, line and list of a unit."""
        line, where = lax.rem(unit, self.lines), lax.div(unit, self.lines)
        row, head = lax.div(where, self.heads), lax.rem(where, self.heads)
        list_row = row if self.list_rows > 1 else 0
        list_head = head if self.list_heads > 1 else 0
        return row, head, line, (list_row * self.list_heads + list_head) * self.lines + line

    def room(self, lap, warpgroup):
        """Where a warpgroup's queries of this lap lie."""
        if self.rooms == 1:
            return warpgroup
        return lax.rem(lap, self.rooms) * self.tiles.consumers + warpgroup

    def copy_unit(self, lap, step, unit, tiles_of_unit):
        """Bring the queries of a unit, then its keys and values as room becomes free."""
        plgpu, tiles = gpu.plgpu, self.tiles
        row, head, line, lists = self.unpack(unit)
        for w in range(tiles.consumers):
            room = self.room(lap, w)
            gpu.pl.when(lap >= self.rooms)(
                lambda room=room: plgpu.barrier_wait(self.shared.query_free.at[room])
            )
            first = line * tiles.block_q + w * ROWS
            here = self.shared.query_here.at[room]
            self.shared.queries.load(self.refs["query"], row, first, head, room, here)
        key_head = lax.div(head, self.group)

        def tile(j, step):
            slot = lax.rem(step, tiles.stages)
            block = self.refs["index"][lists * self.blocks + j]
            first = block * tiles.block_k
            for name, room in (("key", self.shared.keys), ("value", self.shared.values)):
                free, here = (
                    getattr(self.shared, f"{name}_free"),
                    getattr(self.shared, f"{name}_here"),
                )
                gpu.pl.when(step >= tiles.stages)(
                    lambda free=free: plgpu.barrier_wait(free.at[slot])
                )
                room.load(self.refs[name], row, first, key_head, slot, here.at[slot])
                if name == "key":
                    at = line * tiles.block_q, block * tiles.block_k
                    self.brought.copy(self.shared, self.refs, step, row, head, *at)
            return step + 1

        return lax.fori_loop(0, tile_counts(tiles_of_unit)[0], tile, step)

    def compute_unit(self, warpgroup, lap, step, unit, tiles_of_unit):
        """Attention of 64 queries over the tiles of their line."""
        plgpu, tiles, engine = gpu.plgpu, self.tiles, self.engine
        row, head, line, lists = self.unpack(unit)
        count, partial = tile_counts(tiles_of_unit)
        first_row = line * tiles.block_q + warpgroup * ROWS
        room = self.room(lap, warpgroup)
        tile = Tile(
            self.spec,
            self.operands,
            self.brought.others(self.refs),
            row,
            head,
            first_row,
            tiles.block_k,
            engine=engine,
        )
        shared = self.shared
        masked = self.operands.masked

        def place(j):
            """Where tile j begins; asked for before its keys are waited for."""
            if not tile.needs_place:
                return 0
            return self.refs["index"][lists * self.blocks + j] * tiles.block_k

        def mine():
            """Where its queries are; if registers are short, as if it was not known before.

            Else they are taken by where each part of the queries begins.
            """
            short = max(self.matrices["queries"].columns, self.value_columns) > 128
            if (condition := self.operands.condition) is not None:
                short |= bool(condition.pairs or condition.unions)
            return lax.optimization_barrier(room) if short else room

        def softmax(products, at, with_mask, peak, mass, bias):
            logits, factor, _ = tile.logits(products, at, with_mask, bias=bias)
            if self.bounded:
                weights, new_peak, shrink = jnp.exp2(logits * factor), peak, peak
            else:
                top = gpu.reduce_rows(logits, jnp.maximum, jnp.max) * factor
                # A peak that is only a little too low stays: weights may be larger than 1, and the
                # total need not be multiplied.
                new_peak = jnp.where(top > peak + SLACK, top, peak)
                shrink = jnp.exp2(peak - new_peak)
                weights = jnp.exp2(logits * factor - gpu.broadcast_rows(new_peak, logits.shape))
                mass = mass * shrink
            mass = mass + gpu.reduce_rows(weights, jnp.add, jnp.sum)
            if tile.drops:
                weights = jnp.where(tile.kept(at), weights, 0.0)
            return weights, new_peak, mass, shrink

        bias_of = functools.partial(self.brought.take, shared, engine, warpgroup)
        # The first tile has nothing to overlap with.
        slot, at = lax.rem(step, tiles.stages), place(0)
        plgpu.barrier_wait(self.shared.query_here.at[room])
        plgpu.barrier_wait(self.shared.key_here.at[slot])

        def first(accumulators, values):
            engine.matmul_nt(accumulators[0], shared.queries, mine(), shared.keys, slot)
            if self.rooms > 1:
                gpu.pl.when(lap > 0)(lambda: self.give_back(self.room(lap - 1, warpgroup)))

        nothing = gpu.full((ROWS, tiles.block_k), 0.0)
        ((logits,), _) = engine.run(first, (nothing,))
        plgpu.barrier_arrive(self.shared.key_free.at[slot])
        lowest = gpu.full((ROWS,), 0.0 if self.bounded else LEAST)
        weights, peak, mass, _ = softmax(
            logits, at, masked, lowest, gpu.full((ROWS,), 0.0), bias_of(step)
        )
        weights = weights.astype(self.dtype)
        plgpu.barrier_wait(self.shared.value_here.at[slot])

        def next_tile(with_mask, j, carry):
            step, total, *state = carry
            slot, before = lax.rem(step, tiles.stages), lax.rem(step - 1, tiles.stages)
            at = place(j)
            plgpu.barrier_wait(self.shared.key_here.at[slot])
            if self.turns:
                plgpu.barrier_wait(self.shared.turn.at[warpgroup])

            def both(accumulators, values):
                total, logits = accumulators
                peak, mass, weights, shrink = values
                engine.matmul_nt(logits, shared.queries, mine(), shared.keys, slot)
                engine.matmul_nn(total, weights[...], shared.values, before)
                if self.turns:
                    following = lax.rem(warpgroup + 1, tiles.consumers)
                    plgpu.barrier_arrive(self.shared.turn.at[following])
                # With a mask there are not enough registers for it beside the logits.
                bias = None if masked else bias_of(step)
                new_logits = engine.read_accumulator(logits, pending=shared.values.shape.panels)
                bias = bias_of(step) if masked else bias
                plgpu.barrier_arrive(self.shared.key_free.at[slot])
                found = softmax(new_logits, at, with_mask, peak[...], mass[...], bias)
                # Everything up to here happens before the wait below, hidden behind the product.
                # What holds the assembler to that is the branch in waiting for the values, which
                # the next product needs. Weights are narrowed after it: the product under way
                # reads the registers of the old ones.
                found = lax.optimization_barrier(found)
                plgpu.barrier_wait(self.shared.value_here.at[slot])
                engine.wait()
                new_weights, peak[...], mass[...], shrink[...] = found
                weights[...] = new_weights.astype(self.dtype)

            nothing = gpu.full((ROWS, tiles.block_k), 0.0)
            (total, _), state = engine.run(both, (total, nothing), (*state, state[1]))
            plgpu.barrier_arrive(self.shared.value_free.at[before])
            *state, shrink = state
            if not self.bounded:
                # Partial tiles come first, when peaks still move; and they need the registers.
                total = engine.rescale_rows(total, shrink, unconditional=with_mask)
            return step + 1, total, *state

        carry = (step + 1, gpu.full((ROWS, self.value_columns), 0.0), peak, mass, weights)
        start = 1
        if masked:
            carry = lax.fori_loop(1, partial, functools.partial(next_tile, True), carry)
            start = jnp.maximum(partial, 1)
        carry = lax.fori_loop(start, count, functools.partial(next_tile, False), carry)
        step, total, peak, mass, weights = carry
        if self.apart:
            plgpu.barrier_arrive(self.shared.query_free.at[room])
        slot = lax.rem(step - 1, tiles.stages)

        def last(accumulators, values):
            engine.matmul_nn(accumulators[0], weights, shared.values, slot)

        ((total,), _) = engine.run(last, (total,))
        plgpu.barrier_arrive(self.shared.value_free.at[slot])
        # Unpacked again, so that only one number stays in a register meanwhile.
        row, head, line, _ = self.unpack(lax.optimization_barrier(unit))
        first_row = line * tiles.block_q + warpgroup * ROWS
        self.write(self.room(lap, warpgroup), row, head, first_row, total, peak, mass)
        if self.rooms == 1 and not self.apart:
            self.give_back(room)
        return step

    def give_back(self, room) -> None:
        """Let queries be copied to where the last results were, once those have been read."""
        gpu.plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        gpu.plgpu.barrier_arrive(self.shared.query_free.at[room])

    def write(self, room, row, head, first_row, total, peak, mass) -> None:
        """The output and the log-sum-exp of 64 queries."""
        plgpu = gpu.plgpu
        seen = mass > 0.0
        whole = mass
        if "sinks" in self.refs:
            whole = mass + jnp.exp2(self.refs["sinks"][head] - peak)
        share = jnp.where(seen, 1.0 / (whole * (1.0 - self.spec.dropout_prob)), 0.0)
        lse = jnp.where(seen, peak / LOG2_E + jnp.log(mass), -jnp.inf)
        total = (total * gpu.broadcast_rows(share, total.shape)).astype(self.dtype)
        rows = gpu.pl.ds(first_row, ROWS)
        # The memory may hold the last result, and no warp may still multiply what lies in it.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.shared.results.write(room, total)
        plgpu.commit_smem()
        self.shared.results.store(self.out, row, first_row, head, room)
        self.lse[row, head, rows] = lse
