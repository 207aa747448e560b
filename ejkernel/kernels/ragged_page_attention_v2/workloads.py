"""Named calls over combined pages; the mathematics is that of the next version, proven there."""

import jax.numpy as jnp

from ejkernel.kernels.ragged_page_attention_v2.config import RaggedPageAttentionv2Config
from ejkernel.kernels.ragged_page_attention_v3.workloads import (
    LENGTHS,
    QUERIES,
    integers,
    pages,
    ragged,
)
from ejkernel.ops.workload import Draw, Workload, normal, value


def _combined(
    head_dim: int = 16,
    kv_heads: int = 2,
    padding: int = 0,
    layout: str = "NHD",
    queries: tuple[int, ...] = QUERIES,
    lengths: tuple[int, ...] = LENGTHS,
    page_size: int = 4,
) -> dict[str, Draw | int]:
    call = ragged(
        queries, lengths, 4, kv_heads, head_dim, page_size=page_size, padding=padding, layout=layout
    )
    count = len(lengths) * (-(-max(lengths) // page_size) + 1) + 2
    return {
        "query": call["query"],
        "kv_pages": pages(count, page_size, 2 * kv_heads, head_dim, layout),
        "context_lens": value(lambda: jnp.array(lengths, jnp.int32)),
        "block_tables": call["page_indices"],
        "query_start_loc": call["cu_seqlens_q"],
        "num_seqs": len(lengths),
    }


WORKLOADS = (
    Workload("plain", _combined(60)),
    Workload("fewer_sequences", _combined(40, 4) | {"num_seqs": value(lambda: jnp.int32(4))}),
    Workload("heads_before_pages", _combined(192, layout="HNPD") | {"kv_layout": "HNPD"}),
    Workload(
        "odd_lengths",
        _combined(80, queries=(63, 1, 1), lengths=(63, 127, 1), page_size=16),
    ),
    Workload(
        "all_at_once",
        _combined(96, padding=3)
        | {
            "kv_layout": "HND",
            "softmax_aux": normal(4, 1),
            "sliding_window": 11,
            "logits_soft_cap": 3.0,
            "kv_pages": integers(37, 4, 4, 96),
            "k_scale": value(lambda: jnp.array([0.01, 0.02], jnp.float32)),
            "v_scale": 0.02,
        },
    ).core(),
)

CONFIGS = (RaggedPageAttentionv2Config(num_kv_pages_per_block=2, num_queries_per_block=3),)
