"""Named calls on one device; what a ring adds is tested where there are several."""

from collections.abc import Callable

import jax.numpy as jnp

from ejkernel.kernels.ring_attention.config import RingAttentionConfig
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.workload import Draw, Workload, boolean, normal, value
from ejkernel.types.mask import MaskInfo

_ARRAYS = {
    "query": normal(2, 48, 4, 16),
    "key": normal(2, 48, 2, 16),
    "value": normal(2, 48, 2, 24),
}


def _arrays(queries: int, keys: int, head_dim: int, value_dim: int) -> dict[str, Draw]:
    return {
        "query": normal(2, queries, 4, head_dim),
        "key": normal(2, keys, 2, head_dim),
        "value": normal(2, keys, 2, value_dim),
    }


def _mask(change: Callable[[MaskInfo], MaskInfo]) -> Draw:
    """A mask of one segment and some padding, changed."""
    ids = jnp.repeat(jnp.array([[0, 0, -1]]), 16, 1)
    return value(lambda: change(MaskInfo.from_segments(ids)))


_TYPES = jnp.arange(48)[None] // 5 % 3

WORKLOADS = (
    Workload("plain", _ARRAYS),
    Workload("causal", _ARRAYS | {"causal": True, "causal_offset": 3}),
    Workload(
        "window", _ARRAYS | {"causal": True, "sliding_window": (9, 0), "softmax_aux": normal(4, 1)}
    ).core(),
    Workload("chunks", _ARRAYS | {"chunk_size": 16, "logits_soft_cap": 2.0}),
    Workload(
        "segments",
        _ARRAYS
        | {
            "mask_info": value(
                lambda: MaskInfo.from_segments(jnp.repeat(jnp.array([[0, 1, -1]]), 16, 1))
            ),
            "bias": normal(4, 48, 48),
            "attention_mask": boolean(2, 48, chance=0.8),
        },
    ).core(),
    Workload(
        "lengths",
        _ARRAYS
        | {
            "mask_info": _mask(
                lambda m: m.apply_kv_lengths(jnp.array([31])).apply_token_type_ids(
                    _TYPES, combine="intersect"
                )
            )
        },
    ),
    Workload(
        "union",
        _ARRAYS | {"mask_info": _mask(lambda m: m.apply_causal().apply_token_type_ids(_TYPES))},
    ),
    Workload("dropout", _ARRAYS | {"causal": True, "dropout_prob": 0.3, "dropout_seed": 5}),
    Workload("one_token", _arrays(1, 1, 40, 60) | {"causal": True}),
    Workload(
        "odd_lengths",
        _arrays(63, 127, 80, 96) | {"causal": True, "causal_offset": 64, "softmax_aux": normal(3)},
    ),
    Workload("wide_heads", _arrays(127, 127, 192, 192) | {"sliding_window": (20, 4)}),
)

CONFIGS = (
    RingAttentionConfig(
        fwd_params=FwdParams(q_blocksize=16, kv_blocksize=8),
        bwd_params=BwdParams(q_blocksize=8, kv_blocksize=16),
    ),
)
