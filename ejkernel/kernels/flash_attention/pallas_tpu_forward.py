"""Forward on TPU: softmax block by block along each row of tiles, accumulated in VMEM."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.flash_attention.inputs import Outputs
from ejkernel.kernels.flash_attention.pallas_tpu_call import (
    LANES,
    LOG2_E,
    Call,
    Operand,
    Refs,
    Result,
    product,
)
from ejkernel.types.block_map import FULL, PARTIAL

# Below every logit, yet a number: what was masked, -inf, is 0 after exp2(x - _LEAST).
_LEAST = -1e30
# Rows of a tile that go through softmax together: few enough to stay in registers for the most
# part, enough for the matmuls of some to hide behind the others.
_ROWS = 256


def forward(call: Call, dtype: Any) -> Outputs:
    """Output in `dtype` and log-sum-exp."""
    inputs, size = call.inputs, call.size
    columns = inputs.value.shape[-1]
    operands = [call.of_queries(inputs.query), call.of_keys(inputs.key), call.of_keys(inputs.value)]
    if inputs.bias is not None:
        operands.append(call.of_tile(inputs.bias))
    if inputs.sinks is not None:
        sinks = jnp.broadcast_to(inputs.sinks, (call.q_heads, inputs.sinks.shape[1]))
        operands.append(_sinks(call, sinks.astype(jnp.float32)))
    operands += call.mask_operands()
    rows = (size.heads, size.queries)
    out, lse = call.run(
        _kernel,
        operands,
        [
            Result(
                (call.batch, call.q_heads, call.q_len, columns),
                dtype,
                call.spec_of(
                    (None, *rows, columns), lambda at: (at.batch, at.heads, at.queries, 0)
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
            pltpu.VMEM((*rows, LANES), jnp.float32),
            pltpu.VMEM((*rows, LANES), jnp.float32),
            pltpu.VMEM((*rows, columns), jnp.float32),
        ],
    )
    return Outputs(jnp.swapaxes(out, 1, 2), lse[:, :, 0])


def _sinks(call: Call, sinks: jax.Array) -> Operand:
    """[n, m] -> [n, m, lanes]: the sinks of a block of heads, each over all lanes."""
    wide = jnp.broadcast_to(sinks[..., None], (*sinks.shape, LANES))
    block = (call.size.heads, *wide.shape[1:])
    return Operand(wide, call.spec_of(block, lambda at: (at.heads, 0, 0)))


def _kernel(call: Call, refs: Refs) -> None:
    query, key, value, *others = refs.inputs
    bias = others.pop(0) if call.inputs.bias is not None else None
    sinks = others.pop(0) if call.inputs.sinks is not None else None
    out, lse, most, total, sums = refs.outputs
    here = call.here(refs)

    @pl.when(here.first)
    def _():
        most[...] = jnp.full_like(most, _LEAST)
        total[...] = jnp.zeros_like(total)
        sums[...] = jnp.zeros_like(sums)

    def visit(masked: bool) -> None:
        keys, values = key[...], value[...]
        allowed = call.allowed(here.tile, refs) if masked else None
        if masked and call.ragged_keys:
            # Past the end anything may lie, and 0 times NaN is NaN.
            there = jax.lax.broadcasted_iota(jnp.int32, (values.shape[0], 1), 0)
            there = here.tile.keys * values.shape[0] + there < call.kv_len
            values = jnp.where(there, values, jnp.zeros_like(values))
        kept = None
        parts = [
            (head, slice(start, start + min(_ROWS, call.size.queries)))
            for head, start in itertools.product(
                range(call.size.heads), range(0, call.size.queries, _ROWS)
            )
        ]
        dot = lambda head, rows: product(query[head, rows], keys, transpose_right=True)
        ahead = dot(*parts[0])
        for number, (head, rows) in enumerate(parts):
            # The products of the next rows before the softmax of these, which hides them.
            products, start = ahead, rows.start
            if number + 1 < len(parts):
                ahead = dot(*parts[number + 1])
            of_head = None if bias is None else bias[head if bias.shape[0] > 1 else 0]
            logits, _ = call.logits(products, _rows_of(of_head, rows))
            if allowed is not None:
                logits = jnp.where(_rows_of(allowed, rows), logits, -jnp.inf)
            before = most[head, rows]
            after = jnp.maximum(before, logits.max(axis=1, keepdims=True))
            fade = jnp.exp2(before - after)
            weights = jnp.exp2(logits - _across(after, logits.shape[1]))
            most[head, rows] = after
            total[head, rows] = total[head, rows] * fade + _lane_sums(weights)
            if call.inputs.dropout is not None:
                kept = call.kept(here.tile, head, refs) if start == 0 else kept
                grown = weights * (1 / (1 - call.spec.dropout_prob))
                weights = jnp.where(_rows_of(kept, rows), grown, 0.0)
            sums[head, rows] = sums[head, rows] * _across(fade, sums.shape[2]) + product(
                weights.astype(values.dtype), values
            )

    if call.plain:
        visit(masked=False)
    else:
        pl.when(here.state == FULL)(lambda: visit(masked=False))
        pl.when(here.state == PARTIAL)(lambda: visit(masked=True))

    @pl.when(here.last)
    def _():
        for head in range(call.size.heads):
            visible = total[head].sum(axis=1, keepdims=True)
            highest = most[head][:, :1]
            divisor = visible
            if sinks is not None:
                for sink in range(sinks.shape[1]):
                    divisor += jnp.exp2(sinks[head, sink : sink + 1, :1] * LOG2_E - highest)
            divisor = jnp.where(visible > 0.0, divisor, 1.0)
            out[head] = (sums[head] / divisor).astype(out.dtype)
            natural = highest * (1 / LOG2_E) + jnp.log(visible)
            wide = jnp.broadcast_to(natural, (natural.shape[0], LANES))
            lse[head] = wide.T[:1]


def _rows_of(x: Any, rows: slice) -> Any:
    """Some rows of a tile, or of what is broadcast to one."""
    return x if x is None or x.shape[0] == 1 else x[rows]


def _across(x: jax.Array, width: int) -> jax.Array:
    """A number for each row, the same in all lanes, over so many columns."""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]


def _lane_sums(x: jax.Array) -> jax.Array:
    """Sums along the rows, but for the last: one for each lane."""
    parts = [x[:, start : start + LANES] for start in range(0, x.shape[1], LANES)]
    return functools.reduce(jnp.add, parts)
