"""Attention sinks in a backward pass: shares of keys and sinks, and the gradient of the sinks."""

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp


def share_of_keys(lse: jax.Array, sinks: jax.Array) -> jax.Array:
    """The part of each row's weights that sinks `[1 or n, m]` leave to the keys, `[b, n, t]`."""
    return jax.nn.sigmoid(_difference(lse, sinks))


def share_of_sinks(lse: jax.Array, sinks: jax.Array) -> jax.Array:
    """The part of each row's weights that the sinks take, `[b, n, t]`.

    It is 1 minus `share_of_keys`, without the cancellation of that subtraction for small sinks.
    """
    return jax.nn.sigmoid(-_difference(lse, sinks))


def _difference(lse: jax.Array, sinks: jax.Array) -> jax.Array:
    """The log-sum-exp of the keys minus that of the sinks, `[b, n, t]`; 0 for an empty row."""
    total = logsumexp(sinks.astype(lse.dtype), axis=-1, keepdims=True)  # [1 or n, 1]
    return jnp.where(lse > -jnp.inf, lse - total, 0.0)


def per_sink(d_heads: jax.Array, sinks: jax.Array) -> jax.Array:
    """The gradient of each sink from that of a head's sinks together, `[n]`."""
    d_heads = d_heads[:, None] if sinks.shape[0] > 1 else d_heads.sum(keepdims=True)[:, None]
    logits = sinks.astype(d_heads.dtype)
    total = logsumexp(logits, axis=-1, keepdims=True)
    parts = jnp.exp(logits - jnp.where(total > -jnp.inf, total, 0.0))  # all -inf: no part, not NaN
    return (parts * d_heads).astype(sinks.dtype)
