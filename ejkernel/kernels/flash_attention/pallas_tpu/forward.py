"""Forward on TPU: softmax block by block along each row of tiles, accumulated in VMEM.

Tiles stand keys by queries, and so does what is kept of a row of them: the largest logit and the
sum of the weights of 128 queries are one register, and no step moves anything between lanes. The
output grows transposed, from values that come transposed, and is turned once, at the end.

A tile is cut into squares as wide as the matrix unit. It holds the weights of a square while the
values stream through it, so that those of one square can be multiplied while those of the next are
still made.
"""

import collections
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.flash_attention.inputs import Outputs
from ejkernel.kernels.flash_attention.pallas_tpu.call import (
    LANES,
    LOG2_E,
    Call,
    Here,
    Operand,
    Refs,
    Result,
    product,
)
from ejkernel.types.block_map import FULL, PARTIAL

# Below every logit, yet a number: what was masked, -inf, is 0 after exp2(x - _LEAST).
_LEAST = -1e30
_SUBLANES = 8
_ONES = 16  # rows of ones that add up weights; so many of 16 bits are a register
_TOGETHER = 4  # squares that go through softmax together: more are too many for the registers
_AHEAD = 256  # queries whose products are started before they are needed, to hide the matmuls


def forward(call: Call, dtype: Any, side: int) -> Outputs:
    """Output in `dtype` and log-sum-exp; `side`: the width of the matrix unit."""
    inputs, size = call.inputs, call.size
    columns = inputs.value.shape[-1]
    operands = [
        call.of_queries(inputs.query),
        call.of_keys(inputs.key),
        call.of_keys(inputs.value, transposed=True),
    ]
    if inputs.bias is not None:
        operands.append(call.of_tile(inputs.bias))
    if inputs.sinks is not None:
        sinks = jnp.broadcast_to(inputs.sinks, (call.q_heads, inputs.sinks.shape[1]))
        operands.append(_sinks(call, sinks.astype(jnp.float32)))
    operands += call.mask_operands()
    out, lse = call.run(
        functools.partial(_kernel, side),
        operands,
        [
            Result(
                (call.batch, call.q_heads, call.q_len, columns),
                dtype,
                call.spec_of(
                    (None, size.heads, size.queries, columns),
                    lambda at: (at.batch, at.heads, at.queries, 0),
                ),
            ),
            Result(
                (call.batch, call.q_heads, 1, call.q_len),
                jnp.float32,
                call.spec_of(
                    (None, size.heads, 1, size.queries),
                    lambda at: (at.batch, at.heads, 0, at.queries),
                ),
            ),
        ],
        [
            pltpu.VMEM((size.heads, _SUBLANES, size.queries), jnp.float32),
            pltpu.VMEM((size.heads, _SUBLANES, size.queries), jnp.float32),
            pltpu.VMEM((size.heads, columns, size.queries), jnp.float32),
        ],
    )
    return Outputs(jnp.swapaxes(out, 1, 2), lse[:, :, 0])


def _sinks(call: Call, sinks: jax.Array) -> Operand:
    """[n, m] -> [n, m, lanes]: the sinks of a block of heads, each over all lanes."""
    wide = jnp.broadcast_to(sinks[..., None], (*sinks.shape, LANES))
    block = (call.size.heads, *wide.shape[1:])
    return Operand(wide, call.spec_of(block, lambda at: (at.heads, 0, 0)))


def _kernel(side: int, call: Call, refs: Refs) -> None:
    _, _, value, *others = refs.inputs
    bias = others.pop(0) if call.inputs.bias is not None else None
    sinks = others.pop(0) if call.inputs.sinks is not None else None
    out, lse, most, total, output = refs.outputs
    here = call.here(refs)
    # A unit of 256 has room for them; dropped weights count in the sums, but not in the output.
    by_matmul = side > LANES and value.shape[0] % _ONES == 0 and call.inputs.dropout is None
    sums = _Sums(most, total, output, by_matmul)

    @pl.when(here.first)
    def _():
        most[...] = jnp.full_like(most, _LEAST)
        total[...] = jnp.zeros_like(total)
        output[...] = jnp.zeros_like(output)

    visit = functools.partial(_visit, call, refs, here, sums, bias, side)
    if call.plain:
        visit(masked=False)
    else:
        pl.when(here.state == FULL)(lambda: visit(masked=False))
        pl.when(here.state == PARTIAL)(lambda: visit(masked=True))

    @pl.when(here.last)
    def _():
        for head in range(call.size.heads):
            visible = total[head, :1] if by_matmul else total[head].sum(axis=0, keepdims=True)
            highest = most[head, :1]
            divisor = visible
            if sinks is not None:
                for sink in range(sinks.shape[1]):
                    divisor += jnp.exp2(sinks[head, sink : sink + 1, :1] * LOG2_E - highest)
            divisor = jnp.where(visible > 0.0, divisor, 1.0)
            out[head] = (output[head] / divisor).T.astype(out.dtype)
            lse[head] = highest * (1 / LOG2_E) + jnp.log(visible)


