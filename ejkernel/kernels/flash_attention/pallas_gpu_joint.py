"""Backward on Hopper in one kernel: five products for a tile where two kernels take seven.

Two warpgroups hold 64 keys each and walk the queries that see them, as in the kernel of keys. They
also leave the gradients of logits in shared memory, where a third warpgroup multiplies them with
the keys and adds the product to the gradients of queries in global memory, in float32. It is also
the one that copies.
"""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.pallas_gpu_backward import _row_terms
from ejkernel.kernels.flash_attention.pallas_gpu_forward import whole_tiles
from ejkernel.kernels.flash_attention.pallas_gpu_order import order, turns, unpack
from ejkernel.kernels.flash_attention.pallas_gpu_tile import LOG2_E, ROWS, Operands, Tile
from ejkernel.kernels.flash_attention.pallas_gpu_walk import visibility
from ejkernel.types.rules import Everything

HOLDERS = 2  # warpgroups that hold keys
KEYS = ROWS * HOLDERS  # of a unit of work
QUERIES = 64  # of a tile
CHUNK = 64  # columns of the gradients of queries that are computed at once, at most
HEAD_DIMS = (64, 96, 128)
MOST_VALUE_DIM = 128
REGISTERS = (216, 72)  # of a thread that holds keys, and of one of the third warpgroup


@dataclasses.dataclass(frozen=True)
class Joint:
    """How the kernel is cut: tiles of queries in flight, and of gradients of logits."""

    stages: int = 3
    slots: int = 2
    ordered: bool = True


