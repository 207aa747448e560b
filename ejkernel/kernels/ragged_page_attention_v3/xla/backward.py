"""Backward: two passes over the pages like the forward one, logits recomputed in each.

The first computes the gradients of the queries, the sinks and the scales. The second adds to the
gradients of the pages, in place. It is dead code where no gradients of the cache are used, and then
costs neither time nor memory.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel.kernels.common.paged import add_pages
from ejkernel.kernels.common.precision import matmul
from ejkernel.kernels.common.sinks import per_sink, share_of_keys, share_of_sinks
from ejkernel.kernels.ragged_page_attention_v3.config import PagedConfig
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.ragged_page_attention_v3.xla.tiles import PageBlock, PagedTiles, QueryTile


def run_backward(
    inputs: Inputs, residuals: Outputs, d_outputs: Outputs, spec: Spec, params: PagedConfig
) -> Inputs:
    """Gradients, shaped like the inputs; integer caches have none."""
    tiles = PagedTiles(inputs, spec, params.queries_per_block, params.pages_per_block)
    recomputed = _Recomputation(tiles, residuals, d_outputs)
    d_query, d_k_scale, d_v_scale, d_sinks = _of_queries(tiles, recomputed)
    d_caches = _of_pages(tiles, recomputed)
    gradients = inputs._replace(
        query=d_query.reshape(inputs.query.shape),
        key_pages=d_caches[0] if d_caches else None,
        value_pages=d_caches[1] if len(d_caches) > 1 else None,
        query_starts=None,
        query_lens=None,
        kv_lens=None,
        page_indices=None,
        sinks=None if inputs.sinks is None else per_sink(d_sinks, inputs.sinks),
        k_scale=None if inputs.k_scale is None else d_k_scale * spec.softmax_scale,
        v_scale=None if inputs.v_scale is None else d_v_scale,
        traced_window=None,
    )
    return jax.tree.map(
        lambda d, x: None if d is None else d.astype(x.dtype),
        gradients,
        inputs,
        is_leaf=lambda x: x is None,
    )


class _Rows(NamedTuple):
    """The rows of a tile, [k, size * group, ...] each."""

    query: jax.Array
    d_out: jax.Array
    lse: jax.Array
    delta: jax.Array
    share: jax.Array | None  # of the keys
    share_of_sinks: jax.Array | None


class _Weights(NamedTuple):
    """Weights and gradients of rows and a block, [k, size * group, block] each, and the keys."""

    keys: jax.Array
    weights: jax.Array  # the sinks not counted
    d_weights: jax.Array  # of the weights with the sinks counted, before the scale of the values
    d_logits: jax.Array


class _Recomputation:
    """The forward pass recomputed, tile by tile and block by block, and its derivatives."""

    def __init__(self, tiles: PagedTiles, residuals: Outputs, d_outputs: Outputs):
        inputs, self.tiles = tiles.inputs, tiles
        flat = lambda x: x.reshape(tiles.rows, tiles.heads, -1)
        self.query, self.d_out = (
            flat(x).astype(tiles.operands) for x in (inputs.query, d_outputs.out)
        )
        terms = _row_terms(inputs, residuals, d_outputs, tiles.dtype)
        self.terms = [flat(jnp.swapaxes(x, 1, 2)) for x in terms]
        self.factor = tiles.factor()[:, None, None]
        self.v_scale = None
        if inputs.v_scale is not None:
            self.v_scale = inputs.v_scale.astype(tiles.dtype)[:, None, None]

    def rows(self, tile: QueryTile, size: int) -> _Rows:
        tiles = self.tiles
        query, d_out = (tiles.own_rows_of(x, tile, size) for x in (self.query, self.d_out))
        lse, *terms = self.terms
        lse = tiles.own_rows_of(lse, tile, size, other=jnp.inf)  # no weight, whatever the logits
        delta, *shares = (tiles.own_rows_of(x, tile, size) for x in terms)
        return _Rows(query, d_out, lse, delta, *(shares or (None, None)))

    def weights(self, tile: QueryTile, size: int, rows: _Rows, block: PageBlock) -> _Weights:
        tiles, cap = self.tiles, self.tiles.spec.logits_soft_cap
        keys, values = tiles.used_keys(block), tiles.used_values(block)
        logits = tiles.logits(matmul("krh,ksh->krs", rows.query, keys, tiles.dtype), size)
        masked = jnp.where(tiles.visible(tile, block), logits, -jnp.inf)
        weights = jnp.exp(masked.reshape(*rows.query.shape[:2], -1) - rows.lse)
        d_weights = matmul("krv,ksv->krs", rows.d_out, values, tiles.dtype)
        if rows.share is not None:
            d_weights *= rows.share
        scaled = d_weights if self.v_scale is None else d_weights * self.v_scale
        d_logits = weights * (scaled - rows.delta)
        if cap is not None:
            d_logits *= 1.0 - jnp.square(logits.reshape(weights.shape) / cap)
        return _Weights(keys, weights, d_weights, d_logits.astype(tiles.operands))


def _of_queries(tiles: PagedTiles, recomputed: _Recomputation) -> tuple:
    """Gradients of the queries [rows, n, h], of the scales [k] and of all sinks of a head [n]."""
    v_scale = recomputed.v_scale

    def attend(tile: QueryTile, size: int, carry: tuple) -> tuple:
        d_query, d_k_scale, d_v_scale, d_sinks = carry
        rows = recomputed.rows(tile, size)

        def step(block: PageBlock, carry: tuple) -> tuple:
            d_rows, products = carry
            found = recomputed.weights(tile, size, rows, block)
            d_rows += matmul("krs,ksh->krh", found.d_logits, found.keys, tiles.dtype)
            if products is not None:
                products += (found.weights * found.d_weights).sum(-1)
            return d_rows, products

        # Of a row's output with its gradient: from the weights, not from the output itself, whose
        # rounding would add up over the rows.
        needed = v_scale is not None or rows.share is not None
        products = tiles.full(rows.query.shape[:2], 0.0) if needed else None
        start: tuple = (tiles.full(rows.query.shape, 0.0), products)
        d_rows, products = tiles.over_blocks(tile, step, start)
        d_k_scale += (rows.query * d_rows).sum((1, 2))
        if v_scale is not None:
            d_v_scale += products.sum(1)
            products *= v_scale[..., 0]
        if rows.share_of_sinks is not None:
            d_sinks -= tiles.by_head(products * rows.share_of_sinks[..., 0], size)
        d_query = tiles.put_rows(d_query, tile, size, d_rows * recomputed.factor)
        return d_query, d_k_scale, d_v_scale, d_sinks

    counts = (tiles.kv_heads, tiles.kv_heads, tiles.heads)
    per_head = [tiles.full((count,), 0.0) for count in counts]
    return tiles.over_tiles(attend, (tiles.full(recomputed.query.shape, 0.0), *per_head))


def _of_pages(tiles: PagedTiles, recomputed: _Recomputation) -> list[jax.Array]:
    """Gradients of the arrays of the cache; none where they are integers."""
    inputs = tiles.inputs
    if not jnp.issubdtype(inputs.key_pages.dtype, jnp.inexact):
        return []
    combined = inputs.value_pages is None

    def attend(tile: QueryTile, size: int, d_caches: list[jax.Array]) -> list[jax.Array]:
        rows = recomputed.rows(tile, size)

        def step(block: PageBlock, d_caches: list[jax.Array]) -> list[jax.Array]:
            found = recomputed.weights(tile, size, rows, block)
            used = found.weights
            for factor in (rows.share, recomputed.v_scale):
                used = used if factor is None else used * factor
            d_keys = matmul("krs,krh->ksh", found.d_logits, rows.query, tiles.dtype)
            d_values = matmul("krs,krv->ksv", used.astype(tiles.operands), rows.d_out, tiles.dtype)
            d_keys *= recomputed.factor
            blocks = [[d_keys, d_values]] if combined else [[d_keys], [d_values]]
            return [
                add_pages(d, block.pages, parts, tiles.axes)
                for d, parts in zip(d_caches, blocks, strict=True)
            ]

        return tiles.over_blocks(tile, step, d_caches)

    caches = tiles.caches[: 1 if combined else 2]
    return tiles.over_tiles(attend, [tiles.full(x.shape, 0.0) for x in caches])


def _row_terms(
    inputs: Inputs, residuals: Outputs, d_outputs: Outputs, dtype: DTypeLike
) -> list[jax.Array]:
    """The terms of each row: lse, delta and, with sinks, w and 1 - w, each [b, n, t].

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
    share = share_of_keys(lse, inputs.sinks)
    return [safe_lse, share * delta - d_lse, share, share_of_sinks(lse, inputs.sinks)]
