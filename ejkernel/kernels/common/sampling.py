"""Data to tune on, where the real one is not known yet."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ejkernel.types.rules import And, KeyLength, Or, QueryLength, Rule, Segments

_LONG = 2**30


def visible(rule: Rule, drawn: Rule) -> Rule:
    """`drawn` with every length that was only a shape in `rule` made long enough to hide nothing.

    Zeros, which stand for unknown integers, would make every row empty and every kernel fast, and
    of packed documents one. They get equal lengths.
    """
    if isinstance(rule, And | Or) and isinstance(drawn, And | Or):
        parts = map(visible, rule.rules, drawn.rules)
        return type(drawn)(tuple(parts))
    if isinstance(rule, KeyLength | QueryLength) and unknown(rule.length):
        return type(rule)(jnp.full(rule.length.shape, _LONG, jnp.int32))  # pyright: ignore
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


def unknown(x: Any) -> bool:
    """Whether only the shape of an array is there."""
    return isinstance(x, Tracer | jax.ShapeDtypeStruct)
