"""A backward kernel on Hopper: gradients of the resident rows, or what is summed over them.

A consumer warpgroup keeps 64 keys (or queries) resident and streams the queries (or keys) that meet
them. Two matmuls give logits and gradients of weights, 64 rows each; what they become stays in
registers as the left operand of the accumulating matmuls. The tiles of a dK/dV kernel are
transposed, which makes that possible. The gradients of a key head are summed over its query heads
inside the kernel.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.common.refs import Index, Ref
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.kernels.flash_attention.pallas_sm90.bias_grad import (
    shared_bias_work_list,
    write_d_logits,
)
from ejkernel.kernels.flash_attention.pallas_sm90.configs import (
    QK,
    ROWS,
    VO,
    BackwardTileConfig,
    GradientKernelSpec,
    has_whole_tiles,
    padded_dims,
)
from ejkernel.kernels.flash_attention.pallas_sm90.logits import LogitTile, StagedBias
from ejkernel.kernels.flash_attention.pallas_sm90.mask_operands import (
    TileOperands,
    partial_tile_mask,
    tile_operands,
)
from ejkernel.kernels.flash_attention.pallas_sm90.row_stats import RowStats, starts_with_lse
from ejkernel.kernels.flash_attention.pallas_sm90.schedule import (
    TileListShape,
    WorkItems,
    key_block_schedule,
    query_block_schedule,
)
from ejkernel.ops.platform import Device
from ejkernel.types.rules import Everything

_State = TypeVar("_State")
# (step, accumulators) before and after a query head.
_HeadCarry = tuple[jax.Array, tuple[jax.Array, ...]]
# (step, accumulators, row sums) before and after a tile.
_Carry = tuple[jax.Array, tuple[jax.Array, ...], jax.Array]
# The same with the left operands of the accumulating matmuls that are still to be done.
_OverlapCarry = tuple[jax.Array, tuple[jax.Array, ...], jax.Array, tuple[jax.Array, ...]]


def staged_bias(
    kernel: GradientKernelSpec, tiles: BackwardTileConfig, inputs: Inputs
) -> StagedBias:
    """How the bias is staged through the shared memory that a kernel leaves."""
    dims = padded_dims(inputs)
    stages = kernel.stages(tiles, dims)
    free_bytes = 0 if stages is None else kernel.free_shared_bytes(tiles, dims, stages)
    sizes = tiles.consumers, tiles.block_streamed, free_bytes
    return StagedBias.fitting(inputs.bias, *sizes, kernel.keys_resident)


def run_kernel(
    inputs: Inputs,
    d_out: jax.Array,
    spec: Spec,
    stats: RowStats,
    device: Device,
    task: GradientKernelSpec,
    tiles: BackwardTileConfig,
) -> list[jax.Array]:
    """The results of one kernel: its accumulated gradients, then its other requested results."""
    b, t, n, _ = inputs.query.shape
    s, k = inputs.value.shape[1:3]
    interpreted = gpu.is_interpreted(device)
    of_keys, rule = task.keys_resident, inputs.mask or Everything()
    block_q, block_k = tiles.block_resident, tiles.block_streamed
    if of_keys:
        block_q, block_k = block_k, block_q
    q_size, kv_size = (-(-size // block) * block for size, block in ((t, block_q), (s, block_k)))
    resident, streamed = (s, (inputs.query, d_out)) if of_keys else (t, (inputs.key, inputs.value))
    heads, group = (k, n // k) if of_keys else (n, 1)
    row_blocks = -(-resident // tiles.block_resident)
    items = WorkItems(
        batch=b,
        heads=heads,
        group=group,
        l2_groups=b * k,
        l2_group_bytes=sum(x.nbytes for x in streamed) // (b * k),
        thread_blocks=min(gpu.multiprocessors(device), b * heads * row_blocks),
    )
    make_schedule = key_block_schedule if of_keys else query_block_schedule
    schedule = make_schedule(rule, items, t, s, block_q, block_k)
    mask = partial_tile_mask(rule, t, s, q_size, kv_size)
    work_list = schedule.work_list
    if task.writes_d_logits and inputs.bias is not None:
        work_list = shared_bias_work_list(schedule.count, items, inputs.bias.shape)
    transpose_bias = of_keys and not staged_bias(task, tiles, inputs)
    operands = tile_operands(inputs, mask, q_size, kv_size, of_keys, transpose_bias)
    pad = lambda x, fill: jnp.pad(x, ((0, 0), (0, 0), (0, q_size - t)), constant_values=fill)
    lse = pad(stats.lse, -jnp.inf if starts_with_lse(spec) else jnp.inf)
    arrays = {
        "query": inputs.query,
        "key": inputs.key,
        "value": inputs.value,
        "d_out": d_out,
        # Gradients are without the factor of dropout until they are written.
        "stats": jnp.stack([lse, pad(stats.offset * (1.0 - spec.dropout_prob), 0.0)], axis=2),
        "work_list": work_list,
        "count": schedule.count.reshape(-1),
        "partial": schedule.partial.reshape(-1),
        "index": schedule.index.reshape(-1),
        **operands.arrays,
    }
    like = (inputs.key, inputs.value) if of_keys else (inputs.query,)
    out_type = [jax.ShapeDtypeStruct(like[i].shape, like[i].dtype) for i in task.accumulated]
    if task.row_sums:
        out_type.append(jax.ShapeDtypeStruct((b, n, kv_size if of_keys else q_size), jnp.float32))
    if task.writes_d_logits and inputs.bias is not None:
        bias = inputs.bias
        dtype = bias.dtype if bias.shape[:2] == (b, n) else jnp.float32  # or accumulated in
        out_type.append(jax.ShapeDtypeStruct((*bias.shape[:2], q_size, kv_size), dtype))
    kernel = _GradientKernel(spec, task, tiles, operands, inputs, schedule.list_shape, interpreted)

    def body(*refs: Ref, **scratch: Ref | tuple[Ref, ...]) -> None:
        kernel.body(dict(zip(arrays, refs, strict=False)), refs[len(arrays) :], scratch)

    launch = gpu.kernel(
        body,
        out_type=tuple(out_type),
        scratch_types=kernel.scratch(),
        blocks=work_list.shape[1],
        warpgroups=tiles.consumers + 1,
        interpreted=interpreted,
    )
    return list(launch(*arrays.values()))


@dataclasses.dataclass(frozen=True)
class _ResidentRows:
    """What a consumer warpgroup knows of its resident rows with one query head."""

    warpgroup: jax.Array
    logits: LogitTile
    list_index: Index
    stats: list[jax.Array]  # of resident queries
    count: jax.Array  # tiles
    partial: jax.Array  # partial tiles


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Tile j of the resident rows, which is the thread block's tile number `step`."""

    rows: _ResidentRows
    j: Index
    step: jax.Array


