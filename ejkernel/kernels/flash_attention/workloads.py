"""Named calls: the conformance suite, the tuner and the benchmark all read this list."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.flash_attention.config import FlashAttentionConfig
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.workload import Draw, Workload, boolean, normal, value
from ejkernel.types.mask import MaskInfo


def _attention(
    batch: int = 2,
    queries: int = 48,
    keys: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
) -> dict[str, Draw]:
    keys = queries if keys is None else keys
    return {
        "query": normal(batch, queries, heads, head_dim),
        "key": normal(batch, keys, kv_heads, head_dim),
        "value": normal(batch, keys, kv_heads, value_dim or head_dim),
    }


def _segments(*rows: tuple[int, ...]) -> MaskInfo:
    """A mask from segment lengths; a negative length is padding."""
    ids = [
        [(-1 if length < 0 else i) for i, length in enumerate(row) for _ in range(abs(length))]
        for row in rows
    ]
    return MaskInfo.from_segments(jnp.array(ids))


def _mask(change: Callable[[MaskInfo], MaskInfo] = lambda mask: mask) -> Draw:
    """A mask of 2 x 48 x 48 tokens in three segments and some padding, changed."""
    return value(lambda: change(_segments((20, 9, 19), (30, 10, -8))))


def _named(
    name: str,
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    **options: Any,
) -> Workload:
    """A call of a model in training: causal unless said otherwise."""
    shape = _attention(batch, length, None, heads, kv_heads, head_dim)
    return Workload(name, shape | {"causal": True} | options, frozenset({"tune"}))


def _cut(length: int, documents: int) -> Draw:
    """Bounds of documents of all lengths that fill a row."""
    inner = np.random.default_rng(0).choice(np.arange(1, length), documents - 1, replace=False)
    return value(lambda: jnp.array([0, *np.sort(inner), length], jnp.int32))


def _ids(length: int, documents: int) -> Draw:
    """The same documents as ids of the tokens."""

    def make() -> MaskInfo:
        cuts = _cut(length, documents).make(None, None)  # pyright: ignore[reportArgumentType]
        ids = jnp.searchsorted(cuts, jnp.arange(length), side="right").astype(jnp.int32) - 1
        return MaskInfo.from_segments(ids[None])

    return value(make)


# Calls that tuned tables know: the shapes that peers are timed on, and attention layers of models.
_MODELS = (
    _named("pretraining_16k", 1, 16384, 16, 16, 128),
    _named("pretraining_64k", 1, 65536, 16, 4, 128),
    _named("encoder_16k", 1, 16384, 16, 16, 128, causal=False),
    _named("head_dim_128", 4, 4096, 16, 16, 128),
    _named("head_dim_128_full", 4, 4096, 16, 16, 128, causal=False),
    _named("head_dim_64", 4, 4096, 32, 8, 64),
    _named("head_dim_64_full", 4, 4096, 32, 8, 64, causal=False),
    _named("head_dim_256", 2, 8192, 8, 8, 256),
    _named("packed_16k", 1, 16384, 16, 16, 128, cum_seqlens_q=_cut(16384, 37)),
    _named("packed_16k_ids", 1, 16384, 16, 16, 128, mask_info=_ids(16384, 37)),
    _named("packed_llama3_8b", 1, 8192, 32, 8, 128, mask_info=_ids(8192, 12)),
    _named("window_1k", 1, 16384, 16, 16, 128, sliding_window=(1023, 0)),
    _named("soft_cap_16k", 1, 16384, 16, 16, 128, logits_soft_cap=50.0),
    _named("bias_4k", 1, 4096, 16, 16, 128, causal=False, bias=normal(1, 16, 4096, 4096)),
    _named("llama3_8b", 2, 8192, 32, 8, 128),
    _named("llama3_70b", 1, 8192, 64, 8, 128),
    _named("qwen3_8b", 1, 32768, 32, 8, 128),
    _named("qwen3_30b_a3b", 2, 4096, 32, 4, 128),
    _named("gemma2_9b", 2, 8192, 16, 8, 256, logits_soft_cap=50.0, softmax_scale=0.0625),
    _named(
        "gemma2_9b_window",
        2,
        8192,
        16,
        8,
        256,
        logits_soft_cap=50.0,
        softmax_scale=0.0625,
        sliding_window=(4095, 0),
    ),
    _named("gpt_oss", 2, 8192, 64, 8, 64, softmax_aux=normal(64, 1)),
    _named(
        "gpt_oss_window", 2, 8192, 64, 8, 64, softmax_aux=normal(64, 1), sliding_window=(127, 0)
    ),
)

_SMALL = _attention()
_PACKED = _attention(batch=1, queries=56)

WORKLOADS = (
    Workload("plain", _SMALL),
    Workload("one_head_for_all", _attention(kv_heads=1)),
    Workload("heads_of_their_own", _attention(kv_heads=4)),
    Workload("value_dim", _attention(head_dim=24, value_dim=40)),
    Workload("odd_lengths", _attention(queries=63, keys=127)),
    Workload("one_token", _attention(queries=1, keys=1)),
    Workload("scale", _SMALL | {"softmax_scale": 0.7}),
    Workload("causal", _SMALL | {"causal": True}),
    Workload("causal_odd", _attention(queries=127) | {"causal": True}),
    Workload("decode", _attention(queries=1, keys=63) | {"causal": True, "causal_offset": 62}),
    Workload(
        "causal_offset",
        _attention(queries=24) | {"causal": True, "causal_offset": -5},
    ),
    Workload(
        "causal_offset_rows",
        _attention(queries=24, keys=40)
        | {"causal": True, "causal_offset": value(lambda: jnp.array([16, -3]))},
    ),
    Workload("window", _SMALL | {"sliding_window": 5}),
    Workload("window_pair", _SMALL | {"sliding_window": (7, 2), "causal": True}),
    Workload("soft_cap", _SMALL | {"logits_soft_cap": 2.0, "causal": True}),
    Workload("bias", _SMALL | {"bias": normal(2, 4, 48, 48)}),
    Workload("bias_heads", _SMALL | {"bias": normal(4, 1, 48), "causal": True}).core(),
    Workload("bias_rows", _SMALL | {"bias": normal(48, 1), "logits_soft_cap": 3.0}),
    Workload("sinks", _SMALL | {"softmax_aux": normal(3), "causal": True}),
    Workload(
        "sinks_heads", _SMALL | {"softmax_aux": normal(4, 2), "sliding_window": (4, 0)}
    ).core(),
    Workload("mask_keys", _SMALL | {"attention_mask": boolean(2, 48, chance=0.7)}),
    Workload("mask_pairs", _SMALL | {"attention_mask": boolean(2, 48, 48)}),
    Workload(
        "mask_heads", _SMALL | {"attention_mask": boolean(1, 4, 48, 48), "causal": True}
    ).core(),
    Workload("segments", _SMALL | {"mask_info": _mask()}),
    Workload("segments_causal", _SMALL | {"mask_info": _mask(), "causal": True}).core(),
    Workload(
        "segments_shared",
        _SMALL | {"mask_info": value(lambda: _segments((10, 30, -8))), "causal": True},
    ),
    Workload("chunks", _SMALL | {"mask_info": _mask(lambda m: m.apply_chunked(16))}),
    Workload(
        "lengths",
        _SMALL | {"mask_info": _mask(lambda m: m.apply_kv_lengths(jnp.array([31, 0])))},
    ),
    Workload(
        "token_types",
        _SMALL
        | {
            "mask_info": _mask(
                lambda m: m.apply_token_type_ids(
                    jnp.arange(96).reshape(2, 48) // 7 % 3, combine="intersect"
                )
            )
        },
    ),
    Workload(
        "union",
        _SMALL
        | {
            "mask_info": _mask(
                lambda m: (
                    m.apply_causal()
                    .apply_token_type_ids(jnp.arange(96).reshape(2, 48) // 5 % 3)
                    .apply_sliding_window((20, 9))
                )
            )
        },
    ),
    Workload(
        "packed",
        _PACKED
        | {
            "cum_seqlens_q": value(lambda: jnp.array([0, 17, 17, 40, 50])),
            "causal": True,
            "sliding_window": (9, 0),
        },
    ),
    Workload(
        "packed_apart",
        _attention(batch=1, queries=40, keys=60)
        | {
            "cum_seqlens_q": value(lambda: jnp.array([0, 13, 38])),
            "cum_seqlens_k": value(lambda: jnp.array([0, 20, 60])),
            "causal": True,
            "causal_offset": value(lambda: jnp.array([7, 15])),
        },
    ).core(),
    Workload(
        "dropout", _SMALL | {"dropout_prob": 0.3, "dropout_seed": value(lambda: jnp.int32(7))}
    ).core(),
    Workload(
        "blind_rows",
        _attention(queries=20)
        | {
            "causal": True,
            "causal_offset": -6,
            "softmax_aux": normal(4, 1),
            "bias": normal(20, 20),
        },
    ).core(),
    Workload(
        "all_at_once",
        _attention(queries=45, keys=51, value_dim=24)
        | {
            "bias": normal(1, 4, 45, 51),
            "softmax_aux": normal(4, 1),
            "attention_mask": boolean(2, 1, 45, 51, chance=0.8),
            "causal": True,
            "causal_offset": 6,
            "sliding_window": (30, 4),
            "logits_soft_cap": 4.0,
            "dropout_prob": 0.2,
            "dropout_seed": 3,
        },
    ).core(),
    *_MODELS,
)

# Blocks small enough that the workloads above have several, full, partial and empty.
CONFIGS = (
    FlashAttentionConfig(
        fwd_params=FwdParams(q_blocksize=16, kv_blocksize=8),
        bwd_params=BwdParams(q_blocksize=8, kv_blocksize=16),
    ),
)
