"""Recurrent attention: gated linear attention as a stream, which hands its state on."""

from ejkernel.kernels.gla_attention import OP as GLA_ATTENTION
from ejkernel.kernels.recurrent_attention.config import RecurrentAttentionConfig

OP = GLA_ATTENTION.renamed("recurrent_attention", config=RecurrentAttentionConfig)
