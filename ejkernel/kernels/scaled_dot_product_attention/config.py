"""The configuration class of scaled dot-product attention."""

import dataclasses

from ejkernel.kernels.flash_attention.config import FlashAttentionConfig


@dataclasses.dataclass(frozen=True)
class ScaledDotProductAttentionConfig(FlashAttentionConfig):
    """The same fields as flash attention's."""
