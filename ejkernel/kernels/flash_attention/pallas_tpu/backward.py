"""Backward on TPU: one fused kernel along the columns of tiles, five matmuls a tile.

Tiles are transposed, keys by queries, so that every matmul takes its operands as they are stored.
The gradients of keys and values are accumulated over a column. That of the queries, transposed,
stays in VMEM for all columns; where it does not fit, the queries are cut into parts that run one
after the other.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.common.constants import LOG2_E
from ejkernel.kernels.common.mosaic_tpu.blocks import BlockResult
from ejkernel.kernels.common.mosaic_tpu.vectors import LANES, matmul_nn, matmul_nt
from ejkernel.kernels.common.refs import Index
from ejkernel.kernels.common.sinks import per_sink, share_of_keys, share_of_sinks
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.pallas_tpu import bias_grad
from ejkernel.kernels.flash_attention.pallas_tpu.configs import FlashTileConfig
from ejkernel.kernels.flash_attention.pallas_tpu.launch import (
    FlashCall,
    FlashRefs,
    HeadGroups,
    ResultHook,
)
from ejkernel.types.block_map import EMPTY, FULL, PARTIAL
from ejkernel.types.rules import Everything


class _PartGradients(NamedTuple):
    """Gradients from a part of the queries; `sinks`: of all sinks of a head, [n]."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    sinks: jax.Array | None


def backward(
    inputs: Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: Spec,
    config: FlashTileConfig,
    *,
    vmem: int,
    on_results: ResultHook | None = None,
) -> Inputs:
    """Gradients in float32, some resident queries and heads of each key head at a time."""
    q_len, size, part = inputs.query.shape[1], config.size, config.resident_queries
    heads = HeadGroups.of(inputs, size.heads)
    rows = []
    for i in range(heads.count):
        rows.append([])
        for start in range(0, q_len, part):
            pick = lambda x, axis, i=i: heads.pick(x, axis, i)
            cut, *of_rows = _cut(inputs, residuals, d_outputs, pick, start, part)
            call = FlashCall(
                cut,
                spec,
                size,
                vmem=vmem,
                on_results=on_results,
                by_keys=True,
                first_query=start,
            )
            rows[-1].append(_part(call, config.mxu_width, *of_rows))
    d_query = heads.joined([jnp.concatenate([x.query for x in row], 1) for row in rows], 2)
    total = lambda parts: functools.reduce(jnp.add, parts)
    d_bias = d_sinks = None
    if inputs.bias is not None:
        bias = [bias_grad.of_queries([x.bias for x in row], inputs.bias) for row in rows]
        d_bias = bias_grad.of_heads(bias, heads, inputs.bias)
    if inputs.sinks is not None:
        shares = [total([x.sinks for x in row]) for row in rows]
        d_sinks = per_sink(heads.joined(shares, 0), inputs.sinks)
    return Inputs(
        query=d_query,
        key=total([x.key for row in rows for x in row]),
        value=total([x.value for row in rows for x in row]),
        bias=d_bias,
        sinks=d_sinks,
        mask=None,
    )


def _cut(
    inputs: Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    pick: Callable[[jax.Array, int], jax.Array],
    start: int,
    part: int,
) -> tuple[Inputs, Outputs, Outputs]:
    """A call with the query heads that `pick(x, axis)` gives, and some of its queries."""
    q_len, kv_len = inputs.query.shape[1], inputs.key.shape[1]
    end = min(start + part, q_len)
    rows = lambda x, axis: jax.lax.slice_in_dim(x, start, end, axis=axis)
    of_rows = lambda x: Outputs(rows(pick(x.out, 2), 1), rows(pick(x.lse, 1), 2))
    rule = inputs.mask or Everything()
    sinks, counters = inputs.sinks, inputs.dropout
    return (
        inputs._replace(
            query=rows(pick(inputs.query, 2), 1),
            mask=rule if part >= q_len else rule.slice(start, end - start, 0, kv_len),
            bias=_cut_bias(inputs.bias, pick, rows),
            sinks=sinks if sinks is None or sinks.shape[0] == 1 else pick(sinks, 0),
            dropout=counters and counters._replace(head_index=pick(counters.head_index, 0)),
        ),
        of_rows(residuals),
        of_rows(d_outputs),
    )


def _cut_bias(
    bias: jax.Array | None,
    pick: Callable[[jax.Array, int], jax.Array],
    rows: Callable[[jax.Array, int], jax.Array],
) -> jax.Array | None:
    if bias is None:
        return None
    bias = pick(bias, 1) if bias.shape[1] > 1 else bias
    return rows(bias, 2) if bias.shape[2] > 1 else bias


