"""Backward: the same walk over the pages, logits recomputed, gradients of pages added in place."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from ejkernel.kernels.common.paged import add_pages
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.ragged_page_attention_v3.xla_tiles import Block, Tile, Tiles, matmul


def backward(
    inputs: Inputs, residuals: Outputs, d_outputs: Outputs, spec: Spec, params: Any
) -> Inputs:
    """Gradients, shaped like the inputs; integer caches have none."""
    tiles = Tiles(inputs, spec, params.queries_per_block, params.pages_per_block)
    dtype, heads = tiles.dtype, tiles.heads
    flat = lambda x: x.reshape(tiles.rows, heads, -1)
    query, d_out = (flat(x).astype(tiles.operands) for x in (inputs.query, d_outputs.out))
    terms = _row_terms(inputs, residuals, d_outputs, dtype)
    terms = [flat(jnp.swapaxes(x, 1, 2)) for x in terms]
    combined = inputs.value_pages is None
    factor = tiles.factor()[:, None, None]
    v_scale = None if inputs.v_scale is None else inputs.v_scale.astype(dtype)[:, None, None]

    def attend(tile: Tile, size: int, carry: tuple) -> tuple:
        d_query, d_caches, d_heads = carry
        rows, d_rows = (tiles.own_rows_of(x, tile, size) for x in (query, d_out))
        lse, delta, *share = (tiles.rows_of(x, tile, size) for x in terms)

        def step(block: Block, carry: tuple) -> tuple:
            d_own, d_caches, products = carry
            keys, values = tiles.used_keys(block), tiles.used_values(block)
            logits = tiles.logits(matmul("krh,ksh->krs", rows, keys, dtype), size)
            visible = tiles.visible(tile, block)
            masked = jnp.where(visible, logits, -jnp.inf).reshape(*rows.shape[:2], -1)
            weights = used = jnp.exp(masked - lse)
            d_weights = matmul("krv,ksv->krs", d_rows, values, dtype)
            if share:
                used, d_weights = used * share[0], d_weights * share[0]
            if products is not None:
                products += (weights * d_weights).sum(-1)
            if v_scale is not None:
                used, d_weights = used * v_scale, d_weights * v_scale
            d_logits = weights * (d_weights - delta)
            if spec.logits_soft_cap is not None:
                d_logits *= 1.0 - jnp.square(logits.reshape(masked.shape) / spec.logits_soft_cap)
            d_logits = d_logits.astype(tiles.operands)
            d_own += matmul("krs,ksh->krh", d_logits, keys, dtype)
            if d_caches:
                d_values = matmul("krs,krv->ksv", used.astype(tiles.operands), d_rows, dtype)
                d_keys = matmul("krs,krh->ksh", d_logits, rows, dtype) * factor
                blocks = [[d_keys, d_values]] if combined else [[d_keys], [d_values]]
                d_caches = [
                    add_pages(d, block.pages, parts, tiles.axes)
                    for d, parts in zip(d_caches, blocks, strict=True)
                ]
            return d_own, d_caches, products

        # Of the output with its gradient, row by row: from the weights, not from the output, whose
        # rounding would add up over the rows.
        products = None if v_scale is None and not share else tiles.full(rows.shape[:2], 0.0)
        start = (tiles.full(rows.shape, 0.0), d_caches, products)
        d_own, d_caches, products = tiles.over_blocks(tile, step, start)
        d_k_scale, d_v_scale, d_sinks = d_heads
        d_k_scale += (rows * d_own).sum((1, 2))
        if v_scale is not None:
            d_v_scale += products.sum(1)
            products *= v_scale[..., 0]
        if share:
            d_sinks -= tiles.by_head(products * (1.0 - share[0][..., 0]), size)
        d_query = tiles.put_rows(d_query, tile, size, d_own * factor)
        return d_query, d_caches, (d_k_scale, d_v_scale, d_sinks)

    caches = [inputs.key_pages] if combined else [inputs.key_pages, inputs.value_pages]
    if not jnp.issubdtype(inputs.key_pages.dtype, jnp.inexact):
        caches = []
    start = (
        tiles.full(query.shape, 0.0),
        [tiles.full(x.shape, 0.0) for x in caches],
        tuple(tiles.full((x,), 0.0) for x in (tiles.kv_heads, tiles.kv_heads, heads)),
    )
    d_query, d_caches, (d_k_scale, d_v_scale, d_sinks) = tiles.over_tiles(attend, start)
    gradients = inputs._replace(
        query=d_query.reshape(inputs.query.shape),
        key_pages=d_caches[0] if d_caches else None,
        value_pages=d_caches[1] if len(d_caches) > 1 else None,
        query_starts=None,
        query_lens=None,
        kv_lens=None,
        page_indices=None,
        sinks=_per_sink(d_sinks, inputs.sinks),
        k_scale=None if inputs.k_scale is None else d_k_scale * spec.softmax_scale,
        v_scale=None if inputs.v_scale is None else d_v_scale,
    )
    return jax.tree.map(
        lambda d, x: None if d is None else d.astype(x.dtype),
        gradients,
        inputs,
        is_leaf=lambda x: x is None,
    )


def _row_terms(
    inputs: Inputs, residuals: Outputs, d_outputs: Outputs, dtype: Any
) -> list[jax.Array]:
    """What the logits of a row share: lse, delta and, with sinks, w, each [b, n, t].

    With w the part of a row's weights that the sinks leave to the keys (1 without sinks),
    d_logits = exp(logits - lse) * (w * d_weights - delta).
    """
    lse, d_lse = residuals.lse.astype(dtype), d_outputs.lse.astype(dtype)
    seen = lse > -jnp.inf
    out, d_out = residuals.out.astype(dtype), d_outputs.out.astype(dtype)
    delta = jnp.where(seen, jnp.swapaxes((out * d_out).sum(-1), 1, 2), 0.0)
    safe_lse = jnp.where(seen, lse, jnp.inf)
    if inputs.sinks is None:
        return [safe_lse, delta - d_lse]
    sinks = logsumexp(inputs.sinks.astype(dtype), axis=-1, keepdims=True)  # [1 or n, 1]
    share = jax.nn.sigmoid(jnp.where(seen, lse - sinks, 0.0))
    return [safe_lse, share * delta - d_lse, share]


def _per_sink(d_heads: jax.Array, sinks: jax.Array | None) -> jax.Array | None:
    """The gradient of each sink from that of the log-sum-exp of a head's sinks, [n]."""
    if sinks is None:
        return None
    d_heads = d_heads[:, None]
    if sinks.shape[0] == 1:
        d_heads = d_heads.sum(0, keepdims=True)
    sinks = sinks.astype(d_heads.dtype)
    total = logsumexp(sinks, axis=-1, keepdims=True)
    return d_heads * jnp.exp(sinks - jnp.where(total > -jnp.inf, total, 0.0))
