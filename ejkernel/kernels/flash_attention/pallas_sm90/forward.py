"""Forward pass on Hopper: a persistent, warp-specialised kernel.

The pipeline is that of FlashAttention-3 (https://arxiv.org/abs/2407.08608). One producer warpgroup
copies queries, keys and values to ring buffers; two or three consumer warpgroups compute, 64
queries each. A consumer starts the logits of tile j and the product of tile j - 1's weights with
its values, and computes the softmax of tile j while the latter runs. Two consumers alternate
(ping-pong scheduling): one computes its softmax while the other uses the tensor cores.
"""

import functools
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import logsumexp

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.common.constants import LOG2_E
from ejkernel.kernels.common.refs import Index, Ref
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.pallas_sm90.configs import (
    ROWS,
    SHARED_BYTES,
    ForwardTileConfig,
    has_whole_tiles,
)
from ejkernel.kernels.flash_attention.pallas_sm90.logits import LogitTile, StagedBias
from ejkernel.kernels.flash_attention.pallas_sm90.mask_operands import (
    TileOperands,
    partial_tile_mask,
    tile_operands,
)
from ejkernel.kernels.flash_attention.pallas_sm90.schedule import (
    TileListShape,
    WorkItems,
    query_block_schedule,
    unpack_counts,
)
from ejkernel.ops.platform import Device
from ejkernel.types.rules import Everything

# The running max of a row that has seen nothing: finite, so that -inf less it is -inf and not NaN.
_LOWEST_MAX = -1e30
# By how many powers of two the running max may be too low before accumulators are rescaled.
_RESCALE_THRESHOLD = 8.0
# Logits known to lie between plus and minus so many powers of two need no running max: sums over
# all keys, times any value that a model has, are still finite. So are weights in bfloat16.
_BOUNDED_LOGITS = 80.0


def forward(
    inputs: Inputs,
    spec: Spec,
    tiles: ForwardTileConfig,
    device: Device,
    repeated_queries: int | None = None,
) -> Outputs:
    """Output and log-sum-exp.

    Args:
        inputs: of the call.
        spec: of the call.
        tiles: sizes of the tiles.
        device: of the call.
        repeated_queries: the number of queries that the mask has, where the rows of a tile are the
            queries of several heads.
    """
    b, t, n, _ = inputs.query.shape
    s, v = inputs.value.shape[1], inputs.value.shape[3]
    interpreted = gpu.is_interpreted(device)
    rule = inputs.mask or Everything()
    q_blocks, k_blocks = -(-t // tiles.block_q), -(-s // tiles.block_k)
    q_size, kv_size = q_blocks * tiles.block_q, k_blocks * tiles.block_k
    items = WorkItems(
        batch=b,
        heads=n,
        group=1,
        l2_groups=b * inputs.key.shape[2],
        l2_group_bytes=(inputs.key.nbytes + inputs.value.nbytes) // (b * inputs.key.shape[2]),
        thread_blocks=min(gpu.multiprocessors(device), b * n * q_blocks),
    )
    mask_queries = repeated_queries or t
    schedule = query_block_schedule(rule, items, mask_queries, s, tiles.block_q, tiles.block_k)
    mask = partial_tile_mask(rule, mask_queries, s, repeated_queries or q_size, kv_size)
    if mask is not None and repeated_queries is not None:
        mask = mask.repeated(q_size)
    operands = tile_operands(inputs, mask, q_size, kv_size)
    sinks = None
    if inputs.sinks is not None:
        sinks = logsumexp(inputs.sinks.astype(jnp.float32), axis=-1) * LOG2_E
        sinks = jnp.broadcast_to(sinks, (n,))
    arrays = {
        "query": inputs.query,
        "key": inputs.key,
        "value": inputs.value,
        "work_list": schedule.work_list,
        "packed_counts": schedule.packed_counts,
        "index": schedule.index.reshape(-1),
        **operands.arrays,
        **({} if sinks is None else {"sinks": sinks}),
    }
    kernel = _ForwardKernel(spec, tiles, operands, inputs, schedule.list_shape, interpreted)

    def body(*refs: Ref, **scratch: Ref | tuple[Ref, ...]) -> None:
        kernel.body(dict(zip(arrays, refs, strict=False)), *refs[len(arrays) :], **scratch)

    run = gpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((b, t, n, v), inputs.query.dtype),
            jax.ShapeDtypeStruct((b, n, q_size), jnp.float32),
        ),
        scratch_types=kernel.scratch(),
        blocks=items.thread_blocks,
        warpgroups=tiles.consumers + 1,
        interpreted=interpreted,
    )
    out, lse = run(*arrays.values())
    return Outputs(out, lse[..., :t])


