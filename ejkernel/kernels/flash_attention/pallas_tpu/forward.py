"""Forward on TPU: online softmax along each row of tiles, accumulated in VMEM.

Tiles are transposed, keys by queries, and so are the accumulators: the running max and the
denominator of 128 queries are one register, and no step moves data between lanes. The output is
accumulated transposed, from transposed values, and transposed once at the end.

A tile is cut into squares as wide as the matrix unit (MXU). The MXU holds the weights of a square
while the values stream through it, so that one square is multiplied while the weights of the next
are computed.
"""

import collections
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from ejkernel.kernels.common.constants import LOG2_E
from ejkernel.kernels.common.mosaic_tpu.blocks import BlockOperand, BlockResult
from ejkernel.kernels.common.mosaic_tpu.vectors import LANES, LEAST, SUBLANES, matmul_nn, matmul_nt
from ejkernel.kernels.common.refs import Ref
from ejkernel.kernels.flash_attention.inputs import Outputs
from ejkernel.kernels.flash_attention.pallas_tpu.launch import FlashCall, FlashRefs
from ejkernel.kernels.flash_attention.pallas_tpu.schedule import Step
from ejkernel.types.block_map import FULL, PARTIAL

_ONES = 16  # rows of ones that sum the weights: a register of 16-bit numbers
_SQUARES_AT_ONCE = 4  # squares that go through softmax together: more would spill registers
_PREFETCHED = 256  # queries whose logits are started before they are needed, to hide the matmuls


def forward(call: FlashCall, dtype: DTypeLike, mxu_width: int) -> Outputs:
    """Output in `dtype` and log-sum-exp."""
    inputs, size = call.inputs, call.size
    columns = inputs.value.shape[-1]
    operands = [
        call.query_operand(inputs.query),
        call.key_operand(inputs.key),
        call.key_operand(inputs.value, transposed=True),
    ]
    if inputs.bias is not None:
        operands.append(call.tile_operand(inputs.bias))
    if inputs.sinks is not None:
        sinks = jnp.broadcast_to(inputs.sinks, (call.q_heads, inputs.sinks.shape[1]))
        operands.append(_sink_operand(call, sinks.astype(jnp.float32)))
    operands += call.mask_operands()
    out, lse = call.launch(
        functools.partial(_kernel, mxu_width),
        operands,
        [
            BlockResult(
                (call.batch, call.q_heads, call.q_len, columns),
                dtype,
                call.block_spec(
                    (None, size.heads, size.queries, columns),
                    lambda at: (at.batch, at.heads, at.queries, 0),
                ),
            ),
            BlockResult(
                (call.batch, call.q_heads, 1, call.q_len),
                jnp.float32,
                call.block_spec(
                    (None, size.heads, 1, size.queries),
                    lambda at: (at.batch, at.heads, 0, at.queries),
                ),
            ),
        ],
        [
            pltpu.VMEM((size.heads, SUBLANES, size.queries), jnp.float32),
            pltpu.VMEM((size.heads, SUBLANES, size.queries), jnp.float32),
            pltpu.VMEM((size.heads, columns, size.queries), jnp.float32),
        ],
    )
    return Outputs(jnp.swapaxes(out, 1, 2), lse[:, :, 0])


def _sink_operand(call: FlashCall, sinks: jax.Array) -> BlockOperand:
    """[n, m] -> [n, m, lanes], the same in all lanes"""
    wide = jnp.broadcast_to(sinks[..., None], (*sinks.shape, LANES))
    block = (call.size.heads, *wide.shape[1:])
    return BlockOperand(wide, call.block_spec(block, lambda at: (at.heads, 0, 0)))


def _kernel(mxu_width: int, call: FlashCall, refs: FlashRefs) -> None:
    value, *others = refs.inputs[2:]
    bias = others.pop(0) if call.inputs.bias is not None else None
    sinks = others.pop(0) if call.inputs.sinks is not None else None
    out, lse, row_max, row_sum, acc = refs.outputs
    step = call.current_step(refs)
    # An MXU of 256 has unused rows for the ones. With dropout the sum differs from the weights.
    by_matmul = mxu_width > LANES and value.shape[0] % _ONES == 0 and call.inputs.dropout is None
    state = _SoftmaxState(row_max, row_sum, acc, by_matmul)

    @pl.when(step.first)
    def _():
        row_max[...] = jnp.full_like(row_max, LEAST)
        row_sum[...] = jnp.zeros_like(row_sum)
        acc[...] = jnp.zeros_like(acc)

    visit = functools.partial(_visit, call, refs, step, state, bias, mxu_width)
    if call.unmasked:
        visit(masked=False)
    else:
        pl.when(step.state == FULL)(lambda: visit(masked=False))
        pl.when(step.state == PARTIAL)(lambda: visit(masked=True))

    @pl.when(step.last)
    def _():
        for head in range(call.size.heads):
            visible = row_sum[head, :1] if by_matmul else row_sum[head].sum(axis=0, keepdims=True)
            highest = row_max[head, :1]
            divisor = visible
            if sinks is not None:
                for sink in range(sinks.shape[1]):
                    divisor += jnp.exp2(sinks[head, sink : sink + 1, :1] * LOG2_E - highest)
            divisor = jnp.where(visible > 0.0, divisor, 1.0)
            out[head] = (acc[head] / divisor).T.astype(out.dtype)
            lse[head] = highest * (1 / LOG2_E) + jnp.log(visible)


