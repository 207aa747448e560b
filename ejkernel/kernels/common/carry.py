"""What a loop may begin with."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def zeros(shape: tuple[int, ...], dtype: Any, *trees: Any) -> jax.Array:
    """Zeros that a loop over these arrays may carry.

    Inside `shard_map` a carried value must vary from the beginning over every mesh axis over which
    one of the arrays does; here it does, and holds none of their data.
    """
    anchor = sum(lax.full_like(x, 0, shape=(), dtype=jnp.int32) for x in jax.tree.leaves(trees))
    return lax.full_like(anchor, 0, shape=shape, dtype=dtype)
