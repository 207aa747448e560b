"""Fused backward pass on Hopper: one kernel, with five matmuls a tile where two kernels take seven.

Two consumer warpgroups keep 64 keys each resident and stream the queries that see them, as in the
dK/dV kernel. They also leave the gradients of logits in shared memory, where a third warpgroup
multiplies them with the keys and adds the product to the gradients of queries in global memory, in
float32. It is the producer as well. The order of these additions is not fixed, so that the last
bits of the gradients of queries differ from run to run: the pass is nondeterministic.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.common.constants import LOG2_E
from ejkernel.kernels.common.refs import Index, Ref
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.pallas_sm90.configs import QK, ROWS, VO, has_whole_tiles
from ejkernel.kernels.flash_attention.pallas_sm90.logits import LogitTile
from ejkernel.kernels.flash_attention.pallas_sm90.mask_operands import (
    TileOperands,
    partial_tile_mask,
    tile_operands,
)
from ejkernel.kernels.flash_attention.pallas_sm90.row_stats import row_stats
from ejkernel.kernels.flash_attention.pallas_sm90.schedule import (
    TileListShape,
    WorkItems,
    key_block_schedule,
)
from ejkernel.ops.platform import Device
from ejkernel.types.rules import Everything

CONSUMERS = 2  # warpgroups with resident keys
BLOCK_K = ROWS * CONSUMERS  # keys of a work item
BLOCK_Q = 64  # queries of a tile
STAGES = 3  # tiles of queries in the ring buffer
D_LOGITS_STAGES = 2  # tiles of gradients of logits in shared memory
D_QUERY_COLUMNS = 64  # columns of the gradients of queries that are computed at once, at most
HEAD_DIMS = (64, 96, 128)
MOST_VALUE_DIM = 128
REGISTERS = (216, 72)  # of a thread of a consumer warpgroup, and of the third one

_State = TypeVar("_State")
_Carry = tuple[jax.Array, tuple[jax.Array, jax.Array]]  # step, accumulators of values and keys


def why_not(inputs: Inputs, spec: Spec) -> str | None:
    """Why the fused kernel does not support a backward pass that the others support, or None."""
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


def backward(
    inputs: Inputs, residuals: Outputs, d_outputs: Outputs, spec: Spec, device: Device
) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none."""
    stats = row_stats(inputs, residuals, d_outputs, spec)
    b, t, n, head_dim = inputs.query.shape
    s, k = inputs.value.shape[1:3]
    interpreted = gpu.is_interpreted(device)
    rule = inputs.mask or Everything()
    q_size, kv_size = -(-t // BLOCK_Q) * BLOCK_Q, -(-s // BLOCK_K) * BLOCK_K
    key_blocks = kv_size // BLOCK_K
    items = WorkItems(
        batch=b,
        heads=k,
        group=n // k,
        l2_groups=b * k,
        l2_group_bytes=(inputs.query.nbytes + d_outputs.out.nbytes) // (b * k),
        # The interpreter has no atomic additions.
        thread_blocks=1 if interpreted else min(gpu.multiprocessors(device), b * k * key_blocks),
    )
    schedule = key_block_schedule(rule, items, t, s, BLOCK_Q, BLOCK_K)
    mask = partial_tile_mask(rule, t, s, q_size, kv_size)
    operands = tile_operands(inputs, mask, q_size, kv_size, transposed=True)
    pad = lambda x, fill: jnp.pad(x, ((0, 0), (0, 0), (0, q_size - t)), constant_values=fill)
    arrays = {
        "query": inputs.query,
        "key": inputs.key,
        "value": inputs.value,
        "d_out": d_outputs.out,
        "stats": jnp.stack([pad(stats.lse, -jnp.inf), pad(stats.offset, 0.0)], axis=2),
        "work_list": schedule.work_list,
        "count": schedule.count.reshape(-1),
        "partial": schedule.partial.reshape(-1),
        "index": schedule.index.reshape(-1),
        **operands.arrays,
    }
    # Whole tiles, so that no addition is cut off.
    d_query = jax.new_ref(jnp.zeros((b, q_size, n, head_dim), jnp.float32))
    names = (*arrays, "d_query")
    kernel = _FusedKernel(spec, operands, inputs, schedule.list_shape, interpreted)

    def body(*refs: Ref, **scratch: Ref | tuple[Ref, ...]) -> None:
        kernel.body(dict(zip(names, refs, strict=False)), refs[len(names) :], scratch)

    run = gpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[1:3]),
        scratch_types=kernel.scratch(),
        blocks=items.thread_blocks,
        warpgroups=CONSUMERS + 1,
        interpreted=interpreted,
    )
    d_key, d_value = run(*arrays.values(), d_query)
    d_query = (d_query[...][:, :t] * spec.softmax_scale).astype(inputs.query.dtype)
    return Inputs(d_query, d_key, d_value, sinks=None, mask=None)


