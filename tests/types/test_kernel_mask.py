"""The normal form of a mask for kernels allows the pairs that its rules allow."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rule_cases import BATCH, EXAMPLES, HEADS, cases

from ejkernel.types.kernel_mask import (
    KernelMask,
    conjunctions,
    is_overlapping_interval,
    kernel_mask,
    row_bounds,
    without_kernel_mask,
)
from ejkernel.types.rules import (
    And,
    Band,
    Blocks,
    Chunks,
    Dense,
    Everything,
    KeyLength,
    Match,
    Or,
    QueryLength,
    Segments,
    TokenTypes,
)

PADDING = st.sampled_from([(0, 0), (3, 5)])


def pairs_of(mask, q_len, kv_len, kv_size):
    allowed = np.asarray(mask.allowed(kv_size))
    shape = (BATCH, HEADS, max(allowed.shape[2], q_len), kv_size)
    return np.broadcast_to(allowed, shape)[:, :, :q_len, :kv_len]


@EXAMPLES
@given(cases(), PADDING)
def test_it_allows_the_pairs_of_the_mask(case, padding):
    make, expected, q_len, kv_len = case
    q_size, kv_size = q_len + padding[0], kv_len + padding[1]
    rule = make()
    traced = jax.jit(kernel_mask, static_argnums=(1, 2, 3, 4))
    for build in (kernel_mask, traced):
        mask = build(rule, q_len, kv_len, q_size, kv_size)
        np.testing.assert_array_equal(pairs_of(mask, q_len, kv_len, kv_size), expected)


@EXAMPLES
@given(cases(), PADDING)
def test_up_to_hides_what_lies_past_the_last_key(case, padding):
    make, expected, q_len, kv_len = case
    q_size, kv_size = q_len + padding[0], kv_len + padding[1]
    mask = kernel_mask(make(), q_len, kv_len, q_size, kv_size).up_to(kv_len - 1, q_size)
    allowed = pairs_of(mask, q_len, kv_size, kv_size)
    np.testing.assert_array_equal(allowed[..., :kv_len], expected)
    assert not allowed[..., kv_len:].any()


@EXAMPLES
@given(cases())
def test_conjunctions_together_are_the_mask(case):
    make, expected, q_len, kv_len = case
    rule = make()
    found = conjunctions(rule, 6)
    if found is None:
        return
    assert 0 < len(found) <= 6
    members = [And(rules).dense(q_len, kv_len) for rules in found]
    joined = np.asarray(functools.reduce(operator.or_, members))
    np.testing.assert_array_equal(np.broadcast_to(joined, expected.shape), expected)


def test_each_query_has_its_first_and_last_key():
    rule = Band(-2, 1) & KeyLength(jnp.array([3, 9])) & QueryLength(4)
    mask = kernel_mask(rule, 5, 6, 5, 6)
    assert mask.lower is not None
    assert mask.upper is not None
    assert mask.lower.tolist() == [[-2, -1, 0, 1, 2]]
    assert mask.upper.tolist() == [[1, 2, 2, 2, -1], [1, 2, 3, 4, -1]]
    assert mask.id_pairs == mask.unions == ()


@EXAMPLES
@given(cases())
def test_a_conjunction_is_its_bounds_and_its_pairs_of_ids(case):
    make, _, q_len, kv_len = case
    for rules in conjunctions(make(), 6) or []:
        lower, upper = row_bounds(rules, q_len)
        pairs = tuple(
            tuple(map(jnp.atleast_2d, rule.id_pair())) for rule in rules if isinstance(rule, Match)
        )
        allowed = KernelMask(lower, upper, pairs).allowed(kv_len)
        expected = And(rules).dense(q_len, kv_len)
        shape = (BATCH, 1, q_len, kv_len)
        np.testing.assert_array_equal(
            np.broadcast_to(allowed, shape), np.broadcast_to(expected, shape)
        )


def test_documents_become_bounds_and_other_segments_pairs_of_ids():
    ids = jnp.array([[0, 0, 1, 1, 1, -1]])
    for documents in (Segments(ids, ids, 2), Segments(ids, ids, 2, jnp.array([[0, 2, 5]]))):
        mask = kernel_mask(documents, 6, 6, 8, 8)
        assert mask.id_pairs == ()
        assert mask.lower is not None
        assert mask.upper is not None
        seen = [
            list(range(int(first), int(last) + 1))
            for first, last in zip(mask.lower[0], mask.upper[0], strict=True)
        ]
        assert seen == [[0, 1], [0, 1], [2, 3, 4], [2, 3, 4], [2, 3, 4], [], [], []]
    plain = kernel_mask(Segments(ids, ids), 6, 6, 8, 8)
    assert plain.lower is None
    assert [(q.shape, k.shape) for q, k in plain.id_pairs] == [((1, 8), (1, 8))]


def test_a_mask_of_keys_is_a_pair_of_ids_and_a_mask_of_pairs_stays_dense():
    keys = kernel_mask(Dense(jnp.array([[[[True, False, True]]]])), 2, 3, 2, 4)
    assert keys.dense is None
    assert keys.allowed(4)[0, 0].astype(int).tolist() == [[1, 0, 1, 0]] * 2
    pairs = jnp.array([[[[True, False], [True, True]]]])
    both = kernel_mask(Dense(pairs) & Dense(~pairs), 2, 2, 2, 2)
    assert both.dense is not None
    assert both.dense.dtype == jnp.int8
    assert not both.allowed(2).any()


def test_what_allows_everything_leaves_nothing():
    assert kernel_mask(Everything(), 3, 3, 4, 4) == KernelMask()
    assert kernel_mask(Or((Band(None, 0), And(()))), 3, 3, 4, 4) == KernelMask()


def test_nothing_is_allowed_by_an_empty_union():
    mask = kernel_mask(Or(()), 3, 3, 4, 4)
    assert not mask.allowed(4).any()


def test_repeated_queries_see_the_same_keys():
    rule = (Band(-1, 0) | TokenTypes(jnp.array([[1, 0, 1]]), jnp.array([[1, 1, 2, 0]]))) & Dense(
        jnp.array([[[[1, 1, 0, 1], [1, 0, 1, 1], [0, 1, 1, 1]]]]) != 0
    )
    mask = kernel_mask(rule, 3, 4, 3, 4)
    expected = np.asarray(rule.dense(3, 4))[0, 0]
    repeated = np.asarray(mask.repeated(7).allowed(4))[0, 0]
    np.testing.assert_array_equal(repeated, expected[np.arange(7) % 3])


@pytest.mark.parametrize(
    ("rule", "kinds"),
    [
        (Everything(), []),
        (Band(None, 0) & (KeyLength(2) | Chunks(3)), []),
        (Blocks(jnp.ones((1, 1, 2, 2), bool), 2, 2), ["Blocks"]),
        (Band(None, 0) | Blocks(jnp.ones((1, 1, 2, 2), bool), 2, 2), ["Blocks"]),
    ],
)
def test_rules_without_a_normal_form_are_named(rule, kinds):
    assert without_kernel_mask(rule) == kinds


def test_too_many_conjunctions_or_a_table_are_refused():
    two = KeyLength(2) | QueryLength(1)
    assert len(conjunctions(two & two, 4) or []) == 4
    assert conjunctions(two & two, 3) is None
    assert conjunctions(Dense(jnp.ones((1, 1, 2, 2), bool)), 6) is None
    assert conjunctions(Or(()), 6) is None
    assert conjunctions(Everything(), 6) == [()]


def test_intervals_that_overlap():
    ids = jnp.zeros((1, 4), int)
    assert is_overlapping_interval(Band(None, 0))
    assert is_overlapping_interval(Segments(ids, ids, 1))
    assert not is_overlapping_interval(Segments(ids, ids))
    assert not is_overlapping_interval(Band(None, 0, ids))
    assert not is_overlapping_interval(Everything())