class _SoftmaxState(NamedTuple):
    """The state of the online softmax along a row of tiles, queries along the lanes.

    Attributes:
        row_max: the largest logit, in every sublane.
        row_sum: the sum of the weights: the whole in every sublane, or a part in each.
        acc: the output before the division.
        by_matmul: whether one matmul gives the output and the whole sum of the weights.
    """

    row_max: Ref
    row_sum: Ref
    acc: Ref
    by_matmul: bool

    def add_values(
        self,
        head: int,
        queries: slice,
        alpha: jax.Array,
        values: list[jax.Array],
        weights: list[jax.Array],
    ) -> None:
        """Rescale the output of some queries and add the values, for each square of weights."""
        columns = self.acc.shape[1]
        if self.by_matmul:
            ones = lambda x: jnp.ones((_ONES, x.shape[1]), x.dtype)
            values = [jnp.concatenate([x, ones(x)]) for x in values]
        products = [matmul_nn(x, y.astype(x.dtype)) for x, y in zip(values, weights, strict=True)]
        found = functools.reduce(jnp.add, products)
        self.acc[head, :, queries] = self.acc[head, :, queries] * alpha[:1] + found[:columns]
        if self.by_matmul:
            self._add_to_sum(head, queries, alpha, found[columns : columns + SUBLANES])

    def add_weights(
        self, head: int, queries: slice, alpha: jax.Array, weights: list[jax.Array]
    ) -> None:
        """Rescale the sum of the weights and add these, unless `add_values` does."""
        if not self.by_matmul:
            sums = functools.reduce(jnp.add, map(_sublane_sums, weights))
            self._add_to_sum(head, queries, alpha, sums)

    def _add_to_sum(self, head: int, queries: slice, alpha: jax.Array, sums: jax.Array) -> None:
        self.row_sum[head, :, queries] = self.row_sum[head, :, queries] * alpha + sums


def _visit(
    call: FlashCall,
    refs: FlashRefs,
    step: Step,
    state: _SoftmaxState,
    bias: Ref | None,
    mxu_width: int,
    *,
    masked: bool,
) -> None:
    """A tile, part by part: a strip of queries, and some squares of keys."""
    query, key, value, *_ = refs.inputs
    allowed = call.allowed(step.tile, refs) if masked else None
    kept = None
    # Loaded again for every part: keeping them would spill registers.
    values = lambda squares: [_values(call, step, value[:, x], x, masked) for x in squares]
    squares = _cut(call.size.keys, mxu_width)
    groups = [squares[i : i + _SQUARES_AT_ONCE] for i in range(0, len(squares), _SQUARES_AT_ONCE)]
    heads, strips = range(call.size.heads), _cut(call.size.queries, mxu_width)
    parts = list(itertools.product(heads, strips, groups))
    dots = lambda head, queries, squares: [
        matmul_nt(key[keys], query[head, queries]) for keys in squares
    ]
    ahead = _PREFETCHED // mxu_width
    waiting = collections.deque(dots(*part) for part in parts[:ahead])
    for number, (head, queries, squares) in enumerate(parts):
        if number + ahead < len(parts):
            waiting.append(dots(*parts[number + ahead]))
        logits = []
        for keys, products in zip(squares, waiting.popleft(), strict=True):
            part_of_bias = None
            if bias is not None:
                of_head = bias[head if bias.shape[0] > 1 else 0]
                part_of_bias = _part(of_head, keys, queries)
            logits.append(call.logits(products, part_of_bias)[0])
            if allowed is not None:
                logits[-1] = jnp.where(_part(allowed, keys, queries), logits[-1], -jnp.inf)
        old_max = state.row_max[head, :, queries]
        highest = [x.max(axis=0, keepdims=True) for x in logits]
        row_max = functools.reduce(jnp.maximum, highest, old_max)
        alpha = jnp.exp2(old_max - row_max)
        weights = [jnp.exp2(x - row_max[:1]) for x in logits]
        state.row_max[head, :, queries] = row_max
        state.add_weights(head, queries, alpha, weights)
        if call.inputs.dropout is not None:
            if kept is None or queries.start == 0:
                kept = call.dropout_mask(step.tile, head, refs)
            scale = 1 / (1 - call.spec.dropout_prob)
            weights = [
                jnp.where(_part(kept, keys, queries), x * scale, 0.0)
                for keys, x in zip(squares, weights, strict=True)
            ]
        state.add_values(head, queries, alpha, values(squares), weights)


def _cut(size: int, width: int) -> list[slice]:
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]


def _values(call: FlashCall, step: Step, values: jax.Array, keys: slice, masked: bool) -> jax.Array:
    """Values, 0 past the end: anything may lie there, and 0 times NaN is NaN."""
    if not (masked and call.ragged_keys):
        return values
    place = jax.lax.broadcasted_iota(jnp.int32, (1, values.shape[1]), 1)
    there = step.tile.keys * call.size.keys + keys.start + place < call.kv_len
    # Mosaic does not spread a row over a few rows of 16 bits.
    narrow = values.shape[0] < SUBLANES
    kept = values.astype(jnp.float32) if narrow else values
    return jnp.where(there, kept, jnp.zeros_like(kept)).astype(values.dtype)


def _part(x: jax.Array, keys: slice, queries: slice) -> jax.Array:
    """Some keys and queries of a tile, or of an array that is broadcast to one."""
    x = x if x.shape[0] == 1 else x[keys]
    return x if x.shape[1] == 1 else x[:, queries]


def _sublane_sums(x: jax.Array) -> jax.Array:
    """Partial sums over keys, one for each sublane."""
    return x.reshape(-1, SUBLANES, x.shape[1]).sum(axis=0)
