"""From the mask arguments of a call to one rule: masks, causality, windows, packed sequences."""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.common.arguments import as_array, cumulative_lengths, integer_array
from ejkernel.types.arguments import SlidingWindow, boolean, window_pair
from ejkernel.types.mask import MaskInfo
from ejkernel.types.rule_arrays import bounded
from ejkernel.types.rules import And, Band, Chunks, Dense, Everything, Rule, Segments

# Left and right; each a static int, or one number for every batch row, [1].
Window = tuple[int | jax.Array, int | jax.Array]


class Extent(NamedTuple):
    """What a mask must fit: batch, heads, queries, keys."""

    batch: int
    heads: int
    queries: int
    keys: int


def attention_rule(
    op: str,
    extent: Extent,
    *,
    mask_info: MaskInfo | None,
    attention_mask: object,
    causal: bool,
    causal_offset: object,
    sliding_window: SlidingWindow | None,
    cum_seqlens_q: object = None,
    cum_seqlens_k: object = None,
    batched: bool = True,
) -> Rule:
    """The rule of a call: the conjunction of all its mask arguments.

    `batched` says whether the arrays of the call had a batch axis, and so its masks.
    """
    rule: Rule = Everything()
    if mask_info is not None:
        rule = _from_mask_info(op, extent, mask_info)
    if attention_mask is not None:
        rule = rule & Dense(dense_mask(op, extent, attention_mask, batched))
    window = _window(op, sliding_window)
    if not causal and not _is_zero(causal_offset):
        raise ValueError(f"{op}: causal_offset needs causal=True.")
    if cum_seqlens_q is not None:
        packing = _packing(op, extent, cum_seqlens_q, cum_seqlens_k)
        return rule & packing.rule(op, causal, causal_offset, window)
    if cum_seqlens_k is not None:
        raise ValueError(f"{op}: cum_seqlens_k needs cum_seqlens_q.")
    if causal:
        rule = rule & Band(None, _offset(op, causal_offset, extent.batch, "batch row"))
    if window is not None:
        rule = rule & Band(-window[0], window[1])
    return rule


def _window(op: str, window: SlidingWindow | None) -> Window | None:
    """A window as (left, right), what is traced as [1]: one number for every batch row."""
    if window is None:
        return None
    left, right = window_pair(f"{op}: sliding_window", window)
    batched = lambda x: x if isinstance(x, int) else x.reshape(1)
    return batched(left), batched(right)


def chunk_rule(op: str, size: object) -> Rule:
    """Causal attention inside chunks of `size` positions."""
    if size is None:
        return Everything()
    if not isinstance(size, int | np.integer) or size < 1:
        raise ValueError(f"{op}: chunk_size must be a positive int, got {size!r}.")
    return And((Chunks(operator.index(size)), Band(None, 0)))


def dense_mask(op: str, extent: Extent, mask: object, batched: bool = True) -> jax.Array:
    """A mask of rank 2 [b, s] (keys that are there), 3 [b, t, s] or 4 as [#b, #n, #t, #s].

    In a call without a batch axis [s], [t, s] and [n, t, s]. What has a batch of 1 there all the
    same means the same.
    """
    given = as_array(op, "attention_mask", mask)
    mask = boolean(
        f"{op}: attention_mask", given, ", and what is added to the logits is the argument bias="
    )
    if not batched and 0 < mask.ndim < 4:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    elif mask.ndim == 2:
        mask = mask[:, None, None, :]
    elif mask.ndim == 3:
        mask = mask[:, None]
    if mask.ndim != 4 or any(
        size not in (1, full) for size, full in zip(mask.shape, extent, strict=True)
    ):
        shapes = "[batch, keys], [batch, queries, keys] or [batch, heads, queries, keys]"
        if not batched:
            shapes = "[keys], [queries, keys] or [heads, queries, keys]"
        raise ValueError(
            f"{op}: attention_mask must have shape {shapes}, "
            f"here {tuple(extent)[not batched :]}, got {given.shape}."
        )
    return mask


def _from_mask_info(op: str, extent: Extent, mask_info: object) -> Rule:
    if not isinstance(mask_info, MaskInfo):
        raise ValueError(f"{op}: mask_info must be a MaskInfo, got {type(mask_info).__name__}.")
    batch, lengths = mask_info.batch_size, (mask_info.q_len, mask_info.kv_len)
    if lengths != (extent.queries, extent.keys) or batch not in (None, 1, extent.batch):
        raise ValueError(
            f"{op}: mask_info has shape {mask_info.shape} (batch, queries, keys), the arrays have "
            f"{(extent.batch, extent.queries, extent.keys)}; a batch of 1 is shared by every row."
        )
    if mask_info.rule.heads not in (1, extent.heads):
        raise ValueError(
            f"{op}: mask_info has {mask_info.rule.heads} heads, the query has {extent.heads}."
        )
    return mask_info.rule


