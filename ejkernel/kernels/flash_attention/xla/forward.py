"""Forward: online softmax over blocks of keys (https://arxiv.org/abs/2112.05682)."""

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from ejkernel.kernels.common.precision import matmul
from ejkernel.kernels.common.refs import Index
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.xla.tiles import Blocks, FlashTiles, over_blocks


def forward(inputs: Inputs, spec: Spec, block_q: int, block_k: int) -> Outputs:
    """Output and log-sum-exp of a call, in blocks of these sizes."""
    tiles = FlashTiles(inputs, spec, block_q, block_k, over="k")
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
    query = tiles.pad_queries(inputs.query)
    key, value = tiles.source_of_keys(inputs.key), tiles.source_of_keys(inputs.value)
    sinks = None if inputs.sinks is None else logsumexp(inputs.sinks.astype(dtype), axis=-1)

    def attend(index: Index, carry: tuple) -> tuple[jax.Array, jax.Array]:
        u, i = divmod(index, tiles.q_blocks)
        unit = tiles.unit(u)
        rows = tiles.queries(query, unit, i)

        def step(j: Blocks, carry: tuple) -> tuple:
            acc, row_max, row_sum = carry
            logits = matmul("lqh,lkh->lqk", rows, tiles.keys(key, unit, j), dtype)
            flat = logits.shape
            logits = tiles.logits(logits, unit, i, j)
            visible = tiles.visible(unit, i, j)
            if visible is not None:
                logits = jnp.where(visible, logits, -jnp.inf)
            logits = logits.reshape(flat)
            new_max = jnp.maximum(row_max, logits.max(-1))
            weights = jnp.exp(logits - new_max[..., None])
            alpha = jnp.exp(row_max - new_max)
            row_sum = row_sum * alpha + weights.sum(-1)
            if inputs.dropout is not None:
                weights = jnp.where(tiles.kept(unit, i, j).reshape(flat), weights, 0.0)
            values = tiles.keys(value, unit, j)
            products = matmul("lqk,lkv->lqv", weights.astype(values.dtype), values, dtype)
            return acc * alpha[..., None] + products, new_max, row_sum

        # The maximum starts at the least finite number: -inf minus that is still -inf, not NaN.
        start = (
            tiles.full((*rows.shape[:2], value.shape[-1]), 0.0, dtype),
            tiles.full(rows.shape[:2], jnp.finfo(dtype).min, dtype),
            tiles.full(rows.shape[:2], 0.0, dtype),
        )
        acc, row_max, row_sum = tiles.over_keys(unit, i, step, start)
        seen = row_sum > 0
        divisor = row_sum
        if sinks is not None:
            divisor = row_sum + jnp.exp(tiles.per_head(sinks, unit) - row_max)
        divisor = jnp.where(seen, divisor, 1.0) * (1.0 - spec.dropout_prob)
        out = (acc / divisor[..., None]).astype(inputs.query.dtype)
        lse = jnp.where(seen, row_max + jnp.log(jnp.where(seen, row_sum, 1.0)), -jnp.inf)
        lse = lse[..., None]
        return tiles.put_queries(carry[0], out, unit, i), tiles.put_queries(carry[1], lse, unit, i)

    b, t, n, _ = query.shape
    out = tiles.full((b, t, n, value.shape[-1]), 0.0, inputs.query.dtype)
    lse = tiles.full((b, t, n, 1), 0.0, dtype)
    out, lse = over_blocks(attend, (out, lse), tiles.units * tiles.q_blocks)
    return Outputs(out[:, : tiles.q_len], jnp.swapaxes(lse[:, : tiles.q_len, :, 0], 1, 2))
