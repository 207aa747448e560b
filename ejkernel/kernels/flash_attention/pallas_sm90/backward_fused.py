"""Backward on Hopper in one kernel: five products for a tile where two kernels take seven.

Two warpgroups hold 64 keys each and walk the queries that see them, as in the kernel of keys. They
also leave the gradients of logits in shared memory, where a third warpgroup multiplies them with
the keys and adds the product to the gradients of queries in global memory, in float32. It is also
the one that copies. Who adds first is not known beforehand, so that the last bits of these
gradients differ from run to run.
"""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.pallas_sm90 import backward_fused_engine as engine
from ejkernel.kernels.flash_attention.pallas_sm90.backward import _row_terms
from ejkernel.kernels.flash_attention.pallas_sm90.backward_fused_walk import (
    HOLDERS,
    KEYS,
    QUERIES,
    SLOTS,
    STAGES,
    Tiles,
    Walked,
)
from ejkernel.kernels.flash_attention.pallas_sm90.deal import Units
from ejkernel.kernels.flash_attention.pallas_sm90.forward import whole_tiles
from ejkernel.kernels.flash_attention.pallas_sm90.logits import ROWS, Operands
from ejkernel.kernels.flash_attention.pallas_sm90.schedule import visibility, walk_columns
from ejkernel.ops.platform import Device
from ejkernel.types.rules import Everything

CHUNK = 64  # columns of the gradients of queries that are computed at once, at most
HEAD_DIMS = (64, 96, 128)
MOST_VALUE_DIM = 128
REGISTERS = (216, 72)  # of a thread that holds keys, and of one of the third warpgroup


