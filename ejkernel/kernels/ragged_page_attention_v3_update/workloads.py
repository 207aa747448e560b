"""Named calls that write the cache: the conformance suite and the benchmark read this list."""

import jax.numpy as jnp

from ejkernel.kernels.ragged_page_attention_v3.workloads import ragged
from ejkernel.kernels.ragged_page_attention_v3_update.config import (
    RaggedPageAttentionv3UpdateConfig,
)
from ejkernel.ops.workload import Draw, Workload, normal, value


def _update(
    queries: tuple[int, ...] = (1, 9, 0, 3, 5),
    lengths: tuple[int, ...] = (13, 9, 0, 3, 22),
    kv_heads: int = 4,
    head_dim: int = 16,
    value_dim: int | None = None,
    padding: int = 0,
    **shape,
) -> dict[str, Draw]:
    call = ragged(queries, lengths, 8, kv_heads, head_dim, value_dim, padding=padding, **shape)
    tokens = sum(queries) + padding
    return {
        "query": call.pop("query"),
        "key": normal(tokens, kv_heads, head_dim),
        "value": normal(tokens, kv_heads, value_dim or head_dim),
        **call,
    }


WORKLOADS = (
    Workload("plain", _update(head_dim=60)),
    Workload("decode", _update((1,) * 4, (7, 1, 31, 16), head_dim=40, value_dim=24)),
    Workload("odd_lengths", _update((63, 1, 1), (63, 127, 1), page_size=16)),
    Workload("no_page", _update(head_dim=80, padding=4, holes=((0, 3), (4, 0), (4, 5)))),
    Workload("heads_first", _update(head_dim=96, layout="HND") | {"kv_layout": "HND"}),
    Workload("heads_before_pages", _update(head_dim=192, layout="HNPD") | {"kv_layout": "HNPD"}),
    Workload(
        "all_at_once",
        _update(padding=2)
        | {
            "softmax_aux": normal(8, 1),
            "sliding_window": 11,
            "logits_soft_cap": 3.0,
            "k_scale": value(lambda: jnp.array([0.5, 1.5, 1.0, 0.8], jnp.float32)),
            "v_scale": 0.7,
        },
    ).core(),
)

CONFIGS = (RaggedPageAttentionv3UpdateConfig(num_kv_pages_per_block=2, num_queries_per_block=3),)
