"""From one representation of a mask to another, as plain functions.

Masks of tokens are `[b, t]`, True (or 1) for a token; masks of pairs are `[b, n, t, s]`, True
where the query may see the key; segment ids are `[b, t]`, negative for padding; `cu_seqlens` are
the start and end of each row of a padded batch, `[start_0, end_0, start_1, end_1, ...]`.
"""

from typing import Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel.types.arguments import ArrayValues, boolean, to_int32
from ejkernel.types.rules import Segments

KEY_PADDING_POSITION = 2**31 - 1


def mask_to_segment_ids(mask: ArrayValues, per_head: bool = False) -> tuple[jax.Array, jax.Array]:
    """Segment ids that say as much of a mask of pairs as ids can.

    Where the mask of a batch row is exactly a set of disjoint segments, the ids give it back:
    `mask[q, k] == (q_ids[q] == kv_ids[k] >= 0)`. Otherwise they only tell tokens (0) from padding
    (-1, a query that sees nothing or a key that nothing sees).

    Args:
        mask: `[t, s]`, `[b, t, s]` or `[b, n, t, s]`, of booleans or integers; what is not 0 is
            allowed.
        per_head: give each head ids of its own; otherwise all heads must agree on the segments.

    Returns:
        Query ids `[..., t]` and key ids `[..., s]`, int32, numbered from 0 by their first key; with
        `per_head` the heads of a `[b, n, t, s]` mask stay.

    Raises:
        ValueError: if the mask has another rank or holds floats.

    >>> q_ids, kv_ids = mask_to_segment_ids([[1, 1, 0, 0], [0, 0, 1, 0]])
    >>> q_ids.tolist(), kv_ids.tolist()
    ([0, 1], [0, 0, 1, -1])
    """
    mask = boolean("mask_to_segment_ids: mask", mask)
    if mask.ndim not in (2, 3, 4):
        raise ValueError(f"mask_to_segment_ids: the rank must be 2, 3 or 4, got {mask.shape}.")
    if mask.ndim < 4:
        mask = jnp.expand_dims(mask, -3)
    elif per_head:
        mask = jnp.expand_dims(mask, -3)  # [b, n, 1, t, s]: each head is a mask of its own
    function = _segments_of_one
    for _ in mask.shape[:-3]:
        function = jax.vmap(function)
    return function(mask)


@overload
def segment_ids_to_mask(
    segment_ids: ArrayValues,
    dtype: DTypeLike = jnp.bool_,
    return_separate_masks: Literal[False] = False,
) -> jax.Array: ...


