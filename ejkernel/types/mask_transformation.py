"""Masks made from masks: causal, windows, chunks, token types, lengths, replaced parts.

None of it makes anything of size Q x K.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types import mask_ids
from ejkernel.types.arguments import (
    ArrayValues,
    SlidingWindow,
    choice,
    integers,
    numbers,
    static_integer,
    window_pair,
)
from ejkernel.types.conversion import KEY_PADDING_POSITION
from ejkernel.types.mask_construction import ids_of_pairs, with_positions
from ejkernel.types.mask_fields import Mask, changed, with_batch
from ejkernel.types.rule_arrays import Start, take
from ejkernel.types.rules import (
    And,
    Band,
    Chunks,
    KeyLength,
    Or,
    Rule,
    Segments,
    TokenTypes,
    ZeroPolicy,
)

if TYPE_CHECKING:
    from ejkernel.types.mask import MaskInfo


class Keep:
    """Stands for "as it is" where None means "none"."""

    def __repr__(self) -> str:
        return "KEEP"


KEEP = Keep()

# What `MaskInfo.replace` takes for an array.
Replacement = ArrayValues | Keep | None


def apply_causal(mask: Mask, offset: ArrayValues) -> Mask:
    """`k <= q + offset`."""
    mask, number = _with_numbers(mask, "apply_causal: offset", offset)
    return _restricted(mask, Band(None, number))


def apply_sliding_window(
    mask: Mask,
    sliding_window: SlidingWindow,
    offset: ArrayValues,
    mode: Literal["default", "decode", "prefill"] | None,
    index: ArrayValues | None,
) -> Mask:
    """`q + offset - left <= k <= q + offset + right`, and the part that `mode` keeps."""
    name = "apply_sliding_window"
    left, right = window_pair(f"MaskInfo.{name}: sliding_window", sliding_window)
    choice(f"MaskInfo.{name}: mode", mode, (None, "default", "decode", "prefill"))
    if (mode == "decode") != (index is not None):
        raise ValueError(f'MaskInfo.{name}: mode="decode" and index go together.')
    mask, shift = _with_numbers(mask, f"{name}: offset", offset)
    low, high = (_per_row(mask, side) for side in (left, right))
    mask = _restricted(mask, Band(shift - low, shift + high))
    if mode not in ("decode", "prefill"):
        return mask
    if not isinstance(left, int) or not isinstance(right, int):
        raise ValueError(
            f'MaskInfo.{name}: mode="{mode}" cuts the mask to its window, so the window must be '
            f"known at trace time, got {sliding_window!r}; leave the mode out."
        )
    width = min(left + right + 1, mask.kv_len)
    if mode == "decode" and index is not None:
        mask, query = _with_numbers(mask, f"{name}: index", index)
        query = _clip(query, 0, mask.q_len - 1)
        key = _clip(query + shift - left, 0, mask.kv_len - width)
        return _sliced(mask, query, 1, key, width)
    if np.ndim(sliding_window) == 0:  # pyright: ignore[reportArgumentType]
        width = max(1, min(left, mask.kv_len))
    return _sliced(mask, 0, mask.q_len, mask.kv_len - width, width)


def apply_chunked(mask: Mask, chunk_size: ArrayValues, offset: ArrayValues) -> Mask:
    """`q // chunk_size == k // chunk_size` and `k <= q + offset`."""
    mask, size = _with_numbers(mask, "apply_chunked: chunk_size", chunk_size)
    mask, shift = _with_numbers(mask, "apply_chunked: offset", offset)
    if isinstance(size, int) and size < 1:
        raise ValueError(f"MaskInfo.apply_chunked: chunk_size must be positive, got {size}.")
    if not isinstance(size, int):
        size = jnp.maximum(size, 1)
    q_valid, kv_valid = mask_ids.valid(mask)
    return _restricted(
        mask,
        Chunks(size) & Band(None, shift),
        q_ids=_chunk_numbers(q_valid, size),
        kv_ids=_chunk_numbers(kv_valid, size),
    )


def apply_token_type_ids(
    mask: Mask,
    token_type_ids: ArrayValues,
    combine: Literal["union", "intersect", "replace"],
    zero_policy: ZeroPolicy,
    update_segment_ids: bool | None,
) -> Mask:
    """The mask united with, intersected with or replaced by the mask of equal token types."""
    where = "MaskInfo.apply_token_type_ids"
    choice(f"{where}: combine", combine, ("union", "intersect", "replace"))
    choice(f"{where}: zero_policy", zero_policy, ("q", "kv", "both", "none"))
    pair = token_type_ids if isinstance(token_type_ids, tuple) else (token_type_ids,) * 2
    if len(pair) != 2:
        raise ValueError(f"{where}: a tuple of token types must be a pair, got {len(pair)}.")
    mask, q_types = _with_types(mask, where, pair[0], mask.q_len)
    mask, kv_types = _with_types(mask, where, pair[1], mask.kv_len)
    if kv_types.ndim == 2:
        q_types = jnp.broadcast_to(q_types, (kv_types.shape[0], mask.q_len))
    rule = TokenTypes(q_types, kv_types, zero_policy)
    ids: dict[str, jax.Array] = {}
    if combine != "union" if update_segment_ids is None else update_segment_ids:
        kept = mask_ids.valid(mask) if combine == "intersect" else (True, True)
        padding = -1 if zero_policy != "none" else 0
        ids = {
            name: jnp.where(valid, jnp.where(types == 0, padding, types), -1)
            for name, valid, types in zip(
                ("q_ids", "kv_ids"), kept, (q_types, kv_types), strict=True
            )
        }
    if combine == "intersect":
        return _restricted(mask, rule, **ids)
    if combine == "replace" and ids:
        # The types alone say what is padding; positions stay what they were.
        q_positions, kv_positions = mask_ids.positions(mask)
        places = {"q_positions": q_positions, "kv_positions": kv_positions}
        return changed(mask, rule=rule, ids_rule=None, **places, **ids)
    # What the ids say is no longer a part of the rule: keep it next to the rule.
    ids_rule = mask_ids.id_rules(mask_ids.source(mask))
    joined = mask.rule | rule if combine == "union" else rule
    return changed(mask, rule=joined, ids_rule=ids_rule, **ids)


def apply_kv_lengths(
    mask: Mask,
    kv_lengths: ArrayValues,
    q_len: int | None,
    end_index: ArrayValues | None,
    sliding_window: int | None,
) -> Mask:
    """`k < kv_lengths`, for a range of queries and the newest keys."""
    name = "apply_kv_lengths"
    where = f"MaskInfo.{name}"
    if (q_len is None) != (end_index is None):
        raise ValueError(f"{where}: q_len and end_index go together.")
    mask, lengths = _with_numbers(mask, f"{name}: kv_lengths", kv_lengths)
    mask = _restricted(mask, KeyLength(lengths))
    if mask.kv_positions is not None:
        positions = mask_ids.cut_off(mask.kv_positions, lengths, KEY_PADDING_POSITION)
        mask = changed(mask, kv_positions=positions)
    if q_len is not None and end_index is not None:
        size = static_integer(f"{where}: q_len", q_len, 1)
        if size > mask.q_len:
            raise ValueError(f"{where}: q_len must be at most {mask.q_len}, got {size}.")
        mask, end = _with_numbers(mask, f"{name}: end_index", end_index)
        start = _clip(end - size, 0, mask.q_len - size)
        mask = _sliced(mask, start, size, 0, mask.kv_len)
    if sliding_window is not None:
        width = min(static_integer(f"{where}: sliding_window", sliding_window, 1), mask.kv_len)
        start = _clip(lengths - width, 0, mask.kv_len - width)
        mask = _sliced(mask, 0, mask.q_len, start, width)
    return mask


def _with_mask(mask: Mask, attention_mask: ArrayValues | None) -> Mask:
    """`mask` with a mask of pairs in place of its rules, or only with its segments."""
    if attention_mask is None:
        return changed(mask, rule=Segments(*mask_ids.reported(mask)), ids_rule=None)
    given = type(mask).from_attention_mask(attention_mask)
    if given.shape[1:] != (mask.q_len, mask.kv_len):
        raise ValueError(
            "MaskInfo.replace: attention_mask must be of this mask's lengths "
            f"{(mask.q_len, mask.kv_len)}, got {given.shape[1:]}."
        )
    size = max(mask.batch_size or 1, given.batch_size or 1)
    if {mask.batch_size, given.batch_size} - {None, 1, size}:
        raise ValueError(
            f"MaskInfo.replace: attention_mask must have {mask.batch_size} batch rows like this "
            f"mask, or 1, got {given.batch_size}."
        )
    mask, given = with_batch(mask, size), with_batch(given, size)
    return changed(mask, rule=given.rule, ids_rule=None, q_ids=None, kv_ids=None)


def replaced(
    mask: Mask,
    attention_mask: Replacement,
    segment_ids: tuple[Replacement, Replacement],
    cu_seqlens: tuple[Replacement, Replacement],
    positions: tuple[Replacement, Replacement],
    axis_names: Mapping[str, object],
) -> Mask:
    """`mask` with other parts; see `MaskInfo.replace`. Pairs are of queries and keys."""
    new_mask = mask
    if not isinstance(attention_mask, Keep):
        new_mask = _with_mask(mask, attention_mask)
    q_ids = _new_ids(new_mask, "q", segment_ids[0], cu_seqlens[0], mask.q_len)
    kv_ids = _new_ids(new_mask, "kv", segment_ids[1], cu_seqlens[1], mask.kv_len)
    if q_ids is not KEEP or kv_ids is not KEEP:
        new_mask = _with_ids(new_mask, q_ids, kv_ids)
    names = ("q_positions", "kv_positions")
    cleared = {name: None for name, new in zip(names, positions, strict=True) if new is None}
    kept = {name: new for name, new in axis_names.items() if new is not KEEP}
    new_mask = changed(new_mask, **kept, **cleared)
    given = (None if isinstance(new, Keep) else new for new in positions)
    return with_positions(new_mask, "MaskInfo.replace", *given)


def _new_ids(
    mask: "MaskInfo", side: str, ids: Replacement, cu_seqlens: Replacement, length: int
) -> jax.Array | Keep | None:
    """The new ids of one side; None for no segments."""
    if ids is not KEEP and cu_seqlens is not KEEP:
        raise ValueError(
            f"MaskInfo.replace: give {side}_segment_ids or cu_seqlens_{side}, not both."
        )
    if ids is None or cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, Keep):
        ids = ids_of_pairs(f"MaskInfo.replace: cu_seqlens_{side}", cu_seqlens, length)
    if isinstance(ids, Keep):
        return ids
    array = integers(f"MaskInfo.replace: {side}_segment_ids", ids, 2)
    if array.shape[1] != length or array.shape[0] not in (1, mask.batch_size):
        raise ValueError(
            f"MaskInfo.replace: {side}_segment_ids must have shape "
            f"{(mask.batch_size, length)}, got {array.shape}."
        )
    return jnp.broadcast_to(array, (mask.batch_size, length))


def _with_ids(mask: Mask, q_ids: jax.Array | Keep | None, kv_ids: jax.Array | Keep | None) -> Mask:
    """The mask with other segments, or none, wherever its rules speak of segments."""
    if q_ids is None or kv_ids is None:
        segments = None
    else:
        old_q, old_kv = mask_ids.derived(mask)
        segments = Segments(
            old_q if isinstance(q_ids, Keep) else q_ids,
            old_kv if isinstance(kv_ids, Keep) else kv_ids,
        )
    rule = _with_segments(mask.rule, segments)
    if segments is not None and "segments" not in mask.rule.features():
        rule = rule & segments
    ids_rule = None
    if mask.ids_rule is not None or not mask_ids.has_segments(rule):
        # All are tokens, if nothing else says which are: a mask has a batch even without rules.
        shown = segments or Segments(*_zero_ids(mask.shape))
        ids_rule = mask_ids.id_rules(_with_segments(mask_ids.source(mask), None)) & shown
    return changed(mask, rule=rule, ids_rule=ids_rule, q_ids=None, kv_ids=None)


def _with_segments(rule: Rule, segments: Segments | None) -> Rule:
    """`rule` with `segments` in place of every segment rule; None lets every segment see all."""
    if isinstance(rule, Segments):
        return And(()) if segments is None else segments
    if isinstance(rule, And | Or):
        parts = tuple(_with_segments(part, segments) for part in rule.rules)
        return type(rule)(parts)
    return rule


def _zero_ids(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    *batch, q_len, kv_len = shape
    return jnp.zeros((*batch, q_len), jnp.int32), jnp.zeros((*batch, kv_len), jnp.int32)


def _with_numbers(mask: Mask, where: str, value: ArrayValues) -> tuple[Mask, int | jax.Array]:
    """One number per batch row; a mask of batch 1 takes the batch of the numbers."""
    number = numbers(f"MaskInfo.{where}", value, mask.batch_size)
    if isinstance(number, jax.Array) and number.ndim == 1 and number.shape[0] != mask.batch_size:
        return with_batch(mask, number.shape[0]), number
    return mask, number


def _per_row(mask: "MaskInfo", number: int | jax.Array) -> int | jax.Array:
    """A number that is not known yet, once for each batch row; a static one as it is."""
    if isinstance(number, int) or mask.batch_size is None:
        return number
    return jnp.broadcast_to(number, (mask.batch_size,))


def _with_types(mask: Mask, where: str, given: ArrayValues, length: int) -> tuple[Mask, jax.Array]:
    """Token types of one side, with the batch of the mask, and the mask with that of them."""
    batch = mask.batch_size
    types = integers(f"{where}: token_type_ids", given, 1 if batch is None else 2)
    if types.shape[-1] != length:
        raise ValueError(
            f"{where}: token types must have the mask's length {length}, got {types.shape}."
        )
    if batch is None or types.shape[0] == batch:
        return mask, types
    if batch != 1 and types.shape[0] != 1:
        raise ValueError(
            f"{where}: token types must have the mask's batch {batch}, got {types.shape}."
        )
    size = max(batch, types.shape[0])
    return with_batch(mask, size), jnp.broadcast_to(types, (size, length))


def _restricted(mask: Mask, rule: Rule, **changes: object) -> Mask:
    """The mask with one rule more."""
    if mask.batch_size is not None:
        rule = rule.with_batch(mask.batch_size)
    ids_rule = mask.ids_rule
    if ids_rule is not None:
        ids_rule = ids_rule & mask_ids.id_rules(rule)
    return changed(mask, rule=mask.rule & rule, ids_rule=ids_rule, **changes)


def _sliced(mask: Mask, q_start: Start, q_len: int, k_start: Start, k_len: int) -> Mask:
    """The mask of a rectangle that lies inside this one."""
    q_positions, kv_positions = mask.q_positions, mask.kv_positions
    # Once tokens are cut away, positions can no longer be counted from the ids.
    if mask_ids.has_segments(mask_ids.source(mask)):
        q_positions, kv_positions = mask_ids.positions(mask)
    part = lambda array, start, length: (
        None if array is None else take(array, start, length, -1, fill=-1)
    )
    cut = lambda rule: rule.slice(q_start, q_len, k_start, k_len)
    return changed(
        mask,
        rule=cut(mask.rule),
        ids_rule=None if mask.ids_rule is None else cut(mask.ids_rule),
        q_len=q_len,
        kv_len=k_len,
        q_positions=part(q_positions, q_start, q_len),
        kv_positions=part(kv_positions, k_start, k_len),
        q_ids=part(mask.q_ids, q_start, q_len),
        kv_ids=part(mask.kv_ids, k_start, k_len),
    )


def _clip(number: int | jax.Array, low: int, high: int) -> int | jax.Array:
    return max(low, min(number, high)) if isinstance(number, int) else jnp.clip(number, low, high)


def _chunk_numbers(valid: jax.Array, size: int | jax.Array) -> jax.Array:
    if not isinstance(size, int):
        size = size[..., None]
    return jnp.where(valid, jnp.arange(valid.shape[-1]) // size + 1, -1).astype(jnp.int32)
