"""The public operations. Every name is defined in `ejkernel.kernels.<operation>.api`."""

from ejkernel.kernels.blocksparse_attention.api import (
    BlockSparseAttention as BlockSparseAttention,
)
from ejkernel.kernels.blocksparse_attention.api import (
    blocksparse_attention as blocksparse_attention,
)
from ejkernel.kernels.blocksparse_attention.config import (
    BlockSparseAttentionConfig as BlockSparseAttentionConfig,
)
from ejkernel.kernels.flash_attention.api import FlashAttention as FlashAttention
from ejkernel.kernels.flash_attention.api import flash_attention as flash_attention
from ejkernel.kernels.flash_attention.config import FlashAttentionConfig as FlashAttentionConfig
from ejkernel.kernels.gla_attention.api import GLAttention as GLAttention
from ejkernel.kernels.gla_attention.api import gla_attention as gla_attention
from ejkernel.kernels.gla_attention.config import GLAttentionConfig as GLAttentionConfig
from ejkernel.kernels.grouped_matmul.api import GroupedMatmul as GroupedMatmul
from ejkernel.kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig as GroupedMatmulConfig
from ejkernel.kernels.lightning_attention.api import LightningAttention as LightningAttention
from ejkernel.kernels.lightning_attention.api import lightning_attention as lightning_attention
from ejkernel.kernels.lightning_attention.config import (
    LightningAttentionConfig as LightningAttentionConfig,
)
from ejkernel.kernels.mean_pooling.api import MeanPooling as MeanPooling
from ejkernel.kernels.mean_pooling.api import mean_pooling as mean_pooling
from ejkernel.kernels.mean_pooling.config import MeanPoolingConfig as MeanPoolingConfig
from ejkernel.kernels.native_sparse_attention.api import (
    NativeSparseAttention as NativeSparseAttention,
)
from ejkernel.kernels.native_sparse_attention.api import (
    native_sparse_attention as native_sparse_attention,
)
from ejkernel.kernels.native_sparse_attention.config import (
    NativeSparseAttentionConfig as NativeSparseAttentionConfig,
)
from ejkernel.kernels.page_attention.api import PageAttention as PageAttention
from ejkernel.kernels.page_attention.api import page_attention as page_attention
from ejkernel.kernels.page_attention.config import PageAttentionConfig as PageAttentionConfig
from ejkernel.kernels.ragged_page_attention_v2.api import (
    RaggedPageAttentionv2 as RaggedPageAttentionv2,
)
from ejkernel.kernels.ragged_page_attention_v2.api import (
    ragged_page_attention_v2 as ragged_page_attention_v2,
)
from ejkernel.kernels.ragged_page_attention_v2.config import (
    RaggedPageAttentionv2Config as RaggedPageAttentionv2Config,
)
from ejkernel.kernels.ragged_page_attention_v3.api import (
    RaggedPageAttentionv3 as RaggedPageAttentionv3,
)
from ejkernel.kernels.ragged_page_attention_v3.api import (
    ragged_page_attention_v3 as ragged_page_attention_v3,
)
from ejkernel.kernels.ragged_page_attention_v3.config import (
    RaggedPageAttentionv3Config as RaggedPageAttentionv3Config,
)
from ejkernel.kernels.ragged_page_attention_v3_update.api import (
    RaggedPageAttentionv3Update as RaggedPageAttentionv3Update,
)
from ejkernel.kernels.ragged_page_attention_v3_update.api import (
    ragged_page_attention_v3_update as ragged_page_attention_v3_update,
)
from ejkernel.kernels.ragged_page_attention_v3_update.config import (
    RaggedPageAttentionv3UpdateConfig as RaggedPageAttentionv3UpdateConfig,
)
from ejkernel.kernels.recurrent_attention.api import RecurrentAttention as RecurrentAttention
from ejkernel.kernels.recurrent_attention.api import recurrent_attention as recurrent_attention
from ejkernel.kernels.recurrent_attention.config import (
    RecurrentAttentionConfig as RecurrentAttentionConfig,
)
from ejkernel.kernels.ring_attention.api import RingAttention as RingAttention
from ejkernel.kernels.ring_attention.api import ring_attention as ring_attention
from ejkernel.kernels.ring_attention.config import RingAttentionConfig as RingAttentionConfig
from ejkernel.kernels.scaled_dot_product_attention.api import (
    ScaledDotProductAttention as ScaledDotProductAttention,
)
from ejkernel.kernels.scaled_dot_product_attention.api import (
    scaled_dot_product_attention as scaled_dot_product_attention,
)
from ejkernel.kernels.scaled_dot_product_attention.config import (
    ScaledDotProductAttentionConfig as ScaledDotProductAttentionConfig,
)
