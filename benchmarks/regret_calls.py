"""Realistic calls at random, for benchmarks/regret.py: of every operation with GPU kernels."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types import MaskInfo

Call = tuple[dict[str, Any], dict[str, Any]]  # shapes of arrays, and other arguments


def _array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _pick(rng: np.random.Generator, *values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _length(rng: np.random.Generator, low: int, high: int) -> int:
    """Log-uniform; mostly a multiple of 64, sometimes any number."""
    length = int(np.exp(rng.uniform(np.log(low), np.log(high))))
    return length if rng.random() < 0.2 else max(64, length // 64 * 64)


def flash_attention(rng: np.random.Generator) -> Call:
    length = _length(rng, 256, 24000)
    dim = _pick(rng, 64, 64, 80, 96, 128, 128, 128, 128, 192, 256)
    kv_heads, group = _pick(rng, 2, 4, 8, 8, 16, 32), _pick(rng, 1, 1, 2, 4, 8)
    # At most some 40 TFLOP in the forward pass, and 2**29 elements of queries.
    heads = kv_heads * group
    most = min(2.0e13 / (length**2 * heads * dim), 2.0**29 / (length * heads * dim))
    batch = max(1, min(_pick(rng, 1, 2, 4, 8, 16), int(most)))
    arrays = {
        "query": _array(batch, length, heads, dim),
        "key": _array(batch, length, kv_heads, dim),
        "value": _array(batch, length, kv_heads, dim),
    }
    options: dict[str, Any] = {"causal": rng.random() < 0.8}
    kind = rng.random()
    if kind < 0.15:
        options |= {"causal": True, "sliding_window": (_pick(rng, 128, 512, 1024, 4096) - 1, 0)}
    elif kind < 0.3:
        documents = int(rng.integers(2, 2 + max(1, length // 400)))
        cuts = np.sort(rng.choice(np.arange(1, length), documents - 1, replace=False))
        ids = np.searchsorted(cuts, np.arange(length), side="right").astype(np.int32)
        options["mask_info"] = MaskInfo.from_segments(np.broadcast_to(ids, (batch, length)))
    if rng.random() < 0.08:
        options["logits_soft_cap"] = 50.0
    if rng.random() < 0.06 and length <= 4096:
        arrays["bias"] = _array(1, heads, length, length)
    return arrays, options


def blocksparse_attention(rng: np.random.Generator) -> Call:
    size = _pick(rng, 64, 128)
    blocks = int(np.exp(rng.uniform(np.log(8), np.log(96))))
    dim, kv_heads, group = _pick(rng, 64, 128, 128), _pick(rng, 4, 8, 16), _pick(rng, 1, 2, 4)
    length, batch = blocks * size, _pick(rng, 1, 2)
    mask = rng.random((blocks, blocks)) < rng.uniform(0.05, 0.5)
    mask |= np.eye(blocks, dtype=bool)
    arrays = {
        "query": _array(batch, length, kv_heads * group, dim),
        "key": _array(batch, length, kv_heads, dim),
        "value": _array(batch, length, kv_heads, dim),
    }
    return arrays, {"block_mask": jnp.asarray(mask), "block_size": size}


def grouped_matmul(rng: np.random.Generator) -> Call:
    experts = _pick(rng, 8, 16, 32, 64, 128)
    sizes = (768, 1024, 1408, 1536, 2048, 2880, 4096, 7168)
    k, n = _pick(rng, *sizes), _pick(rng, *sizes)
    while experts * k * n > 2**30:
        experts //= 2
    rows = _length(rng, 64, 60000)
    uneven = rng.dirichlet(np.full(experts, _pick(rng, 0.5, 2.0, 20.0)))
    ids = rng.choice(experts, rows, p=uneven).astype(np.int32)
    arrays = {"inputs": _array(rows, k), "weights": _array(experts, k, n)}
    return arrays, {"group_ids": jnp.asarray(ids)}


def _paged(rng: np.random.Generator) -> dict[str, Any]:
    """Sequences with their new tokens, their pages in any order, and the sizes of heads."""
    sequences = _pick(rng, 1, 4, 8, 16, 32, 64, 128, 256)
    longest = int(np.exp(rng.uniform(np.log(256), np.log(32768))))
    longest = min(longest, 2**21 // sequences)
    lengths = np.maximum(16, (longest * rng.uniform(0.3, 1.0, sequences)).astype(int))
    new = np.ones(sequences, int)
    if rng.random() < 0.35:  # prefill, or a mixture
        some = rng.random(sequences) < _pick(rng, 0.2, 1.0)
        new = np.where(some, np.minimum(lengths, int(_length(rng, 64, 4096))), 1)
    page, dim = _pick(rng, 16, 32, 64, 128), _pick(rng, 64, 128, 128)
    kv_heads, group = _pick(rng, 1, 2, 4, 8, 8), _pick(rng, 1, 4, 8)
    used = -(-lengths // page)
    table = np.full((sequences, int(used.max())), -1, np.int32)
    order = rng.permutation(int(used.sum())).astype(np.int32)
    for row, count, end in zip(table, used, np.cumsum(used), strict=True):
        row[:count] = order[end - count : end]
    return {
        "new": new,
        "lengths": lengths,
        "table": jnp.asarray(table),
        "query": (kv_heads * group, dim),
        "pages": (int(used.sum()), page, kv_heads, dim),
    }


def _ends(counts: np.ndarray) -> jax.Array:
    return jnp.array([0, *np.cumsum(counts)], jnp.int32)


def ragged_page_attention_v3(rng: np.random.Generator) -> Call:
    paged = _paged(rng)
    arrays = {
        "query": _array(int(paged["new"].sum()), *paged["query"]),
        "key_pages": _array(*paged["pages"]),
        "value_pages": _array(*paged["pages"]),
    }
    lists = {
        "cu_seqlens_q": _ends(paged["new"]),
        "cu_seqlens_k": _ends(paged["lengths"]),
        "page_indices": paged["table"],
    }
    return arrays, lists


def ragged_page_attention_v3_update(rng: np.random.Generator) -> Call:
    arrays, lists = ragged_page_attention_v3(rng)
    new = (arrays["query"].shape[0], *arrays["key_pages"].shape[2:])
    return arrays | {"key": _array(*new), "value": _array(*new)}, lists


def ragged_page_attention_v2(rng: np.random.Generator) -> Call:
    paged = _paged(rng)
    pages, page, kv_heads, dim = paged["pages"]
    arrays = {
        "query": _array(int(paged["new"].sum()), *paged["query"]),
        "kv_pages": _array(pages, page, 2 * kv_heads, dim),
    }
    lists = {
        "context_lens": jnp.asarray(paged["lengths"], jnp.int32),
        "block_tables": paged["table"],
        "query_start_loc": _ends(paged["new"]),
        "num_seqs": len(paged["lengths"]),
    }
    return arrays, lists


def page_attention(rng: np.random.Generator) -> Call:
    paged = _paged(rng)
    arrays = {
        "query": _array(len(paged["lengths"]), *paged["query"]),
        "key_cache": _array(*paged["pages"]),
        "value_cache": _array(*paged["pages"]),
    }
    lists = {
        "context_lens": jnp.asarray(paged["lengths"], jnp.int32),
        "block_tables": paged["table"],
    }
    return arrays, lists


def _documents(rng: np.random.Generator, length: int) -> jax.Array:
    """Where packed sequences begin, and the end of the last."""
    count = int(rng.integers(2, 2 + max(1, length // 400)))
    cuts = np.sort(rng.choice(np.arange(1, length), count - 1, replace=False))
    return jnp.array([0, *cuts, length], jnp.int32)


def _linear(rng: np.random.Generator) -> tuple[Call, tuple[int, ...]]:
    """Linear attention without gates, and the shape of its gates: `[b, s, n, h]`."""
    heads, dim = _pick(rng, 4, 8, 16, 32), _pick(rng, 64, 128, 128, 256)
    length = _length(rng, 256, 32768)
    batch = max(1, min(_pick(rng, 1, 2, 4, 8, 16), 2**27 // (length * heads * dim)))
    options: dict[str, Any] = {}
    if rng.random() < 0.15:
        batch, options["cu_seqlens"] = 1, _documents(rng, length)
    shape = (batch, length, heads, dim)
    return ({name: _array(*shape) for name in ("query", "key", "value")}, options), shape


def gla_attention(rng: np.random.Generator) -> Call:
    (arrays, options), shape = _linear(rng)
    arrays["gate"] = _array(*shape[: _pick(rng, 3, 4, 4)])  # per head or per channel
    return arrays, options


def lightning_attention(rng: np.random.Generator) -> Call:
    (arrays, options), _ = _linear(rng)
    return arrays, options | {"layer_idx": int(rng.integers(0, 24)), "num_layers": 24}


def recurrent_attention(rng: np.random.Generator) -> Call:
    (arrays, options), shape = _linear(rng)
    if rng.random() < 0.5:
        arrays["gate"] = _array(*shape)
    return arrays, options


def native_sparse_attention(rng: np.random.Generator) -> Call:
    length, block = _length(rng, 1024, 32768), _pick(rng, 32, 64, 64)
    kv_heads, group, dim = _pick(rng, 2, 4, 8), _pick(rng, 1, 4, 16), _pick(rng, 64, 128, 128)
    chosen = min(_pick(rng, 8, 16, 16), length // block)
    arrays = {
        "query": _array(1, length, kv_heads * group, dim),
        "key": _array(1, length, kv_heads, dim),
        "value": _array(1, length, kv_heads, dim),
    }
    own = np.arange(length)[:, None, None] // block  # no token selects a block after its own
    indices = rng.integers(0, own + 1, (length, kv_heads, chosen))
    return arrays, {"block_indices": jnp.asarray(indices[None], jnp.int32), "block_size": block}


def mean_pooling(rng: np.random.Generator) -> Call:
    length, dim = _length(rng, 64, 8192), _pick(rng, 384, 768, 1024, 2048, 4096)
    batch = max(1, min(_pick(rng, 1, 8, 32, 64, 256), 2**28 // (length * dim)))
    kind = rng.random()
    if kind < 0.3:
        total = batch * length
        return {"x": _array(total, dim)}, {"cu_seqlens": _documents(rng, total)}
    if kind < 0.7:
        valid = rng.integers(1, length + 1, (batch, 1))
        return {"x": _array(batch, length, dim)}, {
            "attention_mask": jnp.asarray(np.arange(length) < valid)
        }
    return {"x": _array(batch, length, dim)}, {}


def ring_attention(rng: np.random.Generator) -> Call:
    """What one device computes."""
    length, dim = _length(rng, 1024, 16384), _pick(rng, 64, 128, 128)
    kv_heads, group = _pick(rng, 4, 8, 16), _pick(rng, 1, 2, 4)
    arrays = {
        "query": _array(1, length, kv_heads * group, dim),
        "key": _array(1, length, kv_heads, dim),
        "value": _array(1, length, kv_heads, dim),
    }
    return arrays, {"causal": rng.random() < 0.8}


# The place in this list is part of the seed of a call: append what is new. How many calls make a
# published figure.
OPS: dict[str, tuple[Callable[[np.random.Generator], Call], int]] = {
    "blocksparse_attention": (blocksparse_attention, 20),
    "flash_attention": (flash_attention, 60),
    "grouped_matmul": (grouped_matmul, 60),
    "ragged_page_attention_v3": (ragged_page_attention_v3, 20),
    "ragged_page_attention_v3_update": (ragged_page_attention_v3_update, 20),
    "ragged_page_attention_v2": (ragged_page_attention_v2, 20),
    "page_attention": (page_attention, 20),
    "gla_attention": (gla_attention, 20),
    "lightning_attention": (lightning_attention, 20),
    "recurrent_attention": (recurrent_attention, 20),
    "native_sparse_attention": (native_sparse_attention, 20),
    "mean_pooling": (mean_pooling, 20),
    "ring_attention": (ring_attention, 20),
}


def draw(op: str, number: int) -> Call:
    """The call of this number, always the same one."""
    seed = np.random.SeedSequence([list(OPS).index(op), number])
    return OPS[op][0](np.random.default_rng(seed))
