"""Random rules with their masks by definition, for property tests."""

import functools
import operator
from functools import partial

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from tiers import examples

from ejkernel.types.rules import (
    Band,
    Chunks,
    Dense,
    Everything,
    KeyLength,
    QueryLength,
    Segments,
    TokenTypes,
)

BATCH, HEADS = 2, 3
# Few shapes, because every new one is compiled anew.
LENGTHS = st.sampled_from([(6, 11), (1, 9)])
KINDS = ("everything", "segments", "band", "positions", "chunks", "key", "query", "types", "dense")
EXAMPLES = examples(12)


def index(number):
    """A number, or one per batch row, against [b, n, q, k]."""
    return np.asarray(number).reshape(-1, 1, 1, 1)


def numbers(low, high):
    integer = st.integers(low, high)
    return integer | st.lists(integer, min_size=BATCH, max_size=BATCH)


def ids(length, low=-1, high=3):
    """Random numbers [1 or b, length]: drawn one by one they would mostly be all the same."""
    draw = lambda seed: np.random.default_rng(seed).integers(low, high + 1, (1 + seed % 2, length))
    return st.integers(0, 10**6).map(draw)


def made(kind, *values):
    """A rule, with NumPy arrays and lists as JAX arrays."""
    return kind(*(jnp.array(v) if isinstance(v, list | np.ndarray) else v for v in values))


def joined(connective, makers):
    return functools.reduce(connective, [make() for make in makers])


@st.composite
def leaf_rules(draw, q_len, kv_len):
    """How to make a rule that is no combination, and its mask by definition, [b, n, q, k].

    The rule is made later: drawing it would run JAX inside hypothesis, which objects.
    """
    q, k = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    kind = draw(st.sampled_from(KINDS))
    match kind:
        case "everything":
            make, mask = Everything, np.ones((q_len, kv_len), bool)
        case "segments":
            a, b = draw(ids(q_len)), draw(ids(kv_len))
            make = partial(made, Segments, a, b)
            a, b = a[:, None, :, None], b[:, None, None, :]
            mask = (a == b) & (a >= 0) & (b >= 0)
        case "band" | "positions":
            low, high = draw(st.none() | numbers(-4, 2)), draw(st.none() | numbers(-2, 4))
            positions, p = None, q
            if kind == "positions" and (low is not None or high is not None):
                p = draw(ids(q_len, 0, kv_len))
                positions, p = p, p[:, None, :, None]
            make = partial(made, Band, low, high, positions)
            mask = np.ones_like(k - p, bool)
            mask = mask & (k - p >= index(low)) if low is not None else mask
            mask = mask & (k - p <= index(high)) if high is not None else mask
        case "chunks":
            size, start, k_start = draw(numbers(1, 5)), draw(numbers(0, 3)), draw(numbers(0, 3))
            make = partial(made, Chunks, size, start, k_start)
            mask = (q + index(start)) // index(size) == (k + index(k_start)) // index(size)
        case "key":
            length = draw(numbers(-1, kv_len + 1))
            make, mask = partial(made, KeyLength, length), (k < index(length)) & (q >= 0)
        case "query":
            length = draw(numbers(-1, q_len + 1))
            make, mask = partial(made, QueryLength, length), (q < index(length)) & (k >= 0)
        case "types":
            policy = draw(st.sampled_from(["q", "kv", "both", "none"]))
            a, b = draw(ids(q_len, 0)), draw(ids(kv_len, 0))
            make = partial(made, TokenTypes, a, b, policy)
            a, b = a[:, None, :, None], b[:, None, None, :]
            mask = (a == b) & ((a != 0) | (policy not in ("q", "both")))
            mask &= (b != 0) | (policy not in ("kv", "both"))
        case "dense":
            shape = draw(
                st.tuples(
                    st.sampled_from([1, BATCH]),
                    st.sampled_from([1, HEADS]),
                    st.sampled_from([1, q_len]),
                    st.sampled_from([1, kv_len]),
                )
            )
            seed, share = draw(st.integers(0, 10**6)), draw(st.sampled_from([0.2, 0.9]))
            mask = np.random.default_rng(seed).random(shape) < share
            make = partial(made, Dense, mask)
    mask = mask[(None,) * (4 - mask.ndim)]
    return make, np.broadcast_to(mask, (BATCH, HEADS, q_len, kv_len))


@st.composite
def rules(draw, q_len, kv_len, depth=2):
    """An expression of rules, and its mask by definition."""
    if depth == 0 or draw(st.booleans()):
        return draw(leaf_rules(q_len, kv_len))
    parts = draw(st.lists(rules(q_len, kv_len, depth - 1), min_size=2, max_size=3))
    connective = draw(st.sampled_from([operator.and_, operator.or_]))
    makers, masks = zip(*parts, strict=True)
    return partial(joined, connective, makers), functools.reduce(connective, masks)


@st.composite
def cases(draw):
    q_len, kv_len = draw(LENGTHS)
    make, mask = draw(rules(q_len, kv_len))
    return make, mask, q_len, kv_len


def full(values):
    return np.broadcast_to(values, (BATCH, HEADS, *values.shape[-2:]))
