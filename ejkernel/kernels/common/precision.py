"""How exactly to multiply: float32 in full, unless the user of JAX has asked for less."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def precision() -> lax.Precision | None:
    """What to hand to a matmul; None leaves it to what the user has asked for."""
    asked = getattr(jax.config, "jax_default_matmul_precision", None)
    return lax.Precision.HIGHEST if asked is None else None


def matmul(equation: str, left: jax.Array, right: jax.Array, dtype: Any = None) -> jax.Array:
    """`einsum` at that precision, accumulated in `dtype`."""
    return jnp.einsum(equation, left, right, precision=precision(), preferred_element_type=dtype)