class _ForwardKernel:
    """The kernel: its static sizes, and the programs of its warpgroups."""

    # Arrays in global memory by name, results, and shared memory with its barriers: set inside the
    # kernel.
    refs: dict[str, Ref]
    out: Ref
    lse: Ref
    shared: types.SimpleNamespace

    def __init__(
        self,
        spec: Spec,
        tiles: ForwardTileConfig,
        operands: TileOperands,
        inputs: Inputs,
        lists: TileListShape,
        interpreted: bool,
    ):
        self.spec, self.tiles, self.operands, self.lists = spec, tiles, operands, lists
        self.heads = inputs.query.shape[2]
        self.group = self.heads // inputs.key.shape[2]
        self.dtype = inputs.query.dtype
        self.interpreted = interpreted
        self.engine = gpu.INTERPRETED if interpreted else gpu.WGMMA
        whole_tiles = has_whole_tiles(inputs)
        matrices = functools.partial(gpu.SharedMatrices, self.dtype, whole_tiles=whole_tiles)
        keys = matrices(tiles.stages, tiles.block_k, inputs.key.shape[3])
        values = matrices(tiles.stages, tiles.block_k, inputs.value.shape[3])
        self.value_columns = values.columns
        self.query_buffers = tiles.query_buffers(keys.columns, values.columns)
        self.separate_results = keys.columns != values.columns
        count = tiles.consumers * self.query_buffers
        queries = matrices(count, ROWS, inputs.query.shape[3])
        self.matrices = {"queries": queries, "keys": keys, "values": values}
        if self.separate_results:
            self.matrices["results"] = matrices(count, ROWS, inputs.value.shape[3])
        free_bytes = SHARED_BYTES - tiles.shared_bytes(keys.columns, values.columns)
        self.staged_bias = StagedBias.fitting(
            operands.arrays.get("bias"),
            tiles.consumers,
            tiles.block_k,
            free_bytes,
            transposed=False,
        )
        cap = spec.logits_soft_cap
        self.without_max = (
            cap is not None
            and cap * LOG2_E <= _BOUNDED_LOGITS
            and self.dtype == jnp.dtype(jnp.bfloat16)
        )

    @property
    def ping_pong(self) -> bool:
        """Whether consumer warpgroups alternate in issuing their matmuls.

        Three do better without, and so do two if the soft cap takes longer than the matmuls.
        """
        return self.tiles.consumers == 2 and self.spec.logits_soft_cap is None

    def scratch(self) -> dict[str, object]:
        """Shared memory and barriers."""
        matrices, stages, consumers = self.matrices, self.tiles.stages, self.tiles.consumers
        queries = matrices["queries"]
        return {
            **{name: one.allocate(self.interpreted) for name, one in matrices.items()},
            **self.staged_bias.scratch(self.interpreted),
            "query_full": gpu.barriers(queries.count, queries.panels),
            "query_empty": gpu.barriers(queries.count),
            "key_full": gpu.barriers(stages, matrices["keys"].panels),
            "key_empty": gpu.barriers(stages, consumers),
            "value_full": gpu.barriers(stages, matrices["values"].panels),
            "value_empty": gpu.barriers(stages, consumers),
            "scheduler": gpu.barriers(consumers),
        }

    def body(
        self, refs: dict[str, Ref], out: Ref, lse: Ref, **scratch: Ref | tuple[Ref, ...]
    ) -> None:
        """The program of every warpgroup."""
        self.refs, self.out, self.lse = refs, out, lse
        bound = {
            name: one.bind(scratch[name], self.interpreted) for name, one in self.matrices.items()
        }
        self.shared = types.SimpleNamespace(**{"results": bound["queries"]} | scratch | bound)
        gpu.specialise_warpgroups(
            self.tiles.consumers, lambda: self.for_each_work_item(self.produce), self.consume_all
        )

    def for_each_work_item(self, process: Callable[..., jax.Array]) -> None:
        """`step = process(wave, step, item, packed_counts)` for the items of this thread block."""
        gpu.for_each_work_item(self.refs["work_list"], process, self.refs["packed_counts"])

    def unpack(self, item: jax.Array) -> tuple[Index, Index, Index, Index]:
        """Batch row, head, query block and list of a work item."""
        batch, head, q_block = self.lists.unpack(item, self.heads)
        return batch, head, q_block, self.lists.list_index(batch, head, q_block)

    def query_buffer(self, wave: jax.Array, warpgroup: Index) -> Index:
        """The buffer of a warpgroup's queries in this wave."""
        if self.query_buffers == 1:
            return warpgroup
        return lax.rem(wave, self.query_buffers) * self.tiles.consumers + warpgroup

    def key_block(self, list_index: Index, j: Index) -> jax.Array:
        """The key block of tile j."""
        return self.refs["index"][list_index * self.lists.column_blocks + j]

    def produce(
        self, wave: jax.Array, step: jax.Array, item: jax.Array, packed_counts: jax.Array
    ) -> jax.Array:
        """Copy the queries of a work item, then its keys and values as stages become empty."""
        plgpu, tiles, shared = gpu.plgpu, self.tiles, self.shared
        batch, head, q_block, list_index = self.unpack(item)
        for w in range(tiles.consumers):
            buffer = self.query_buffer(wave, w)
            gpu.pl.when(wave >= self.query_buffers)(
                lambda buffer=buffer: plgpu.barrier_wait(shared.query_empty.at[buffer])
            )
            first = q_block * tiles.block_q + w * ROWS
            full = shared.query_full.at[buffer]
            shared.queries.load(self.refs["query"], batch, first, head, buffer, full)
        key_head = lax.div(head, self.group)

        def one_tile(j: Index, step: jax.Array) -> jax.Array:
            stage = lax.rem(step, tiles.stages)
            block = self.key_block(list_index, j)
            first = block * tiles.block_k
            for name, ring in (("key", shared.keys), ("value", shared.values)):
                empty, full = getattr(shared, f"{name}_empty"), getattr(shared, f"{name}_full")
                gpu.pl.when(step >= tiles.stages)(
                    lambda empty=empty: plgpu.barrier_wait(empty.at[stage])
                )
                ring.load(self.refs[name], batch, first, key_head, stage, full.at[stage])
                if name == "key":
                    at = q_block * tiles.block_q, block * tiles.block_k
                    self.staged_bias.produce(shared, self.refs, step, batch, head, *at)
            return step + 1

        return lax.fori_loop(0, unpack_counts(packed_counts)[0], one_tile, step)

    def consume_all(self, warpgroup: jax.Array) -> None:
        """The work items of this thread block, for one consumer warpgroup."""
        if self.ping_pong:
            gpu.pl.when(warpgroup == self.tiles.consumers - 1)(
                lambda: gpu.plgpu.barrier_arrive(self.shared.scheduler.at[0])
            )
        self.for_each_work_item(functools.partial(self.consume, warpgroup))

    def consume(
        self,
        warpgroup: jax.Array,
        wave: jax.Array,
        step: jax.Array,
        item: jax.Array,
        packed_counts: jax.Array,
    ) -> jax.Array:
        """Attention of 64 queries over the tiles of their query block."""
        plgpu, tiles, engine, shared = gpu.plgpu, self.tiles, self.engine, self.shared
        batch, head, q_block, list_index = self.unpack(item)
        count, partial = unpack_counts(packed_counts)
        first_row = q_block * tiles.block_q + warpgroup * ROWS
        buffer = self.query_buffer(wave, warpgroup)
        tile = LogitTile(
            self.spec,
            self.operands,
            self.staged_bias.refs_of_tile(self.refs),
            batch,
            head,
            first_row,
            tiles.block_k,
            engine=engine,
        )
        masked = self.operands.masked

        def first_key(j: Index) -> Index:
            """The first key of tile j; read before the wait for the keys."""
            if not tile.needs_position:
                return 0
            return self.key_block(list_index, j) * tiles.block_k

        def query_index() -> Index:
            """The buffer of the queries.

            Where registers are short, the compiler must not know that it is the same for all tiles:
            it would keep the address of every part of the queries in registers.
            """
            short = max(self.matrices["queries"].columns, self.value_columns) > 128
            if (condition := self.operands.condition) is not None:
                short |= bool(condition.id_pairs or condition.unions)
            return lax.optimization_barrier(buffer) if short else buffer

        def softmax(
            products: jax.Array,
            at: Index,
            with_mask: bool,
            row_max: jax.Array,
            row_sum: jax.Array,
            bias: jax.Array | None,
        ) -> tuple[jax.Array, ...]:
            """Weights relative to the running max, which they update."""
            logits, log2_scale, _ = tile.logits(products, at, with_mask, bias=bias)
            if self.without_max:
                weights, new_max, alpha = jnp.exp2(logits * log2_scale), row_max, row_max
            else:
                tile_max = gpu.reduce_rows(logits, jnp.maximum, jnp.max) * log2_scale
                # A running max that is only a little too low stays: weights may be larger than 1,
                # and the accumulator need not be rescaled.
                new_max = jnp.where(tile_max > row_max + _RESCALE_THRESHOLD, tile_max, row_max)
                alpha = jnp.exp2(row_max - new_max)
                weights = jnp.exp2(logits * log2_scale - gpu.broadcast_rows(new_max, logits.shape))
                row_sum = row_sum * alpha
            row_sum = row_sum + gpu.reduce_rows(weights, jnp.add, jnp.sum)
            if tile.has_dropout:
                weights = jnp.where(tile.dropout_mask(at), weights, 0.0)
            return weights, new_max, row_sum, alpha

        next_bias = functools.partial(self.staged_bias.consume, shared, engine, warpgroup)
        # Prologue: the first tile has nothing to overlap with.
        stage, at = lax.rem(step, tiles.stages), first_key(0)
        plgpu.barrier_wait(shared.query_full.at[buffer])
        plgpu.barrier_wait(shared.key_full.at[stage])

        def first_logits(accumulators: gpu.Accumulators, values: gpu.Accumulators) -> None:
            engine.matmul_nt(accumulators[0], shared.queries, query_index(), shared.keys, stage)
            if self.query_buffers > 1:
                release = lambda: self.release_queries(self.query_buffer(wave - 1, warpgroup))
                gpu.pl.when(wave > 0)(release)

        zeros = gpu.full((ROWS, tiles.block_k), 0.0)
        ((logits,), _) = engine.run(first_logits, (zeros,))
        plgpu.barrier_arrive(shared.key_empty.at[stage])
        lowest = gpu.full((ROWS,), 0.0 if self.without_max else _LOWEST_MAX)
        weights, row_max, row_sum, _ = softmax(
            logits, at, masked, lowest, gpu.full((ROWS,), 0.0), next_bias(step)
        )
        weights = weights.astype(self.dtype)
        plgpu.barrier_wait(shared.value_full.at[stage])

        def next_tile(
            with_mask: bool, j: jax.Array, carry: tuple[jax.Array, ...]
        ) -> tuple[jax.Array, ...]:
            step, acc, *state = carry
            stage, previous = lax.rem(step, tiles.stages), lax.rem(step - 1, tiles.stages)
            at = first_key(j)
            plgpu.barrier_wait(shared.key_full.at[stage])
            if self.ping_pong:
                plgpu.barrier_wait(shared.scheduler.at[warpgroup])

            def both_matmuls(accumulators: gpu.Accumulators, values: gpu.Accumulators) -> None:
                acc, logits = accumulators
                row_max, row_sum, weights, alpha = values
                engine.matmul_nt(logits, shared.queries, query_index(), shared.keys, stage)
                engine.matmul_nn(acc, weights[...], shared.values, previous)
                if self.ping_pong:
                    following = lax.rem(warpgroup + 1, tiles.consumers)
                    plgpu.barrier_arrive(shared.scheduler.at[following])
                # With a mask there are not enough registers for both the bias and the logits.
                bias = None if masked else next_bias(step)
                new_logits = engine.read_accumulator(logits, pending=shared.values.shape.panels)
                bias = next_bias(step) if masked else bias
                plgpu.barrier_arrive(shared.key_empty.at[stage])
                found = softmax(new_logits, at, with_mask, row_max[...], row_sum[...], bias)
                # Everything up to here runs before the wait below, hidden behind the second
                # matmul. What holds the assembler to that is the branch in the wait for the values,
                # which the next matmul needs. Weights are narrowed after it: the matmul in flight
                # reads the registers of the old ones.
                found = lax.optimization_barrier(found)
                plgpu.barrier_wait(shared.value_full.at[stage])
                engine.wait()
                new_weights, row_max[...], row_sum[...], alpha[...] = found
                weights[...] = new_weights.astype(self.dtype)

            zeros = gpu.full((ROWS, tiles.block_k), 0.0)
            (acc, _), state = engine.run(both_matmuls, (acc, zeros), (*state, state[1]))
            plgpu.barrier_arrive(shared.value_empty.at[previous])
            *state, alpha = state
            if not self.without_max:
                # Partial tiles come first, when the running max still changes; and they need the
                # registers.
                acc = engine.rescale_rows(acc, alpha, unconditional=with_mask)
            return step + 1, acc, *state

        carry = (step + 1, gpu.full((ROWS, self.value_columns), 0.0), row_max, row_sum, weights)
        start = 1
        if masked:
            carry = lax.fori_loop(1, partial, functools.partial(next_tile, True), carry)
            start = jnp.maximum(partial, 1)
        carry = lax.fori_loop(start, count, functools.partial(next_tile, False), carry)
        step, acc, row_max, row_sum, weights = carry
        # Epilogue: the product of the last tile's weights with its values.
        if self.separate_results:
            plgpu.barrier_arrive(shared.query_empty.at[buffer])
        stage = lax.rem(step - 1, tiles.stages)

        def last_matmul(accumulators: gpu.Accumulators, values: gpu.Accumulators) -> None:
            engine.matmul_nn(accumulators[0], weights, shared.values, stage)

        ((acc,), _) = engine.run(last_matmul, (acc,))
        plgpu.barrier_arrive(shared.value_empty.at[stage])
        # Unpacked again, so that only one number stays in a register meanwhile.
        batch, head, q_block, _ = self.unpack(lax.optimization_barrier(item))
        first_row = q_block * tiles.block_q + warpgroup * ROWS
        result = self.query_buffer(wave, warpgroup)
        self.write(result, batch, head, first_row, acc, row_max, row_sum)
        if self.query_buffers == 1 and not self.separate_results:
            self.release_queries(buffer)
        return step

    def release_queries(self, buffer: Index) -> None:
        """Let queries be copied to the buffer of the last results, once these have been stored."""
        gpu.plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        gpu.plgpu.barrier_arrive(self.shared.query_empty.at[buffer])

    def write(
        self,
        buffer: Index,
        batch: Index,
        head: Index,
        first_row: Index,
        acc: jax.Array,
        row_max: jax.Array,
        row_sum: jax.Array,
    ) -> None:
        """The output and the log-sum-exp of 64 queries."""
        plgpu = gpu.plgpu
        sees_a_key = row_sum > 0.0
        denominator = row_sum
        if "sinks" in self.refs:
            denominator = row_sum + jnp.exp2(self.refs["sinks"][head] - row_max)
        keep_prob = 1.0 - self.spec.dropout_prob
        scale = jnp.where(sees_a_key, 1.0 / (denominator * keep_prob), 0.0)
        lse = jnp.where(sees_a_key, row_max / LOG2_E + jnp.log(row_sum), -jnp.inf)
        out = (acc * gpu.broadcast_rows(scale, acc.shape)).astype(self.dtype)
        # The buffer may hold the last result, and no warp may still multiply what lies in it.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.shared.results.write(buffer, out)
        plgpu.commit_smem()
        self.shared.results.store(self.out, batch, first_row, head, buffer)
        self.lse[batch, head, gpu.pl.ds(first_row, ROWS)] = lse
