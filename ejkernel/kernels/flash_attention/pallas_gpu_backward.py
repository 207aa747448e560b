"""Backward on Hopper: one kernel for keys and values, one for queries; both deterministic.

A computing warpgroup holds 64 keys (or queries) and walks the queries (or keys) that meet them. Two
products give logits and gradients of weights, 64 rows each; their weights and gradients stay in
registers as the left sides of the products that they are summed in. For keys the tiles stand
transposed, which makes that possible. The gradients of a key head are summed over its query heads
inside the kernel.
"""

import dataclasses
import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.common.sinks import per_sink, share_of_keys
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.pallas_gpu_forward import whole_tiles
from ejkernel.kernels.flash_attention.pallas_gpu_tile import LOG2_E, ROWS, Operands, Tile
from ejkernel.kernels.flash_attention.pallas_gpu_walk import Units, visibility, walk, walk_columns
from ejkernel.types.rules import Everything


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a kernel is cut: computing warpgroups, columns of a tile, tiles kept in flight.

    With `overlap`, the sums of a tile run while the next one's gradients are computed, which takes
    more registers.
    """

    consumers: int
    columns: int
    stages: int
    overlap: bool

    @property
    def rows(self) -> int:
        return ROWS * self.consumers

    def shared_bytes(self, head_dim: int, value_dim: int) -> int:
        """Shared memory of a kernel."""
        matrices = 2 * (self.rows + self.stages * self.columns) * (head_dim + value_dim)
        return matrices + self.stages * self.columns * 2 * 4


def backward(
    inputs: Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: Spec,
    of_keys: Tiles,
    of_queries: Tiles,
    interpreted: bool = False,
) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none."""
    terms = _row_terms(inputs, residuals, d_outputs, spec)
    d_out = d_outputs.out
    if inputs.sinks is not None or inputs.dropout is not None:
        factor = jnp.swapaxes(terms.share, 1, 2)[..., None] / (1.0 - spec.dropout_prob)
        d_out = (d_out * factor).astype(inputs.query.dtype)
    run = functools.partial(_run, inputs, d_out, spec, terms, interpreted)
    d_key, d_value = run(of_keys, for_keys=True)
    d_query, *sums = run(of_queries, for_keys=False)
    d_sinks = None
    if inputs.sinks is not None:
        # What weights and their gradients sum to, from which the kernel has taken delta.
        taken = sums[0][..., : terms.share.shape[2]] - jnp.where(terms.seen, terms.start, 0.0)
        d_sinks = per_sink(-((1.0 - terms.share) * taken).sum((0, 2)), inputs.sinks)
    return Inputs(d_query, d_key, d_value, sinks=d_sinks, mask=None)


class _Terms(NamedTuple):
    """What the logits of a row share, each [b, n, t].

    With w the part of a row's weights that sinks leave to the keys (1 without sinks),
    d_logits = 2 ** (logits - lse) * (w * d_weights - delta).
    """

    lse: jax.Array  # in base 2; negative and in units of products where these begin with it
    start: jax.Array  # what gradients of weights begin with, -delta
    share: jax.Array  # w
    seen: jax.Array  # whether the row sees a key


def _row_terms(inputs: Inputs, residuals: Outputs, d_outputs: Outputs, spec: Spec) -> _Terms:
    lse, d_lse = residuals.lse, d_outputs.lse.astype(jnp.float32)
    products = residuals.out.astype(jnp.float32) * d_outputs.out.astype(jnp.float32)
    # Summed on its own: together with what follows, XLA reads it five times as slowly.
    delta = jnp.swapaxes(lax.optimization_barrier(products.sum(-1)), 1, 2)
    seen = lse > -jnp.inf
    safe = jnp.where(seen, lse * LOG2_E, jnp.inf)  # a row that sees nothing has weights of 0
    if _starts_with_lse(spec):
        safe = safe * (-1.0 / (spec.softmax_scale * LOG2_E))
    share = jnp.ones_like(lse)
    if inputs.sinks is not None:
        share = share_of_keys(lse, inputs.sinks)
    return _Terms(safe, d_lse - share * delta, share, seen)


def _starts_with_lse(spec: Spec) -> bool:
    """Whether products can begin with lse, which then needs no registers of its own."""
    return spec.logits_soft_cap is None


