"""Attention of decoding sequences over a cache of pages: ragged attention with equal lengths."""

from ejkernel.kernels.page_attention.config import PageAttentionConfig
from ejkernel.kernels.ragged_page_attention_v3 import OP as RAGGED_PAGE_ATTENTION

OP = RAGGED_PAGE_ATTENTION.renamed(
    "page_attention",
    config=PageAttentionConfig,
    operands=("query", "key_pages", "value_pages", "kv_lens", "page_indices", "sinks"),
    shardable=frozenset("bnk"),
    sharding_hints={"p": RAGGED_PAGE_ATTENTION.sharding_hints["p"]},
)
