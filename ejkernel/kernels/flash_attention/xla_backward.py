"""Backward: one pass over blocks of keys, five matmuls a tile (https://arxiv.org/abs/2307.08691).

Tiles stand transposed, keys by queries: then four of the five matmuls take their operands as they are
stored, and the fifth gives the gradient of the queries transposed, which costs one copy at the end.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import logsumexp

from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.xla_tiles import Tiles, matmul, over_blocks


def backward(
    inputs: Inputs, residuals: Outputs, d_outputs: Outputs, spec: Spec, block_q: int, block_k: int
) -> Inputs:
    """Gradients of a call, in blocks of these sizes."""
    tiles = Tiles(inputs, spec, block_q, block_k)
    cut = tiles.cut
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
    query, d_out = cut.pad_queries(inputs.query), cut.pad_queries(d_outputs.out)
    key, value = cut.pad_keys(inputs.key), cut.pad_keys(inputs.value)
    terms, d_sinks = _row_terms(inputs, residuals, d_outputs, dtype)
    # A row that sees nothing, or lies beyond the last: exp(logits - inf) is 0 whatever the logits.
    terms = [cut.pad_queries(x, 2, fill) for x, fill in zip(terms, (jnp.inf, 0.0, 0.0), strict=False)]

    def column(index: Any, carry: tuple) -> tuple:
        u, j = divmod(index, cut.k_blocks)
        unit = cut.unit(u)
        keys, values = cut.keys(key, unit, j), cut.keys(value, unit, j)
        keys_t = jnp.swapaxes(keys, -1, -2)

        def step(i: Any, carry: tuple) -> tuple:
            d_query, d_bias, d_keys, d_values = carry
            rows, d_rows = cut.queries(query, unit, i), cut.queries(d_out, unit, i)
            lse, delta, *share = (cut.per_row(x, unit, i)[:, None] for x in terms)
            logits = tiles.logits(matmul("lkh,lqh->lkq", keys, rows, dtype), unit, i, j, True)
            d_weights = matmul("lkv,lqv->lkq", values, d_rows, dtype)
            flat = d_weights.shape
            visible = tiles.visible(unit, i, j, True)
            masked = logits if visible is None else jnp.where(visible, logits, -jnp.inf)
            weights = used = jnp.exp(masked.reshape(flat) - lse)
            if inputs.dropout is not None:
                kept = tiles.kept(unit, i, j, True).reshape(flat)
                grow = 1.0 / (1.0 - spec.dropout_prob)
                used, d_weights = (jnp.where(kept, x * grow, 0.0) for x in (used, d_weights))
            if share:
                used, d_weights = used * share[0], d_weights * share[0]
            d_values += matmul("lkq,lqv->lkv", used.astype(d_rows.dtype), d_rows, dtype)
            d_logits = weights * (d_weights - delta)
            if spec.logits_soft_cap is not None:
                d_logits *= 1.0 - jnp.square(logits.reshape(flat) / spec.logits_soft_cap)
            if d_bias is not None:
                d_bias = tiles.add_bias_tile(d_bias, unit, i, j, d_logits.reshape(logits.shape))
            d_logits = d_logits.astype(rows.dtype)
            d_keys += matmul("lkq,lqh->lkh", d_logits, rows, dtype)
            d_rows_t = matmul("lhk,lkq->lhq", keys_t, d_logits, dtype)
            return cut.add_queries_t(d_query, d_rows_t, unit, i), d_bias, d_keys, d_values

        d_query, d_bias, d_key, d_value = carry
        zeros = (tiles.full(x.shape, 0.0, dtype) for x in (keys, values))
        d_query, d_bias, d_keys, d_values = tiles.over_queries(
            unit, j, step, (d_query, d_bias, *zeros)
        )
        d_keys *= spec.softmax_scale
        d_key, d_value = cut.add_keys(d_key, d_keys, unit, j), cut.add_keys(d_value, d_values, unit, j)
        return d_query, d_bias, d_key, d_value

    b, t, n, h = query.shape
    d_query = tiles.full((b, n, h, t), 0.0, dtype)
    d_bias = None if tiles.bias is None else tiles.full(tiles.bias.shape, 0.0, dtype)
    d_key, d_value = (tiles.full(x.shape, 0.0, dtype) for x in (key, value))
    d_query, d_bias, d_key, d_value = over_blocks(
        column, (d_query, d_bias, d_key, d_value), cut.units * cut.k_blocks
    )
    d_query = d_query.transpose(0, 3, 1, 2)[:, : cut.q_len] * spec.softmax_scale
    gradients = Inputs(
        d_query,
        d_key[:, : cut.kv_len],
        d_value[:, : cut.kv_len],
        bias=d_bias,
        sinks=d_sinks,
        mask=None,
    )
    if d_bias is not None:
        t, s = inputs.bias.shape[2:]
        gradients = gradients._replace(bias=d_bias[:, :, :t, :s])
    return Inputs(
        *(None if d is None else d.astype(x.dtype) for d, x in zip(gradients, inputs, strict=True))
    )


def _row_terms(inputs: Inputs, residuals: Outputs, d_outputs: Outputs, dtype: Any):
    """What the logits of a row share, each [b, n, t], and the gradient of the sinks.

    With w the part of a row's weights that the sinks leave to the keys (1 without sinks),
    d_logits = exp(logits - lse) * (w * d_weights - delta). Returns ([lse, delta, w], d_sinks).
    """
    lse = residuals.lse.astype(dtype)
    seen = lse > -jnp.inf
    out, d_out = residuals.out.astype(dtype), d_outputs.out.astype(dtype)
    delta = jnp.einsum("btnv,btnv->bnt", out, d_out, precision=lax.Precision.HIGHEST)
    d_lse = d_outputs.lse.astype(dtype)
    safe_lse = jnp.where(seen, lse, jnp.inf)
    if inputs.sinks is None:
        return [safe_lse, delta - d_lse], None
    sinks = inputs.sinks.astype(dtype)
    sinks_lse = logsumexp(sinks, axis=-1, keepdims=True)  # [1 or n, 1]
    excess = jnp.where(seen, lse - sinks_lse, 0.0)
    share = jax.nn.sigmoid(excess)
    d_sinks_lse = -(delta * jax.nn.sigmoid(-excess)).sum((0, 2))[:, None]  # [n, 1]
    if sinks.shape[0] == 1:
        d_sinks_lse = d_sinks_lse.sum(0, keepdims=True)
    parts = jnp.exp(sinks - jnp.where(sinks_lse > -jnp.inf, sinks_lse, 0.0))
    return [safe_lse, share * delta - d_lse, share], parts * d_sinks_lse
