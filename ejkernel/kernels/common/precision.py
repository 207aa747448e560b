"""How exactly to multiply: float32 in full, unless the user of JAX has asked for less."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import settings


def precision() -> lax.Precision | None:
    """What to hand to a matmul; None leaves it to what the user has asked for."""
    asked = getattr(jax.config, "jax_default_matmul_precision", None)
    return lax.Precision.HIGHEST if asked is None else None


def matmul(equation: str, left: jax.Array, right: jax.Array, dtype: Any = None) -> jax.Array:
    """`einsum` at that precision, accumulated in `dtype`."""
    return jnp.einsum(equation, left, right, precision=precision(), preferred_element_type=dtype)


def tile_product(left: jax.Array, right: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """The matmul of two tiles inside a kernel, over one axis of each, accumulated in float32."""
    if settings.interpret():  # the same products, in a dtype whose every matmul a CPU has
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return lax.dot_general(
        left,
        right,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=precision() if left.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
