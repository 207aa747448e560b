"""Attention sinks: the shares of keys and sinks in each row, and the gradient of the sinks."""

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp


def share_of_keys(lse: jax.Array, sinks: jax.Array) -> jax.Array:
    """The part of each row's weights that sinks `[1 or n, m]` leave to the keys, `[b, n, t]`."""
    return _shares(lse, sinks)[0]


def share_of_sinks(lse: jax.Array, sinks: jax.Array) -> jax.Array:
    """The part of each row's weights that the sinks take, `[b, n, t]`.

    It is 1 minus `share_of_keys`, without the cancellation of that subtraction for small sinks.
    """
    return _shares(lse, sinks)[1]


def _shares(lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The parts of the keys and of the sinks: the logistic function of a difference, and its rest.

    Both are written with the exponential of a negative number, because a logistic function that a
    compiler derives from `tanh` or from `1 - x` rounds small parts coarsely. Derivatives of this
    form do not cancel either. A row that sees no key counts as half and half.
    """
    sinks = sinks.astype(lse.dtype)
    none = (sinks == -jnp.inf).all(-1, keepdims=True)
    total = logsumexp(jnp.where(none, 0.0, sinks), axis=-1, keepdims=True)  # [1 or n, 1]
    ahead = jnp.where(none, jnp.inf, jnp.where(lse > -jnp.inf, lse - total, 0.0))
    keys_lead = ahead > 0
    ratio = jnp.exp(jnp.where(keys_lead, -ahead, ahead))  # of the smaller part to the larger
    larger = 1.0 / (1.0 + ratio)
    smaller = ratio * larger
    return jnp.where(keys_lead, larger, smaller), jnp.where(keys_lead, smaller, larger)


def per_query(x: jax.Array) -> jax.Array:
    """One number per row, from `[b, n, t]` to `[b, t, n, 1]`, to scale the rows of an output."""
    return jnp.swapaxes(x, 1, 2)[..., None]


def per_sink(d_heads: jax.Array, sinks: jax.Array) -> jax.Array:
    """The gradient of each sink from that of a head's sinks together, `[n]`."""
    d_heads = d_heads[:, None] if sinks.shape[0] > 1 else d_heads.sum(keepdims=True)[:, None]
    logits = sinks.astype(d_heads.dtype)
    total = logsumexp(logits, axis=-1, keepdims=True)
    parts = jnp.exp(logits - jnp.where(total > -jnp.inf, total, 0.0))  # all -inf: no part, not NaN
    return (parts * d_heads).astype(sinks.dtype)
