"""Sequences of the devices of a mesh axis, one after the other on every device."""

import functools

import jax
import jax.numpy as jnp
from jax import lax


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def gathered(x: jax.Array, axis_name: str) -> jax.Array:
    """The tokens `[b, t, ...]` of all devices; gradients are summed in float32 and scattered."""
    return lax.all_gather(x, axis_name, axis=1, tiled=True)


@gathered.defjvp
def _(
    axis_name: str, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (d_x,) = primals, tangents
    wide = d_x.astype(jnp.promote_types(d_x.dtype, jnp.float32))  # the transpose is the sum
    d_all = lax.all_gather(wide, axis_name, axis=1, tiled=True)
    return gathered(x, axis_name), d_all.astype(d_x.dtype)
