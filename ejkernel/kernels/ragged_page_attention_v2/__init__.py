"""Ragged attention over pages that hold keys and values together."""

from ejkernel.kernels.ragged_page_attention_v2.config import RaggedPageAttentionv2Config
from ejkernel.kernels.ragged_page_attention_v3 import OP as RAGGED_PAGE_ATTENTION

OP = RAGGED_PAGE_ATTENTION.renamed(
    "ragged_page_attention_v2",
    config=RaggedPageAttentionv2Config,
    operands=(
        "query",
        "key_pages",
        "context_lens",
        "block_tables",
        "query_start_loc",
        "num_seqs",
        "sinks",
    ),
    sharding_hints={"t": RAGGED_PAGE_ATTENTION.sharding_hints["t"]},
)