def backward(
    inputs: Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: Spec,
    interpreted: bool = False,
    tiles: Joint = Joint(),
) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none."""
    terms = _row_terms(inputs, residuals, d_outputs, spec)
    b, t, n, head_dim = inputs.query.shape
    s, k = inputs.value.shape[1:3]
    rule = inputs.mask or Everything()
    q_size, kv_size = -(-t // QUERIES) * QUERIES, -(-s // KEYS) * KEYS
    lines = kv_size // KEYS
    workers = 1 if interpreted else min(gpu.MULTIPROCESSORS, b * k * lines)
    who = order(b * k, lines, workers)
    plan = turns(rule, t, s, QUERIES, KEYS)
    seen = visibility(rule, t, s, q_size, kv_size)
    operands = Operands.of(inputs, seen, q_size, kv_size, transposed=True)
    pad = lambda x, fill: jnp.pad(x, ((0, 0), (0, 0), (0, q_size - t)), constant_values=fill)
    arrays = {
        "query": inputs.query,
        "key": inputs.key,
        "value": inputs.value,
        "d_out": d_outputs.out,
        "terms": jnp.stack([pad(terms.lse, -jnp.inf), pad(terms.start, 0.0)], axis=2),
        "order": jnp.asarray(who.units),
        "count": plan.count.reshape(-1),
        "tiles": plan.tiles.reshape(-1),
        **operands.arrays,
    }
    # What is added to: whole tiles, so that no addition is cut off.
    d_query = jax.new_ref(jnp.zeros((b, q_size, n, head_dim), jnp.float32))
    # Whose turn it is: counted up where lines go downward, else down from the last one.
    downward = np.repeat(who.downward(np.arange(b * k)), n // k).reshape(b, n, 1)
    turn = jax.new_ref(jnp.where(downward, 0, plan.visits - 1).reshape(-1))
    names = (*arrays, "d_query", "turn")
    work = _Joint(spec, tiles, operands, inputs, plan.tiles.shape, who, interpreted)

    def body(*refs: Any, **shared: Any) -> None:
        work.body(dict(zip(names, refs, strict=False)), refs[len(names) :], shared)

    run = gpu.kernel(
        body,
        interpreted,
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[1:3]),
        scratch_types=work.scratch(),
        grid=(workers,),
        grid_names=("block",),
        num_threads=HOLDERS + 1,
        thread_name="warpgroup",
    )
    d_key, d_value = run(*arrays.values(), d_query, turn)
    d_query = (d_query[...][:, :t] * spec.softmax_scale).astype(inputs.query.dtype)
    return Inputs(d_query, d_key, d_value, sinks=None, mask=None)


def why_not(inputs: Inputs, spec: Spec) -> str | None:
    """What keeps one kernel from taking a backward pass that the others can take, or None."""
    if jax.__version_info__ < (0, 11):
        return "needs JAX 0.11 or newer"
    given = {
        "bias": inputs.bias is not None,
        "sinks": inputs.sinks is not None,
        "dropout": inputs.dropout is not None,
        "logits_soft_cap": spec.logits_soft_cap is not None,
    }
    if any(given.values()):
        return f"does not support {', '.join(name for name, has in given.items() if has)}"
    head_dim, value_dim = inputs.query.shape[3], inputs.value.shape[3]
    if head_dim not in HEAD_DIMS:
        return f"needs a head dim of {', '.join(map(str, HEAD_DIMS))}, got {head_dim}"
    if value_dim > MOST_VALUE_DIM:
        return f"needs a value dim of at most {MOST_VALUE_DIM}, got {value_dim}"
    return None


class _Joint:
    """The kernel: its static numbers, and the programs of its warpgroups."""

    # Global memory by name, results, and shared memory with its barriers: known inside the kernel.
    refs: dict[str, Any]
    results: Any
    shared: Any

    def __init__(self, spec, tiles: Joint, operands, inputs, lists, who, interpreted):
        self.who = who
        self.spec, self.tiles, self.operands = spec, tiles, operands
        self.dtype, self.interpreted = inputs.query.dtype, interpreted
        self.heads = inputs.key.shape[2]
        self.group = inputs.query.shape[2] // self.heads
        dims, whole = (inputs.query.shape[3], inputs.value.shape[3]), whole_tiles(inputs)
        of = lambda count, rows: tuple(
            gpu.Matrices(self.dtype, count, rows, dim, whole) for dim in dims
        )
        self.held, self.moving = of(HOLDERS, ROWS), of(tiles.stages, QUERIES)
        # Laid out as keys and queries are, with which they are multiplied.
        width = (gpu.swizzle(self.held[0].width) or 0) // 2
        self.d_logits = gpu.shared_tile(
            self.dtype, HOLDERS * tiles.slots, ROWS, QUERIES, width=width
        )
        width = min(CHUNK, self.held[0].width)
        self.chunks = [(i, min(width, dims[0] - i)) for i in range(0, dims[0], width)]
        self.list_rows, self.list_heads, self.lines, self.blocks = lists
        self.engine = gpu.EMULATION if interpreted else gpu.HARDWARE

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        copies, stages, slots = sum(x.strips for x in self.held), self.tiles.stages, self.tiles.slots
        return {
            "held": tuple(gpu.allocate(self.interpreted, one) for one in self.held),
            "moving": tuple(gpu.allocate(self.interpreted, one) for one in self.moving),
            "d_logits": self.d_logits,
            "sums": tuple(gpu.shared_numbers(QUERIES, width) for _, width in self.chunks),
            "terms": gpu.plgpu.SMEM((stages, 2, QUERIES), jnp.float32),
            "held_here": gpu.barriers(HOLDERS, copies),
            "held_free": gpu.barriers(HOLDERS),
            "keys_done": gpu.barriers(1),
            "moving_here": gpu.barriers(stages, copies + 1),
            "moving_free": gpu.barriers(stages, HOLDERS),
            "d_logits_here": gpu.barriers(slots, HOLDERS),
            "d_logits_free": gpu.barriers(slots),
        }

    def body(self, refs: dict[str, Any], results: Any, shared: dict[str, Any]) -> None:
        """What every warpgroup does."""
        self.refs, self.results = refs, results
        bind = lambda ref, one: gpu.bind(self.interpreted, ref, one)[0]
        for name, matrices in (("held", self.held), ("moving", self.moving)):
            shared[name] = [bind(*pair) for pair in zip(shared[name], matrices, strict=True)]
        self.shared = types.SimpleNamespace(**shared)
        warpgroup = lax.axis_index("warpgroup")
        plgpu = gpu.plgpu

        @gpu.pl.when(warpgroup == HOLDERS)
        def _serving():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            self.each_unit(self.serve_unit)
            plgpu.wait_smem_to_gmem(0)

        @gpu.pl.when(warpgroup < HOLDERS)
        def _computing():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            self.each_unit(functools.partial(self.compute_unit, warpgroup))
            plgpu.wait_smem_to_gmem(0)

    def each_unit(self, program) -> None:
        """`step = program(lap, step, unit)` for the units of this block."""
        gpu.each_unit(self.refs["order"], program)

    def unpack(self, unit):
        """Batch row, key head and line of a unit."""
        line, pair = lax.rem(unit, self.lines), lax.div(unit, self.lines)
        return lax.div(pair, self.heads), lax.rem(pair, self.heads), line

    def each_head(self, row, head, line, program, carry):
        """`carry = program(list of tiles, carry)` for the query heads of a unit."""

        def one(query_head, carry):
            return program(_Tiles(self, row, query_head, line), carry)

        if self.group == 1:
            return one(head, carry)
        first = head * self.group
        return lax.fori_loop(first, first + self.group, one, carry)

    def serve_unit(self, lap, step, unit):
        """Bring what is held and what is walked; sum up the gradients of queries, tile by tile."""
        row, head, line = self.unpack(unit)
        plgpu, stages, shared = gpu.plgpu, self.tiles.stages, self.shared

        def keys_and_values():
            for w in range(HOLDERS):
                gpu.pl.when(lap > 0)(lambda w=w: plgpu.barrier_wait(shared.held_free.at[w]))
                rows = gpu.pl.ds(line * KEYS + w * ROWS, ROWS)
                for name, room in zip(("key", "value"), shared.held, strict=True):
                    room.fetch(self.refs[name], row, rows, head, w, shared.held_here.at[w])
            for w in range(HOLDERS):
                plgpu.barrier_wait(shared.held_here.at[w])

        def of_head(tiles, carry):
            def fetch(j, step):
                self.fetch(tiles, j, step)
                return step + 1

            lax.fori_loop(0, jnp.minimum(tiles.count, stages - 1), fetch, carry[0])
            # Only now: the memory of the keys before is free later than that of their queries.
            gpu.pl.when(tiles.head == head * self.group)(keys_and_values)

            return lax.fori_loop(0, tiles.count, functools.partial(self.add, tiles), carry)

        step, last = self.each_head(row, head, line, of_head, (step, jnp.int32(-1)))
        plgpu.barrier_arrive(shared.keys_done.at[0])
        self.pass_on(jnp.where(self.downward(row, head), -1, 1), last, 0)
        return step

    def downward(self, row, head):
        """Whether the units of a key head walk downward, in the order of their lines."""
        return self.who.downward(row * self.heads + head)

    def fetch(self, tiles, j, step) -> None:
        """Begin to copy a tile of queries, when there is room."""
        plgpu, stages, shared = gpu.plgpu, self.tiles.stages, self.shared
        slot = lax.rem(step, stages)
        rows = gpu.pl.ds(tiles.tile(j)[0] * QUERIES, QUERIES)
        gpu.pl.when(step >= stages)(lambda: plgpu.barrier_wait(shared.moving_free.at[slot]))
        here = shared.moving_here.at[slot]
        for name, room in zip(("query", "d_out"), shared.moving, strict=True):
            room.fetch(self.refs[name], tiles.row, rows, tiles.head, slot, here)
        source = self.refs["terms"].at[tiles.row, tiles.head, :, rows]
        plgpu.copy_gmem_to_smem(source, shared.terms.at[slot], here)

    def add(self, tiles, j, carry):
        """Add a tile's gradients of queries, from what the other warpgroups have left.

        By then they no longer need the tile before, so that its room is free. The carry has the
        step, and the number of the tile before, which others have not been told of.
        """
        step, last = carry
        plgpu, shared = gpu.plgpu, self.shared
        slot = lax.rem(step, self.tiles.slots)
        plgpu.barrier_wait(shared.d_logits_here.at[slot])
        ahead = self.tiles.stages - 1
        gpu.pl.when(j + ahead < tiles.count)(lambda: self.fetch(tiles, j + ahead, step + ahead))
        block, _, turn = tiles.tile(j)
        number = tiles.number(block)
        rows, later = gpu.pl.ds(block * QUERIES, QUERIES), len(self.chunks) - 1
        for i, (start, width) in enumerate(self.chunks):
            total = self.of_queries(slot, start, width)
            if i == later:
                plgpu.barrier_arrive(shared.d_logits_free.at[slot])
                self.pass_on(tiles.stride, last, later)
            if i == 0 and self.tiles.ordered:
                self.engine.wait_for_number(self.refs["turn"].at[number], turn)
            columns = gpu.pl.ds(start, width)
            target = self.refs["d_query"].at[tiles.row, rows, tiles.head, columns]
            self.engine.add_through(shared.sums[i], target, total, later)
        return step + 1, number

    def pass_on(self, stride, number, unfinished) -> None:
        """Wait until what was added is there, and let others add to that tile."""
        if not self.tiles.ordered:
            return

        @gpu.pl.when(number >= 0)
        def _added():
            gpu.plgpu.wait_smem_to_gmem(unfinished)
            self.engine.add_number(self.refs["turn"].at[number], -stride)

    def of_queries(self, slot, start, width):
        """A tile's gradients of logits times keys, some columns of it."""
        # Not known to be the same in every tile: what follows from it would be kept in registers.
        first = lax.optimization_barrier(jnp.int32(0))

        def products(accumulators, values):
            for w in range(HOLDERS):
                left = self.shared.d_logits.at[slot * HOLDERS + w]
                keys = self.shared.held[0]
                self.engine.across(accumulators[0], left, keys, first + w, start, width)

        return self.engine.run(products, (gpu.full((QUERIES, width), 0.0),))[0][0]

    def compute_unit(self, warpgroup, lap, step, unit):
        """The gradients of 64 keys and values."""
        row, head, line = self.unpack(unit)
        gpu.plgpu.barrier_wait(self.shared.held_here.at[warpgroup])
        sums = tuple(gpu.full((ROWS, self.held[i].columns), 0.0) for i in (1, 0))

        walked = functools.partial(_Walked, self, warpgroup, unit)

        first = _Tiles(self, row, head * self.group, line)
        carry = walked(first).first_tile(step, sums)

        def of_head(tiles, carry):
            begin = jnp.where(tiles.head == first.head, 1, 0)
            return lax.fori_loop(begin, tiles.count, walked(tiles).next_tile, carry)

        carry = self.each_head(row, head, line, of_head, carry)
        step, sums = walked(first).last_tile(*carry)
        # Unpacked again, so that only one number stays in a register meanwhile.
        row, head, line = self.unpack(lax.optimization_barrier(unit))
        self.write(warpgroup, row, head, line * KEYS + warpgroup * ROWS, sums)
        return step

    def write(self, warpgroup, row, head, first_row, sums) -> None:
        """Sums to global memory, through the memory that held the rows they belong to."""
        plgpu, shared = gpu.plgpu, self.shared
        rows = gpu.pl.ds(first_row, ROWS)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # all threads have done their products
        for i, total in zip((1, 0), sums, strict=True):
            if i == 0:  # the gradients of queries still need the keys
                plgpu.barrier_wait(shared.keys_done.at[0])
                total = total * self.spec.softmax_scale
            shared.held[i].put(warpgroup, total.astype(self.dtype))
        plgpu.commit_smem()
        for i in (0, 1):
            shared.held[i].store(self.results[i], row, rows, head, warpgroup)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(shared.held_free.at[warpgroup])


