"""The precision of matmuls: float32 in full, unless the user of JAX has requested less."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ejkernel import settings


def precision() -> lax.Precision | None:
    """The precision to request of a matmul; None where the user has set a default of their own."""
    asked = getattr(jax.config, "jax_default_matmul_precision", None)
    return lax.Precision.HIGHEST if asked is None else None


def matmul(
    equation: str, left: jax.Array, right: jax.Array, dtype: DTypeLike | None = None
) -> jax.Array:
    """`einsum` at that precision, accumulated in `dtype`."""
    return jnp.einsum(equation, left, right, precision=precision(), preferred_element_type=dtype)


def tile_product(left: jax.Array, right: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """The matmul of two tiles inside a kernel, over one axis of each, accumulated in float32."""
    if settings.interpret():  # a CPU does not have the matmuls of every dtype
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return lax.dot_general(
        left,
        right,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=precision() if left.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
