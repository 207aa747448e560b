"""The call: that of flash attention, word for word."""

from typing import ClassVar, Final, Literal, overload

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike

from ejkernel.kernels.flash_attention.api import (
    MaskArguments,
    Operands,
    SoftmaxArguments,
    attend,
)
from ejkernel.kernels.scaled_dot_product_attention import OP
from ejkernel.kernels.scaled_dot_product_attention.config import ScaledDotProductAttentionConfig
from ejkernel.ops.executor import Request
from ejkernel.ops.module import BoundFunction, Module, operation
from ejkernel.types.arguments import SlidingWindow
from ejkernel.types.mask import MaskInfo


@overload
def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: ArrayLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_offset: int | ArrayLike = 0,
    sliding_window: SlidingWindow | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | ArrayLike | None = None,
    return_lse: Literal[False] = False,
    platform: str | None = None,
    cfg: ScaledDotProductAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array: ...


@overload
def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: ArrayLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_offset: int | ArrayLike = 0,
    sliding_window: SlidingWindow | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | ArrayLike | None = None,
    return_lse: Literal[True],
    platform: str | None = None,
    cfg: ScaledDotProductAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> tuple[jax.Array, jax.Array]: ...


@operation
def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None,
    softmax_aux: ArrayLike | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: ArrayLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_offset: int | ArrayLike = 0,
    sliding_window: SlidingWindow | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | ArrayLike | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: ScaledDotProductAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention: the same call, meaning and implementations as `flash_attention`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import scaled_dot_product_attention
    >>> x = jnp.ones((2, 16, 4, 8))
    >>> padding = jnp.arange(16)[None, :] < jnp.array([[16], [9]])
    >>> scaled_dot_product_attention(x, x, x, attention_mask=padding, causal=True).shape
    (2, 16, 4, 8)
    """
    return attend(
        OP,
        Operands(query, key, value, bias, softmax_aux, cum_seqlens_q, cum_seqlens_k),
        MaskArguments(mask_info, attention_mask, causal, causal_offset, sliding_window),
        SoftmaxArguments(softmax_scale, logits_soft_cap, dropout_prob, dropout_seed),
        Request(platform, cfg, mesh, in_specs, out_specs),
        return_lse,
    )


class ScaledDotProductAttention(Module):
    """Scaled dot-product attention as an object; see `scaled_dot_product_attention`."""

    __call__: Final = BoundFunction(scaled_dot_product_attention)
    config: ClassVar[type[ScaledDotProductAttentionConfig]] = ScaledDotProductAttentionConfig
