"""Attention sinks in a backward pass: the share of the keys, and the gradient of the sinks."""

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp


def share_of_keys(lse: jax.Array, sinks: jax.Array) -> jax.Array:
    """The part of each row's weights that sinks `[1 or n, m]` leave to the keys, `[b, n, t]`."""
    total = logsumexp(sinks.astype(lse.dtype), axis=-1, keepdims=True)  # [1 or n, 1]
    return jax.nn.sigmoid(jnp.where(lse > -jnp.inf, lse - total, 0.0))


def per_sink(d_heads: jax.Array, sinks: jax.Array) -> jax.Array:
    """The gradient of each sink from that of a head's sinks together, `[n]`."""
    d_heads = d_heads[:, None] if sinks.shape[0] > 1 else d_heads.sum(keepdims=True)[:, None]
    logits = sinks.astype(d_heads.dtype)
    total = logsumexp(logits, axis=-1, keepdims=True)
    parts = jnp.exp(logits - jnp.where(total > -jnp.inf, total, 0.0))  # all -inf: no part, not NaN
    return (parts * d_heads).astype(sinks.dtype)
