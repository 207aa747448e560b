"""What can be read from a mask as a whole: the mask of pairs, bias, counts, lengths, block map."""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from ejkernel.types import mask_ids
from ejkernel.types.arguments import concrete, host_values, known_dtype, static_integer
from ejkernel.types.block_map import BlockMap, block_map
from ejkernel.types.conversion import qkv_masks_to_cu_seqlens
from ejkernel.types.mask_fields import cached
from ejkernel.types.rules import Rule, Segments

if TYPE_CHECKING:
    from ejkernel.types.mask import MaskInfo


def attention_mask(mask: "MaskInfo", dtype: DTypeLike) -> jax.Array:
    """The mask of pairs `[b, 1 or n, t, s]` in `dtype`, 1 where allowed."""
    dtype = known_dtype("MaskInfo: dtype", dtype)
    return cached(mask, ("mask", dtype), lambda: _attention_mask(mask, dtype))


def bias(mask: "MaskInfo", dtype: DTypeLike, masked_value: ArrayLike) -> jax.Array:
    """0 where allowed, `masked_value` elsewhere."""
    if not jnp.issubdtype(known_dtype("MaskInfo.create_bias: dtype", dtype), jnp.floating):
        raise ValueError(f"MaskInfo.create_bias: dtype must be floating-point, got {dtype!r}.")
    allowed = attention_mask(mask, jnp.bool_)
    return jnp.where(allowed, jnp.zeros((), dtype), jnp.asarray(masked_value, dtype))


def is_multi_sequence(mask: "MaskInfo") -> bool | jax.Array:
    """Whether some row holds more than one segment."""
    ids = mask_ids.reported(mask)[0]
    largest = jnp.max(ids, axis=-1)
    smallest = jnp.min(jnp.where(ids < 0, largest[..., None], ids), axis=-1)
    return _as_bool((largest > smallest).any())


def is_self_attention(mask: "MaskInfo") -> bool | jax.Array:
    """Whether lengths and segment ids of queries and keys agree."""
    if mask.q_len != mask.kv_len:
        return False
    for rule in mask_ids.source(mask).parts():
        if isinstance(rule, Segments) and rule.q_ids is not rule.kv_ids:
            return _as_bool((rule.q_ids == rule.kv_ids).all())
    return True


def cu_seqlens(
    mask: "MaskInfo", out_dtype: DTypeLike, max_segments: int
) -> tuple[jax.Array, jax.Array]:
    """Start and end of the tokens of each row, `[2 b]` for queries and for keys."""
    static_integer("MaskInfo.get_or_compute_qkv_cu_seqlens: max_segments", max_segments, 1)
    dtype = np.dtype(out_dtype)
    return cached(
        mask,
        ("cu_seqlens", dtype),
        lambda: qkv_masks_to_cu_seqlens(*mask_ids.valid(mask), out_dtype=dtype),
    )


def segment_lens(mask: "MaskInfo", max_segments: int) -> tuple[jax.Array, jax.Array]:
    """How many queries and how many keys each id below `max_segments` has."""
    where = "MaskInfo.segment_lens: max_segments"
    size = static_integer(where, max_segments, 1)
    ids = mask_ids.reported(mask)
    for values in map(host_values, ids):
        if values is not None and values.max(initial=-1) >= size:
            raise ValueError(f"{where} must exceed the largest id {values.max()}, got {size}.")
    return _count(ids[0], size), _count(ids[1], size)


def packed_cu_seqlens(mask: "MaskInfo", max_segments: int) -> tuple[jax.Array, jax.Array]:
    """Cumulative lengths of all segments of all rows, without padding."""
    where = "MaskInfo.to_packed_cu_seqlens"
    size = static_integer(f"{where}: max_segments", max_segments, 1)
    ids = tuple(array.reshape(-1, array.shape[-1]) for array in mask_ids.reported(mask))
    for values in map(host_values, ids):
        if values is not None and any((np.diff(row[row >= 0]) < 0).any() for row in values):
            raise ValueError(f"{where}: segment ids must not decrease along a row.")
    (q_rank, kv_rank), total = _global_ranks(*ids)
    count = host_values(total)
    if count is not None and count > size:
        raise ValueError(f"{where}: max_segments must be at least {count}, got {size}.")
    lengths = (_count(rank.reshape(-1), size) for rank in (q_rank, kv_rank))
    q_packed, kv_packed = (jnp.pad(jnp.cumsum(each), (1, 0)) for each in lengths)
    return q_packed.astype(jnp.int32), kv_packed.astype(jnp.int32)


def blocks(mask: "MaskInfo", block_q: int, block_k: int) -> BlockMap:
    """The block map of the mask."""
    sizes = (
        static_integer("MaskInfo.block_map: block_q", block_q, 1),
        static_integer("MaskInfo.block_map: block_k", block_k, 1),
    )
    return cached(
        mask, ("block_map", sizes), lambda: _block_map(mask.rule, mask.q_len, mask.kv_len, *sizes)
    )


def _attention_mask(mask: "MaskInfo", dtype: np.dtype) -> jax.Array:
    allowed = _dense(mask.rule, mask.q_len, mask.kv_len).astype(dtype)
    if mask.batch_size is None:
        return allowed
    return jnp.broadcast_to(allowed, (mask.batch_size, *allowed.shape[-3:]))


# One compilation each, and no intermediate masks of every rule.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _dense(rule: Rule, q_len: int, kv_len: int) -> jax.Array:
    return rule.dense(q_len, kv_len)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _block_map(rule: Rule, q_len: int, kv_len: int, block_q: int, block_k: int) -> BlockMap:
    return block_map(rule, q_len, kv_len, block_q, block_k)


def _as_bool(value: jax.Array) -> bool | jax.Array:
    return bool(value) if concrete(value) else value


def _count(ids: jax.Array, size: int) -> jax.Array:
    """How often each of 0 to size - 1 occurs along the last axis."""
    zeros = jnp.zeros(size, jnp.int32)
    count = lambda row: zeros.at[jnp.where(row < 0, size, row)].add(1, mode="drop")
    for _ in ids.shape[:-1]:
        count = jax.vmap(count)
    return count(ids)


def _global_ranks(
    q_ids: jax.Array, kv_ids: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Ids `[b, t]`, `[b, s]` renumbered without gaps over all rows, -1 staying; and how many."""
    ordered = jnp.sort(jnp.concatenate([q_ids, kv_ids], axis=-1), axis=-1)
    before = jnp.pad(ordered[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    is_new = (ordered >= 0) & (ordered != jnp.where(before < 0, -1, before))
    rank = jnp.cumsum(is_new, axis=-1)  # of each sorted id within its row, from 1
    first = jnp.cumsum(rank[:, -1]) - rank[:, -1]  # segments of the rows before

    def renumber(ids: jax.Array) -> jax.Array:
        place = jax.vmap(jnp.searchsorted)(ordered, ids)
        found = jnp.take_along_axis(rank, place, axis=-1) - 1 + first[:, None]
        return jnp.where(ids < 0, -1, found)

    return (renumber(q_ids), renumber(kv_ids)), rank[:, -1].sum()
