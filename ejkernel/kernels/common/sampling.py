"""Data to tune on, where the real one is not known yet."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ejkernel.types.rules import And, Band, KeyLength, Or, QueryLength, Rule, Segments

_LONG = 2**30


def visible(rule: Rule, drawn: Rule) -> Rule:
    """`drawn` with lengths and windows that were only shapes in `rule` made to hide nothing.

    Zeros, which stand for unknown integers, would make every row empty and every kernel fast, and
    of packed documents one. They get equal lengths.
    """
    if isinstance(rule, And | Or) and isinstance(drawn, And | Or):
        parts = map(visible, rule.rules, drawn.rules)
        return type(drawn)(tuple(parts))
    if isinstance(rule, KeyLength | QueryLength) and unknown(rule.length):
        return type(rule)(jnp.full(rule.length.shape, _LONG, jnp.int32))  # pyright: ignore
    if isinstance(rule, Band) and isinstance(drawn, Band):
        wide = {name: _wide(rule, name) for name in ("low", "high")}
        return dataclasses.replace(drawn, **{k: v for k, v in wide.items() if v is not None})
    if isinstance(rule, Segments) and rule.documents and unknown(rule.q_ids):
        tokens = rule.q_ids.shape[-1]
        ids = jnp.arange(tokens, dtype=jnp.int32) * rule.documents // tokens
        ids = jnp.broadcast_to(ids, rule.q_ids.shape)
        starts = rule.starts
        if starts is not None:
            first = -(-jnp.arange(starts.shape[-1], dtype=jnp.int32) * tokens // rule.documents)
            starts = jnp.broadcast_to(first, starts.shape)
        return Segments(ids, ids, rule.documents, starts)
    return drawn


def _wide(rule: Band, side: Literal["low", "high"]) -> jax.Array | None:
    """A bound that hides nothing, in place of one of a window that is not known yet."""
    bound = getattr(rule, side)
    if rule.low is None or not unknown(bound):  # a causal offset of 0 is as good as any
        return None
    return jnp.full(bound.shape, -_LONG if side == "low" else _LONG, jnp.int32)


def unknown(x: Any) -> bool:
    """Whether only the shape of an array is there."""
    return isinstance(x, Tracer | jax.ShapeDtypeStruct)