def _is_zero(offset: object) -> bool:
    return isinstance(offset, int | np.integer) and offset == 0


def _offset(op: str, offset: object, count: int, per: str) -> int | jax.Array:
    """A causal offset: a static int, or an int32 array with one entry per row."""
    if isinstance(offset, int | np.integer):
        return operator.index(offset)
    offset = integer_array(op, "causal_offset", offset)
    if offset.shape not in ((), (1,), (count,)) or not jnp.issubdtype(offset.dtype, jnp.integer):
        raise ValueError(
            f"{op}: causal_offset must be an int or {count} ints, one per {per}, "
            f"got {offset.dtype}{list(offset.shape)}."
        )
    return offset[None] if offset.ndim == 0 else offset


class _Packing(NamedTuple):
    """Packed sequences: the segment of each token, and the key that corresponds to each query."""

    segments: Segments
    positions: jax.Array | None  # [1, t]: index of that key; None: the query's own index
    count: int

    def rule(self, op: str, causal: bool, offset: object, window: Window | None) -> Rule:
        rule: Rule = self.segments
        if causal:
            shift = _offset(op, offset, self.count, "sequence")
            if isinstance(shift, int) or shift.shape[0] == 1:
                rule = rule & Band(None, shift, self.positions)
            else:
                rule = rule & Band(None, 0, _shifted(self.segments.q_ids, self.positions, shift))
        if window is not None:
            rule = rule & Band(-window[0], window[1], self.positions)
        return rule


def _packing(op: str, extent: Extent, cum_q: object, cum_k: object) -> _Packing:
    if extent.batch != 1:
        raise ValueError(
            f"{op}: cum_seqlens_* describe one packed row, got a batch of {extent.batch}; for "
            "padded rows use MaskInfo.from_cu_seqlens."
        )
    cum_q = cumulative_lengths(op, "cum_seqlens_q", cum_q, extent.queries)
    if cum_k is None:
        if extent.queries != extent.keys:
            raise ValueError(
                f"{op}: {extent.queries} queries and {extent.keys} keys need cum_seqlens_k as well."
            )
        return _Packing(_same_segments(cum_q, extent.queries), None, cum_q.shape[0] - 1)
    cum_k = cumulative_lengths(op, "cum_seqlens_k", cum_k, extent.keys)
    if cum_q.shape != cum_k.shape:
        raise ValueError(
            f"{op}: cum_seqlens_q and cum_seqlens_k must describe as many sequences, got "
            f"{cum_q.shape[0] - 1} and {cum_k.shape[0] - 1}."
        )
    segments, positions = _segments(cum_q, cum_k, extent.queries, extent.keys)
    return _Packing(segments, positions, cum_q.shape[0] - 1)


_COMPARE_ALL_LIMIT = 2**24  # comparisons


def _ids(cum: jax.Array, tokens: int) -> jax.Array:
    """The sequence of each token [1, tokens]; -1 past the last."""
    index = jnp.arange(tokens, dtype=jnp.int32)
    # Comparing all is one small kernel, where a search is a loop of many.
    method = "compare_all" if cum.size * tokens <= _COMPARE_ALL_LIMIT else "scan"
    ids = jnp.searchsorted(cum, index, side="right", method=method).astype(jnp.int32) - 1
    return jnp.where(index < cum[-1], ids, -1)[None]


@functools.partial(jax.jit, static_argnames="tokens")
def _same_segments(cum: jax.Array, tokens: int) -> Segments:
    ids, documents = _ids(cum, tokens), _rounded(cum.shape[0] - 1)
    starts = jnp.pad(cum, (0, documents + 1 - cum.shape[0]), mode="edge")
    return Segments(ids, ids, documents, starts[None])


def _rounded(count: int) -> int:
    """`count` rounded up, so that not every number of documents is compiled anew."""
    return 1 << max(count - 1, 0).bit_length() if count < 8 else -(-count // 8) * 8


@functools.partial(jax.jit, static_argnames=("queries", "keys"))
def _segments(
    cum_q: jax.Array, cum_k: jax.Array, queries: int, keys: int
) -> tuple[Segments, jax.Array]:
    q_ids = _ids(cum_q, queries)
    # The key at the same position in the query's sequence. Its index grows with that of the query,
    # so that a block of queries still sees one range of keys.
    shift = (cum_k - cum_q)[jnp.maximum(q_ids, 0)]
    positions = jnp.arange(queries, dtype=jnp.int32) + shift
    return Segments(q_ids, _ids(cum_k, keys)), positions


@jax.jit
def _shifted(q_ids: jax.Array, positions: jax.Array | None, shift: jax.Array) -> jax.Array:
    if positions is None:
        positions = jnp.arange(q_ids.shape[-1], dtype=jnp.int32)
    return positions + jnp.asarray(bounded(shift))[jnp.maximum(q_ids, 0)]