@dataclasses.dataclass(frozen=True)
class QueryTileOrder:
    """The tiles of one key block and query head, in the order in which they are processed.

    Work items of the same wave should be at different tiles, or their additions wait for each
    other. With a causal mask those of a head begin at their own places and go upward; in the next
    wave, as the work list is ordered, they begin the later the shorter they are, and go downward.
    Where a key block meets every query block, each begins elsewhere.
    """

    batch: Index
    head: Index
    key_block: Index
    list_index: Index
    count: jax.Array
    first: jax.Array
    stride: jax.Array


def query_tile_order(
    refs: dict[str, Ref],
    lists: TileListShape,
    batch: Index,
    head: Index,
    key_block: Index,
    wave: Index,
) -> QueryTileOrder:
    """The order of the tiles of a key block and query head in this wave."""
    list_index = lists.list_index(batch, head, key_block)
    count = refs["count"][list_index]
    downward, every = lax.rem(wave, 2) == 1, count == lists.column_blocks
    first = jnp.where(every, lax.div(key_block * lists.column_blocks, lists.row_blocks), 0)
    first = jnp.where(downward, count - 1 - first, first)
    stride = jnp.where(downward, -1, 1)
    return QueryTileOrder(batch, head, key_block, list_index, count, first, stride)


def query_tile(
    refs: dict[str, Ref], lists: TileListShape, order: QueryTileOrder, j: Index, padded_keys: bool
) -> tuple[jax.Array, jax.Array]:
    """The first query of tile j, and whether the tile is partial."""
    at = order.first + j * order.stride
    at = jnp.where(at < 0, at + order.count, jnp.where(at < order.count, at, at - order.count))
    start = refs["index"][order.list_index * lists.column_blocks + at] * BLOCK_Q
    partial = at < refs["partial"][order.list_index]
    # Keys past the last one are 0, but their weights need not be finite.
    return start, partial | (order.key_block == lists.row_blocks - 1) if padded_keys else partial


def _columns(matrices: gpu.SharedMatrixRefs, index: Index, start: int, width: int) -> Ref:
    """Some columns of matrix `index`, which lie in one panel."""
    panel, first = divmod(start, matrices.shape.width)
    whole = matrices.panel(index, panel)
    if (first, width) == (0, matrices.shape.width):
        return whole
    return whole.at[:, first : first + width]


class _FusedWgmmaEngine(gpu.WgmmaEngine):
    """With both operands of a matmul in shared memory, and additions to global memory."""

    def matmul_nn_shared(
        self, accumulator: gpu.Accumulator, left: Ref, right: gpu.SharedMatrixRefs, j: Index
    ) -> None:
        """Start `accumulator += left @ right[j]`."""
        self.matmul_nn(accumulator, left, right, j)

    def matmul_tn(self, accumulator: gpu.Accumulator, left: Ref, right: Ref) -> None:
        """Start `accumulator += left.T @ right`."""
        gpu.plgpu.wgmma(accumulator, gpu.transposed(left), right)

    def add_to_global(self, staging: Ref, target: Ref, value: jax.Array, pending: int) -> None:
        """Start to add a tile to global memory, through a staging buffer in shared memory.

        The buffer is free once at most `pending` of this warpgroup's copies still read theirs.
        """
        gpu.plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
        staging[...] = value
        gpu.plgpu.commit_smem()
        gpu.plgpu.copy_smem_to_gmem(staging, target, reduction_op="add")