def _run(inputs, d_out, spec, terms, interpreted, tiles: Tiles, for_keys: bool) -> tuple:
    b, t, n, _ = inputs.query.shape
    s, k = inputs.value.shape[1:3]
    rule = inputs.mask or Everything()
    block_q, block_k = (tiles.columns, tiles.rows) if for_keys else (tiles.rows, tiles.columns)
    q_size, kv_size = (-(-size // block) * block for size, block in ((t, block_q), (s, block_k)))
    held, read = (s, (inputs.query, d_out)) if for_keys else (t, (inputs.key, inputs.value))
    heads, group = (k, n // k) if for_keys else (n, 1)
    units = Units(
        batch=b,
        heads=heads,
        group=group,
        pairs=b * k,
        shared_bytes=sum(x.nbytes for x in read) // (b * k),
        workers=min(gpu.MULTIPROCESSORS, b * heads * -(-held // tiles.rows)),
    )
    plan = (walk_columns if for_keys else walk)(rule, units, t, s, block_q, block_k)
    seen = visibility(rule, t, s, q_size, kv_size)
    operands = Operands.of(inputs, seen, q_size, kv_size, transposed=for_keys)
    pad = lambda x, fill: jnp.pad(x, ((0, 0), (0, 0), (0, q_size - t)), constant_values=fill)
    lse = pad(terms.lse, -jnp.inf if _starts_with_lse(spec) else jnp.inf)
    arrays = {
        "query": inputs.query,
        "key": inputs.key,
        "value": inputs.value,
        "d_out": d_out,
        "terms": jnp.stack([lse, pad(terms.start, 0.0)], axis=2),
        "order": plan.order,
        "count": plan.count.reshape(-1),
        "partial": plan.partial.reshape(-1),
        "index": plan.index.reshape(-1),
        **operands.arrays,
    }
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    out_type = [like(inputs.key), like(inputs.value)] if for_keys else [like(inputs.query)]
    if not for_keys and inputs.sinks is not None:
        out_type.append(jax.ShapeDtypeStruct((b, n, q_size), jnp.float32))
    work = _Backward(spec, tiles, operands, inputs, plan.index.shape, for_keys, interpreted)

    def body(*refs: Any, **shared: Any) -> None:
        work.body(dict(zip(arrays, refs, strict=False)), refs[len(arrays) :], shared)

    consumers, stages = tiles.consumers, tiles.stages
    copies = sum(one.strips for one in work.held)
    scratch = {
        "held": tuple(gpu.allocate(interpreted, one) for one in work.held),
        "moving": tuple(gpu.allocate(interpreted, one) for one in work.moving),
        "held_here": gpu.barriers(consumers, copies),
        "held_free": gpu.barriers(consumers),
        "moving_here": gpu.barriers(stages, copies + for_keys),
        "moving_free": gpu.barriers(stages, consumers),
    }
    if for_keys:
        scratch["terms"] = gpu.plgpu.SMEM((stages, 2, tiles.columns), jnp.float32)
    run = gpu.kernel(
        body,
        interpreted,
        out_type=tuple(out_type),
        scratch_types=scratch,
        grid=(units.workers,),
        grid_names=("block",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
    )
    return run(*arrays.values())


class _Backward:
    """A kernel: its static numbers, and the programs of its warpgroups."""

    # Global memory by name, results, and shared memory with its barriers: known inside the kernel.
    refs: dict[str, Any]
    results: Any
    shared: Any

    def __init__(self, spec, tiles, operands, inputs, lists, for_keys, interpreted):
        self.spec, self.tiles, self.operands = spec, tiles, operands
        self.for_keys, self.dtype = for_keys, inputs.query.dtype
        self.lse_first = _starts_with_lse(spec)
        self.sinks = inputs.sinks is not None
        heads, key_heads = inputs.query.shape[2], inputs.key.shape[2]
        self.group = heads // key_heads
        self.heads = key_heads if for_keys else heads  # of a unit
        dims, whole = (inputs.query.shape[3], inputs.value.shape[3]), whole_tiles(inputs)
        of = lambda count, rows: tuple(
            gpu.Matrices(self.dtype, count, rows, dim, whole) for dim in dims
        )
        self.held = of(tiles.consumers, ROWS)
        self.moving = of(tiles.stages, tiles.columns)
        self.interpreted = interpreted
        self.list_rows, self.list_heads, self.lines, self.blocks = lists
        self.engine = gpu.EMULATION if interpreted else gpu.HARDWARE
        # A tile's sums: for keys of values and keys, for queries of queries alone.
        self.summed = (1, 0) if for_keys else (0,)

    def body(self, refs: dict[str, Any], results: Any, shared: dict[str, Any]) -> None:
        """What every warpgroup does."""
        self.refs, self.results = refs, results
        for name, matrices in (("held", self.held), ("moving", self.moving)):
            pairs = zip(shared[name], matrices, strict=True)
            shared[name] = [gpu.bind(self.interpreted, ref, one)[0] for ref, one in pairs]
        self.shared = types.SimpleNamespace(**shared)

        gpu.divide_roles(
            self.tiles.consumers,
            lambda: self.each_unit(self.copy_unit),
            lambda warpgroup: self.each_unit(functools.partial(self.compute_unit, warpgroup)),
        )

    def each_unit(self, program) -> None:
        """`step = program(lap, step, unit)` for the units of this block."""
        gpu.each_unit(self.refs["order"], program)

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

        if not self.for_keys or self.group == 1:
            return one(head, carry)
        first = head * self.group
        return lax.fori_loop(first, first + self.group, one, carry)

    @property
    def names(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """What a warpgroup holds, and what comes and goes."""
        of_keys, of_queries = ("key", "value"), ("query", "d_out")
        return (of_keys, of_queries) if self.for_keys else (of_queries, of_keys)

    def copy_unit(self, lap, step, unit):
        """Bring what the warpgroups hold, then what they walk as room becomes free."""
        row, head, line = self.unpack(unit)
        plgpu, tiles, shared = gpu.plgpu, self.tiles, self.shared
        held, moving = self.names
        for w in range(tiles.consumers):
            gpu.pl.when(lap > 0)(lambda w=w: plgpu.barrier_wait(shared.held_free.at[w]))
            rows = gpu.pl.ds(line * tiles.rows + w * ROWS, ROWS)
            for name, room in zip(held, shared.held, strict=True):
                room.fetch(self.refs[name], row, rows, head, w, shared.held_here.at[w])

        def of_head(query_head, key_head, lists, step):
            moving_head = query_head if self.for_keys else key_head

            def tile(j, step):
                slot = lax.rem(step, tiles.stages)
                at = self.refs["index"][lists * self.blocks + j] * tiles.columns
                columns = gpu.pl.ds(at, tiles.columns)
                gpu.pl.when(step >= tiles.stages)(
                    lambda: plgpu.barrier_wait(shared.moving_free.at[slot])
                )
                here = shared.moving_here.at[slot]
                for name, room in zip(moving, shared.moving, strict=True):
                    room.fetch(self.refs[name], row, columns, moving_head, slot, here)
                if self.for_keys:
                    source = self.refs["terms"].at[row, query_head, :, columns]
                    plgpu.copy_gmem_to_smem(source, shared.terms.at[slot], here)
                return step + 1

            return lax.fori_loop(0, self.refs["count"][lists], tile, step)

        return self.each_head(row, head, line, of_head, step)

    def compute_unit(self, warpgroup, lap, step, unit):
        """The gradients of 64 keys, or of 64 queries."""
        row, head, line = self.unpack(unit)
        plgpu, tiles, shared = gpu.plgpu, self.tiles, self.shared
        first_row = line * tiles.rows + warpgroup * ROWS
        plgpu.barrier_wait(shared.held_here.at[warpgroup])
        sums = tuple(gpu.full((ROWS, self.held[i].columns), 0.0) for i in self.summed)
        taken = gpu.full((ROWS,), 0.0)

        def of_head(query_head, key_head, lists, carry):
            columns = tiles.columns
            tile = Tile(
                self.spec,
                self.operands,
                self.refs,
                row,
                query_head,
                first_row,
                columns,
                self.for_keys,
            )
            walked = _Walked(self, warpgroup, tile, row, query_head, lists)
            return walked.over_tiles(carry)

        step, sums, taken = self.each_head(row, head, line, of_head, (step, sums, taken))
        # Unpacked again, so that only one number stays in a register meanwhile.
        row, head, line = self.unpack(lax.optimization_barrier(unit))
        first_row = line * tiles.rows + warpgroup * ROWS
        self.write(warpgroup, row, head, first_row, sums, taken)
        return step

    def write(self, warpgroup, row, head, first_row, sums, taken) -> None:
        """Sums to global memory, through the memory that held the rows they belong to."""
        plgpu, shared = gpu.plgpu, self.shared
        rows = gpu.pl.ds(first_row, ROWS)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # all threads have done their products
        for i, total in zip(self.summed, sums, strict=True):
            scale = self.spec.softmax_scale if i == 0 else 1.0
            shared.held[i].put(warpgroup, (total * scale).astype(self.dtype))
        plgpu.commit_smem()
        for i in self.summed:
            shared.held[i].store(self.results[i], row, rows, head, warpgroup)
        if len(self.results) > len(self.summed):
            self.results[-1][row, head, rows] = taken
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(shared.held_free.at[warpgroup])


class _Walked:
    """One warpgroup's walk over the tiles of one query head."""

    def __init__(self, work: _Backward, warpgroup, tile: Tile, row, head, lists):
        self.work, self.warpgroup, self.tile, self.lists = work, warpgroup, tile, lists
        self.tiles, self.shared, self.engine = work.tiles, work.shared, work.engine
        self.shape = (ROWS, work.tiles.columns)
        if not work.for_keys:
            ref, rows = work.refs["terms"], gpu.pl.ds(tile.first_row, ROWS)
            self.row_terms = [
                gpu.load(ref.at[row, head, i, rows], gpu.rows_layout()) for i in range(2)
            ]

    def over_tiles(self, carry):
        """`(step, sums, taken)` after all tiles."""
        refs, masked = self.work.refs, self.work.operands.masked
        count, self.partial = refs["count"][self.lists], refs["partial"][self.lists]
        start = 0
        if self.tiles.overlap:
            carry = self.first_tile(masked, carry)
            start = 1
        step = self.next_tile if self.tiles.overlap else self.whole_tile
        carry = lax.fori_loop(start, count, functools.partial(step, masked), carry)
        return self.last_tile(carry) if self.tiles.overlap else carry

    def whole_tile(self, with_mask, j, carry):
        """Products, gradients, sums, one after the other."""
        step, sums, taken = carry
        slot = lax.rem(step, self.tiles.stages)
        hidden = self.hidden(j, with_mask)
        gpu.plgpu.barrier_wait(self.shared.moving_here.at[slot])
        left, taken = self.gradients(j, slot, with_mask, hidden, taken)
        left = [x.astype(self.work.dtype) for x in left]

        def add(accumulators, values):
            self.sum_up(accumulators, left, slot)

        sums, _ = self.engine.run(add, sums)
        gpu.plgpu.barrier_arrive(self.shared.moving_free.at[slot])
        return step + 1, sums, taken

    def first_tile(self, with_mask, carry):
        step, sums, taken = carry
        slot = lax.rem(step, self.tiles.stages)
        hidden = self.hidden(0, with_mask)
        gpu.plgpu.barrier_wait(self.shared.moving_here.at[slot])
        left, taken = self.gradients(0, slot, with_mask, hidden, taken)
        return step + 1, sums, taken, tuple(x.astype(self.work.dtype) for x in left)

    def next_tile(self, with_mask, j, carry):
        """Products of this tile and sums of the one before are under way together."""
        step, sums, taken, left = carry
        plgpu, shared, stages = gpu.plgpu, self.shared, self.tiles.stages
        slot, before = lax.rem(step, stages), lax.rem(step - 1, stages)
        hidden = self.hidden(j, with_mask)
        plgpu.barrier_wait(shared.moving_here.at[slot])

        def both(accumulators, values):
            *sums, logits, d_weights = accumulators
            taken, *left = values
            self.start_products((logits, d_weights), slot)
            self.sum_up(sums, [x[...] for x in left], before)
            # Matmuls that were begun after the first product, and after the second.
            after = sum(shared.moving[i].shape.strips for i in self.work.summed)
            both = after + shared.moving[1].shape.strips
            found = self.weights(j, slot, with_mask, self.engine.read(logits, both))
            d_weights = self.engine.read(d_weights, after)
            new_left, new_taken = self.gradients_of(found, j, slot, d_weights, taken[...])
            new_left, taken[...] = lax.optimization_barrier((new_left, new_taken))
            self.engine.wait()
            for ref, x in zip(left, new_left, strict=True):
                ref[...] = x.astype(self.work.dtype)

        start = self.start(0, hidden, slot), self.start(1, hidden, slot)
        (*sums, _, _), (taken, *left) = self.engine.run(both, (*sums, *start), (taken, *left))
        plgpu.barrier_arrive(shared.moving_free.at[before])
        return step + 1, tuple(sums), taken, tuple(left)

    def last_tile(self, carry):
        step, sums, taken, left = carry
        slot = lax.rem(step - 1, self.tiles.stages)
        sums, _ = self.engine.run(lambda sums, values: self.sum_up(sums, left, slot), sums)
        gpu.plgpu.barrier_arrive(self.shared.moving_free.at[slot])
        return step, sums, taken

    def hidden(self, j, with_mask):
        """-inf where the mask hides a pair, 0 elsewhere, to begin a logit with; None without mask.

        Before the tile is waited for: then the waiting keeps what this reads, and what the products
        begin with, from needing registers at the same time.
        """
        if not with_mask:
            return None
        zero = lambda: gpu.full(self.shape, 0.0)
        partial = lambda: jnp.where(self.tile.visible(self.place(j)), zero(), -jnp.inf)
        return lax.cond(j < self.partial, partial, zero)

    def start(self, i, hidden, slot):
        """What a product is added to: terms of rows, and what the mask hides."""
        if i == 1:
            return self.term(1, slot)
        logits = self.term(0, slot) if self.work.lse_first else gpu.full(self.shape, 0.0)
        return logits if hidden is None else logits + hidden

    def start_products(self, accumulators, slot, which=(0, 1)) -> None:
        for accumulator, i in zip(accumulators, which, strict=True):
            held, moving = self.shared.held[i], self.shared.moving[i]
            self.engine.inner(accumulator, held, self.warpgroup, moving, slot)

    def sum_up(self, accumulators, left, slot) -> None:
        """Add a tile: weights times gradients of outputs, gradients of logits times the rest."""
        for accumulator, x, i in zip(accumulators, left, self.work.summed, strict=True):
            self.engine.outer(accumulator, x, self.shared.moving[i], slot)

    def gradients(self, j, slot, with_mask, hidden, taken):
        """Both products of a tile, and what becomes of them."""

        def products(*which):
            body = lambda accumulators, values: self.start_products(accumulators, slot, which)
            return self.engine.run(body, [self.start(i, hidden, slot) for i in which])[0]

        if self.narrow:  # the second product needs the registers of the first
            weights = self.weights(j, slot, with_mask, *products(0))
            d_weights = products(1)[0]
        else:
            logits, d_weights = products(0, 1)
            weights = self.weights(j, slot, with_mask, logits)
        return self.gradients_of(weights, j, slot, d_weights, taken)

    @property
    def narrow(self) -> bool:
        """Whether registers are short: two sums, and weights that take more than exponentials."""
        more = self.tile.drops or self.work.spec.logits_soft_cap is not None
        return more and self.work.for_keys and not self.tiles.overlap

    def place(self, j):
        if not self.tile.needs_place:
            return 0
        index = self.work.refs["index"][self.lists * self.work.blocks + j]
        return index * self.tiles.columns

    def term(self, i, slot):
        """A number for each query, along the rows or columns that are queries."""
        if not self.work.for_keys:
            return gpu.along_rows(self.row_terms[i], self.shape)
        part = gpu.load(self.shared.terms.at[slot, i], gpu.columns_layout())
        return gpu.along_columns(part, self.shape)

    def weights(self, j, slot, with_mask, products):
        """Weights as they are summed, as they are, and times the slope of their logits.

        The latter are negative where dropout has taken a weight away.
        """
        at = self.place(j)
        logits, factor, slope = self.tile.logits(products, at, with_mask=False)
        exponents = logits * factor
        if not self.work.lse_first:
            exponents = exponents - self.term(0, slot)
        weights = used = steep = jnp.exp2(exponents)
        if slope is not None:
            if with_mask:  # what began at -inf is still there, though its cap is finite
                weights = used = jnp.where(products > -jnp.inf, weights, 0.0)
            steep = weights * slope
        if self.tile.drops:
            kept = self.tile.kept(at)
            used, steep = jnp.where(kept, used, 0.0), jnp.where(kept, steep, -steep)
        if self.narrow:
            used, steep = lax.optimization_barrier((used.astype(self.work.dtype), steep))
        return used, weights, steep

    def gradients_of(self, found, j, slot, d_weights, taken):
        """What the tile's sums are made of: for keys the weights too, else gradients of logits."""
        used, weights, steep = found
        if self.tile.drops:
            d_weights = jnp.where(steep > 0.0, d_weights, self.term(1, slot))
            steep = jnp.abs(steep)
        if self.work.sinks and not self.work.for_keys:
            taken = taken + gpu.reduce_rows(weights * d_weights, jnp.add, jnp.sum)
        d_logits = steep * d_weights
        return ((used, d_logits) if self.work.for_keys else (d_logits,)), taken