class _Weights(NamedTuple):
    """Weights of a tile.

    `used` are those after dropout, `weights` those before. `slope` are the weights times the
    derivative of the soft cap, negative where dropout has removed a weight.
    """

    used: jax.Array
    weights: jax.Array
    slope: jax.Array


class _GradientKernel:
    """A backward kernel: its static sizes, and the programs of its warpgroups."""

    # Arrays in global memory by name, results, and shared memory with its barriers: set inside the
    # kernel.
    refs: dict[str, Ref]
    results: Sequence[Ref]
    shared: types.SimpleNamespace

    def __init__(
        self,
        spec: Spec,
        task: GradientKernelSpec,
        tiles: BackwardTileConfig,
        operands: TileOperands,
        inputs: Inputs,
        lists: TileListShape,
        interpreted: bool,
    ):
        self.spec, self.task, self.tiles, self.operands = spec, task, tiles, operands
        self.lists, self.interpreted = lists, interpreted
        self.dtype, self.shape = inputs.query.dtype, (ROWS, tiles.block_streamed)
        # The lse in the accumulators of logits needs no registers of its own.
        self.lse_first = starts_with_lse(spec)
        heads, key_heads = inputs.query.shape[2], inputs.key.shape[2]
        self.group, self.batch_and_heads = heads // key_heads, (inputs.query.shape[0], heads)
        self.heads = key_heads if task.keys_resident else heads  # of work items
        self.engine = gpu.INTERPRETED if interpreted else gpu.WGMMA
        whole_tiles = has_whole_tiles(inputs)
        matrices = lambda i, count, rows: gpu.SharedMatrices(
            self.dtype, count, rows, (inputs.query, inputs.value)[i].shape[3], whole_tiles
        )
        self.dims = padded_dims(inputs)
        stages = task.stages(tiles, self.dims)
        if stages is None:
            raise ValueError(
                f"flash_attention: not enough shared memory for {tiles} with dims {self.dims}."
            )
        self.stages, self.staged_bias = stages, staged_bias(task, tiles, inputs)
        self.result_buffers = task.result_buffers(self.dims)
        residents = task.resident_matrices(self.dims)
        self.residents = {i: matrices(i, tiles.consumers, ROWS) for i in residents}
        self.rings = {i: matrices(i, stages[i], tiles.block_streamed) for i in (QK, VO)}
        self.has_dropout = inputs.dropout is not None
        # Matrices that only the first matmuls read, and those that only accumulating ones read.
        self.read_once = [i for i in (QK, VO) if i not in task.accumulated]
        self.read_late = [i for i in task.accumulated if i not in task.matmuls]

    # How the exponentials are hidden behind the second matmul: the assembler would move them behind
    # the wait for it, but not past a matmul that needs them, and not past a branch.

    @property
    def accumulates_early(self) -> bool:
        """Whether the matmul of the values starts as soon as there are weights."""
        return self.task.accumulated == (VO, QK) and not self.tiles.overlap

    @property
    def waits_early(self) -> bool:
        """Whether the next tile's first operand is waited for in the middle of this tile."""
        short = self.one_matmul_at_a_time or (self.task.row_sums and self.dims[QK] > 192)
        return self.task.accumulated == (QK,) and not self.tiles.overlap and not short

    @property
    def one_matmul_at_a_time(self) -> bool:
        """Whether registers are short: a wide accumulator, and dropout bits for every weight."""
        wide = self.task.accumulated == (QK,) and self.dims[QK] > 192
        return wide and self.has_dropout and not self.tiles.overlap

    def scratch(self) -> dict[str, object]:
        """Shared memory and barriers."""
        consumers, barriers = self.tiles.consumers, gpu.barriers
        allocate = lambda matrices: tuple(x.allocate(self.interpreted) for x in matrices.values())
        panels = sum(self.residents[i].panels for i in self.task.matmuls)
        scratch = {
            "resident": allocate(self.residents),
            "ring": allocate(self.rings),
            "resident_full": barriers(consumers, panels),
            "resident_empty": barriers(consumers),
            "ring_full": tuple(
                barriers(self.stages[i], one.panels + (self.task.keys_resident and i == QK))
                for i, one in self.rings.items()
            ),
            "ring_empty": tuple(barriers(count, consumers) for count in self.stages),
        }
        if self.task.keys_resident:
            shape = (self.stages[QK], 2, self.tiles.block_streamed)
            scratch["stats"] = gpu.plgpu.SMEM(shape, jnp.float32)
        return scratch | self.staged_bias.scratch(self.interpreted)

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
            pairs = zip(matrices.items(), scratch[name], strict=True)  # pyright: ignore[reportArgumentType]
            bound[name] = {i: one.bind(ref, self.interpreted) for (i, one), ref in pairs}
        self.shared = types.SimpleNamespace(**scratch | bound)
        work_list = self.refs["work_list"]
        gpu.specialise_warpgroups(
            self.tiles.consumers,
            lambda: gpu.for_each_work_item(work_list, self.produce),
            lambda warpgroup: gpu.for_each_work_item(
                work_list, functools.partial(self.consume, warpgroup)
            ),
        )

    def for_each_head(
        self, place: tuple[Index, ...], process: Callable[..., _State], carry: _State
    ) -> _State:
        """`carry = process(query head, key head, list, carry)` for the query heads of an item.

        `place` is its batch row, head and row block.
        """
        batch, head, row_block = place

        def one_head(query_head: Index, carry: _State) -> _State:
            key_head = lax.div(query_head, self.group)
            list_index = self.lists.list_index(batch, query_head, row_block)
            return process(query_head, key_head, list_index, carry)

        if not self.task.keys_resident or self.group == 1:
            return one_head(head, carry)
        first = head * self.group
        return lax.fori_loop(first, first + self.group, one_head, carry)

    def produce(self, wave: jax.Array, step: jax.Array, item: jax.Array) -> jax.Array:
        """Copy what the consumers keep resident, then stream the other side."""
        batch, head, row_block = self.lists.unpack(item, self.heads)
        plgpu, tiles, shared = gpu.plgpu, self.tiles, self.shared
        of_keys, of_queries = ("key", "value"), ("query", "d_out")
        residents, streamed = of_queries, of_keys
        if self.task.keys_resident:
            residents, streamed = of_keys, of_queries
        for w in range(tiles.consumers):
            gpu.pl.when(wave > 0)(lambda w=w: plgpu.barrier_wait(shared.resident_empty.at[w]))
            first = row_block * tiles.block_resident + w * ROWS
            for i in self.task.matmuls:
                full = shared.resident_full.at[w]
                shared.resident[i].load(self.refs[residents[i]], batch, first, head, w, full)

        def of_head(
            query_head: Index, key_head: Index, list_index: Index, step: jax.Array
        ) -> jax.Array:
            streamed_head = query_head if self.task.keys_resident else key_head

            def one_tile(j: Index, step: jax.Array) -> jax.Array:
                block = self.refs["index"][list_index * self.lists.column_blocks + j]
                at = block * tiles.block_streamed
                for i, count in enumerate(self.stages):
                    stage = lax.rem(step, count)
                    empty, full = shared.ring_empty[i].at[stage], shared.ring_full[i].at[stage]
                    gpu.pl.when(step >= count)(lambda empty=empty: plgpu.barrier_wait(empty))
                    ring, array = shared.ring[i], self.refs[streamed[i]]
                    ring.load(array, batch, at, streamed_head, stage, full)
                    if self.task.keys_resident and i == QK:
                        columns = gpu.pl.ds(at, tiles.block_streamed)
                        source = self.refs["stats"].at[batch, query_head, :, columns]
                        plgpu.copy_gmem_to_smem(source, shared.stats.at[stage], full)
                place = batch, query_head, row_block * tiles.block_resident, at
                self.staged_bias.produce(shared, self.refs, step, *place)
                return step + 1

            return lax.fori_loop(0, self.refs["count"][list_index], one_tile, step)

        return self.for_each_head((batch, head, row_block), of_head, step)

    def consume(
        self, warpgroup: jax.Array, wave: jax.Array, step: jax.Array, item: jax.Array
    ) -> jax.Array:
        """The gradients of 64 keys, or of 64 queries."""
        batch, head, row_block = self.lists.unpack(item, self.heads)
        first_row = row_block * self.tiles.block_resident + warpgroup * ROWS
        gpu.plgpu.barrier_wait(self.shared.resident_full.at[warpgroup])
        accs = tuple(gpu.full((ROWS, self.dims[i]), 0.0) for i in self.task.accumulated)

        def of_head(
            query_head: Index, key_head: Index, list_index: Index, carry: _HeadCarry
        ) -> _HeadCarry:
            refs = self.staged_bias.refs_of_tile(self.refs)
            place = batch, query_head, first_row, self.tiles.block_streamed
            logits = LogitTile(self.spec, self.operands, refs, *place, self.task.keys_resident)
            stats = [] if self.task.keys_resident else self.load_stats(batch, query_head, first_row)
            start = (*carry, gpu.full((ROWS,), 0.0))
            count, partial = self.refs["count"][list_index], self.refs["partial"][list_index]
            rows = _ResidentRows(warpgroup, logits, list_index, stats, count, partial)
            step, accs, row_sums = self.over_tiles(rows, start)
            if self.task.row_sums:
                self.results[-1][batch, query_head, gpu.pl.ds(first_row, ROWS)] = row_sums
            if self.task.writes_d_logits:
                self.over_empty_tiles(rows)
            return step, accs

        step, accs = self.for_each_head((batch, head, row_block), of_head, (step, accs))
        self.write(warpgroup, item, accs)
        return step

    def load_stats(self, batch: Index, head: Index, first_row: Index) -> list[jax.Array]:
        """The statistics of resident queries."""
        ref, rows = self.refs["stats"], gpu.pl.ds(first_row, ROWS)
        return [gpu.load(ref.at[batch, head, i, rows], gpu.row_layout()) for i in range(2)]

    def over_tiles(self, rows: _ResidentRows, carry: _Carry) -> _Carry:
        """The carry after all tiles."""
        process = self.narrow_tile if self.one_matmul_at_a_time else self.whole_tile
        if self.waits_early:
            self.wait_full((QK,), carry[0])
        if not self.tiles.overlap:
            return lax.fori_loop(0, rows.count, functools.partial(process, rows), carry)
        overlapping = self.first_tile(rows, carry)
        process = functools.partial(self.next_tile, rows)
        return self.last_tile(lax.fori_loop(1, rows.count, process, overlapping))

    def over_empty_tiles(self, rows: _ResidentRows) -> None:
        """Write 0 for the gradients of logits in tiles where the mask hides everything."""

        def one_tile(j: Index, carry: jax.Array) -> jax.Array:
            self.write_d_logits(rows, j, None)
            return carry

        count = self.refs["count"][rows.list_index]
        lax.fori_loop(count, self.lists.column_blocks, one_tile, jnp.int32(0))

    def stage(self, i: int, step: jax.Array) -> jax.Array:
        return lax.rem(step, self.stages[i])

    def wait_full(self, which: Sequence[int], step: jax.Array) -> None:
        """Wait until these matrices of a tile have been copied."""
        for i in which:
            gpu.plgpu.barrier_wait(self.shared.ring_full[i].at[self.stage(i, step)])

    def release(self, which: Sequence[int], step: jax.Array) -> None:
        """Let the producer overwrite these matrices of a tile."""
        for i in which:
            gpu.plgpu.barrier_arrive(self.shared.ring_empty[i].at[self.stage(i, step)])

    def whole_tile(self, rows: _ResidentRows, j: jax.Array, carry: _Carry) -> _Carry:
        """First matmuls, then accumulating ones; weights are computed during the second matmul."""
        step, accs, row_sums = carry
        tile = _Tile(rows, j, step)
        matmuls, accumulated = self.task.matmuls, self.task.accumulated
        initial = self.initial_logits(tile)
        self.wait_full(matmuls[1:] if self.waits_early else matmuls, step)

        def all_matmuls(accumulators: gpu.Accumulators, values: gpu.Accumulators) -> None:
            accs, products = accumulators[: len(accumulated)], accumulators[len(accumulated) :]
            (row_sums,) = values

            def with_weights(weights: _Weights) -> int:
                if self.accumulates_early:
                    self.accumulate(accs[:1], [weights.used.astype(self.dtype)], step, (VO,))
                    return self.shared.ring[VO].shape.panels
                if self.waits_early:
                    gpu.pl.when(j + 1 < rows.count)(lambda: self.wait_full((QK,), step + 1))
                return 0

            left, row_sums[...] = self.left_operands(
                tile, products, row_sums[...], with_weights=with_weights
            )
            self.release(self.read_once, step)
            self.wait_full(self.read_late, step)
            done = 1 if self.accumulates_early else 0
            left = [x.astype(self.dtype) for x in left[done:]]
            self.accumulate(accs[done:], left, step, accumulated[done:])

        starts = [self.initial_accumulator(tile, i, initial) for i in matmuls]
        accs, (row_sums,) = self.engine.run(all_matmuls, (*accs, *starts), (row_sums,))
        self.release(accumulated, step)
        return step + 1, accs[: len(accumulated)], row_sums

    def narrow_tile(self, rows: _ResidentRows, j: jax.Array, carry: _Carry) -> _Carry:
        """One matmul after the other: the second needs the registers of the first."""
        step, accs, row_sums = carry
        tile = _Tile(rows, j, step)
        initial = self.initial_logits(tile)

        def product(i: int) -> jax.Array:
            self.wait_full((i,), step)
            start = self.initial_accumulator(tile, i, initial)
            body = lambda accumulators, values: self.start_matmuls(tile, accumulators, (i,))
            ((found,), _) = self.engine.run(body, (start,))
            return found

        weights = self.weights(tile, product(QK))
        left, row_sums = self.left_operands_of(tile, weights, product(VO), row_sums)
        left = [x.astype(self.dtype) for x in left]
        self.release(self.read_once, step)
        add = lambda accs, values: self.accumulate(accs, left, step, self.task.accumulated)
        accs, _ = self.engine.run(add, accs)
        self.release(self.task.accumulated, step)
        return step + 1, accs, row_sums

    def first_tile(self, rows: _ResidentRows, carry: _Carry) -> _OverlapCarry:
        """With overlap, the prologue: the first matmuls of the first tile."""
        step, accs, row_sums = carry
        tile = _Tile(rows, 0, step)
        initial = self.initial_logits(tile)
        self.wait_full(self.task.matmuls, step)

        def first_matmuls(accumulators: gpu.Accumulators, values: gpu.Accumulators) -> None:
            row_sums, *left = values
            new_left, row_sums[...] = self.left_operands(tile, accumulators, row_sums[...])
            for ref, x in zip(left, new_left, strict=True):
                ref[...] = x.astype(self.dtype)

        starts = [self.initial_accumulator(tile, i, initial) for i in self.task.matmuls]
        left = [gpu.full(self.shape, 0.0, self.dtype) for _ in self.task.accumulated]
        _, (row_sums, *left) = self.engine.run(first_matmuls, starts, (row_sums, *left))
        self.release(self.read_once, step)
        return step + 1, accs, row_sums, tuple(left)

    def next_tile(self, rows: _ResidentRows, j: jax.Array, carry: _OverlapCarry) -> _OverlapCarry:
        """First matmuls of this tile and accumulating ones of the previous tile overlap."""
        step, accs, row_sums, left = carry
        tile = _Tile(rows, j, step)
        matmuls, accumulated = self.task.matmuls, self.task.accumulated
        initial = self.initial_logits(tile)
        self.wait_full(matmuls, step)
        self.wait_full(self.read_late, step - 1)

        def both(accumulators: gpu.Accumulators, values: gpu.Accumulators) -> None:
            accs, products = accumulators[: len(accumulated)], accumulators[len(accumulated) :]
            row_sums, *left = values

            def accumulate_previous() -> int:
                self.accumulate(accs, [x[...] for x in left], step - 1, accumulated)
                return sum(self.shared.ring[i].shape.panels for i in accumulated)

            new = self.left_operands(tile, products, row_sums[...], accumulate_previous)
            new_left, row_sums[...] = lax.optimization_barrier(new)
            self.engine.wait()
            for ref, x in zip(left, new_left, strict=True):
                ref[...] = x.astype(self.dtype)

        starts = [self.initial_accumulator(tile, i, initial) for i in matmuls]
        accs, (row_sums, *left) = self.engine.run(both, (*accs, *starts), (row_sums, *left))
        self.release(accumulated, step - 1)
        self.release(self.read_once, step)
        return step + 1, accs[: len(accumulated)], row_sums, tuple(left)

    def last_tile(self, carry: _OverlapCarry) -> _Carry:
        """With overlap, the epilogue: the accumulating matmuls of the last tile."""
        step, accs, row_sums, left = carry
        self.wait_full(self.read_late, step - 1)
        add = lambda accs, values: self.accumulate(accs, left, step - 1, self.task.accumulated)
        accs, _ = self.engine.run(add, accs)
        self.release(self.task.accumulated, step - 1)
        return step, accs, row_sums

    def initial_logits(self, tile: _Tile) -> jax.Array | None:
        """The initial logits of a tile: -inf where the mask hides a pair, the bias; None for 0.

        Computed before the wait for the tile: then the wait keeps what this reads, and the operands
        of the matmuls, from needing registers at the same time.
        """
        rows, j, bias = tile.rows, tile.j, None
        if "bias" in self.refs:
            bias = self.staged_bias.consume(self.shared, self.engine, rows.warpgroup, tile.step)
            if bias is None:
                bias = rows.logits.bias(self.first_column(rows, j))
            else:
                bias = bias.astype(jnp.float32)
            if self.spec.logits_soft_cap is not None:  # the cap of -inf is finite
                bias = jnp.maximum(bias, -1e30)
            bias = bias * (1.0 / self.spec.softmax_scale)
        if not self.operands.masked:
            return bias
        initial = lambda: gpu.full(self.shape, 0.0) if bias is None else bias
        visible = lambda: rows.logits.visible(self.first_column(rows, j))
        partial = lambda: jnp.where(visible(), initial(), -jnp.inf)
        return lax.cond(j < rows.partial, partial, initial)

    def initial_accumulator(self, tile: _Tile, i: int, initial: jax.Array | None) -> jax.Array:
        """What the products of matmul i are added to: statistics of rows, the bias, the mask."""
        if i == VO:
            return self.stat(tile, 1)
        logits = self.stat(tile, 0) if self.lse_first else gpu.full(self.shape, 0.0)
        return logits if initial is None else logits + initial

    def start_matmuls(
        self, tile: _Tile, accumulators: gpu.Accumulators, which: Sequence[int]
    ) -> None:
        """Start the matmuls of resident with streamed matrices."""
        # The compiler must not know that these are the same for all tiles: it would compute the
        # address of every part of a matrix before the loop, and keep them all in registers.
        mine, first = lax.optimization_barrier((tile.rows.warpgroup, jnp.int32(0)))
        for accumulator, i in zip(accumulators, which, strict=True):
            resident, ring = self.shared.resident[i], self.shared.ring[i]
            stage = self.stage(i, tile.step) if self.stages[i] > 1 else first
            self.engine.matmul_nt(accumulator, resident, mine, ring, stage)

    def accumulate(
        self,
        accumulators: gpu.Accumulators,
        left: Sequence[jax.Array],
        step: jax.Array,
        which: Sequence[int],
    ) -> None:
        """Start the accumulating matmuls of the tile of `step`.

        The left operands are weights (times gradients of outputs), and gradients of logits (times
        queries or keys).
        """
        for accumulator, x, i in zip(accumulators, left, which, strict=True):
            self.engine.matmul_nn(accumulator, x, self.shared.ring[i], self.stage(i, step))

    def left_operands(
        self,
        tile: _Tile,
        accumulators: gpu.Accumulators,
        row_sums: jax.Array,
        before_weights: Callable[[], int] = lambda: 0,
        with_weights: Callable[[_Weights], int] = lambda weights: 0,
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """The first matmuls of a tile, and the left operands of its accumulating ones.

        `before_weights` starts other matmuls behind them and returns how many, `with_weights` more
        of them when the weights are known.
        """
        self.start_matmuls(tile, accumulators, self.task.matmuls)
        pending = before_weights()
        second = sum(self.shared.ring[i].shape.panels for i in self.task.matmuls[1:])
        logits = self.engine.read_accumulator(accumulators[0], pending + second)
        weights = self.weights(tile, logits)
        if self.waits_early:
            weights = _computed(weights)
        pending += with_weights(weights)
        d_weights = self.engine.read_accumulator(accumulators[1], pending) if second else None
        return self.left_operands_of(tile, weights, d_weights, row_sums)

    def first_column(self, rows: _ResidentRows, j: Index) -> Index:
        """The first column of tile j."""
        if not rows.logits.needs_position and not self.task.writes_d_logits:
            return 0
        index = self.refs["index"][rows.list_index * self.lists.column_blocks + j]
        return index * self.tiles.block_streamed

    def stat(self, tile: _Tile, i: int) -> jax.Array:
        """A number for each query, broadcast along the keys of a tile."""
        if not self.task.keys_resident:
            return gpu.broadcast_rows(tile.rows.stats[i], self.shape)
        part = gpu.load(self.shared.stats.at[self.stage(QK, tile.step), i], gpu.column_layout())
        return gpu.broadcast_columns(part, self.shape)

    def weights(self, tile: _Tile, products: jax.Array) -> _Weights:
        """The weights of a tile, from its logits."""
        logit_tile, at = tile.rows.logits, self.first_column(tile.rows, tile.j)
        logits, log2_scale, cap_gradient = logit_tile.logits(
            products, at, with_mask=False, with_bias=False
        )
        exponents = logits * log2_scale
        if not self.lse_first:
            exponents = exponents - self.stat(tile, 0)
        weights = used = slope = jnp.exp2(exponents)
        if cap_gradient is not None:
            if self.operands.masked:  # the products are still -inf, though their cap is finite
                weights = used = jnp.where(products > -jnp.inf, weights, 0.0)
            slope = weights * cap_gradient
        if logit_tile.has_dropout:
            kept = logit_tile.dropout_mask(at)
            used, slope = jnp.where(kept, used, 0.0), jnp.where(kept, slope, -slope)
        if self.one_matmul_at_a_time:
            used, slope = lax.optimization_barrier((used.astype(self.dtype), slope))
        return _Weights(used, weights, slope)

    def left_operands_of(
        self, tile: _Tile, found: _Weights, d_weights: jax.Array | None, row_sums: jax.Array
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """The left operands of the accumulating matmuls, from the weights and their gradients."""
        used, weights, slope = found
        if d_weights is None:
            return (used,), row_sums
        if self.has_dropout:
            d_weights = jnp.where(slope > 0.0, d_weights, self.stat(tile, 1))
            slope = jnp.abs(slope)
        d_logits = slope * d_weights
        if self.task.row_sums:
            # Without a cap, both kinds are the same.
            capped = self.task.row_sums == "weights" and self.spec.logits_soft_cap is not None
            numbers = weights * d_weights if capped else d_logits
            row_sums = row_sums + gpu.reduce_rows(numbers, jnp.add, jnp.sum)
        if self.task.writes_d_logits:
            self.write_d_logits(tile.rows, tile.j, d_logits)
        operands = {QK: d_logits, VO: used}
        return tuple(operands[i] for i in self.task.accumulated), row_sums

    def write_d_logits(self, rows: _ResidentRows, j: Index, d_logits: jax.Array | None) -> None:
        """Gradients of a tile's logits to the gradient of the bias; None for 0."""
        at, ref = self.first_column(rows, j), self.results[-1]
        write_d_logits(ref, rows.logits, at, d_logits, self.batch_and_heads)

    def write(self, warpgroup: jax.Array, item: jax.Array, accs: Sequence[jax.Array]) -> None:
        """Accumulators to global memory, through the buffers of the rows that they belong to."""
        plgpu, shared = gpu.plgpu, self.shared
        # Unpacked again, so that only one number stays in a register meanwhile.
        batch, head, row_block = self.lists.unpack(lax.optimization_barrier(item), self.heads)
        first_row = row_block * self.tiles.block_resident + warpgroup * ROWS
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # all threads have done their matmuls
        for i, acc in zip(self.task.accumulated, accs, strict=True):
            scale = self.spec.softmax_scale if i == QK else 1.0
            gradient = (acc * (scale / (1.0 - self.spec.dropout_prob))).astype(self.dtype)
            shared.resident[self.result_buffers[i]].write(warpgroup, gradient)
        plgpu.commit_smem()
        for result, i in zip(self.results, self.task.accumulated, strict=False):
            buffer = shared.resident[self.result_buffers[i]]
            buffer.store(result, batch, first_row, head, warpgroup)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(shared.resident_empty.at[warpgroup])


def _computed(weights: _Weights) -> _Weights:
    """The same, known to be computed here; arrays that are the same take registers once."""
    different = {id(x): x for x in weights}
    after = lax.optimization_barrier(tuple(different.values()))
    return _Weights(*(dict(zip(different, after, strict=True))[id(x)] for x in weights))
