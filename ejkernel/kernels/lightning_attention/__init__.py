"""Lightning attention: gated linear attention in which every head has a decay of its own."""

from ejkernel.kernels.gla_attention import OP as GLA_ATTENTION
from ejkernel.kernels.lightning_attention.config import LightningAttentionConfig

OP = GLA_ATTENTION.renamed(
    "lightning_attention",
    config=LightningAttentionConfig,
    operands=("query", "key", "value"),
)