class _Tiles:
    """The tiles of one line and query head, in the order in which they are walked."""

    def __init__(self, work: _Joint, row, head, line):
        self.work, self.row, self.head = work, row, head
        list_row = row if work.list_rows > 1 else 0
        list_head = head if work.list_heads > 1 else 0
        list_ = (list_row * work.list_heads + list_head) * work.lines + line
        self.count = work.refs["count"][list_]
        downward = work.downward(row, lax.div(head, work.group))
        self.first = list_ * work.blocks + jnp.where(downward, self.count - 1, 0)
        self.stride = jnp.where(downward, -1, 1)

    def tile(self, j):
        """Block, whether partial, and turn; see `unpack`."""
        return unpack(self.work.refs["tiles"][self.first + j * self.stride])

    def number(self, block):
        """The tile among those of all rows and heads."""
        work = self.work
        return ((self.row * work.heads * work.group) + self.head) * work.blocks + block


class _Walked:
    """One warpgroup's walk over the tiles of one query head."""

    def __init__(self, work: _Joint, warpgroup, unit, tiles: _Tiles):
        self.work, self.warpgroup, self.unit, self.walk = work, warpgroup, unit, tiles
        self.tiles, self.shared, self.engine = work.tiles, work.shared, work.engine
        self.shape = (ROWS, QUERIES)

    def first_tile(self, step, sums):
        """All of a tile but its part of the sum of keys."""
        (logits,) = self.with_logits(0, step, (), lambda sums: None)
        return step + 1, (self.gradients(step, sums[0], logits), sums[1])

    def next_tile(self, j, carry):
        """The same, with what was left of the tile before beside its first product."""
        step, sums = carry
        d_key, logits = self.with_logits(
            j, step, sums[1:], lambda sums: self.add_keys(sums[0], step - 1)
        )
        gpu.plgpu.barrier_arrive(self.shared.moving_free.at[self.slot(step - 1)])
        return step + 1, (self.gradients(step, sums[0], logits), d_key)

    def last_tile(self, step, sums):
        """What is left of the last one."""
        (d_key,), _ = self.engine.run(
            lambda sums, values: self.add_keys(sums[0], step - 1), sums[1:]
        )
        gpu.plgpu.barrier_arrive(self.shared.moving_free.at[self.slot(step - 1)])
        return step, (sums[0], d_key)

    def slot(self, step):
        return lax.rem(step, self.tiles.stages)

    def with_logits(self, j, step, sums, begin) -> tuple:
        """`sums` after what `begin` does to them, and beside that the products of a tile's logits.

        They are the logits less the log-sum-exp, in units of products; -inf where a pair is hidden.
        """
        slot = self.slot(step)
        hidden = self.hidden(j)
        gpu.plgpu.barrier_wait(self.shared.moving_here.at[slot])

        def both(accumulators, values):
            begin(accumulators[:-1])
            self.product(0, accumulators[-1], slot)

        start = self.term(0, slot)
        start = start if hidden is None else start + hidden
        return self.engine.run(both, (*sums, start))[0]

    def product(self, i, accumulator, slot) -> None:
        # Not known to be the same in every tile: what follows from it would be kept in registers.
        mine = lax.optimization_barrier(self.warpgroup)
        held, moving = self.shared.held[i], self.shared.moving[i]
        self.engine.inner(accumulator, held, mine, moving, slot)

    def add_keys(self, d_key, step) -> None:
        """Begin to add to the sum of keys, from the gradients of logits in shared memory."""
        left = self.shared.d_logits.at[self.own_room(step)]
        self.engine.plain(d_key, left, self.shared.moving[0], self.slot(step))

    def own_room(self, step):
        return lax.rem(step, self.tiles.slots) * HOLDERS + self.warpgroup

    def gradients(self, step, d_value, logits) -> jax.Array:
        """The sum of values with a tile added; leaves the gradients of the tile's logits."""
        shared, dtype, slot = self.shared, self.work.dtype, self.slot(step)
        factor = self.work.spec.softmax_scale * LOG2_E
        weights = lax.optimization_barrier(jnp.exp2(logits * factor).astype(dtype))
        # A branch, over which nothing is moved: before it there is no room for the next product.
        self.wait_for_room(step)

        def both(accumulators, values):
            d_value, d_weights = accumulators
            self.product(1, d_weights, slot)
            self.engine.outer(d_value, weights, shared.moving[1], slot)
            d_weights = self.engine.read(d_weights, shared.moving[1].shape.strips)
            d_logits = (weights.astype(jnp.float32) * d_weights).astype(dtype)
            self.leave(step, d_logits)

        (d_value, _), _ = self.engine.run(both, (d_value, self.term(1, slot)))
        return d_value

    def wait_for_room(self, step) -> None:
        slots, free = self.tiles.slots, self.shared.d_logits_free
        slot = lax.rem(step, slots)
        gpu.pl.when(step >= slots)(lambda: gpu.plgpu.barrier_wait(free.at[slot]))

    def leave(self, step, d_logits) -> None:
        """Gradients of logits, for who sums up those of queries."""
        shared = self.shared
        shared.d_logits.at[self.own_room(step)][...] = d_logits
        gpu.plgpu.commit_smem()
        gpu.plgpu.barrier_arrive(shared.d_logits_here.at[lax.rem(step, self.tiles.slots)])

    def hidden(self, j):
        """-inf where the mask hides a pair, 0 elsewhere; None without a mask."""
        if not self.work.operands.masked:
            return None
        block, hides, _ = self.walk.tile(j)
        zero = lambda: gpu.full(self.shape, 0.0)

        def partial():
            visible = self.mask().visible(block * QUERIES)
            return jnp.where(visible, zero(), -jnp.inf)

        return lax.cond(hides != 0, partial, zero)

    def mask(self) -> Tile:
        """What says which pairs are hidden; nothing of it stays in registers."""
        work, (unit, head) = self.work, lax.optimization_barrier((self.unit, self.walk.head))
        row, _, line = work.unpack(unit)
        first_row = line * KEYS + self.warpgroup * ROWS
        return Tile(work.spec, work.operands, work.refs, row, head, first_row, QUERIES, True)

    def term(self, i, slot):
        """A number for each query, along the columns."""
        part = gpu.load(self.shared.terms.at[slot, i], gpu.columns_layout())
        return gpu.along_columns(part, self.shape)
