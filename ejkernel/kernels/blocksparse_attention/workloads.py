"""Named calls: the conformance suite, the tuner and the benchmark all read this list."""

import jax.numpy as jnp

from ejkernel.kernels.blocksparse_attention.config import BlockSparseAttentionConfig
from ejkernel.kernels.blocksparse_attention.masks import (
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    Mask,
)
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.workload import Draw, Workload, boolean, normal, value
from ejkernel.types.mask import MaskInfo


def _arrays(
    queries: int, keys: int, head_dim: int, value_dim: int, heads_first: bool = False
) -> dict[str, Draw]:
    def array(length: int, heads: int, dim: int) -> Draw:
        return normal(2, *((heads, length) if heads_first else (length, heads)), dim)

    return {
        "query": array(queries, 4, head_dim),
        "key": array(keys, 2, head_dim),
        "value": array(keys, 2, value_dim),
    }


_ARRAYS = _arrays(48, 48, 16, 16)
_HEADS_FIRST = _arrays(48, 48, 16, 16, heads_first=True)


def _per_head(queries: int, keys: int, heads: int, head: int, group: int) -> Mask:
    shape = (queries, keys)
    if head % 2:
        return CausalMask(shape) & LocalMask(shape, (9, 0))
    return FullMask(shape) if head else ChunkedCausalMask(shape, 16)


def _shared(queries: int, keys: int, heads: int, head: int, group: int) -> Mask:
    shape = (queries, keys)
    return CausalMask(shape) & (LocalMask(shape, (6, None)) | ChunkedCausalMask(shape, 16))


WORKLOADS = (
    Workload("blocks", _ARRAYS | {"block_mask": boolean(3, 3), "block_size": 16}).core(),
    Workload(
        "blocks_per_head",
        _ARRAYS | {"block_mask": boolean(4, 6, 3), "block_size": (8, 16), "causal": True},
    ).core(),
    Workload(
        "blocks_per_row",
        _ARRAYS
        | {"block_mask": boolean(2, 1, 5, 4), "block_size": (10, 13), "bias": normal(48, 48)},
    ),
    Workload(
        "heads_first",
        _HEADS_FIRST
        | {
            "block_mask": boolean(2, 4, 3, 3),
            "block_size": 16,
            "layout": "bhsd",
            "softmax_aux": normal(4, 2),
        },
    ).core(),
    Workload("builder", _ARRAYS | {"mask_builder": _shared}),
    Workload("builder_per_head", _ARRAYS | {"mask_builder": _per_head, "logits_soft_cap": 3.0}),
    Workload("chunks", _ARRAYS | {"chunk_size": 12, "sliding_window": (8, 0)}),
    Workload(
        "mask_info",
        _ARRAYS
        | {
            "mask_info": value(lambda: MaskInfo.from_segments(jnp.repeat(jnp.arange(3), 16)[None])),
            "attention_mask": boolean(2, 48, 48),
            "block_mask": boolean(6, 6),
            "block_size": 8,
        },
    ),
    Workload("one_token", _arrays(1, 1, 40, 40) | {"block_mask": boolean(1, 1, chance=1.0)}),
    Workload(
        "decode", _arrays(1, 127, 60, 80) | {"block_mask": boolean(2, 1, 1, 8), "block_size": 16}
    ),
    Workload(
        "odd_lengths",
        _arrays(63, 127, 80, 96)
        | {
            "block_mask": boolean(4, 8, 16),
            "block_size": 8,
            "bias": normal(2, 1, 63, 127),
            "softmax_aux": normal(3),
            "logits_soft_cap": 4.0,
        },
    ).core(),
    Workload(
        "wide_heads",
        _arrays(127, 63, 192, 192) | {"block_mask": boolean(4, 2), "block_size": 32},
    ),
)

CONFIGS = (
    BlockSparseAttentionConfig(
        fwd_params=FwdParams(q_blocksize=16, kv_blocksize=8),
        bwd_params=BwdParams(q_blocksize=8, kv_blocksize=16),
    ),
)
