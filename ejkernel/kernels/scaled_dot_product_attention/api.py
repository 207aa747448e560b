"""The call: that of flash attention, word for word."""

from ejkernel.kernels.flash_attention.api import attend
from ejkernel.kernels.scaled_dot_product_attention import OP
from ejkernel.kernels.scaled_dot_product_attention.config import ScaledDotProductAttentionConfig
from ejkernel.ops.module import Module, public

scaled_dot_product_attention = public(
    attend,
    OP,
    __name__,
    doc="""Softmax attention: the same call, meaning and implementations as `flash_attention`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import scaled_dot_product_attention
    >>> x = jnp.ones((2, 16, 4, 8))
    >>> padding = jnp.arange(16)[None, :] < jnp.array([[16], [9]])
    >>> scaled_dot_product_attention(x, x, x, attention_mask=padding, causal=True).shape
    (2, 16, 4, 8)
    """,
)


class ScaledDotProductAttention(Module):
    """Scaled dot-product attention as an object; see `scaled_dot_product_attention`."""

    function = scaled_dot_product_attention
    config = ScaledDotProductAttentionConfig
