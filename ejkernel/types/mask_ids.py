"""Segment ids of a mask: what can be said of it token by token."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ejkernel.types.conversion import mask_to_segment_ids
from ejkernel.types.rule_tree import is_array
from ejkernel.types.rules import And, Dense, KeyLength, QueryLength, Rule, Segments

if TYPE_CHECKING:
    from ejkernel.types.mask_base import MaskBase


def reported(mask: "MaskBase") -> tuple[jax.Array, jax.Array]:
    """The ids that the mask reports: those put in place of the segments, or the segments."""
    if mask.q_ids is not None and mask.kv_ids is not None:
        return _without_padding(mask, mask.q_ids, mask.kv_ids)
    return derived(mask)


def derived(mask: "MaskBase") -> tuple[jax.Array, jax.Array]:
    """The ids of the segments: of the segment rule, or of a dense mask, or all 0."""
    parts = mask._ids_source.parts()
    segments = [rule for rule in parts if isinstance(rule, Segments)]
    if segments:
        ids = segments[-1].q_ids, segments[-1].kv_ids
    elif (dense := _dense(mask)) is not None:
        # Without a batch axis the first axis is that of the heads: one mask, not several.
        ids = mask_to_segment_ids(dense if dense.ndim == 4 else dense[None])
        ids = ids if dense.ndim == 4 else (ids[0][0], ids[1][0])
    else:
        ids = jnp.zeros(mask.q_len, jnp.int32), jnp.zeros(mask.kv_len, jnp.int32)
    return _without_padding(mask, *ids)


def valid(mask: "MaskBase") -> tuple[jax.Array, jax.Array]:
    """Where the reported ids are not negative, without numbering the segments of a dense mask."""
    if mask.q_ids is None and not has_segments(mask._ids_source):
        dense = _dense(mask)
        if dense is not None:
            seen = dense.any(-3)  # [..., t, s]
            ids = (jnp.where(seen.any(axis), 0, -1) for axis in (-1, -2))
            q_ids, kv_ids = _without_padding(mask, *ids)
            return q_ids >= 0, kv_ids >= 0
    q_ids, kv_ids = mask._ids()
    return q_ids >= 0, kv_ids >= 0


def has_segments(rule: Rule) -> bool:
    """Whether ids can be read from a segment rule that always holds."""
    return any(isinstance(part, Segments) for part in rule.parts())


def id_rules(rule: Rule) -> Rule:
    """The part of `rule` that ids are read from."""
    kinds = (Segments, Dense, KeyLength, QueryLength)
    return And(tuple(part for part in rule.parts() if isinstance(part, kinds)))


def _dense(mask: "MaskBase") -> jax.Array | None:
    parts = tuple(rule for rule in mask._ids_source.parts() if isinstance(rule, Dense))
    return And(parts).dense(mask.q_len, mask.kv_len) if parts else None


def _without_padding(
    mask: "MaskBase", q_ids: jax.Array, kv_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The ids, -1 past the lengths that the rule knows, with the batch axis of the mask."""
    for rule in mask._ids_source.parts():
        if isinstance(rule, QueryLength):
            q_ids = cut_off(q_ids, rule.length, -1)
        elif isinstance(rule, KeyLength):
            kv_ids = cut_off(kv_ids, rule.length, -1)
    if mask.batch_size is None:
        return q_ids, kv_ids
    return (
        jnp.broadcast_to(q_ids, (mask.batch_size, mask.q_len)),
        jnp.broadcast_to(kv_ids, (mask.batch_size, mask.kv_len)),
    )


def cut_off(values: jax.Array, length: int | jax.Array, fill: int) -> jax.Array:
    """`values` `[..., t]` up to `length` `[...]`, `fill` from there on."""
    if is_array(length):
        length = length[..., None]  # type: ignore
    return jnp.where(jnp.arange(values.shape[-1]) < length, values, fill)
