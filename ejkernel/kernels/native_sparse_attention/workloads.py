"""Named calls: the conformance suite, the tuner and the benchmark all read this list."""

import jax
import jax.numpy as jnp

from ejkernel.kernels.gla_attention.workloads import attention
from ejkernel.kernels.native_sparse_attention.config import NativeSparseAttentionConfig
from ejkernel.ops.workload import Draw, Workload, value


def _attention(
    batch: int = 2,
    length: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
) -> dict[str, Draw]:
    return attention(batch, length, heads, kv_heads, head_dim, value_dim)


def _blocks(*shape: int, of: int) -> Draw:
    """Random lists: of the `of` blocks that there are, some again and again, and some of none."""
    return Draw(lambda key, dtype: jax.random.randint(key, shape, -1, of + 1))


def _gate(*shape: int) -> Draw:
    return Draw(lambda key, dtype: jax.nn.sigmoid(jax.random.normal(key, shape)).astype(dtype))


_SMALL = _attention() | {"block_size": 8}
_LISTS = {"block_indices": _blocks(2, 48, 2, 3, of=6)}
_PACKED = _attention(batch=1, length=60) | {
    "cu_seqlens": value(lambda: jnp.array([0, 17, 17, 20, 52])),
    "block_size": 8,
}
_GATES = {name: _gate(2, 48, 4) for name in ("g_cmp", "g_slc", "g_swa")}

WORKLOADS = (
    Workload("plain", _SMALL | _LISTS).core(),
    Workload("chosen_here", _SMALL | {"block_counts": 3}),
    Workload("one_head_for_all", _attention(kv_heads=1) | {"block_size": 8, "block_counts": 4}),
    Workload(
        "heads_of_their_own",
        _attention(kv_heads=4, head_dim=40)
        | {"block_size": 16, "block_indices": _blocks(2, 48, 4, 2, of=3)},
    ),
    Workload(
        "groups_of_three",
        _attention(batch=1, length=63, heads=6, head_dim=60, value_dim=80)
        | {"block_size": 16, "block_indices": _blocks(1, 63, 2, 3, of=4)},
    ),
    Workload("one_token", _attention(length=1) | {"block_indices": _blocks(2, 1, 2, 2, of=1)}),
    Workload(
        "odd_length",
        _attention(batch=1, length=127, heads=2, kv_heads=1, head_dim=96, value_dim=192)
        | {"block_indices": _blocks(1, 127, 1, 2, of=2), "softmax_scale": 0.2},
    ),
    Workload("no_blocks", _SMALL | _LISTS | {"block_counts": 0, "sliding_window": 3}),
    Workload("lists_for_all_heads", _SMALL | {"block_indices": _blocks(2, 48, 3, of=6)}),
    Workload(
        "lists_for_blocks",
        _SMALL
        | {
            "block_indices": _blocks(2, 6, 2, 3, of=6),
            "block_counts": Draw(lambda key, dtype: jax.random.randint(key, (2, 2, 6), 0, 5)),
        },
    ),
    Workload(
        "lists_by_head",
        _attention(heads=4, kv_heads=4)
        | {"block_indices": _blocks(2, 4, 6, 3, of=6), "block_size": 8, "block_counts": 2},
    ),
    Workload("gated", _SMALL | _LISTS | {"g_slc": _gate(2, 48, 4)}),
    Workload("compressed", _SMALL | _LISTS | {"g_cmp": _gate(2, 48, 4)}),
    Workload("too_short_to_compress", _SMALL | {"block_size": 64, "g_cmp": _gate(2, 48, 4)}),
    Workload("window", _SMALL | _LISTS | {"sliding_window": 5}),
    Workload("gated_window", _SMALL | _LISTS | {"g_swa": _gate(2, 48, 4), "sliding_window": 20}),
    Workload("all_branches", _SMALL | _GATES | {"block_counts": 3, "sliding_window": 7}).core(),
    Workload("packed", _PACKED | {"block_indices": _blocks(1, 60, 2, 3, of=4)}),
    Workload(
        "packed_all_branches",
        _PACKED
        | {name: _gate(1, 60, 4) for name in _GATES}
        | {"block_counts": 2, "sliding_window": 6},
    ).core(),
)

# Tiles small enough that the workloads above have several in a chunk, and several chunks.
CONFIGS = (NativeSparseAttentionConfig(block_q=2),)
