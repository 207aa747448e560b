"""Named calls: the conformance suite, the tuner and the benchmark all read this list."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.common.paged import LAYOUTS
from ejkernel.kernels.ragged_page_attention_v3.config import RaggedPageAttentionv3Config
from ejkernel.ops.workload import Draw, Workload, normal, value

# New tokens and tokens in all: decoding, prefilling, empty, prefilling, prefilling the second part.
QUERIES, LENGTHS = (1, 9, 0, 3, 5), (13, 9, 0, 3, 22)


def cumulative(lengths: tuple[int, ...]) -> Draw:
    """[0, l1, l1 + l2, ...]."""
    return value(lambda: jnp.array([0, *np.cumsum(lengths)], jnp.int32))


def table(
    sequences: int, pages_per_sequence: int, pages: int, holes: tuple[tuple[int, int], ...] = ()
) -> Draw:
    """A table of different pages in no order, -1 in the `holes`."""
    entries = np.random.default_rng(0).permutation(pages)[: sequences * pages_per_sequence]
    entries = entries.reshape(sequences, pages_per_sequence).astype(np.int32)
    for hole in holes:
        entries[hole] = -1
    return value(lambda: jnp.array(entries))


def pages(count: int, size: int, kv_heads: int, head_dim: int, layout: str = "NHD") -> Draw:
    """Pages of normal numbers in this layout."""
    sizes = dict(zip("pckh", (count, size, kv_heads, head_dim), strict=True))
    return normal(*(sizes[letter] for letter in LAYOUTS[layout]))


def integers(*shape: int) -> Draw:
    """Every int8 there is."""
    return Draw(lambda key, dtype: jax.random.randint(key, shape, -128, 128, jnp.int8))


def ragged(
    queries: tuple[int, ...] = QUERIES,
    lengths: tuple[int, ...] = LENGTHS,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
    page_size: int = 4,
    padding: int = 0,
    holes: tuple[tuple[int, int], ...] = (),
    layout: str = "NHD",
) -> dict[str, Draw]:
    """A call whose table has an entry to spare in every sequence."""
    per_sequence = -(-max(lengths) // page_size) + 1
    count = len(lengths) * per_sequence + 2
    cache = (count, page_size, kv_heads)
    return {
        "query": normal(sum(queries) + padding, heads, head_dim),
        "key_pages": pages(*cache, head_dim, layout),
        "value_pages": pages(*cache, value_dim or head_dim, layout),
        "cu_seqlens_q": cumulative(queries),
        "cu_seqlens_k": cumulative(lengths),
        "page_indices": table(len(lengths), per_sequence, count, holes),
    }


def _served(
    name: str, queries: tuple[int, ...], lengths: tuple[int, ...], **shape: Any
) -> Workload:
    """A step of a server of a named model: what tuned tables know."""
    shape = {"heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 16} | shape
    return Workload(name, ragged(queries, lengths, **shape), frozenset({"tune"}))


def _spread(count: int, longest: int) -> tuple[int, ...]:
    """Contexts of all lengths, the longest first."""
    return tuple(longest * (count - i) // count for i in range(count))


_SERVED = (
    _served("llama3_8b_decode", (1,) * 64, _spread(64, 8192)),
    _served("llama3_8b_decode_long", (1,) * 8, _spread(8, 65536)),
    _served("llama3_8b_prefill", (2048,) * 2, (2048, 4096)),
    _served("llama3_8b_mixed", (1,) * 63 + (1024,), (*_spread(63, 8192), 1024)),
    _served("llama3_70b_shard_decode", (1,) * 64, _spread(64, 8192), heads=8, kv_heads=1),
    _served("qwen3_30b_a3b_decode", (1,) * 128, _spread(128, 4096), kv_heads=4),
    _served("gpt_oss_decode", (1,) * 64, _spread(64, 8192), heads=64, head_dim=64),
)

_SMALL = ragged()

WORKLOADS = (
    Workload("plain", _SMALL),
    Workload("one_head_for_all", ragged(kv_heads=1, head_dim=40, holes=((0, 1), (4, 0), (4, 5)))),
    Workload(
        "heads_of_their_own",
        ragged(kv_heads=4, head_dim=60, page_size=8) | {"softmax_aux": normal(3)},
    ),
    Workload("value_dim", ragged(head_dim=24, value_dim=80) | {"softmax_scale": 0.7}),
    Workload(
        "odd_lengths",
        ragged((63, 1), (63, 127), head_dim=96, page_size=16) | {"sliding_window": 50},
    ),
    Workload("decode", ragged((1,) * 3, (30, 1, 9), head_dim=192, page_size=1)).core(),
    Workload("more_queries_than_tokens", ragged((4, 2), (2, 5))),
    Workload("window", _SMALL | {"sliding_window": 5}),
    Workload(
        "sinks_heads",
        ragged(padding=7) | {"softmax_aux": normal(4, 2), "logits_soft_cap": 2.0},
    ),
    Workload("heads_first", ragged(layout="HND") | {"kv_layout": "HND"}),
    Workload("heads_before_pages", ragged(layout="HNPD", value_dim=8) | {"kv_layout": "HNPD"}),
    Workload("scales", _SMALL | {"k_scale": value(lambda: jnp.float32(0.3)), "v_scale": 1.5}),
    Workload(
        "integers",
        _SMALL
        | {
            "key_pages": integers(37, 4, 2, 16),
            "value_pages": integers(37, 4, 2, 16),
            "k_scale": value(lambda: jnp.array([0.01, 0.02], jnp.float32)),
            "v_scale": value(lambda: jnp.array([0.02, 0.01], jnp.float32)),
        },
    ).core(),
    Workload(
        "all_at_once",
        ragged(padding=3, layout="HND", value_dim=24, holes=((4, 2),))
        | {
            "softmax_aux": normal(4, 1),
            "sliding_window": 11,
            "logits_soft_cap": 3.0,
            "kv_layout": "HND",
            "k_scale": value(lambda: jnp.array([0.5, 1.5], jnp.float32)),
            "v_scale": value(lambda: jnp.array([2.0, 0.7], jnp.float32)),
        },
    ).core(),
    *_SERVED,
)

# Blocks small enough that the workloads above have several, full, partial and empty.
CONFIGS = (RaggedPageAttentionv3Config(num_kv_pages_per_block=2, num_queries_per_block=3),)
