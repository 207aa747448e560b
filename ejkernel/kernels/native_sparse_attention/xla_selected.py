"""The selected branch: attention of each key block to the tokens that chose it, then combined.

The partial results of a token are combined by their maxima, as in https://arxiv.org/abs/1805.02867.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common.carry import zeros
from ejkernel.kernels.common.precision import matmul
from ejkernel.kernels.common.refs import Index
from ejkernel.kernels.native_sparse_attention import xla_pairs
from ejkernel.kernels.native_sparse_attention.geometry import Tokens
from ejkernel.kernels.native_sparse_attention.inputs import Branch, Inputs, Spec
from ejkernel.kernels.native_sparse_attention.xla_pairs import PairSizes, PairTile


def forward(inputs: Inputs, at: Tokens, spec: Spec, block_q: int) -> Branch:
    """Output and log-sum-exp over the chosen blocks."""
    query, value = inputs.query, inputs.value
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    size = xla_pairs.pair_sizes(inputs, spec, block_q)
    begin, number = xla_pairs.chosen_blocks(inputs, at, size)
    keys, values = size.split_keys(inputs.key), size.split_keys(value)
    queries = size.split_tokens(query)
    first = 0 if inputs.query_start is None else inputs.query_start

    def attend(buffers: tuple, index: jax.Array) -> tuple[tuple, tuple[jax.Array, jax.Array]]:
        unit, chunk = divmod(index, size.chunks)
        pairs = xla_pairs.sort_pairs(begin[unit, chunk], number[unit, chunk], size)
        mine = queries[unit, chunk]

        def step(tile: PairTile, buffers: tuple) -> tuple:
            rows = _rows(mine, tile, size)
            logits = matmul("qh,kh->qk", rows, _block(keys, unit, tile, size), dtype)
            visible = _visible(tile, first, chunk, size)
            logits = jnp.where(visible, logits * spec.softmax_scale, jnp.finfo(dtype).min)
            row_max = logits.max(-1, keepdims=True)
            weights = jnp.exp(logits - row_max)
            block = _block(values, unit, tile, size)
            products = matmul("qk,kv->qv", weights.astype(block.dtype), block, dtype)
            results = (products, row_max, weights.sum(-1))
            # Rows after the tile's own pairs are overwritten by the tiles that follow.
            return tuple(
                lax.dynamic_update_slice_in_dim(buffer, x.reshape(size.rows, -1), tile.first, 0)
                for buffer, x in zip(buffers, results, strict=True)
            )

        buffers = xla_pairs.over_tiles(pairs, size, step, buffers)
        products, maxima, sums = buffers
        used = pairs.used[..., None]  # [slots, chunk, 1]
        maxima = jnp.where(used, maxima[pairs.place], -jnp.inf)
        row_max = jnp.maximum(maxima.max(0), jnp.finfo(dtype).min)  # [chunk, group]
        alpha = jnp.exp(maxima - row_max)
        row_sum = jnp.where(used, alpha * sums[pairs.place], 0.0).sum(0)
        seen = row_sum > 0
        weights = alpha / jnp.where(seen, row_sum, 1.0)
        out = zeros((size.chunk, products.shape[1]), dtype, inputs)
        out = xla_pairs.gather_sum(products, pairs, weights, out)
        lse = jnp.where(seen, row_max + jnp.log(jnp.where(seen, row_sum, 1.0)), -jnp.inf)
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
    size = xla_pairs.pair_sizes(inputs, spec, block_q)
    begin, number = xla_pairs.chosen_blocks(inputs, at, size)
    keys, values = size.split_keys(key), size.split_keys(value)
    queries, d_outs = size.split_tokens(query), size.split_tokens(d_out)
    delta = (branch.out.astype(dtype) * d_out.astype(dtype)).sum(-1)
    deltas, lses = size.split_tokens(delta), size.split_tokens(jnp.swapaxes(branch.lse, 1, 2))
    first = 0 if inputs.query_start is None else inputs.query_start

    def pull_back(carry: tuple, index: jax.Array) -> tuple[tuple, jax.Array]:
        unit, chunk = divmod(index, size.chunks)
        pairs = xla_pairs.sort_pairs(begin[unit, chunk], number[unit, chunk], size)
        mine = [x[unit, chunk] for x in (queries, d_outs, lses, deltas)]

        def step(tile: PairTile, carry: tuple) -> tuple:
            buffer, d_keys, d_values = carry
            rows, d_rows, lse, delta = (_rows(x, tile, size) for x in mine)
            block, v_block = (_block(x, unit, tile, size) for x in (keys, values))
            logits = matmul("qh,kh->qk", rows, block, dtype) * spec.softmax_scale
            d_weights = matmul("qv,kv->qk", d_rows, v_block, dtype)
            visible = _visible(tile, first, chunk, size) & _repeat(tile.useful, size)[:, None]
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


def _rows(x: jax.Array, tile: PairTile, size: PairSizes) -> jax.Array:
    """The tokens of a tile: [chunk, group * d] -> [rows * group, d]."""
    return x.at[tile.token].get(mode="promise_in_bounds").reshape(size.rows * size.group, -1)


def _block(x: jax.Array, unit: Index, tile: PairTile, size: PairSizes) -> jax.Array:
    """The block of a tile, [block_size, d]."""
    return lax.dynamic_slice(x, _start(unit, tile), (1, size.block_size, x.shape[2]))[0]


def _start(unit: Index, tile: PairTile) -> tuple[Index, jax.Array, jax.Array]:
    return unit, tile.begin, jnp.int32(0)


def _add(total: jax.Array, block: jax.Array, unit: Index, tile: PairTile) -> jax.Array:
    """`total` with a block of keys added at the place of the tile's block."""
    start = _start(unit, tile)
    block = block[None] + lax.dynamic_slice(total, start, (1, *block.shape))
    return lax.dynamic_update_slice(total, block, start)


def _visible(tile: PairTile, first: Index, chunk: Index, size: PairSizes) -> jax.Array:
    """Which keys of the block are not after the token, [rows * group, block_size].

    `first` is the place of the first query among the keys.
    """
    ahead = first + chunk * size.chunk + tile.token - tile.begin
    return jnp.arange(size.block_size, dtype=jnp.int32) <= _repeat(ahead, size)[:, None]


def _repeat(x: jax.Array, size: PairSizes) -> jax.Array:
    """[rows] -> [rows * group]."""
    return jnp.broadcast_to(x[:, None], (size.rows, size.group)).reshape(-1)
