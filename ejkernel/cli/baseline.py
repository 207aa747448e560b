"""An operation in plain JAX, and the functions that several of them share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Baseline:
    """One operation in plain JAX, and the call on which ours is compared with it."""

    tokens: int
    call: str  # the call in words
    description: str  # what plain JAX does
    arrays: Callable[[int], dict[str, np.ndarray]]  # of the number of tokens, in float32
    ours: Callable[..., Any]  # of the arrays, by name
    plain: Callable[..., Any]  # the same


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal numbers in float32, drawn without compiling anything."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
) -> jax.Array:
    """`jax.nn.dot_product_attention`; for float64 arrays with the softmax in float64 as well."""
    if query.dtype != jnp.float64:
        return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=is_causal)
    batch, queries, heads, head_dim = query.shape
    grouped = query.reshape(batch, queries, key.shape[2], -1, head_dim)
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, key) * head_dim**-0.5
    visible = jnp.ones((1, 1, queries, key.shape[1]), bool) if mask is None else mask
    if is_causal:
        visible &= jnp.arange(queries)[:, None] >= jnp.arange(key.shape[1])
    # The masks have one head: it stands for the key heads, and broadcasts over their groups.
    weights = jax.nn.softmax(jnp.where(visible[:, :, None], logits, -jnp.inf), axis=-1)
    return jnp.einsum("bkgts,bskv->btkgv", weights, value).reshape(batch, queries, heads, -1)


def scan_tokens(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    gate: jax.Array,
    state: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gated linear attention one token at a time; returns the output and the last state."""
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    batch, _, heads, head_dim = key.shape
    if state is None:
        state = jnp.zeros((batch, heads, head_dim, value.shape[-1]), dtype)

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        query, key, value, gate = (x.astype(dtype) for x in token)
        state = jnp.exp(gate)[..., None] * state + key[..., None] * value[..., None, :]
        return state, jnp.einsum("bhk,bhkv->bhv", query, state)

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (query * head_dim**-0.5, key, value, gate))
    state, out = jax.lax.scan(step, state.astype(dtype), tokens)
    return jnp.moveaxis(out, 0, 1).astype(query.dtype), state