def backward(
    inputs: Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: Spec,
    device: Device,
) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none."""
    terms = _row_terms(inputs, residuals, d_outputs, spec)
    interpreted = gpu.is_interpreted(device)
    b, t, n, head_dim = inputs.query.shape
    s, k = inputs.value.shape[1:3]
    rule = inputs.mask or Everything()
    q_size, kv_size = -(-t // QUERIES) * QUERIES, -(-s // KEYS) * KEYS
    lines = kv_size // KEYS
    units = Units(
        batch=b,
        heads=k,
        group=n // k,
        pairs=b * k,
        shared_bytes=(inputs.query.nbytes + d_outputs.out.nbytes) // (b * k),
        workers=1 if interpreted else min(gpu.multiprocessors(device), b * k * lines),
    )
    plan = walk_columns(rule, units, t, s, QUERIES, KEYS)
    seen = visibility(rule, t, s, q_size, kv_size)
    operands = Operands.of(inputs, seen, q_size, kv_size, transposed=True)
    pad = lambda x, fill: jnp.pad(x, ((0, 0), (0, 0), (0, q_size - t)), constant_values=fill)
    arrays = {
        "query": inputs.query,
        "key": inputs.key,
        "value": inputs.value,
        "d_out": d_outputs.out,
        "terms": jnp.stack([pad(terms.lse, -jnp.inf), pad(terms.start, 0.0)], axis=2),
        "order": plan.order,
        "count": plan.count.reshape(-1),
        "partial": plan.partial.reshape(-1),
        "index": plan.index.reshape(-1),
        **operands.arrays,
    }
    # What is added to: whole tiles, so that no addition is cut off.
    d_query = jax.new_ref(jnp.zeros((b, q_size, n, head_dim), jnp.float32))
    names = (*arrays, "d_query")
    work = _Joint(spec, operands, inputs, plan.index.shape, interpreted)

    def body(*refs: Any, **shared: Any) -> None:
        work.body(dict(zip(names, refs, strict=False)), refs[len(names) :], shared)

    run = gpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[1:3]),
        scratch_types=work.scratch(),
        blocks=units.workers,
        warpgroups=HOLDERS + 1,
        interpreted=interpreted,
    )
    d_key, d_value = run(*arrays.values(), d_query)
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

    def __init__(self, spec, operands, inputs, lists, interpreted):
        self.spec, self.operands = spec, operands
        self.dtype, self.interpreted = inputs.query.dtype, interpreted
        self.heads = inputs.key.shape[2]
        self.group = inputs.query.shape[2] // self.heads
        dims, whole = (inputs.query.shape[3], inputs.value.shape[3]), whole_tiles(inputs)
        of = lambda count, rows: tuple(
            gpu.SharedMatrices(self.dtype, count, rows, dim, whole) for dim in dims
        )
        self.held, self.moving = of(HOLDERS, ROWS), of(STAGES, QUERIES)
        # Laid out as keys and queries are, with which they are multiplied.
        width = (gpu.swizzle_bytes(self.held[0].width) or 0) // 2
        self.d_logits = gpu.tiled_memory(self.dtype, HOLDERS * SLOTS, ROWS, QUERIES, width=width)
        width = min(CHUNK, self.held[0].width)
        self.chunks = [(i, min(width, dims[0] - i)) for i in range(0, dims[0], width)]
        self.ragged = inputs.key.shape[1] % KEYS != 0
        self.list_rows, self.list_heads, self.lines, self.blocks = lists
        self.engine = engine.EMULATION if interpreted else engine.HARDWARE

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        copies = sum(one.panels for one in self.held)
        return {
            "held": tuple(one.allocate(self.interpreted) for one in self.held),
            "moving": tuple(one.allocate(self.interpreted) for one in self.moving),
            "d_logits": self.d_logits,
            "sums": tuple(engine.shared_numbers(QUERIES, width) for _, width in self.chunks),
            "terms": gpu.plgpu.SMEM((STAGES, 2, QUERIES), jnp.float32),
            "held_here": gpu.barriers(HOLDERS, copies),
            "held_free": gpu.barriers(HOLDERS),
            "keys_done": gpu.barriers(1),
            "moving_here": gpu.barriers(STAGES, copies + 1),
            "moving_free": gpu.barriers(STAGES, HOLDERS),
            "d_logits_here": gpu.barriers(SLOTS, HOLDERS),
            "d_logits_free": gpu.barriers(SLOTS),
        }

    def body(self, refs: dict[str, Any], results: Any, shared: dict[str, Any]) -> None:
        """What every warpgroup does."""
        self.refs, self.results = refs, results
        bind = lambda ref, one: one.bind(ref, self.interpreted)
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
        gpu.for_each_work_item(self.refs["order"], program)

    def unpack(self, unit):
        """Batch row, key head and line of a unit."""
        line, pair = lax.rem(unit, self.lines), lax.div(unit, self.lines)
        return lax.div(pair, self.heads), lax.rem(pair, self.heads), line

    def each_head(self, row, head, line, lap, program, carry):
        """`carry = program(list of tiles, carry)` for the query heads of a unit."""

        def one(query_head, carry):
            return program(Tiles(self, row, query_head, line, lap), carry)

        if self.group == 1:
            return one(head, carry)
        first = head * self.group
        return lax.fori_loop(first, first + self.group, one, carry)

    def serve_unit(self, lap, step, unit):
        """Bring what is held and what is walked; sum up the gradients of queries, tile by tile."""
        row, head, line = self.unpack(unit)
        plgpu, shared = gpu.plgpu, self.shared

        def keys_and_values():
            for w in range(HOLDERS):
                gpu.pl.when(lap > 0)(lambda w=w: plgpu.barrier_wait(shared.held_free.at[w]))
                first = line * KEYS + w * ROWS
                for name, room in zip(("key", "value"), shared.held, strict=True):
                    room.load(self.refs[name], row, first, head, w, shared.held_here.at[w])
            for w in range(HOLDERS):
                plgpu.barrier_wait(shared.held_here.at[w])

        def of_head(tiles, step):
            def fetch(j, step):
                self.fetch(tiles, j, step)
                return step + 1

            lax.fori_loop(0, jnp.minimum(tiles.count, STAGES - 1), fetch, step)
            # Only now: the memory of the keys before is free later than that of their queries.
            gpu.pl.when(tiles.head == head * self.group)(keys_and_values)

            return lax.fori_loop(0, tiles.count, functools.partial(self.add, tiles), step)

        step = self.each_head(row, head, line, lap, of_head, step)
        plgpu.barrier_arrive(shared.keys_done.at[0])
        return step

    def fetch(self, tiles, j, step) -> None:
        """Begin to copy a tile of queries, when there is room."""
        plgpu, shared = gpu.plgpu, self.shared
        slot = lax.rem(step, STAGES)
        first = tiles.tile(j)[0]
        gpu.pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(shared.moving_free.at[slot]))
        here = shared.moving_here.at[slot]
        for name, room in zip(("query", "d_out"), shared.moving, strict=True):
            room.load(self.refs[name], tiles.row, first, tiles.head, slot, here)
        source = self.refs["terms"].at[tiles.row, tiles.head, :, gpu.pl.ds(first, QUERIES)]
        plgpu.copy_gmem_to_smem(source, shared.terms.at[slot], here)

    def add(self, tiles, j, step):
        """Add a tile's gradients of queries, from what the other warpgroups have left.

        By then they no longer need the tile before, so that its room is free.
        """
        plgpu, shared = gpu.plgpu, self.shared
        slot = lax.rem(step, SLOTS)
        plgpu.barrier_wait(shared.d_logits_here.at[slot])
        ahead = STAGES - 1
        gpu.pl.when(j + ahead < tiles.count)(lambda: self.fetch(tiles, j + ahead, step + ahead))
        rows, later = gpu.pl.ds(tiles.tile(j)[0], QUERIES), len(self.chunks) - 1
        for i, (start, width) in enumerate(self.chunks):
            total = self.of_queries(slot, start, width)
            if i == later:
                plgpu.barrier_arrive(shared.d_logits_free.at[slot])
            columns = gpu.pl.ds(start, width)
            target = self.refs["d_query"].at[tiles.row, rows, tiles.head, columns]
            self.engine.add_through(shared.sums[i], target, total, later)
        return step + 1

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

        walked = functools.partial(Walked, self, warpgroup, unit)

        first = Tiles(self, row, head * self.group, line, lap)
        carry = walked(first).first_tile(step, sums)

        def of_head(tiles, carry):
            begin = jnp.where(tiles.head == first.head, 1, 0)
            return lax.fori_loop(begin, tiles.count, walked(tiles).next_tile, carry)

        carry = self.each_head(row, head, line, lap, of_head, carry)
        step, sums = walked(first).last_tile(*carry)
        # Unpacked again, so that only one number stays in a register meanwhile.
        row, head, line = self.unpack(lax.optimization_barrier(unit))
        self.write(warpgroup, row, head, line * KEYS + warpgroup * ROWS, sums)
        return step

    def write(self, warpgroup, row, head, first_row, sums) -> None:
        """Sums to global memory, through the memory that held the rows they belong to."""
        plgpu, shared = gpu.plgpu, self.shared
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # all threads have done their products
        for i, total in zip((1, 0), sums, strict=True):
            if i == 0:  # the gradients of queries still need the keys
                plgpu.barrier_wait(shared.keys_done.at[0])
                total = total * self.spec.softmax_scale
            shared.held[i].write(warpgroup, total.astype(self.dtype))
        plgpu.commit_smem()
        for i in (0, 1):
            shared.held[i].store(self.results[i], row, first_row, head, warpgroup)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(shared.held_free.at[warpgroup])
