"""Named calls of decoding sequences; the mathematics is that of the ragged op, proven there."""

import jax.numpy as jnp

from ejkernel.kernels.page_attention.config import PageAttentionConfig
from ejkernel.kernels.ragged_page_attention_v3.workloads import integers, pages, table
from ejkernel.ops.workload import Draw, Workload, normal, value


def _decode(
    lengths: tuple[int, ...] = (17, 0, 30, 1),
    queries: int | None = 1,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 4,
    holes: tuple = (),
    layout: str = "NHD",
) -> dict[str, Draw]:
    batch, per_sequence = len(lengths), -(-max(lengths) // page_size) + 1
    count = batch * per_sequence + 1
    middle = () if queries is None else (queries,)
    return {
        "query": normal(batch, *middle, heads, head_dim),
        "key_cache": pages(count, page_size, kv_heads, head_dim, layout),
        "value_cache": pages(count, page_size, kv_heads, head_dim, layout),
        "context_lens": value(lambda: jnp.array(lengths, jnp.int32)),
        "block_tables": table(batch, per_sequence, count, holes),
    }


_SMALL = _decode()

WORKLOADS = (
    Workload("plain", _SMALL),
    Workload("without_the_axis_of_queries", _decode(queries=None, head_dim=40)),
    Workload("several_queries", _decode(queries=3, head_dim=60) | {"sliding_window": 6}).core(),
    Workload(
        "odd_lengths", _decode((1, 63, 127), head_dim=80, page_size=16, holes=((1, 0), (2, 4)))
    ),
    Workload("heads_first", _decode(head_dim=192, layout="HND") | {"kv_layout": "HND"}),
    Workload(
        "all_at_once",
        _decode(heads=8, head_dim=96)
        | {
            "key_cache": integers(37, 4, 2, 96),
            "value_cache": integers(37, 4, 2, 96),
            "softmax_aux": normal(8, 2),
            "sliding_window": 11,
            "logits_soft_cap": 3.0,
            "k_scale": value(lambda: jnp.array([0.01, 0.02], jnp.float32)),
            "v_scale": 0.02,
        },
    ).core(),
)

CONFIGS = (PageAttentionConfig(pages_per_compute_block=2),)