@overload
def segment_ids_to_mask(
    segment_ids: ArrayValues,
    dtype: DTypeLike = jnp.bool_,
    *,
    return_separate_masks: Literal[True],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...


def segment_ids_to_mask(
    segment_ids: ArrayValues,
    dtype: DTypeLike = jnp.bool_,
    return_separate_masks: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array, jax.Array]:
    """The mask of pairs of the same segment.

    Args:
        segment_ids: ids `[b, t]` for queries and keys alike, or a pair `([b, t], [b, s])`.
        dtype: dtype of the result, 1 where allowed.
        return_separate_masks: also give the masks of tokens.

    Returns:
        `[b, 1, t, s]`, or `(query mask [b, t], key mask [b, s], mask [b, 1, t, s])`.

    >>> segment_ids_to_mask(jnp.array([[0, 1, -1]]), dtype=int)[0, 0].tolist()
    [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    """
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    q_ids, kv_ids = (jnp.asarray(ids) for ids in pair)
    mask = Segments(q_ids, kv_ids).dense(q_ids.shape[-1], kv_ids.shape[-1]).astype(dtype)
    if not return_separate_masks:
        return mask
    return (q_ids >= 0).astype(dtype), (kv_ids >= 0).astype(dtype), mask


def segment_ids_to_qkv_masks(
    q_segment_ids: ArrayValues,
    kv_segment_ids: ArrayValues | None = None,
    dtype: DTypeLike = jnp.bool_,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The masks of queries `[b, t]`, of keys `[b, s]` and of pairs `[b, 1, t, s]`.

    >>> q_mask, kv_mask, mask = segment_ids_to_qkv_masks(jnp.array([[0, -1]]), dtype=int)
    >>> q_mask.tolist(), kv_mask.tolist(), mask.tolist()
    ([[1, 0]], [[1, 0]], [[[[1, 0], [0, 0]]]])
    """
    kv_segment_ids = q_segment_ids if kv_segment_ids is None else kv_segment_ids
    return segment_ids_to_mask((q_segment_ids, kv_segment_ids), dtype, return_separate_masks=True)


def qkv_masks_to_cu_seqlens(
    q_mask: ArrayValues, kv_mask: ArrayValues | None = None, *, out_dtype: DTypeLike = jnp.int32
) -> tuple[jax.Array, jax.Array]:
    """Start and end of the tokens of each row, `(2 b,)` for queries and for keys.

    The start is the first token, the end one past the last; `(0, 0)` for a row without tokens.

    >>> qkv_masks_to_cu_seqlens(jnp.array([[0, 1, 1], [0, 0, 0]]))[0].tolist()
    [1, 3, 0, 0]
    """
    kv_mask = q_mask if kv_mask is None else kv_mask
    q_tokens = boolean("qkv_masks_to_cu_seqlens: q_mask", q_mask)
    kv_tokens = boolean("qkv_masks_to_cu_seqlens: kv_mask", kv_mask)
    return _ends_of_tokens(q_tokens, out_dtype), _ends_of_tokens(kv_tokens, out_dtype)


def cu_seqlens_to_mask(
    cu_seqlens: ArrayValues, max_len: int, dtype: DTypeLike = jnp.bool_
) -> jax.Array:
    """The mask of tokens `[b, max_len]` of start and end pairs `(2 b,)`.

    Raises:
        ValueError: if the pairs are not one array of even length.

    >>> cu_seqlens_to_mask(jnp.array([0, 2, 1, 3]), 3, int).tolist()
    [[1, 1, 0], [0, 1, 1]]
    """
    cu_seqlens = to_int32(jnp.asarray(cu_seqlens))
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] % 2:
        raise ValueError(
            "cu_seqlens_to_mask: cu_seqlens must be start and end pairs, one array of even length, "
            f"got shape {cu_seqlens.shape}."
        )
    start, end = cu_seqlens[0::2, None], cu_seqlens[1::2, None]
    position = jnp.arange(max_len)
    return ((start <= position) & (position < end)).astype(dtype)


def qkv_cu_seqlens_to_qkv_masks(
    cu_seqlens_q: ArrayValues,
    *,
    max_q_len: int,
    cu_seqlens_kv: ArrayValues | None = None,
    max_kv_len: int | None = None,
    dtype: DTypeLike = jnp.bool_,
) -> tuple[jax.Array, jax.Array]:
    """The masks of queries `[b, max_q_len]` and keys `[b, max_kv_len]` of start and end pairs.

    >>> q_mask, kv_mask = qkv_cu_seqlens_to_qkv_masks(jnp.array([0, 1]), max_q_len=2, dtype=int)
    >>> q_mask.tolist(), kv_mask.tolist()
    ([[1, 0]], [[1, 0]])
    """
    cu_seqlens_kv = cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
    max_kv_len = max_q_len if max_kv_len is None else max_kv_len
    return (
        cu_seqlens_to_mask(cu_seqlens_q, max_q_len, dtype),
        cu_seqlens_to_mask(cu_seqlens_kv, max_kv_len, dtype),
    )


def qkv_cu_seqlens_to_attention_mask(
    cu_seqlens_q: ArrayValues,
    *,
    max_q_len: int,
    cu_seqlens_kv: ArrayValues | None = None,
    max_kv_len: int | None = None,
    dtype: DTypeLike = jnp.bool_,
) -> jax.Array:
    """The mask of pairs of tokens, `[b, 1, max_q_len, max_kv_len]`, of start and end pairs.

    >>> qkv_cu_seqlens_to_attention_mask(jnp.array([0, 1]), max_q_len=2, dtype=int).tolist()
    [[[[1, 0], [0, 0]]]]
    """
    q_mask, kv_mask = qkv_cu_seqlens_to_qkv_masks(
        cu_seqlens_q, max_q_len=max_q_len, cu_seqlens_kv=cu_seqlens_kv, max_kv_len=max_kv_len
    )
    return (q_mask[:, None, :, None] & kv_mask[:, None, None, :]).astype(dtype)


def attention_mask_to_qkv_cu_seqlens(
    attention_mask: ArrayValues,
    *,
    reduce_heads: Literal["any", "all", "first"] = "any",
    out_dtype: DTypeLike = jnp.int32,
) -> tuple[jax.Array, jax.Array]:
    """Start and end of the queries that see something and of the keys that something sees.

    Args:
        attention_mask: `[b, t, s]` or `[b, n, t, s]`, of booleans or integers.
        reduce_heads: a pair counts if any head allows it, if all do, or if the first does.
        out_dtype: dtype of the result.

    Returns:
        Pairs `(2 b,)` for queries and for keys.

    Raises:
        ValueError: if the mask has another rank or `reduce_heads` is none of the three.

    >>> mask = jnp.array([[[1, 1, 0], [1, 1, 0], [0, 0, 0]]])
    >>> [pairs.tolist() for pairs in attention_mask_to_qkv_cu_seqlens(mask)]
    [[0, 2], [0, 2]]
    """
    mask = boolean("attention_mask_to_qkv_cu_seqlens: attention_mask", attention_mask)
    if mask.ndim not in (3, 4):
        raise ValueError(
            f"attention_mask_to_qkv_cu_seqlens: the mask must have rank 3 or 4, got {mask.shape}."
        )
    if reduce_heads not in ("any", "all", "first"):
        raise ValueError(
            "attention_mask_to_qkv_cu_seqlens: reduce_heads must be any, all or first, "
            f"got {reduce_heads!r}."
        )
    if mask.ndim == 4:
        mask = {"any": mask.any(1), "all": mask.all(1), "first": mask[:, 0]}[reduce_heads]
    return qkv_masks_to_cu_seqlens(mask.any(-1), mask.any(-2), out_dtype=out_dtype)


def segment_positions(ids: jax.Array, padding: int) -> jax.Array:
    """Position of each token in its run of equal ids `[..., t]`, `padding` where there is none."""
    index = jnp.arange(ids.shape[-1], dtype=jnp.int32)
    before = jnp.concatenate([jnp.full_like(ids[..., :1], -1), ids[..., :-1]], axis=-1)
    begins = jnp.where(ids != before, index, 0)
    begin = jax.lax.cummax(begins, axis=begins.ndim - 1)
    return jnp.where(ids < 0, padding, index - begin)


def _segments_of_one(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ids of one mask `[n, t, s]` whose heads must agree."""
    seen = mask.any(0)  # [t, s]
    q_valid, kv_valid = seen.any(1), seen.any(0)
    # If the mask is a set of segments, its rows are told apart by their first key, and a key
    # belongs to whichever row first sees it.
    first_key = jnp.argmax(seen, axis=1)
    is_first = jnp.zeros(seen.shape[1], jnp.int32).at[first_key].max(q_valid.astype(jnp.int32))
    q_ids = jnp.where(q_valid, jnp.cumsum(is_first)[first_key] - 1, -1)
    kv_ids = jnp.where(kv_valid, q_ids[jnp.argmax(seen, axis=0)], -1)
    rebuilt = Segments(q_ids, kv_ids).dense(*seen.shape)
    exact = (rebuilt == mask).all()
    return (
        jnp.where(exact, q_ids, jnp.where(q_valid, 0, -1)).astype(jnp.int32),
        jnp.where(exact, kv_ids, jnp.where(kv_valid, 0, -1)).astype(jnp.int32),
    )


def _ends_of_tokens(mask: jax.Array, dtype: DTypeLike) -> jax.Array:
    """First token and one past the last of each row of `[..., t]`, as one array."""
    start = jnp.argmax(mask, axis=-1)
    end = mask.shape[-1] - jnp.argmax(mask[..., ::-1], axis=-1)
    pairs = jnp.stack([start, end], axis=-1)
    return jnp.where(mask.any(-1, keepdims=True), pairs, 0).astype(dtype).reshape(-1)
