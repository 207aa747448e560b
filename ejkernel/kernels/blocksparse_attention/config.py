"""The configuration class of block-sparse attention."""

import dataclasses

from ejkernel.kernels.flash_attention.config import FlashAttentionConfig


@dataclasses.dataclass(frozen=True)
class BlockSparseAttentionConfig(FlashAttentionConfig):
    """The same fields as flash attention's: the blocks of the kernel, not those of the mask."""
