"""What a mask says token by token: segment ids, which tokens are padding, positions."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ejkernel.types.conversion import KEY_PADDING_POSITION, mask_to_segment_ids, segment_positions
from ejkernel.types.mask_fields import cached, changed
from ejkernel.types.rule_tree import is_array
from ejkernel.types.rules import And, Dense, KeyLength, QueryLength, Rule, Segments

if TYPE_CHECKING:
    from ejkernel.types.mask import MaskInfo


def source(mask: "MaskInfo") -> Rule:
    """The rule that ids are read from."""
    return mask.rule if mask.ids_rule is None else mask.ids_rule


def reported(mask: "MaskInfo") -> tuple[jax.Array, jax.Array]:
    """The ids that the mask reports: those put in place of the segments, or the segments."""
    return cached(mask, "ids", lambda: _reported(mask))


def reported_per_head(mask: "MaskInfo") -> tuple[jax.Array, jax.Array]:
    """The ids that the mask reports for each head, `[..., n, t]` and `[..., n, s]`."""
    dense = [rule for rule in source(mask).parts() if isinstance(rule, Dense)]
    if mask.rule.heads == 1 or not dense or mask.q_ids is not None or mask.batch_size is None:
        q_ids, kv_ids = reported(mask)
        heads = (*q_ids.shape[:-1], mask.rule.heads)
        return (
            jnp.broadcast_to(q_ids[..., None, :], (*heads, mask.q_len)),
            jnp.broadcast_to(kv_ids[..., None, :], (*heads, mask.kv_len)),
        )
    return mask_to_segment_ids(dense[-1].dense(mask.q_len, mask.kv_len), per_head=True)


def derived(mask: "MaskInfo") -> tuple[jax.Array, jax.Array]:
    """The ids of the segments: of the segment rule, or of a dense mask, or all 0."""
    segments = [rule for rule in source(mask).parts() if isinstance(rule, Segments)]
    if segments:
        ids = segments[-1].q_ids, segments[-1].kv_ids
    elif (dense := _dense(mask)) is not None:
        # Without a batch axis the first axis is that of the heads: one mask, not several.
        ids = mask_to_segment_ids(dense if dense.ndim == 4 else dense[None])
        ids = ids if dense.ndim == 4 else (ids[0][0], ids[1][0])
    else:
        ids = jnp.zeros(mask.q_len, jnp.int32), jnp.zeros(mask.kv_len, jnp.int32)
    return _without_padding(mask, *ids)


def valid(mask: "MaskInfo") -> tuple[jax.Array, jax.Array]:
    """Which queries and keys are tokens rather than padding: where the ids are not negative."""
    return cached(mask, "valid", lambda: _valid(mask))


def positions(mask: "MaskInfo") -> tuple[jax.Array, jax.Array]:
    """Positions of queries and keys, as given or counted in each segment."""
    return cached(mask, "positions", lambda: _positions(mask))


def materialized(mask: "MaskInfo", per_head: bool) -> "MaskInfo":
    """The mask with its ids stored in it."""
    if per_head and mask.rule.heads > 1:
        raise ValueError(
            "MaskInfo.materialize_segment_ids: a mask stores one id per token; "
            "get_or_compute_segment_ids(per_head=True) gives ids for each head."
        )
    q_ids, kv_ids = reported(mask)
    return changed(mask, q_ids=q_ids, kv_ids=kv_ids)


def has_segments(rule: Rule) -> bool:
    """Whether ids can be read from a segment rule that always holds."""
    return any(isinstance(part, Segments) for part in rule.parts())


def id_rules(rule: Rule) -> Rule:
    """The part of `rule` that ids are read from."""
    kinds = (Segments, Dense, KeyLength, QueryLength)
    return And(tuple(part for part in rule.parts() if isinstance(part, kinds)))


def cut_off(values: jax.Array, length: int | jax.Array, fill: int) -> jax.Array:
    """`values` `[..., t]` up to `length` `[...]`, `fill` from there on."""
    if is_array(length):
        length = length[..., None]
    with jax.numpy_rank_promotion("allow"):
        return jnp.where(jnp.arange(values.shape[-1]) < length, values, fill)


def _reported(mask: "MaskInfo") -> tuple[jax.Array, jax.Array]:
    if mask.q_ids is not None and mask.kv_ids is not None:
        return _without_padding(mask, mask.q_ids, mask.kv_ids)
    return derived(mask)


def _valid(mask: "MaskInfo") -> tuple[jax.Array, jax.Array]:
    # The segments of a dense mask need not be numbered for this.
    if mask.q_ids is None and not has_segments(source(mask)):
        dense = _dense(mask)
        if dense is not None:
            seen = dense.any(-3)  # [..., t, s]
            ids = (jnp.where(seen.any(axis), 0, -1) for axis in (-1, -2))
            q_ids, kv_ids = _without_padding(mask, *ids)
            return q_ids >= 0, kv_ids >= 0
    q_ids, kv_ids = reported(mask)
    return q_ids >= 0, kv_ids >= 0


def _positions(mask: "MaskInfo") -> tuple[jax.Array, jax.Array]:
    q_positions, kv_positions = mask.q_positions, mask.kv_positions
    if q_positions is None or kv_positions is None:
        # Of the segments themselves: chunks and token types do not move a token.
        q_ids, kv_ids = derived(mask)
        if q_positions is None:
            q_positions = segment_positions(q_ids, padding=-1)
        if kv_positions is None:
            kv_positions = segment_positions(kv_ids, padding=KEY_PADDING_POSITION)
    return q_positions, kv_positions


def _dense(mask: "MaskInfo") -> jax.Array | None:
    parts = tuple(rule for rule in source(mask).parts() if isinstance(rule, Dense))
    return And(parts).dense(mask.q_len, mask.kv_len) if parts else None


def _without_padding(
    mask: "MaskInfo", q_ids: jax.Array, kv_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The ids, -1 past the lengths that the rule knows, with the batch axis of the mask."""
    for rule in source(mask).parts():
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
