"""Arguments that the softmax attentions share, in the form their kernels take."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ejkernel.kernels.common.arguments import as_array, static_number
from ejkernel.kernels.common.masking import Extent


def scale_of_logits(op: str, scale: object, head_dim: int) -> float:
    """The factor of the logits, by default one over the root of the head dim."""
    return head_dim**-0.5 if scale is None else static_number(op, "softmax_scale", scale)


def bound_of_logits(op: str, soft_cap: object) -> float | None:
    """The soft cap, a positive number if there is one."""
    if soft_cap is None:
        return None
    number = static_number(op, "logits_soft_cap", soft_cap)
    if not number > 0:
        raise ValueError(f"{op}: logits_soft_cap must be positive, got {soft_cap}.")
    return number


def bias_of_rank_four(op: str, bias: ArrayLike | None, extent: Extent) -> jax.Array | None:
    """The bias as [#b, #n, #t, #s], at its own shape."""
    if bias is None:
        return None
    bias = as_array(op, "bias", bias)
    shape = (1,) * (4 - bias.ndim) + bias.shape
    if (
        bias.ndim < 2
        or len(shape) != 4
        or not jnp.issubdtype(bias.dtype, jnp.floating)
        or any(size not in (1, full) for size, full in zip(shape, extent, strict=True))
    ):
        raise ValueError(
            f"{op}: bias must be floating point and broadcast to [batch, heads, queries, keys] = "
            f"{tuple(extent)}, got {bias.dtype}{list(bias.shape)}."
        )
    return bias if bias.ndim == 4 else bias.reshape(shape)


def sinks_per_head(op: str, sinks: ArrayLike | None, heads: int) -> jax.Array | None:
    """The sinks as [1 or heads, sinks]."""
    if sinks is None:
        return None
    sinks = as_array(op, "softmax_aux", sinks)
    if (
        sinks.ndim not in (1, 2)
        or (sinks.ndim == 2 and sinks.shape[0] != heads)
        or sinks.size == 0
        or not jnp.issubdtype(sinks.dtype, jnp.floating)
    ):
        raise ValueError(
            f"{op}: softmax_aux must be floating point [sinks] or [{heads}, sinks], "
            f"got {sinks.dtype}{list(sinks.shape)}."
        )
    return sinks[None] if sinks.ndim == 1 else sinks
