"""Backward: one pass over blocks of keys, five matmuls a tile (https://arxiv.org/abs/2307.08691).

Tiles are transposed, keys by queries. Then four of the five matmuls take their operands as they are
stored; the fifth gives the gradient of the queries transposed, which costs one copy at the end.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ejkernel.kernels.common.precision import matmul
from ejkernel.kernels.common.refs import Index
from ejkernel.kernels.common.sinks import per_sink, share_of_keys, share_of_sinks
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.xla.tiles import Blocks, FlashTiles, over_blocks


def backward(
    inputs: Inputs, residuals: Outputs, d_outputs: Outputs, spec: Spec, block_q: int, block_k: int
) -> Inputs:
    """Gradients of a call, in blocks of these sizes."""
    tiles = FlashTiles(inputs, spec, block_q, block_k, over="q")
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
    query, d_out = map(tiles.source_of_queries, (inputs.query, d_outputs.out))
    key, value = tiles.pad_keys(inputs.key), tiles.pad_keys(inputs.value)
    lse, *terms = _row_terms(inputs, residuals, d_outputs, dtype)
    terms = [tiles.pad_queries(x, 2) for x in terms]
    terms = [tiles.pad_queries(lse, 2, fill=jnp.inf), *terms]

    def column(index: Index, carry: tuple) -> tuple:
        u, j = divmod(index, tiles.k_blocks)
        unit = tiles.unit(u)
        keys, values = tiles.keys(key, unit, j), tiles.keys(value, unit, j)
        # Transposed before the matmul, not by it: XLA on CPUs cannot with few bfloat16 rows.
        keys_t = lax.optimization_barrier(jnp.swapaxes(keys, 1, 2))

        def step(i: Blocks, carry: tuple) -> tuple:
            d_query, d_bias, d_sinks, d_keys, d_values = carry
            rows, d_rows = tiles.queries(query, unit, i), tiles.queries(d_out, unit, i)
            lse, delta, *shares = (tiles.per_row(x, unit, i) for x in terms)
            logits = matmul("lkh,lqh->lkq", keys, rows, dtype)
            d_weights = matmul("lkv,lqv->lkq", values, d_rows, dtype)
            flat = logits.shape
            logits = tiles.logits(logits, unit, i, j, transposed=True)
            visible = tiles.visible(unit, i, j, transposed=True)
            masked = logits if visible is None else jnp.where(visible, logits, -jnp.inf)
            weights = used = jnp.exp(masked.reshape(flat) - lse)
            if inputs.dropout is not None:
                kept = tiles.kept(unit, i, j, transposed=True).reshape(flat)
                scale = 1.0 / (1.0 - spec.dropout_prob)
                used, d_weights = (jnp.where(kept, x * scale, 0.0) for x in (used, d_weights))
            if shares:
                of_keys, of_sinks = shares
                used, d_weights = used * of_keys, d_weights * of_keys
                # From the weights, not from the output, whose rounding many rows would add up.
                taken = (weights * d_weights * of_sinks).sum(1)
                d_sinks = tiles.add_to_heads(d_sinks, -taken, unit)
            d_values += matmul("lkq,lqv->lkv", used.astype(d_rows.dtype), d_rows, dtype)
            d_logits = weights * (d_weights - delta)
            if (cap := spec.logits_soft_cap) is not None:
                d_logits *= 1.0 - jnp.square(logits.reshape(flat) / cap)
            if d_bias is not None:
                d_bias = tiles.add_to_bias(d_bias, d_logits.reshape(logits.shape), unit, i, j)
            d_logits = d_logits.astype(rows.dtype)
            d_keys += matmul("lkq,lqh->lkh", d_logits, rows, dtype)
            d_rows_t = matmul("lhk,lkq->lhq", keys_t, d_logits, dtype)
            d_query = tiles.add_queries_t(d_query, d_rows_t, unit, i)
            return d_query, d_bias, d_sinks, d_keys, d_values

        *whole, d_key, d_value = carry
        start = (*whole, *(tiles.full(x.shape, 0.0, dtype) for x in (keys, values)))
        *whole, d_keys, d_values = tiles.over_queries(unit, j, step, start)
        d_key = tiles.add_keys(d_key, d_keys * spec.softmax_scale, unit, j)
        return *whole, d_key, tiles.add_keys(d_value, d_values, unit, j)

    b, _, n, h = inputs.query.shape
    zeros = lambda shape: tiles.full(shape, 0.0, dtype)
    carry: tuple = (
        zeros((b, n, h, tiles.q_blocks * tiles.block_q)),
        None if tiles.bias is None else zeros(tiles.bias.shape),
        None if inputs.sinks is None else zeros((n,)),
        zeros(key.shape),
        zeros(value.shape),
    )
    d_query, d_bias, d_sinks, d_key, d_value = over_blocks(
        column, carry, tiles.units * tiles.k_blocks
    )
    d_query = d_query.transpose(0, 3, 1, 2) * spec.softmax_scale
    return Inputs(
        query=_like(d_query, inputs.query),
        key=_like(d_key, inputs.key),
        value=_like(d_value, inputs.value),
        bias=None if inputs.bias is None else _like(d_bias, inputs.bias),
        sinks=None if inputs.sinks is None else per_sink(d_sinks, inputs.sinks),
        mask=None,
    )


def _like(gradient: jax.Array, x: jax.Array) -> jax.Array:
    """A gradient without its padding, in the dtype of its input."""
    return gradient[tuple(map(slice, x.shape))].astype(x.dtype)


def _row_terms(
    inputs: Inputs, residuals: Outputs, d_outputs: Outputs, dtype: DTypeLike
) -> list[jax.Array]:
    """The terms of each row: lse, delta and, with sinks, w and 1 - w, each [b, n, t].

    With w the share of a row's weights that the sinks leave to the keys (1 without sinks),
    d_logits = exp(logits - lse) * (w * d_weights - delta).
    """
    lse, d_lse = residuals.lse.astype(dtype), d_outputs.lse.astype(dtype)
    out, d_out = residuals.out.astype(dtype), d_outputs.out.astype(dtype)
    # A matmul, because the sum over the last axis of so many rows is slow on CPUs (JAX 0.10).
    delta = matmul("btnv,vw->bntw", out * d_out, jnp.ones((out.shape[-1], 8), dtype), dtype)[..., 0]
    seen = lse > -jnp.inf
    # For a row that sees nothing exp(logits - inf) is 0, whatever the logits.
    safe_lse = jnp.where(seen, lse, jnp.inf)
    if inputs.sinks is None:
        return [safe_lse, delta - d_lse]
    share = share_of_keys(lse, inputs.sinks)
    return [safe_lse, share * delta - d_lse, share, share_of_sinks(lse, inputs.sinks)]
