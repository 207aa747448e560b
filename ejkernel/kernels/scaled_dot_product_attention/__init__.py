"""Scaled dot-product attention: flash attention under the name that users look for."""

from ejkernel.kernels.flash_attention import OP as FLASH_ATTENTION
from ejkernel.kernels.scaled_dot_product_attention.config import ScaledDotProductAttentionConfig

OP = FLASH_ATTENTION.renamed("scaled_dot_product_attention", config=ScaledDotProductAttentionConfig)
