"""The selected branch: every block of keys meets the tokens that chose it, then tokens merge.

The partial results of a token are merged by their maxima, as in https://arxiv.org/abs/1805.02867.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common.carry import zeros
from ejkernel.kernels.common.precision import matmul
from ejkernel.kernels.native_sparse_attention import xla_pairs
from ejkernel.kernels.native_sparse_attention.geometry import Tokens
from ejkernel.kernels.native_sparse_attention.inputs import Branch, Inputs, Spec
from ejkernel.kernels.native_sparse_attention.xla_pairs import Cut, Tile


def forward(inputs: Inputs, at: Tokens, spec: Spec, block_q: int) -> Branch:
    """Output and log-sum-exp over the chosen blocks."""
    query, value = inputs.query, inputs.value
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    size = xla_pairs.cut(inputs, spec, block_q)
    begin, number = xla_pairs.chosen_blocks(inputs, at, size)
    keys, values = size.cut_keys(inputs.key), size.cut_keys(value)
    queries = size.cut_tokens(query)

    def attend(buffers: tuple, index: Any) -> tuple[tuple, tuple[jax.Array, jax.Array]]:
        unit, chunk = divmod(index, size.chunks)
        pairs = xla_pairs.sort_pairs(begin[unit, chunk], number[unit, chunk], size)
        mine = queries[unit, chunk]

        def step(tile: Tile, buffers: tuple) -> tuple:
            rows = _rows(mine, tile, size)
            logits = matmul("qh,kh->qk", rows, _block(keys, unit, tile, size), dtype)
            visible = _visible(tile, chunk, size)
            logits = jnp.where(visible, logits * spec.softmax_scale, jnp.finfo(dtype).min)
            peak = logits.max(-1, keepdims=True)
            weights = jnp.exp(logits - peak)
            block = _block(values, unit, tile, size)
            products = matmul("qk,kv->qv", weights.astype(block.dtype), block, dtype)
            results = (products, peak, weights.sum(-1))
            # What lies beyond the tile's own pairs is written again by the tiles that follow.
            return tuple(
                lax.dynamic_update_slice_in_dim(buffer, x.reshape(size.rows, -1), tile.first, 0)
                for buffer, x in zip(buffers, results, strict=True)
            )

        buffers = xla_pairs.over_tiles(pairs, size, step, buffers)
        products, peaks, masses = buffers
        used = pairs.used[..., None]  # [slots, chunk, 1]
        peaks = jnp.where(used, peaks[pairs.place], -jnp.inf)
        peak = jnp.maximum(peaks.max(0), jnp.finfo(dtype).min)  # [chunk, group]
        shares = jnp.exp(peaks - peak)
        mass = jnp.where(used, shares * masses[pairs.place], 0.0).sum(0)
        seen = mass > 0
        weights = shares / jnp.where(seen, mass, 1.0)
        out = zeros((size.chunk, products.shape[1]), dtype, inputs)
        out = xla_pairs.gather_sum(products, pairs, weights, out)
        lse = jnp.where(seen, peak + jnp.log(jnp.where(seen, mass, 1.0)), -jnp.inf)
        return buffers, (out.astype(query.dtype), lse)

    width = size.group * value.shape[-1]
    buffers = tuple(
        zeros((size.pairs + size.rows, columns), dtype, inputs)
        for columns in (width, size.group, size.group)
    )
    steps = jnp.arange(size.units * size.chunks, dtype=jnp.int32)
    _, (out, lse) = lax.scan(attend, buffers, steps)
    lse = size.join_tokens(lse)[..., 0]
    return Branch(size.join_tokens(out), jnp.swapaxes(lse, 1, 2))


def backward(
    inputs: Inputs, at: Tokens, branch: Branch, d_out: jax.Array, spec: Spec, block_q: int
) -> tuple[jax.Array, ...]:
    """Gradients of query, key and value, in the dtype in which they are summed."""
    query, key, value = inputs[:3]
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    size = xla_pairs.cut(inputs, spec, block_q)
    begin, number = xla_pairs.chosen_blocks(inputs, at, size)
    keys, values = size.cut_keys(key), size.cut_keys(value)
    queries, d_outs = size.cut_tokens(query), size.cut_tokens(d_out)
    delta = (branch.out.astype(dtype) * d_out.astype(dtype)).sum(-1)
    deltas, lses = size.cut_tokens(delta), size.cut_tokens(jnp.swapaxes(branch.lse, 1, 2))

    def pull_back(carry: tuple, index: Any) -> tuple[tuple, jax.Array]:
        unit, chunk = divmod(index, size.chunks)
        pairs = xla_pairs.sort_pairs(begin[unit, chunk], number[unit, chunk], size)
        mine = [x[unit, chunk] for x in (queries, d_outs, lses, deltas)]

        def step(tile: Tile, carry: tuple) -> tuple:
            buffer, d_keys, d_values = carry
            rows, d_rows, lse, delta = (_rows(x, tile, size) for x in mine)
            block, v_block = (_block(x, unit, tile, size) for x in (keys, values))
            logits = matmul("qh,kh->qk", rows, block, dtype) * spec.softmax_scale
            d_weights = matmul("qv,kv->qk", d_rows, v_block, dtype)
            visible = _visible(tile, chunk, size) & _repeat(tile.useful, size)[:, None]
            weights = jnp.where(visible, jnp.exp(logits - lse), 0.0)
            d_logits = (weights * (d_weights - delta)).astype(rows.dtype)
            weights = weights.astype(d_rows.dtype)
            d_values = _add(d_values, matmul("qk,qv->kv", weights, d_rows, dtype), unit, tile)
            d_keys = _add(d_keys, matmul("qk,qh->kh", d_logits, rows, dtype), unit, tile)
            d_query = matmul("qk,kh->qh", d_logits, block, dtype).reshape(size.rows, -1)
            buffer = lax.dynamic_update_slice_in_dim(buffer, d_query, tile.first, 0)
            return buffer, d_keys, d_values

        carry = xla_pairs.over_tiles(pairs, size, step, carry)
        d_query = zeros(mine[0].shape, dtype, inputs)
        return carry, xla_pairs.gather_sum(carry[0], pairs, None, d_query)

    carry = (
        zeros((size.pairs + size.rows, queries.shape[-1]), dtype, inputs),
        zeros(keys.shape, dtype, inputs),
        zeros(values.shape, dtype, inputs),
    )
    steps = jnp.arange(size.units * size.chunks, dtype=jnp.int32)
    (_, d_key, d_value), d_query = lax.scan(pull_back, carry, steps)
    d_query, d_key = size.join_tokens(d_query), size.join_keys(d_key)
    return d_query * spec.softmax_scale, d_key * spec.softmax_scale, size.join_keys(d_value)


def _rows(x: jax.Array, tile: Tile, size: Cut) -> jax.Array:
    """[chunk, group * d] -> what the tokens of a tile have, [rows * group, d]."""
    return x.at[tile.token].get(mode="promise_in_bounds").reshape(size.rows * size.group, -1)


def _block(x: jax.Array, unit: Any, tile: Tile, size: Cut) -> jax.Array:
    """The block of a tile, [block_size, d]."""
    return lax.dynamic_slice(x, _start(unit, tile), (1, size.block_size, x.shape[2]))[0]


def _start(unit: Any, tile: Tile) -> tuple[Any, Any, Any]:
    return unit, tile.begin, jnp.int32(0)


def _add(total: jax.Array, block: jax.Array, unit: Any, tile: Tile) -> jax.Array:
    """`total` with a block of keys added where the tile's block stands."""
    start = _start(unit, tile)
    block = block[None] + lax.dynamic_slice(total, start, (1, *block.shape))
    return lax.dynamic_update_slice(total, block, start)


def _visible(tile: Tile, chunk: Any, size: Cut) -> jax.Array:
    """Which keys of the block are not ahead of the token, [rows * group, block_size]."""
    ahead = chunk * size.chunk + tile.token - tile.begin
    return jnp.arange(size.block_size, dtype=jnp.int32) <= _repeat(ahead, size)[:, None]


def _repeat(x: jax.Array, size: Cut) -> jax.Array:
    """[rows] -> [rows * group]."""
    return jnp.broadcast_to(x[:, None], (size.rows, size.group)).reshape(-1)
