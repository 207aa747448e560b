"""Constants that a loop may begin with."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike


def anchor(*trees: Any) -> jax.Array:
    """A zero that varies over every mesh axis over which one of the arrays varies.

    Inside `shard_map` a carried value must vary from the beginning over those axes. The anchor
    holds none of the arrays' data.
    """
    leaves = (lax.full_like(x, 0, shape=(), dtype=jnp.int32) for x in jax.tree.leaves(trees))
    return jnp.asarray(sum(leaves))


def full(
    anchor: jax.Array, shape: tuple[int, ...], value: ArrayLike, dtype: DTypeLike
) -> jax.Array:
    """A constant array that a loop over the arrays of the anchor may carry."""
    return lax.full_like(anchor, value, shape=shape, dtype=dtype)


def zeros(shape: tuple[int, ...], dtype: DTypeLike, *trees: Any) -> jax.Array:
    """Zeros that a loop over these arrays may carry."""
    return full(anchor(*trees), shape, 0, dtype)