class _Sums(NamedTuple):
    """What is kept of a row of tiles, queries along the lanes.

    `most`: the largest logit, in every sublane. `total`: of the weights, whole in every sublane or
    one part in each; whole where they are found `by_matmul`, along with the output.
    """

    most: Any
    total: Any
    output: Any
    by_matmul: bool

    def add(self, head: int, queries: slice, fade: jax.Array, values: list, weights: list) -> None:
        """Add the values of some queries, a square of them for each of the weights."""
        columns = self.output.shape[1]
        if self.by_matmul:
            ones = lambda x: jnp.ones((_ONES, x.shape[1]), x.dtype)
            values = [jnp.concatenate([x, ones(x)]) for x in values]
        products = [product(x, y.astype(x.dtype)) for x, y in zip(values, weights, strict=True)]
        found = functools.reduce(jnp.add, products)
        self.output[head, :, queries] = self.output[head, :, queries] * fade[:1] + found[:columns]
        if self.by_matmul:
            self._grow(head, queries, fade, found[columns : columns + _SUBLANES])

    def count(self, head: int, queries: slice, fade: jax.Array, weights: list) -> None:
        """Add up weights, unless `add` does."""
        if not self.by_matmul:
            self._grow(head, queries, fade, functools.reduce(jnp.add, map(_sublanes, weights)))

    def _grow(self, head: int, queries: slice, fade: jax.Array, by: jax.Array) -> None:
        self.total[head, :, queries] = self.total[head, :, queries] * fade + by


def _visit(
    call: Call,
    refs: Refs,
    here: Here,
    sums: _Sums,
    bias: Any,
    side: int,
    *,
    masked: bool,
) -> None:
    """The work on a tile, part by part: a strip of queries, and some squares of keys."""
    query, key, value, *_ = refs.inputs
    allowed = call.allowed(here.tile, refs) if masked else None
    kept = None
    # Loaded anew for every part: there are not registers enough to keep them.
    values = lambda squares: [_values(call, here, value[:, x], x, masked) for x in squares]
    squares = _cut(call.size.keys, side)
    groups = [squares[i : i + _TOGETHER] for i in range(0, len(squares), _TOGETHER)]
    heads, strips = range(call.size.heads), _cut(call.size.queries, side)
    parts = list(itertools.product(heads, strips, groups))
    dots = lambda head, queries, squares: [
        product(key[keys], query[head, queries], transpose_right=True) for keys in squares
    ]
    ahead = _AHEAD // side
    waiting = collections.deque(dots(*part) for part in parts[:ahead])
    for number, (head, queries, squares) in enumerate(parts):
        if number + ahead < len(parts):
            waiting.append(dots(*parts[number + ahead]))
        logits = []
        for keys, products in zip(squares, waiting.popleft(), strict=True):
            of_head = None if bias is None else bias[head if bias.shape[0] > 1 else 0]
            logits.append(call.logits(products, _part(of_head, keys, queries))[0])
            if allowed is not None:
                logits[-1] = jnp.where(_part(allowed, keys, queries), logits[-1], -jnp.inf)
        before = sums.most[head, :, queries]
        highest = [x.max(axis=0, keepdims=True) for x in logits]
        after = functools.reduce(jnp.maximum, highest, before)
        fade = jnp.exp2(before - after)
        weights = [jnp.exp2(x - after[:1]) for x in logits]
        sums.most[head, :, queries] = after
        sums.count(head, queries, fade, weights)
        if call.inputs.dropout is not None:
            kept = call.kept(here.tile, head, refs) if queries.start == 0 else kept
            grow = 1 / (1 - call.spec.dropout_prob)
            weights = [
                jnp.where(_part(kept, keys, queries), x * grow, 0.0)
                for keys, x in zip(squares, weights, strict=True)
            ]
        sums.add(head, queries, fade, values(squares), weights)


def _cut(size: int, side: int) -> list[slice]:
    return [slice(start, min(start + side, size)) for start in range(0, size, side)]


def _values(call: Call, here: Here, values: jax.Array, keys: slice, masked: bool) -> jax.Array:
    """Values, 0 past the end: anything may lie there, and 0 times NaN is NaN."""
    if not (masked and call.ragged_keys):
        return values
    place = jax.lax.broadcasted_iota(jnp.int32, (1, values.shape[1]), 1)
    there = here.tile.keys * call.size.keys + keys.start + place < call.kv_len
    return jnp.where(there, values, jnp.zeros_like(values))


def _part(x: Any, keys: slice, queries: slice) -> Any:
    """Some keys and queries of a tile, or of what is broadcast to one."""
    if x is None:
        return None
    x = x if x.shape[0] == 1 else x[keys]
    return x if x.shape[1] == 1 else x[:, queries]


def _sublanes(x: jax.Array) -> jax.Array:
    """Sums over keys, but for the last: one for each sublane."""
    return x.reshape(-1, _SUBLANES, x.shape[1]).sum(axis=0)
