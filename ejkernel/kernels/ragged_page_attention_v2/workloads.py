"""Named calls over combined pages; the mathematics is that of the next version, proven there."""

import jax.numpy as jnp

from ejkernel.kernels.ragged_page_attention_v2.config import RaggedPageAttentionv2Config
from ejkernel.kernels.ragged_page_attention_v3.workloads import (
    LENGTHS,
    QUERIES,
    cumulative,
    integers,
    pages,
    ragged,
    table,
)
from ejkernel.ops.workload import Draw, Workload, normal, value


def _combined(
    head_dim: int = 16, kv_heads: int = 2, padding: int = 0, layout: str = "NHD"
) -> dict[str, Draw | int]:
    return {
        "query": ragged(head_dim=head_dim, padding=padding)["query"],
        "kv_pages": pages(37, 4, 2 * kv_heads, head_dim, layout),
        "context_lens": value(lambda: jnp.array(LENGTHS, jnp.int32)),
        "block_tables": table(5, 7, 37),
        "query_start_loc": cumulative(QUERIES),
        "num_seqs": 5,
    }


WORKLOADS = (
    Workload("plain", _combined()),
    Workload("fewer_sequences", _combined(40, 4) | {"num_seqs": value(lambda: jnp.int32(4))}),
    Workload("heads_before_pages", _combined(layout="HNPD") | {"kv_layout": "HNPD"}),
    Workload(
        "all_at_once",
        _combined(padding=3)
        | {
            "kv_layout": "HND",
            "softmax_aux": normal(4, 1),
            "sliding_window": 11,
            "logits_soft_cap": 3.0,
            "kv_pages": integers(37, 4, 4, 16),
            "k_scale": value(lambda: jnp.array([0.01, 0.02], jnp.float32)),
            "v_scale": 0.02,
        },
    ).core(),
)

CONFIGS = (RaggedPageAttentionv2Config(num_kv_pages_per_block=2, num_queries_per_block=3),)
