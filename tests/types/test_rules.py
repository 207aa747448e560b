"""Every rule against a NumPy evaluation of its definition, pair by pair."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rule_cases import BATCH, EXAMPLES, LENGTHS, cases, full, leaf_rules

from ejkernel.types.rules import (
    And,
    Band,
    Chunks,
    Dense,
    Everything,
    KeyLength,
    Or,
    QueryLength,
    Segments,
    TokenTypes,
)


@EXAMPLES
@given(cases())
def test_dense_is_the_definition(case):
    make, mask, q_len, kv_len = case
    rule = make()
    dense = rule.dense(q_len, kv_len)
    np.testing.assert_array_equal(full(dense), mask)
    assert dense.shape[-3:] == (rule.heads, q_len, kv_len)
    assert rule.batched == (dense.ndim == 4 and dense.shape[0] > 1)


@EXAMPLES
@given(cases())
def test_a_row_is_the_row_of_the_mask(case):
    make, mask, q_len, kv_len = case
    rule = make()
    for row in (rule.row(1), jax.jit(lambda rule, b: rule.row(b))(rule, 1)):
        dense = row.dense(q_len, kv_len)
        assert dense.ndim == 3
        np.testing.assert_array_equal(np.broadcast_to(dense, mask[1].shape), mask[1])


@EXAMPLES
@given(cases())
def test_a_head_is_the_head_of_the_mask(case):
    make, mask, q_len, kv_len = case
    rule = make()
    dense = rule.head(2).dense(q_len, kv_len)
    np.testing.assert_array_equal(full(dense), full(mask[:, 2:3]))


@EXAMPLES
@given(cases(), st.data())
def test_a_slice_is_the_slice_of_the_mask(case, data):
    make, mask, q_len, kv_len = case
    rule = make()
    q_size, k_size = min(2, q_len), 3
    starts = [
        (data.draw(st.integers(0, q_len - q_size)), data.draw(st.integers(0, kv_len - k_size)))
        for _ in range(BATCH)
    ]
    (q, k), expected = starts[0], []
    for row, (q_start, k_start) in enumerate(starts):
        expected.append(mask[row, :, q_start : q_start + q_size, k_start : k_start + k_size])
    part = mask[:, :, q : q + q_size, k : k + k_size]
    static = rule.slice(q, q_size, k, k_size)
    traced = jax.jit(lambda rule, q, k: rule.slice(q, q_size, k, k_size))(rule, q, k)
    per_row = rule.slice(
        jnp.array([s[0] for s in starts]), q_size, jnp.array([s[1] for s in starts]), k_size
    )
    np.testing.assert_array_equal(full(static.dense(q_size, k_size)), part)
    np.testing.assert_array_equal(full(traced.dense(q_size, k_size)), part)
    np.testing.assert_array_equal(full(per_row.dense(q_size, k_size)), np.stack(expected))


@EXAMPLES
@given(cases())
def test_tiles_put_together_are_the_mask(case):
    make, mask, q_len, kv_len = case
    rule = make()
    block_q, block_k = 4, 5

    @jax.jit
    def tile(rule, i, j):
        rule = rule.row(1).slice(i * block_q, block_q, j * block_k, block_k)
        return rule.dense(block_q, block_k)

    for i in range(-(-q_len // block_q)):
        for j in range(-(-kv_len // block_k)):
            q, k = i * block_q, j * block_k
            part = mask[1, :, q : q + block_q, k : k + block_k]
            found = tile(rule, i, j)[:, : part.shape[-2], : part.shape[-1]]
            np.testing.assert_array_equal(np.broadcast_to(found, part.shape), part)


@EXAMPLES
@given(cases(), st.sampled_from([(2, 3), (4, 4), (16, 16), (1, 1)]))
def test_blocks_never_hide_a_pair_nor_invent_one(case, block):
    make, mask, q_len, kv_len = case
    rule = make()
    block_q, block_k = block
    some, every = rule.blocks(q_len, kv_len, block_q, block_k)
    assert some.shape == every.shape
    assert some.shape[-3:] == (rule.heads, -(-q_len // block_q), -(-kv_len // block_k))
    some, every = full(some), full(every)
    for i in range(some.shape[-2]):
        for j in range(some.shape[-1]):
            q, k = i * block_q, j * block_k
            part = mask[:, :, q : q + block_q, k : k + block_k]
            assert not (part.any((-1, -2)) & ~some[..., i, j]).any()
            assert not (~part.all((-1, -2)) & every[..., i, j]).any()


@EXAMPLES
@given(st.data())
def test_blocks_of_one_rule_are_exact_where_its_blocks_are_single_pairs(data):
    q_len, kv_len = data.draw(LENGTHS)
    make, mask = data.draw(leaf_rules(q_len, kv_len))
    rule = make()
    some, every = rule.blocks(q_len, kv_len, 1, 1)
    np.testing.assert_array_equal(full(every), mask)
    np.testing.assert_array_equal(full(some), mask)


def exact_blocks(mask, block):
    tiles = mask.reshape(mask.shape[0] // block, block, mask.shape[1] // block, block)
    return tiles.any((1, 3)), tiles.all((1, 3))


@pytest.mark.parametrize(
    "rule",
    [
        Band(None, 0),
        Band(-5, 0),
        Band(-3, 6),
        Chunks(6),
        Chunks(4, 2, 5),
        KeyLength(9),
        QueryLength(17),
        Band(None, 0) | KeyLength(8),
        Band(None, 0) & Chunks(8),
        Segments(jnp.arange(24)[None] // 8, jnp.arange(24)[None] // 8),
        # Interleaved: the ranges of all blocks overlap, the sets of ids do not.
        Segments(*[jnp.array([[0, 2, 0, 2, 1, 1, 1, 1] * 3])] * 2),
        TokenTypes(jnp.arange(24)[None] // 4 % 3, jnp.arange(24)[None] // 4 % 3, "both"),
    ],
    ids=str,
)
def test_blocks_are_exact_for_common_masks(rule):
    some, every = rule.blocks(24, 24, 4, 4)
    dense = np.array(rule.dense(24, 24)).reshape(24, 24)
    expected_some, expected_every = exact_blocks(dense, 4)
    np.testing.assert_array_equal(some.reshape(6, 6), expected_some)
    np.testing.assert_array_equal(every.reshape(6, 6), expected_every)


@EXAMPLES
@given(cases())
def test_rules_survive_a_round_trip_through_their_leaves(case):
    make, mask, q_len, kv_len = case
    rule = make()
    leaves, structure = jax.tree.flatten(rule)
    rebuilt = jax.tree.unflatten(structure, leaves)
    np.testing.assert_array_equal(full(rebuilt.dense(q_len, kv_len)), mask)
    # Anything may stand where an array stood, and stays a leaf there.
    assert jax.tree.leaves(jax.tree.map(lambda leaf: 0, rule)) == [0] * len(leaves)
    assert jax.tree.structure(jax.tree.map(lambda leaf: 0, rule)) == structure


@EXAMPLES
@given(cases())
def test_jit_and_vmap_agree_with_eager(case):
    make, mask, q_len, kv_len = case
    rule = make()
    np.testing.assert_array_equal(
        jax.jit(lambda rule: rule.dense(q_len, kv_len))(rule), rule.dense(q_len, kv_len)
    )
    leaves = jax.tree.leaves(rule)
    if leaves and all(leaf.shape[0] == BATCH for leaf in leaves):
        mapped = jax.vmap(lambda rule: rule.dense(q_len, kv_len))(rule)
        np.testing.assert_array_equal(full(mapped), mask)
        some, every = jax.vmap(lambda rule: rule.blocks(q_len, kv_len, 4, 4))(rule)
        np.testing.assert_array_equal(full(some), full(rule.blocks(q_len, kv_len, 4, 4)[0]))
        np.testing.assert_array_equal(full(every), full(rule.blocks(q_len, kv_len, 4, 4)[1]))


def test_and_drops_what_says_nothing():
    causal = Band(None, 0)
    assert (causal & Everything()) is causal
    assert isinstance(Everything() & Everything(), Everything)
    assert len((causal & Chunks(2) & (Everything() & KeyLength(3))).rules) == 3


def test_or_with_everything_is_everything():
    assert isinstance(Band(None, 0) | Everything(), Everything)
    assert len((Band(None, 0) | Chunks(2) | KeyLength(3)).rules) == 3


def test_no_rules_at_all():
    assert And(()).dense(2, 3).all()
    assert not Or(()).dense(2, 3).any()
    assert not Or(()).blocks(2, 3, 2, 2)[0].any()


def test_static_starts_keep_numbers_static():
    rule = Band(-3, 0) & Chunks(4) & KeyLength(5) & QueryLength(6)
    assert jax.tree.leaves(rule.slice(np.int64(2), 2, 3, 2)) == []
    assert rule.slice(2, 2, 3, 2).describe() == (
        "and", ("band", -4, -1, None), ("chunks", 4, 2, 3), ("keylength", 2), ("querylength", 4),
    )  # fmt: skip


def test_features_name_the_kinds():
    ones = jnp.ones((1, 4), jnp.int32)
    assert Everything().features() == frozenset()
    assert Band(None, 3).features() == {"causal"}
    assert Band(-2, 0, ones).features() == {"window", "positions"}
    assert (Segments(ones, ones) | TokenTypes(ones, ones)).features() == {
        "segments",
        "token_types",
        "union",
    }
    assert (Dense(jnp.ones((1, 1, 4, 4), bool)) & KeyLength(3) & Chunks(2)).features() == {
        "mask",
        "lengths",
        "chunks",
    }


def test_describe_is_hashable_and_names_arrays():
    ones = jnp.ones((1, 4), jnp.int32)
    description = (Segments(ones, ones) & Band(None, jnp.array([3]))).describe()
    assert description == ("and", ("segments", "array", "array"), ("band", None, "array", None))
    hash(description)


def test_how_many_documents_there_are_is_no_part_of_a_description():
    ids = jnp.array([[0, 0, 1, -1]])
    four, eight = Segments(ids, ids, documents=4), Segments(ids, ids, documents=8)
    assert four.describe() == eight.describe() != Segments(ids, ids).describe()


def test_documents_are_not_promised_for_a_part_of_a_mask():
    """Where it begins elsewhere among the keys than among the queries they are not the same."""
    ids = jnp.array([[0, 0, 1, 1]])
    rule = Segments(ids, ids, documents=2)
    assert rule.row(0).documents == 2
    assert rule.slice(0, 2, 2, 2).documents is None


def test_contiguity_is_known_before_the_arrays_are():
    ones = jnp.ones((1, 4), jnp.int32)
    band = Band(-2, jnp.array([1, 2]))
    assert band.contiguous
    assert band.contiguous_columns
    assert Band(-2, 2, ones).contiguous
    assert not Band(-2, 2, ones).contiguous_columns
    assert (band & Chunks(3) & KeyLength(2) & QueryLength(2)).contiguous_columns
    assert not (band & Segments(ones, ones)).contiguous
    assert not (band | Chunks(3)).contiguous


@pytest.mark.parametrize("bound", [2**31 - 1, -(2**31) + 1])
def test_a_bound_at_the_end_of_int32_does_not_wrap_around(bound):
    assert Band(None, bound).dense(4, 4).all() == (bound > 0)
    assert Band(bound, None).blocks(4, 4, 2, 2)[1].all() == (bound < 0)
    assert Band(None, jnp.array([bound])).dense(4, 4).all() == (bound > 0)


@pytest.mark.parametrize("bound", [2**31 - 1, -(2**31) + 1, 2**40, -(2**40)])
def test_a_part_of_a_mask_with_a_bound_at_the_end_of_int32(bound):
    part = lambda rule: jax.jit(lambda at: rule.slice(at, 4, 0, 4).dense(4, 4))(4)
    back = lambda rule: jax.jit(lambda at: rule.slice(0, 4, at, 4).dense(4, 4))(4)
    for cut in (part, back):
        assert (cut(Band(None, bound)) == (bound > 0)).all()
        assert (cut(Band(bound, None)) == (bound < 0)).all()
        assert (cut(KeyLength(bound)) == (bound > 0)).all()
        assert (cut(QueryLength(bound)) == (bound > 0)).all()