def _part(
    call: FlashCall, mxu_width: int, residuals: Outputs, d_outputs: Outputs
) -> _PartGradients:
    """Launch the kernel for some of the queries."""
    inputs, spec, size = call.inputs, call.spec, call.size
    lse, delta, share = _row_terms(inputs, residuals, d_outputs)
    d_out = d_outputs.out
    if share is not None:
        d_out = d_out * jnp.swapaxes(share, 1, 2)[..., None]
    d_out = d_out.astype(inputs.query.dtype)
    operands = [
        call.query_operand(inputs.query),
        call.query_operand(d_out),
        call.key_operand(inputs.key),
        call.key_operand(inputs.value),
        call.row_operand(lse, jnp.inf),
        call.row_operand(delta, 0.0),
    ]
    if inputs.bias is not None:
        operands.append(call.tile_operand(inputs.bias))
    operands += call.mask_operands()

    width, columns = inputs.key.shape[-1], inputs.value.shape[-1]
    heads = call.q_heads if call.schedule.heads > 1 else call.kv_heads
    keys = (call.batch, heads, call.kv_len)
    blocks = -(-call.q_len // size.queries) * size.queries
    resident = [(size.heads, width, blocks)]
    if share is not None:
        resident.append((size.heads, 1, blocks))
    of_key_block = lambda at: (
        at.batch,
        at.heads if call.schedule.heads > 1 else call.key_head(at),
        at.keys,
        0,
    )
    results = [
        BlockResult(
            (*keys, x), jnp.float32, call.block_spec((None, None, size.keys, x), of_key_block)
        )
        for x in (width, columns)
    ]
    d_bias = bias_grad.BiasGradient(call)
    results += d_bias.results
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    results += [
        BlockResult((call.batch, call.q_heads, *x[1:]), jnp.float32, in_hbm) for x in resident
    ]
    d_key, d_value, *d_rest = call.launch(
        functools.partial(_kernel, d_bias, mxu_width),
        operands,
        results,
        [
            pltpu.VMEM((size.keys, width), jnp.float32),
            pltpu.VMEM((size.keys, columns), jnp.float32),
            pltpu.VMEM((width, size.keys), inputs.key.dtype),
            *(pltpu.VMEM(shape, jnp.float32) for shape in resident),
            *d_bias.scratch,
        ],
        sequential=d_bias.shared,
    )
    if call.schedule.heads > 1:
        of_group = lambda x: x.reshape(call.batch, call.kv_heads, -1, *x.shape[2:]).sum(2)
        d_key, d_value = of_group(d_key), of_group(d_value)
    of_bias = d_bias.assembled(d_rest.pop(0)) if d_bias.results else None
    d_query = d_rest[0][..., : call.q_len].transpose(0, 3, 1, 2) * spec.softmax_scale
    d_share = None
    if inputs.sinks is not None:
        # From the weights, not from the output, whose rounding many rows would add up.
        taken = d_rest[1][:, :, 0, : call.q_len] * share_of_sinks(residuals.lse, inputs.sinks)
        d_share = -taken.sum((0, 2))
    return _PartGradients(
        d_query,
        jnp.swapaxes(d_key, 1, 2) * spec.softmax_scale,
        jnp.swapaxes(d_value, 1, 2),
        of_bias,
        d_share,
    )


def _kernel(
    d_bias: bias_grad.BiasGradient, mxu_width: int, call: FlashCall, refs: FlashRefs
) -> None:
    query, d_out, key, value, lse, delta, *others = refs.inputs
    bias = others.pop(0) if call.inputs.bias is not None else None
    sinks = call.inputs.sinks is not None
    d_key, d_value, *rest = refs.outputs
    step = call.current_step(refs)
    if d_bias.results:
        scratch = rest.pop() if d_bias.scratch else None
        d_bias = d_bias.at(step, rest.pop(0), scratch)
    results, rest = rest[: 1 + sinks], rest[1 + sinks :]
    d_keys, d_values, key_t, *resident = rest
    start = step.tile.queries * call.size.queries
    # Strips as wide as a matrix unit of 256 spill a tenth of the registers. A unit of 128 is faster
    # with whole tiles, and so is the gradient of a bias.
    whole = mxu_width <= LANES or bias is not None
    count = call.size.queries
    width = count if whole else mxu_width
    strips = [slice(x, min(x + width, count)) for x in range(0, count, width)]

    @pl.when(step.first_of_row)
    def _():
        for x in resident:
            x[...] = jnp.zeros_like(x)
        d_bias.begin_row()

    @pl.when(step.first)
    def _():
        d_keys[...] = jnp.zeros_like(d_keys)
        d_values[...] = jnp.zeros_like(d_values)
        end = call.kv_len if call.ragged_keys else None
        keys = _within(key[...], step.tile.keys * call.size.keys, end)
        key_t[...] = keys.T
        d_bias.begin()

    def visit(masked: bool) -> None:
        q_end = call.q_len if masked and call.ragged_queries else None
        k_end = call.kv_len if masked and call.ragged_keys else None
        first = step.tile.keys * call.size.keys
        keys, values = (_within(x[...], first, k_end) for x in (key, value))
        allowed = call.allowed(step.tile, refs) if masked else None
        d_bias.load()
        for head, strip in itertools.product(range(call.size.heads), strips):
            at = lambda x, strip=strip: x if x.shape[1] == 1 else x[:, strip]
            queries, d_outs = (
                _within(x[head, strip], start + strip.start, q_end) for x in (query, d_out)
            )
            products = matmul_nt(keys, queries)
            of_head = None if bias is None else bias[head if bias.shape[0] > 1 else 0]
            logits, slope = call.logits(products, of_head)
            if allowed is not None:
                logits = jnp.where(at(allowed), logits, -jnp.inf)
            weights = used = jnp.exp2(logits - lse[head, :, strip])
            d_weights = matmul_nt(values, d_outs)
            if call.inputs.dropout is not None:
                kept = at(call.dropout_mask(step.tile, head, refs))
                scale = 1 / (1 - call.spec.dropout_prob)
                used, d_weights = (jnp.where(kept, x * scale, 0.0) for x in (used, d_weights))
            d_values[...] += matmul_nn(used.astype(d_outs.dtype), d_outs)
            rows = pl.ds(pl.multiple_of(start + strip.start, 128), queries.shape[0])
            if sinks:
                resident[1][head, :, rows] += (weights * d_weights).sum(0, keepdims=True)
            d_logits = weights * (d_weights - delta[head, :, strip])
            if slope is not None:
                # A bias past the end may be no number, and so is then its slope.
                d_logits *= slope if allowed is None else jnp.where(at(allowed), slope, 0.0)
            d_bias.add(head, d_logits)
            d_logits = d_logits.astype(queries.dtype)
            d_keys[...] += matmul_nn(d_logits, queries)
            resident[0][head, :, rows] += matmul_nn(key_t[...], d_logits)
        d_bias.store()

    if call.unmasked:
        visit(masked=False)
    else:
        pl.when(step.state == FULL)(lambda: visit(masked=False))
        pl.when(step.state == PARTIAL)(lambda: visit(masked=True))

    pl.when(step.state == EMPTY)(d_bias.skip)

    @pl.when(step.last)
    def _():
        d_key[...] = d_keys[...]
        d_value[...] = d_values[...]
        d_bias.end()

    @pl.when(step.last_of_row)
    def _():
        heads = pl.ds(step.tile.heads * call.size.heads, call.size.heads)
        for x, whole in zip(resident, results, strict=True):
            pltpu.sync_copy(x, whole.at[step.tile.batch, heads])
        d_bias.end_row()


def _within(x: jax.Array, start: Index, end: int | None) -> jax.Array:
    """Rows from `start` on, 0 past the end: anything may lie there, and 0 times NaN is NaN."""
    if end is None:
        return x
    row = start + jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
    return jnp.where(row < end, x, jnp.zeros_like(x))


def _row_terms(
    inputs: Inputs, residuals: Outputs, d_outputs: Outputs
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The terms of each row: lse in base 2, delta and, with sinks, the share of the keys.

    d_logits = exp2(logits - lse) * (share * d_weights - delta), each [b, n, t].
    """
    out, d_out = (x.out.astype(jnp.float32) for x in (residuals, d_outputs))
    delta = jnp.einsum("btnv,btnv->bnt", out, d_out)
    seen = residuals.lse > -jnp.inf
    # For a row that sees nothing exp2(logits - inf) is 0, whatever the logits.
    lse = jnp.where(seen, residuals.lse * LOG2_E, jnp.inf)
    if inputs.sinks is None:
        return lse, delta - d_outputs.lse, None
    share = share_of_keys(residuals.lse, inputs.sinks)
    return lse, share * delta - d_outputs.lse, share
