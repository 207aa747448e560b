"""`jax.nn.dot_product_attention`, computed by `flash_attention`."""

import reprlib
from collections.abc import Sequence
from typing import Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from ejkernel.kernels.common.arguments import as_array, integer_array, static_number
from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo
from ejkernel.types.rules import Everything, KeyLength, QueryLength, Rule

_NAME = "dot_product_attention"
_PLATFORMS = {"xla": "xla", "cudnn": "cuda"}


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: Literal[False] = False,
    platform: str | None = None,
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: Literal[True],
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
    platform: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`jax.nn.dot_product_attention` in linear memory, computed by `flash_attention`.

    Arguments and results are those of `jax.nn.dot_product_attention`, with one difference: a row
    that sees no key gives 0 and a residual of -inf, where JAX gives the mean of all values.

    Args:
        query: `[batch, queries, heads, head_dim]`, or without the batch axis.
        key: `[batch, keys, kv_heads, head_dim]`, or without the batch axis.
        value: `[batch, keys, kv_heads, value_dim]`, or without the batch axis.
        bias: added to the logits, broadcastable to `[batch, heads, queries, keys]`.
        mask: boolean, True where a key may be seen, broadcastable to the same shape.
        scale: of the logits; by default `head_dim ** -0.5`. A traced one, for example a learned
            temperature, is multiplied into the query.
        is_causal: query `q` sees keys `k <= q`.
        query_seq_lengths: how many queries of each batch row exist, `[batch]`; the others give 0.
        key_value_seq_lengths: how many keys of each batch row exist, `[batch]`.
        local_window_size: `w` or `(left, right)`: `-left <= k - q <= right`.
        implementation: "xla" and "cudnn" choose the platforms "xla" and "cuda".
        return_residual: also return the log-sum-exp.
        platform: as in `flash_attention`; not together with `implementation`.

    Returns:
        The output, shaped like the query with the value's last axis; with `return_residual` also
        the log-sum-exp `[batch, queries, heads]` in the dtype of the key.

    Raises:
        ValueError: the arguments do not fit each other.
        UnsupportedError: the requested platform does not support the call.

    >>> import jax.numpy as jnp
    >>> import ejkernel
    >>> x = jnp.ones((2, 128, 8, 64))
    >>> ejkernel.dot_product_attention(x, x, x, is_causal=True).shape
    (2, 128, 8, 64)
    """
    if not isinstance(return_residual, bool | np.bool_):
        raise ValueError(
            f"{_NAME}: return_residual must be True or False, got {reprlib.repr(return_residual)}."
        )
    query, key, value = (
        _array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    has_batch = query.ndim == 4
    if query.ndim not in (3, 4) or not query.ndim == key.ndim == value.ndim:
        raise ValueError(
            f"{_NAME}: query, key and value must all have 3 or all have 4 axes, "
            f"got {query.shape}, {key.shape} and {value.shape}."
        )
    if not has_batch:
        query, key, value = query[None], key[None], value[None]
    query, softmax_scale = _scaled(query, scale)
    out, lse = flash_attention(
        query,
        key,
        value,
        _rank_four("bias", bias),
        mask_info=_lengths(query, key, query_seq_lengths, key_value_seq_lengths),
        attention_mask=_boolean(_rank_four("mask", mask)),
        softmax_scale=softmax_scale,
        causal=is_causal,
        sliding_window=_window(local_window_size),
        return_lse=True,
        platform=_platform(implementation, platform),
    )
    lse = jax.lax.stop_gradient(jnp.swapaxes(lse, 1, 2).astype(key.dtype))
    if not has_batch:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


def _array(name: str, x: ArrayLike) -> jax.Array:
    return as_array(_NAME, name, x)


def _rank_four(name: str, x: ArrayLike | None) -> jax.Array | None:
    """`x` with leading axes of size 1."""
    if x is None:
        return None
    x = _array(name, x)
    if x.ndim > 4:
        raise ValueError(f"{_NAME}: {name} must have at most 4 axes, got {x.shape}.")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _boolean(mask: jax.Array | None) -> jax.Array | None:
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(
            f"{_NAME}: mask must be boolean, got {mask.dtype}; what is added to the logits is "
            "bias=, and .astype(bool) makes a mask of 0 and 1 boolean."
        )
    return mask


def _scaled(query: jax.Array, scale: float | ArrayLike | None) -> tuple[jax.Array, float | None]:
    """The query and the scale of its logits, which must be known when the call is traced."""
    if scale is None:
        return query, None
    if isinstance(scale, str):
        raise ValueError(f"{_NAME}: scale must be a number, got {scale!r}.")
    if isinstance(scale, jax.Array | np.ndarray | list | tuple) and (shape := np.shape(scale)):
        raise ValueError(f"{_NAME}: scale must be one number, got an array of shape {shape}.")
    if not isinstance(scale, Tracer):
        return query, static_number(_NAME, "scale", scale)
    product = query.astype(jnp.promote_types(query.dtype, jnp.float32)) * scale
    return product.astype(query.dtype), 1.0


def _window(size: int | Sequence[int] | None) -> int | tuple[int, int] | None:
    if not isinstance(size, Sequence):
        return size
    if len(size) != 2:
        raise ValueError(
            f"{_NAME}: local_window_size must be one number or (left, right), got {size}."
        )
    return size[0], size[1]


def _lengths(
    query: jax.Array, key: jax.Array, queries: ArrayLike | None, keys: ArrayLike | None
) -> MaskInfo | None:
    """The mask of what exists of each batch row."""
    if queries is None and keys is None:
        return None
    batch, q_len, kv_len = query.shape[0], query.shape[1], key.shape[1]

    def checked(name: str, lengths: ArrayLike) -> jax.Array:
        lengths = integer_array(_NAME, name, lengths)
        if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise ValueError(
                f"{_NAME}: {name} must be integers of shape ({batch},), one for each batch row, "
                f"got {lengths.dtype}{list(lengths.shape)}."
            )
        return lengths

    rule: Rule = Everything()
    if queries is not None:
        rule &= QueryLength(checked("query_seq_lengths", queries))
    if keys is not None:
        rule &= KeyLength(checked("key_value_seq_lengths", keys))
    return MaskInfo(rule, q_len, kv_len)


def _platform(implementation: str | None, platform: str | None) -> str | None:
    if implementation is None:
        return platform
    if platform is not None:
        raise ValueError(f"{_NAME}: give implementation= or platform=, not both.")
    if not isinstance(implementation, str) or implementation not in _PLATFORMS:
        known = ", ".join(map(repr, _PLATFORMS))
        raise ValueError(
            f"{_NAME}: implementation must be None, {known}, got {implementation!r}; "
            "platform= takes any platform."
        )
    return _PLATFORMS[implementation]
