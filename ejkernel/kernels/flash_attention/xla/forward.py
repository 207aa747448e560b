"""Forward: online softmax over blocks of keys (https://arxiv.org/abs/2112.05682)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from ejkernel.kernels.common.precision import matmul
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.xla.tiles import Tiles, over_blocks


def forward(inputs: Inputs, spec: Spec, block_q: int, block_k: int) -> Outputs:
    """Output and log-sum-exp of a call, in blocks of these sizes."""
    tiles = Tiles(inputs, spec, block_q, block_k, over="k")
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
    query = tiles.pad_queries(inputs.query)
    key, value = tiles.source_of_keys(inputs.key), tiles.source_of_keys(inputs.value)
    sinks = None if inputs.sinks is None else logsumexp(inputs.sinks.astype(dtype), axis=-1)

    def attend(index: Any, carry: tuple) -> tuple[jax.Array, jax.Array]:
        u, i = divmod(index, tiles.q_blocks)
        unit = tiles.unit(u)
        rows = tiles.queries(query, unit, i)

        def step(j: Any, carry: tuple) -> tuple:
            total, peak, mass = carry
            logits = matmul("lqh,lkh->lqk", rows, tiles.keys(key, unit, j), dtype)
            flat = logits.shape
            logits = tiles.logits(logits, unit, i, j)
            visible = tiles.visible(unit, i, j)
            if visible is not None:
                logits = jnp.where(visible, logits, -jnp.inf)
            logits = logits.reshape(flat)
            new_peak = jnp.maximum(peak, logits.max(-1))
            weights = jnp.exp(logits - new_peak[..., None])
            shrink = jnp.exp(peak - new_peak)
            mass = mass * shrink + weights.sum(-1)
            if inputs.dropout is not None:
                weights = jnp.where(tiles.kept(unit, i, j).reshape(flat), weights, 0.0)
            values = tiles.keys(value, unit, j)
            products = matmul("lqk,lkv->lqv", weights.astype(values.dtype), values, dtype)
            return total * shrink[..., None] + products, new_peak, mass

        # The peak starts at the least finite number: -inf less than that is still -inf, not NaN.
        start = (
            tiles.full((*rows.shape[:2], value.shape[-1]), 0.0, dtype),
            tiles.full(rows.shape[:2], jnp.finfo(dtype).min, dtype),
            tiles.full(rows.shape[:2], 0.0, dtype),
        )
        total, peak, mass = tiles.over_keys(unit, i, step, start)
        seen = mass > 0
        whole = mass if sinks is None else mass + jnp.exp(tiles.per_head(sinks, unit) - peak)
        whole = jnp.where(seen, whole, 1.0) * (1.0 - spec.dropout_prob)
        out = (total / whole[..., None]).astype(inputs.query.dtype)
        lse = jnp.where(seen, peak + jnp.log(jnp.where(seen, mass, 1.0)), -jnp.inf)[..., None]
        return tiles.put_queries(carry[0], out, unit, i), tiles.put_queries(carry[1], lse, unit, i)

    b, t, n, _ = query.shape
    out = tiles.full((b, t, n, value.shape[-1]), 0.0, inputs.query.dtype)
    lse = tiles.full((b, t, n, 1), 0.0, dtype)
    out, lse = over_blocks(attend, (out, lse), tiles.units * tiles.q_blocks)
    return Outputs(out[:, : tiles.q_len], jnp.swapaxes(lse[:, : tiles.q_len, :, 0], 1, 2))
