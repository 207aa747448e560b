"""A call of a flash attention kernel on TPU: its operands, its grid, and what a tile sees.

    query   [b, n, t, h]   blocks of `heads` query heads of one key head and `queries` rows
    key     [b, k, s, h]   blocks of `keys` rows
    rows    [b, n, 1, t]   a number for each query, along the lanes

Tiles are transposed, keys by queries: the maximum and the sum of a row of logits take one register
for 128 queries, and are found without moving data between lanes.

The grid is (batch rows, blocks of heads, tiles). The tiles are those of the schedule, so that what
the mask hides is neither loaded nor visited. Where the mask differs between batch rows or heads,
the schedule lists all of them and the grid has one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel import settings
from ejkernel.kernels.common.constants import LOG2_E
from ejkernel.kernels.common.mosaic_tpu.blocks import BlockOperand, BlockResult
from ejkernel.kernels.common.refs import Index, Ref
from ejkernel.kernels.flash_attention import dropout
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.kernels.flash_attention.pallas_tpu.mask_operands import TileMask
from ejkernel.kernels.flash_attention.pallas_tpu.schedule import (
    Step,
    TilePosition,
    TileSchedule,
    tile_schedule,
)
from ejkernel.ops.meshes import result_shape
from ejkernel.types.rules import Everything

# From the results of a kernel to those that are used: ring attention orders its communication so.
ResultHook = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]


class FlashTileSize(NamedTuple):
    """The size of a tile."""

    queries: int
    keys: int
    heads: int  # query heads of one key head that a step computes


class FlashRefs(NamedTuple):
    """The refs of a kernel: the schedule, scalars, blocks of operands, results and scratch."""

    results: Ref
    entries: Ref
    scalars: tuple[Ref, ...]
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]


class FlashCall:
    """One call of a kernel that may use `vmem` bytes.

    Args:
        on_results: maps the results of the kernel to those that are used.
        by_keys: results are blocks of keys.
        first_query: the index of the first query, where these are a part of all queries.
    """

    vmem: int
    on_results: ResultHook | None
    inputs: Inputs
    spec: Spec
    by_keys: bool
    first_query: int
    batch: int
    q_len: int
    q_heads: int
    kv_len: int
    kv_heads: int

    def __init__(
        self,
        inputs: Inputs,
        spec: Spec,
        size: FlashTileSize,
        *,
        vmem: int,
        on_results: ResultHook | None = None,
        by_keys: bool = False,
        first_query: int = 0,
    ):
        self.vmem, self.on_results = vmem, on_results
        self.inputs, self.spec, self.by_keys, self.first_query = inputs, spec, by_keys, first_query
        self.batch, self.q_len, self.q_heads, _ = inputs.query.shape
        _, self.kv_len, self.kv_heads, _ = inputs.key.shape
        rule = inputs.mask or Everything()
        self.size: FlashTileSize = size._replace(heads=1) if rule.heads > 1 else size
        self.mask: TileMask = TileMask(rule, self.q_len, self.kv_len)
        self.schedule: TileSchedule = tile_schedule(
            rule, self.q_len, self.kv_len, size.queries, size.keys, by_keys=by_keys
        )
        self.ragged_queries: bool = self.q_len % size.queries != 0
        self.ragged_keys: bool = self.kv_len % size.keys != 0
        self.unmasked: bool = self.mask.always and not (self.ragged_queries or self.ragged_keys)

    @property
    def grid(self) -> tuple[int, int, int | jax.Array]:
        head_blocks = self.q_heads // self.size.heads
        return (
            1 if self.schedule.batch > 1 else self.batch,
            1 if self.schedule.heads > 1 else head_blocks,
            self.schedule.count,
        )

    def block_spec(
        self, block: tuple[int | None, ...], index: Callable[[TilePosition], tuple[Index, ...]]
    ) -> pl.BlockSpec:
        """The block spec of a step: the block at `index(tile)`."""

        def index_map(
            row: jax.Array,
            heads: jax.Array,
            step: jax.Array,
            results: Ref,
            entries: Ref,
            *scalars: Ref,
        ) -> tuple[Index, ...]:
            return index(self.schedule.tile(row, heads, step, results, entries))

        return pl.BlockSpec(block, index_map)

    def query_operand(self, x: jax.Array) -> BlockOperand:
        """[b, t, n, d] -> [b, n, t, d]"""
        block = (None, self.size.heads, self.size.queries, x.shape[-1])
        return BlockOperand(
            jnp.swapaxes(x, 1, 2),
            self.block_spec(block, lambda at: (at.batch, at.heads, at.queries, 0)),
        )

    def key_operand(self, x: jax.Array, *, transposed: bool = False) -> BlockOperand:
        """[b, s, k, d] -> [b, k, s, d], or [b, k, d, s]"""
        place = lambda at: (at.batch, self.key_head(at))
        if transposed:
            spec = self.block_spec(
                (None, None, x.shape[-1], self.size.keys), lambda at: (*place(at), 0, at.keys)
            )
            return BlockOperand(jnp.transpose(x, (0, 2, 3, 1)), spec)
        block = (None, None, self.size.keys, x.shape[-1])
        index = lambda at: (*place(at), at.keys, 0)
        return BlockOperand(jnp.swapaxes(x, 1, 2), self.block_spec(block, index))

    def key_head(self, at: TilePosition) -> jax.Array:
        """The key head of a block of query heads."""
        blocks = self.q_heads // self.kv_heads // self.size.heads
        return at.heads if blocks == 1 else jax.lax.div(at.heads, blocks)

    def row_operand(self, x: jax.Array, fill: float) -> BlockOperand:
        """[b, n, t] -> [b, n, 1, t], with `fill` past the end of the last block."""
        missing = -self.q_len % self.size.queries
        x = jnp.pad(x, ((0, 0), (0, 0), (0, missing)), constant_values=fill)
        block = (None, self.size.heads, 1, self.size.queries)
        index = lambda at: (at.batch, at.heads, 0, at.queries)
        return BlockOperand(x[:, :, None], self.block_spec(block, index))

    def mask_operands(self) -> list[BlockOperand]:
        """The arrays of the mask that are no scalars, transposed as the tile is; they come last."""
        return [
            self._mask_operand(x.kind, x.array) for x in self.mask.operands if x.kind != "scalar"
        ]

    def _mask_operand(self, kind: str, x: jax.Array) -> BlockOperand:
        row = lambda at: at.batch if x.shape[0] > 1 else 0
        if kind == "blocks":
            head = lambda at: at.heads if x.shape[1] > 1 else 0
            block = (None, None, *x.shape[2:])
            return BlockOperand(x, self.block_spec(block, lambda at: (row(at), head(at), 0, 0)))
        if kind == "tile":
            return self.tile_operand(x)
        size = self.size.queries if kind == "query" else self.size.keys
        which = (lambda at: at.queries) if kind == "query" else (lambda at: at.keys)
        if kind == "key":  # a column
            spec = self.block_spec((None, size, 1), lambda at: (row(at), which(at), 0))
            return BlockOperand(x[:, :, None], spec)
        return BlockOperand(
            x[:, None], self.block_spec((None, 1, size), lambda at: (row(at), 0, which(at)))
        )

    def tile_operand(self, x: jax.Array) -> BlockOperand:
        """[#b, #n, #t, #s] -> [#b, #n, #s, #t]"""
        many = [size > 1 for size in x.shape]
        heads = self.size.heads if many[1] else 1
        sizes = (self.size.keys if many[3] else 1, self.size.queries if many[2] else 1)

        def index(at: TilePosition) -> tuple[Index, ...]:
            places = (at.keys if many[3] else 0, at.queries if many[2] else 0)
            return (
                at.batch if many[0] else 0,
                at.heads if many[1] else 0,
                *places,
            )

        return BlockOperand(jnp.swapaxes(x, 2, 3), self.block_spec((None, heads, *sizes), index))

    def _scalars(self) -> list[jax.Array]:
        """The arrays in scalar memory: the schedule, scalars of the mask, dropout counters."""
        numbers = [x.array for x in self.mask.operands if x.kind == "scalar"]
        counters = jax.tree.leaves(self.inputs.dropout)
        return [
            *self.schedule.scalars(),
            *numbers,
            *(x.reshape(-1).astype(jnp.int32) for x in counters),
        ]

    def current_step(self, refs: FlashRefs) -> Step:
        """The step that is running."""
        step = pl.program_id(2)
        return self.schedule.step(
            pl.program_id(0), pl.program_id(1), step, refs.results, refs.entries
        )

    def indices(self, tile: TilePosition) -> tuple[jax.Array, jax.Array]:
        """The indices of the queries of a tile as a row, and of its keys as a column."""
        of = lambda start, size, shape, axis: (
            start * size + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        )
        queries, keys, _ = self.size
        return of(tile.queries, queries, (1, queries), 1), of(tile.keys, keys, (keys, 1), 0)

    def allowed(self, tile: TilePosition, refs: FlashRefs) -> jax.Array | None:
        """The pairs of a tile that the mask allows and that are not past the ends; None: all."""
        values, scalars = [], iter(refs.scalars)
        last = sum(x.kind != "scalar" for x in self.mask.operands)
        arrays = iter(refs.inputs[len(refs.inputs) - last :])
        for operand in self.mask.operands:
            if operand.kind == "scalar":
                number = next(scalars)
                values.append(number[tile.batch if operand.array.shape[0] > 1 else 0])
            else:
                x = next(arrays)[...]
                values.append(x[0] if operand.kind == "tile" else x)
        q, k = self.indices(tile)
        allowed = None if self.mask.always else self.mask.allowed(values, q, k)
        ends = [k < self.kv_len] if self.ragged_keys else []
        if self.ragged_queries and self.by_keys and self.inputs.bias is not None:
            ends.append(q < self.q_len)  # past the end a bias may be anything
        for end in ends:
            allowed = end if allowed is None else allowed & end
        return allowed

    def dropout_mask(self, tile: TilePosition, head: int, refs: FlashRefs) -> jax.Array:
        """The pairs of a tile that dropout keeps."""
        given = self.inputs.dropout or ()
        count = sum(x is not None for x in given)
        scalars = iter(refs.scalars[len(refs.scalars) - count :])
        counters: list[Any] = [None if x is None else next(scalars) for x in given]
        seed, rows, heads, *shares = counters
        q, k = self.indices(tile)
        number = heads[tile.heads * self.size.heads + head]
        q = dropout.position(shares[0], q + self.first_query)
        k = dropout.position(shares[1], k)
        return dropout.keep(self.spec.dropout_prob, seed[0], rows[tile.batch], number, q, k)

    def logits(
        self, products: jax.Array, bias: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Logits in base 2, and the derivative of the soft cap; None without one."""
        scale, cap = self.spec.softmax_scale, self.spec.logits_soft_cap
        if bias is None and cap is None:
            return products * (scale * LOG2_E), None
        logits = products * scale
        if bias is not None:
            logits += bias.astype(logits.dtype)
        if cap is None:
            return logits * LOG2_E, None
        ratio = jnp.tanh(logits * (1.0 / cap))
        return ratio * (cap * LOG2_E), 1.0 - ratio * ratio

    def launch(
        self,
        kernel: Callable[["FlashCall", FlashRefs], None],
        operands: list[BlockOperand],
        results: list[BlockResult],
        scratch: list[pl.MemoryRef],
        *,
        sequential: bool = False,
    ) -> Sequence[jax.Array]:
        """Run `kernel(call, refs)`; `sequential`: no two of its steps at the same time."""
        scalars = self._scalars()
        zeroed = [i for i, x in enumerate(results) if x.zeroed]
        zeros = [jnp.zeros(results[i].shape, results[i].dtype) for i in zeroed]
        first, behind = len(scalars) + len(operands), len(operands) + len(zeroed)
        arrays = (*scalars, *(x.array for x in operands), *zeros)
        outer = "arbitrary" if sequential else "parallel"

        def body(results: Ref, entries: Ref, *refs: Ref) -> None:
            numbers, refs = refs[: len(scalars) - 2], refs[len(scalars) - 2 :]
            kernel(self, FlashRefs(results, entries, numbers, refs[: len(operands)], refs[behind:]))

        outputs: Any = pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=self.grid,
                in_specs=[
                    *(x.spec for x in operands),
                    *(pl.BlockSpec(memory_space=pl.ANY) for _ in zeroed),
                ],
                out_specs=[x.spec for x in results],
                scratch_shapes=scratch,
            ),
            out_shape=[result_shape(x.shape, x.dtype, *arrays) for x in results],
            input_output_aliases={first + i: result for i, result in enumerate(zeroed)},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=(outer, outer, "arbitrary"),
                vmem_limit_bytes=self.vmem,
                disable_bounds_checks=True,  # the schedule names no block that is not there
            ),
            interpret=settings.interpret(),
        )(*arrays)
        return outputs if self.on_results is None else self.on_results(outputs)


class HeadGroups(NamedTuple):
    """`count` parts of the query heads with `each` heads of every key head, taken by slices.

    One kernel computes one part. A gather would do as well, but the compiler may want all of an
    array in VMEM for it.
    """

    kv_heads: int
    count: int
    each: int

    @classmethod
    def of(cls, inputs: Inputs, each: int) -> "HeadGroups":
        """The parts of a call; one part where the mask differs between heads."""
        kv_heads = inputs.key.shape[2]
        group = inputs.query.shape[2] // kv_heads
        if (inputs.mask or Everything()).heads > 1:
            each = group
        return cls(kv_heads, group // each, each)

    @property
    def heads(self) -> int:
        """Query heads of all parts."""
        return self.kv_heads * self.count * self.each

    def pick(self, x: jax.Array, axis: int, part: int) -> jax.Array:
        """The heads of a part, from an axis of all."""
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        apart = x.reshape(*before, self.kv_heads, self.count, self.each, *after)
        apart = jax.lax.index_in_dim(apart, part, axis + 1, keepdims=False)
        return apart.reshape(*before, self.kv_heads * self.each, *after)

    def joined(self, parts: list[jax.Array], axis: int) -> jax.Array:
        """All heads, from an axis of each part."""
        before, after = parts[0].shape[:axis], parts[0].shape[axis + 1 :]
        apart = [x.reshape(*before, self.kv_heads, 1, self.each, *after) for x in parts]
        return jnp.concatenate(apart, axis + 1).reshape(*before, self.heads, *after)
