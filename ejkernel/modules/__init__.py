"""The public operations. Every name is defined in `ejkernel.kernels.<operation>.api`."""

from ejkernel.kernels.flash_attention.api import FlashAttention as FlashAttention
from ejkernel.kernels.flash_attention.api import flash_attention as flash_attention
from ejkernel.kernels.flash_attention.config import FlashAttentionConfig as FlashAttentionConfig
from ejkernel.kernels.native_sparse_attention.api import (
    NativeSparseAttention as NativeSparseAttention,
)
from ejkernel.kernels.native_sparse_attention.api import (
    native_sparse_attention as native_sparse_attention,
)
from ejkernel.kernels.native_sparse_attention.config import (
    NativeSparseAttentionConfig as NativeSparseAttentionConfig,
)
from ejkernel.kernels.scaled_dot_product_attention.api import (
    ScaledDotProductAttention as ScaledDotProductAttention,
)
from ejkernel.kernels.scaled_dot_product_attention.api import (
    scaled_dot_product_attention as scaled_dot_product_attention,
)
from ejkernel.kernels.scaled_dot_product_attention.config import (
    ScaledDotProductAttentionConfig as ScaledDotProductAttentionConfig,
)
