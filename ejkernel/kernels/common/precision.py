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
    # A CPU does not have the matmuls of every dtype; Mosaic lowers one with a single row, which it
    # takes for a matrix times a vector, in float32 alone. The products are the same.
    one_row = axes == (1, 1) and right.shape[0] == 1
    if settings.interpret() or one_row:
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return lax.dot_general(
        left,
        right,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=precision() if left.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
