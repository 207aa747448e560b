"""Tiles in the registers of a warpgroup, in the layout of WGMMA accumulators."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ejkernel.kernels.common.mosaic_gpu.versions import plgpu


def row_layout() -> Any:
    """The layout of one number for each row of a tile."""
    return plgpu.Layout.WGMMA.reduce(1)


def column_layout() -> Any:
    """The layout of one number for each column of a tile."""
    return plgpu.Layout.WGMMA.reduce(0)


def full(shape: tuple[int, ...], value: float, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """A constant tile [rows, columns], or a constant for each row [rows]."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else row_layout()
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def broadcast_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x[:, None]`, one number for each row, broadcast to all columns."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (0,)), plgpu.Layout.WGMMA)


def broadcast_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x[None, :]`, one number for each column, broadcast to all rows."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (1,)), plgpu.Layout.WGMMA)


def broadcast_scalar(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One number for all elements, in the layout of other tiles: branches must agree in it."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, ()), plgpu.Layout.WGMMA)


def column_index(shape: tuple[int, ...]) -> jax.Array:
    """The index of each element's column."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)


def row_index(rows: int) -> jax.Array:
    """The index of each row, [rows]."""
    return plgpu.layout_cast(lax.iota(jnp.int32, rows), row_layout())


def reduce_rows(
    x: jax.Array,
    combine: Callable[[jax.Array, jax.Array], jax.Array],
    reduce: Callable[..., jax.Array],
) -> jax.Array:
    """Each row's sum or maximum: halves first, so that no long chain of instructions builds up."""
    width = x.shape[1]
    while width % 16 == 0:
        width //= 2
        x = combine(x[:, :width], x[:, width:])
    return reduce(x, axis=1)