class _FusedInterpretedEngine(gpu.InterpretedEngine, _FusedWgmmaEngine):
    """The same in the interpreter, where one thread block processes everything."""

    def matmul_nn_shared(
        self, accumulator: gpu.Accumulator, left: Ref, right: gpu.SharedMatrixRefs, j: Index
    ) -> None:
        self.matmul_nn(accumulator, left[...], right, j)

    def matmul_tn(self, accumulator: gpu.Accumulator, left: Ref, right: Ref) -> None:
        self.add_product(accumulator, left[...].T, right[...])
        self.fence()

    def add_to_global(self, staging: Ref, target: Ref, value: jax.Array, pending: int) -> None:
        target[...] = target[...] + value


_WGMMA, _INTERPRETED = _FusedWgmmaEngine(), _FusedInterpretedEngine()


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """What a consumer warpgroup knows of its work item with one query head."""

    warpgroup: jax.Array
    item: jax.Array
    order: QueryTileOrder


class _FusedKernel:
    """The kernel: its static sizes, and the programs of its warpgroups."""

    # Arrays in global memory by name, results, and shared memory with its barriers: set inside the
    # kernel.
    refs: dict[str, Ref]
    results: Sequence[Ref]
    shared: types.SimpleNamespace

    def __init__(
        self,
        spec: Spec,
        operands: TileOperands,
        inputs: Inputs,
        lists: TileListShape,
        interpreted: bool,
    ):
        self.spec, self.operands, self.lists = spec, operands, lists
        self.dtype, self.interpreted = inputs.query.dtype, interpreted
        self.shape = (ROWS, BLOCK_Q)
        self.heads = inputs.key.shape[2]
        self.group = inputs.query.shape[2] // self.heads
        dims, whole_tiles = (inputs.query.shape[3], inputs.value.shape[3]), has_whole_tiles(inputs)
        matrices = lambda count, rows: tuple(
            gpu.SharedMatrices(self.dtype, count, rows, dim, whole_tiles) for dim in dims
        )
        self.residents, self.rings = matrices(CONSUMERS, ROWS), matrices(STAGES, BLOCK_Q)
        # Swizzled as keys and queries are, with which they are multiplied.
        width = (gpu.swizzle_bytes(self.residents[QK].width) or 0) // 2
        self.d_logits = gpu.tiled_memory(
            self.dtype, CONSUMERS * D_LOGITS_STAGES, ROWS, BLOCK_Q, width=width
        )
        width = min(D_QUERY_COLUMNS, self.residents[QK].width)
        self.d_query_parts = [(i, min(width, dims[0] - i)) for i in range(0, dims[0], width)]
        self.padded_keys = inputs.key.shape[1] % BLOCK_K != 0
        self.engine = _INTERPRETED if interpreted else _WGMMA

    def scratch(self) -> dict[str, object]:
        """Shared memory and barriers."""
        copies = sum(one.panels for one in self.residents)
        return {
            "resident": tuple(one.allocate(self.interpreted) for one in self.residents),
            "ring": tuple(one.allocate(self.interpreted) for one in self.rings),
            "d_logits": self.d_logits,
            "staging": tuple(_float32_tile(BLOCK_Q, width) for _, width in self.d_query_parts),
            "stats": gpu.plgpu.SMEM((STAGES, 2, BLOCK_Q), jnp.float32),
            "resident_full": gpu.barriers(CONSUMERS, copies),
            "resident_empty": gpu.barriers(CONSUMERS),
            "resident_keys_read": gpu.barriers(1),
            "ring_full": gpu.barriers(STAGES, copies + 1),
            "ring_empty": gpu.barriers(STAGES, CONSUMERS),
            "d_logits_full": gpu.barriers(D_LOGITS_STAGES, CONSUMERS),
            "d_logits_empty": gpu.barriers(D_LOGITS_STAGES),
        }

    def body(
        self,
        refs: dict[str, Ref],
        results: Sequence[Ref],
        scratch: dict[str, Ref | tuple[Ref, ...]],
    ) -> None:
        """The program of every warpgroup."""
        self.refs, self.results = refs, results
        bound = {}
        for name, matrices in (("resident", self.residents), ("ring", self.rings)):
            pairs = zip(matrices, scratch[name], strict=True)  # pyright: ignore[reportArgumentType]
            bound[name] = [one.bind(ref, self.interpreted) for one, ref in pairs]
        self.shared = types.SimpleNamespace(**scratch | bound)
        warpgroup = lax.axis_index("warpgroup")
        plgpu, work_list = gpu.plgpu, self.refs["work_list"]

        @gpu.pl.when(warpgroup == CONSUMERS)
        def _producer():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            gpu.for_each_work_item(work_list, self.produce)
            plgpu.wait_smem_to_gmem(0)

        @gpu.pl.when(warpgroup < CONSUMERS)
        def _consumer():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            gpu.for_each_work_item(work_list, functools.partial(self.consume, warpgroup))
            plgpu.wait_smem_to_gmem(0)

    def tile_order(
        self, batch: Index, head: Index, key_block: Index, wave: jax.Array
    ) -> QueryTileOrder:
        return query_tile_order(self.refs, self.lists, batch, head, key_block, wave)

    def tile(self, order: QueryTileOrder, j: Index) -> tuple[jax.Array, jax.Array]:
        return query_tile(self.refs, self.lists, order, j, self.padded_keys)

    def for_each_head(
        self,
        batch: Index,
        head: Index,
        key_block: Index,
        wave: jax.Array,
        process: Callable[[QueryTileOrder, _State], _State],
        carry: _State,
    ) -> _State:
        """`carry = process(order of tiles, carry)` for the query heads of a work item."""

        def one_head(query_head: Index, carry: _State) -> _State:
            return process(self.tile_order(batch, query_head, key_block, wave), carry)

        if self.group == 1:
            return one_head(head, carry)
        first = head * self.group
        return lax.fori_loop(first, first + self.group, one_head, carry)

    def produce(self, wave: jax.Array, step: jax.Array, item: jax.Array) -> jax.Array:
        """Copy the resident keys and stream queries; add up the gradients of queries by tile."""
        batch, head, key_block = self.lists.unpack(item, self.heads)
        plgpu, shared = gpu.plgpu, self.shared

        def load_keys_and_values() -> None:
            for w in range(CONSUMERS):
                gpu.pl.when(wave > 0)(lambda w=w: plgpu.barrier_wait(shared.resident_empty.at[w]))
                first = key_block * BLOCK_K + w * ROWS
                for name, buffer in zip(("key", "value"), shared.resident, strict=True):
                    full = shared.resident_full.at[w]
                    buffer.load(self.refs[name], batch, first, head, w, full)
            for w in range(CONSUMERS):
                plgpu.barrier_wait(shared.resident_full.at[w])

        def of_head(order: QueryTileOrder, step: jax.Array) -> jax.Array:
            def load(j: Index, step: jax.Array) -> jax.Array:
                self.load_queries(order, j, step)
                return step + 1

            lax.fori_loop(0, jnp.minimum(order.count, STAGES - 1), load, step)
            # Only now: the buffers of the previous keys are free later than those of their queries.
            gpu.pl.when(order.head == head * self.group)(load_keys_and_values)

            return lax.fori_loop(0, order.count, functools.partial(self.add_d_query, order), step)

        step = self.for_each_head(batch, head, key_block, wave, of_head, step)
        plgpu.barrier_arrive(shared.resident_keys_read.at[0])
        return step

    def load_queries(self, order: QueryTileOrder, j: Index, step: jax.Array) -> None:
        """Start to copy a tile of queries, once its stage is empty."""
        plgpu, shared = gpu.plgpu, self.shared
        stage = lax.rem(step, STAGES)
        first = self.tile(order, j)[0]
        gpu.pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(shared.ring_empty.at[stage]))
        full = shared.ring_full.at[stage]
        for name, ring in zip(("query", "d_out"), shared.ring, strict=True):
            ring.load(self.refs[name], order.batch, first, order.head, stage, full)
        queries = gpu.pl.ds(first, BLOCK_Q)
        source = self.refs["stats"].at[order.batch, order.head, :, queries]
        plgpu.copy_gmem_to_smem(source, shared.stats.at[stage], full)

    def add_d_query(self, order: QueryTileOrder, j: jax.Array, step: jax.Array) -> jax.Array:
        """Add a tile's gradients of queries, from the gradients of logits of both consumers.

        By then the consumers no longer need the previous tile, so that its stage is empty.
        """
        plgpu, shared = gpu.plgpu, self.shared
        stage = lax.rem(step, D_LOGITS_STAGES)
        plgpu.barrier_wait(shared.d_logits_full.at[stage])
        ahead = STAGES - 1
        load_next = lambda: self.load_queries(order, j + ahead, step + ahead)
        gpu.pl.when(j + ahead < order.count)(load_next)
        queries, last = gpu.pl.ds(self.tile(order, j)[0], BLOCK_Q), len(self.d_query_parts) - 1
        for i, (start, width) in enumerate(self.d_query_parts):
            part = self.d_query_part(stage, start, width)
            if i == last:
                plgpu.barrier_arrive(shared.d_logits_empty.at[stage])
            columns = gpu.pl.ds(start, width)
            target = self.refs["d_query"].at[order.batch, queries, order.head, columns]
            self.engine.add_to_global(shared.staging[i], target, part, last)
        return step + 1

    def d_query_part(self, stage: jax.Array, start: int, width: int) -> jax.Array:
        """Some columns of a tile's gradients of logits times keys."""
        # The compiler must not know that it is the same for all tiles: it would keep what follows
        # from it in registers.
        first = lax.optimization_barrier(jnp.int32(0))

        def matmuls(accumulators: gpu.Accumulators, values: gpu.Accumulators) -> None:
            for w in range(CONSUMERS):
                left = self.shared.d_logits.at[stage * CONSUMERS + w]
                keys = _columns(self.shared.resident[QK], first + w, start, width)
                self.engine.matmul_tn(accumulators[0], left, keys)

        return self.engine.run(matmuls, (gpu.full((BLOCK_Q, width), 0.0),))[0][0]

    def consume(
        self, warpgroup: jax.Array, wave: jax.Array, step: jax.Array, item: jax.Array
    ) -> jax.Array:
        """The gradients of 64 keys and values."""
        batch, head, key_block = self.lists.unpack(item, self.heads)
        gpu.plgpu.barrier_wait(self.shared.resident_full.at[warpgroup])
        d_value, d_key = (gpu.full((ROWS, self.residents[i].columns), 0.0) for i in (VO, QK))
        consumer = functools.partial(_Consumer, warpgroup, item)

        first = self.tile_order(batch, head * self.group, key_block, wave)
        carry = self.first_tile(consumer(first), step, (d_value, d_key))

        def of_head(order: QueryTileOrder, carry: _Carry) -> _Carry:
            begin = jnp.where(order.head == first.head, 1, 0)
            process = functools.partial(self.next_tile, consumer(order))
            return lax.fori_loop(begin, order.count, process, carry)

        carry = self.for_each_head(batch, head, key_block, wave, of_head, carry)
        step, accs = self.last_tile(consumer(first), *carry)
        self.write(warpgroup, item, accs)
        return step

    def first_tile(
        self, consumer: _Consumer, step: jax.Array, accs: tuple[jax.Array, jax.Array]
    ) -> _Carry:
        """The prologue: all of a tile but its accumulation for keys."""
        (logits,) = self.logits_beside(consumer, 0, step, (), lambda accumulators: None)
        return step + 1, (self.accumulate_values(consumer, step, accs[0], logits), accs[1])

    def next_tile(self, consumer: _Consumer, j: jax.Array, carry: _Carry) -> _Carry:
        """A tile; the previous tile's accumulation for keys overlaps its first matmul."""
        step, accs = carry
        d_key, logits = self.logits_beside(
            consumer,
            j,
            step,
            accs[1:],
            lambda accumulators: self.accumulate_keys(consumer, accumulators[0], step - 1),
        )
        gpu.plgpu.barrier_arrive(self.shared.ring_empty.at[self.stage(step - 1)])
        return step + 1, (self.accumulate_values(consumer, step, accs[0], logits), d_key)

    def last_tile(
        self, consumer: _Consumer, step: jax.Array, accs: tuple[jax.Array, jax.Array]
    ) -> _Carry:
        """The epilogue: the last tile's accumulation for keys."""
        (d_key,), _ = self.engine.run(
            lambda accumulators, values: self.accumulate_keys(consumer, accumulators[0], step - 1),
            accs[1:],
        )
        gpu.plgpu.barrier_arrive(self.shared.ring_empty.at[self.stage(step - 1)])
        return step, (accs[0], d_key)

    def stage(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, STAGES)

    def logits_beside(
        self,
        consumer: _Consumer,
        j: Index,
        step: jax.Array,
        accs: Sequence[jax.Array],
        start_others: Callable[[gpu.Accumulators], None],
    ) -> tuple[jax.Array, ...]:
        """`accs` after the matmuls of `start_others`, and the logits of a tile computed meanwhile.

        The logits are less the log-sum-exp, in units of products; -inf where a pair is hidden.
        """
        stage = self.stage(step)
        mask = self.additive_mask(consumer, j)
        gpu.plgpu.barrier_wait(self.shared.ring_full.at[stage])

        def both(accumulators: gpu.Accumulators, values: gpu.Accumulators) -> None:
            start_others(accumulators[:-1])
            self.start_matmul(consumer, QK, accumulators[-1], stage)

        start = self.stat(0, stage)
        start = start if mask is None else start + mask
        return self.engine.run(both, (*accs, start))[0]

    def start_matmul(
        self, consumer: _Consumer, i: int, accumulator: gpu.Accumulator, stage: jax.Array
    ) -> None:
        """Start the matmul of resident with streamed rows."""
        # The compiler must not know that it is the same for all tiles: it would keep what follows
        # from it in registers.
        mine = lax.optimization_barrier(consumer.warpgroup)
        resident, ring = self.shared.resident[i], self.shared.ring[i]
        self.engine.matmul_nt(accumulator, resident, mine, ring, stage)

    def accumulate_keys(self, consumer: _Consumer, d_key: gpu.Accumulator, step: jax.Array) -> None:
        """Start to add to the gradients of keys, from gradients of logits in shared memory."""
        left = self.shared.d_logits.at[self.d_logits_buffer(consumer, step)]
        self.engine.matmul_nn_shared(d_key, left, self.shared.ring[QK], self.stage(step))

    def d_logits_buffer(self, consumer: _Consumer, step: jax.Array) -> jax.Array:
        return lax.rem(step, D_LOGITS_STAGES) * CONSUMERS + consumer.warpgroup

    def accumulate_values(
        self, consumer: _Consumer, step: jax.Array, d_value: jax.Array, logits: jax.Array
    ) -> jax.Array:
        """The gradients of values with a tile added; leaves the gradients of the tile's logits."""
        shared, dtype, stage = self.shared, self.dtype, self.stage(step)
        log2_scale = self.spec.softmax_scale * LOG2_E
        weights = lax.optimization_barrier(jnp.exp2(logits * log2_scale).astype(dtype))
        # A branch, over which nothing is moved: before it there are no registers for the next
        # matmul.
        self.wait_d_logits_empty(step)

        def both(accumulators: gpu.Accumulators, values: gpu.Accumulators) -> None:
            d_value, products = accumulators
            self.start_matmul(consumer, VO, products, stage)
            self.engine.matmul_nn(d_value, weights, shared.ring[VO], stage)
            d_weights = self.engine.read_accumulator(products, shared.ring[VO].shape.panels)
            d_logits = (weights.astype(jnp.float32) * d_weights).astype(dtype)
            self.write_d_logits(consumer, step, d_logits)

        (d_value, _), _ = self.engine.run(both, (d_value, self.stat(1, stage)))
        return d_value

    def wait_d_logits_empty(self, step: jax.Array) -> None:
        """Wait until the gradients of logits of an earlier tile have been read."""
        empty = self.shared.d_logits_empty.at[lax.rem(step, D_LOGITS_STAGES)]
        gpu.pl.when(step >= D_LOGITS_STAGES)(lambda: gpu.plgpu.barrier_wait(empty))

    def write_d_logits(self, consumer: _Consumer, step: jax.Array, d_logits: jax.Array) -> None:
        """Gradients of logits to shared memory, for the warpgroup that adds up those of queries."""
        shared = self.shared
        shared.d_logits.at[self.d_logits_buffer(consumer, step)][...] = d_logits
        gpu.plgpu.commit_smem()
        gpu.plgpu.barrier_arrive(shared.d_logits_full.at[lax.rem(step, D_LOGITS_STAGES)])

    def additive_mask(self, consumer: _Consumer, j: Index) -> jax.Array | None:
        """-inf where the mask hides a pair, 0 elsewhere; None without a mask."""
        if not self.operands.masked:
            return None
        at, is_partial = self.tile(consumer.order, j)
        zero = lambda: gpu.full(self.shape, 0.0)

        def partial() -> jax.Array:
            visible = self.logit_tile(consumer).visible(at)
            return jnp.where(visible, zero(), -jnp.inf)

        return lax.cond(is_partial, partial, zero)

    def logit_tile(self, consumer: _Consumer) -> LogitTile:
        """What evaluates the mask; nothing of it stays in registers."""
        item, head = lax.optimization_barrier((consumer.item, consumer.order.head))
        batch, _, key_block = self.lists.unpack(item, self.heads)
        first_row = key_block * BLOCK_K + consumer.warpgroup * ROWS
        operands, refs = self.operands, self.refs
        return LogitTile(self.spec, operands, refs, batch, head, first_row, BLOCK_Q, True)

    def stat(self, i: int, stage: jax.Array) -> jax.Array:
        """A number for each query, broadcast along the keys of a tile."""
        part = gpu.load(self.shared.stats.at[stage, i], gpu.column_layout())
        return gpu.broadcast_columns(part, self.shape)

    def write(
        self, warpgroup: jax.Array, item: jax.Array, accs: tuple[jax.Array, jax.Array]
    ) -> None:
        """Accumulators to global memory, through the buffers of the rows that they belong to."""
        plgpu, shared = gpu.plgpu, self.shared
        # Unpacked again, so that only one number stays in a register meanwhile.
        batch, head, key_block = self.lists.unpack(lax.optimization_barrier(item), self.heads)
        first_row = key_block * BLOCK_K + warpgroup * ROWS
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # all threads have done their matmuls
        for i, acc in zip((VO, QK), accs, strict=True):
            if i == QK:  # the gradients of queries still need the keys
                plgpu.barrier_wait(shared.resident_keys_read.at[0])
                acc = acc * self.spec.softmax_scale
            shared.resident[i].write(warpgroup, acc.astype(self.dtype))
        plgpu.commit_smem()
        for i in (QK, VO):
            shared.resident[i].store(self.results[i], batch, first_row, head, warpgroup)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(shared.resident_empty.at[warpgroup])


def _float32_tile(*shape: int) -> object:
    """Shared memory for a float32 tile [rows, columns] on its way to global memory."""
    transforms = (gpu.plgpu.TilingTransform((8, 32)), gpu.plgpu.SwizzleTransform(128))
    return gpu.plgpu.SMEM(shape, jnp.float32, transforms=transforms)
