"""Conversions between the representations of a mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from ejkernel.types import MaskInfo
from ejkernel.types.mask import (
    attention_mask_to_qkv_cu_seqlens,
    cu_seqlens_to_mask,
    mask_to_segment_ids,
    qkv_cu_seqlens_to_attention_mask,
    qkv_cu_seqlens_to_qkv_masks,
    qkv_masks_to_cu_seqlens,
    segment_ids_to_mask,
    segment_ids_to_qkv_masks,
)

EXAMPLES = examples(25)
ROW = st.lists(st.integers(-1, 3), min_size=6, max_size=6)


def unchecked(function):
    """`function` as users have it, without the checks of annotations that tests add."""
    return getattr(function, "__wrapped__", function)


def pairs_of(q_ids, kv_ids):
    a, b = np.asarray(q_ids)[..., :, None], np.asarray(kv_ids)[..., None, :]
    return (a == b) & (a >= 0)


@EXAMPLES
@given(ROW, ROW)
def test_segments_come_back_from_their_mask(q_row, kv_row):
    mask = pairs_of(q_row, kv_row)
    q_ids, kv_ids = mask_to_segment_ids(jnp.array(mask))
    np.testing.assert_array_equal(pairs_of(q_ids, kv_ids), mask)
    np.testing.assert_array_equal(q_ids >= 0, mask.any(1))
    np.testing.assert_array_equal(kv_ids >= 0, mask.any(0))


@EXAMPLES
@given(st.lists(st.booleans(), min_size=12, max_size=12))
def test_ids_of_any_mask_never_forbid_what_it_allows(bits):
    mask = np.array(bits).reshape(3, 4)
    q_ids, kv_ids = mask_to_segment_ids(jnp.array(mask))
    allowed = pairs_of(q_ids, kv_ids)
    assert (allowed | ~mask).all()
    np.testing.assert_array_equal(q_ids >= 0, mask.any(1))
    if (allowed != mask).any():
        assert set(np.unique(q_ids)) | set(np.unique(kv_ids)) <= {-1, 0}


def test_a_causal_mask_has_no_segments_but_tokens():
    causal = jnp.tril(jnp.ones((1, 4, 4), bool))
    q_ids, kv_ids = mask_to_segment_ids(causal)
    assert q_ids.tolist() == kv_ids.tolist() == [[0, 0, 0, 0]]


def test_rows_of_a_batch_are_judged_apart():
    blocks = pairs_of([0, 0, 1], [0, 0, 1])
    mask = jnp.array([blocks, np.tril(np.ones((3, 3), bool))])
    assert mask_to_segment_ids(mask)[0].tolist() == [[0, 0, 1], [0, 0, 0]]


def test_heads_must_agree_or_be_asked_one_by_one():
    first, second = pairs_of([0, 0, 1], [0, 0, 1]), pairs_of([0, 1, 1], [0, 1, 1])
    same, different = jnp.array([[first, first]]), jnp.array([[first, second]])
    assert mask_to_segment_ids(same)[0].tolist() == [[0, 0, 1]]
    assert mask_to_segment_ids(different)[0].tolist() == [[0, 0, 0]]
    per_head = mask_to_segment_ids(different, per_head=True)
    assert per_head[0].tolist() == per_head[1].tolist() == [[[0, 0, 1], [0, 1, 1]]]
    mask = MaskInfo.from_attention_mask(different)
    assert mask.q_segment_ids.tolist() == [[0, 0, 0]]
    assert mask.get_or_compute_segment_ids(per_head=True)[0].tolist() == per_head[0].tolist()
    one = MaskInfo.from_segments(jnp.array([[0, 1]])).get_or_compute_segment_ids(per_head=True)
    assert one[0].tolist() == [[[0, 1]]]


def test_ids_of_a_mask_of_pairs_under_vmap_and_jit():
    mask = MaskInfo.from_attention_mask(jnp.array([pairs_of([0, 0, 1], [0, 1, 1])] * 2))
    read = lambda mask: (mask.q_segment_ids, mask.kv_segment_ids, mask.q_lens)
    for found in (read(mask), jax.jit(read)(mask), jax.vmap(read)(mask)):
        assert [part.tolist() for part in found] == [
            [[0, 0, 1]] * 2,
            [[0, 1, 1]] * 2,
            [3, 3],
        ]


def test_masks_of_segments():
    q_ids, kv_ids = jnp.array([[0, 1, -1]]), jnp.array([[1, 1]])
    expected = pairs_of(q_ids, kv_ids)[:, None]
    np.testing.assert_array_equal(segment_ids_to_mask((q_ids, kv_ids)), expected)
    q_mask, kv_mask, mask = segment_ids_to_qkv_masks(q_ids, kv_ids, dtype=jnp.int8)
    assert (q_mask.tolist(), kv_mask.tolist()) == ([[1, 1, 0]], [[1, 1]])
    np.testing.assert_array_equal(mask, expected)
    assert mask.dtype == jnp.int8
    assert segment_ids_to_mask(q_ids).shape == (1, 1, 3, 3)


@EXAMPLES
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=3))
def test_start_and_end_come_back_from_their_mask(ranges):
    pairs = [bound for start, size in ranges for bound in (start, start + size)]
    mask = cu_seqlens_to_mask(jnp.array(pairs), 8)
    assert mask.sum(-1).tolist() == [size for _, size in ranges]
    assert qkv_masks_to_cu_seqlens(mask)[0].tolist() == pairs


def test_pairs_for_queries_and_keys():
    q_pairs, kv_pairs = jnp.array([0, 1, 1, 2]), jnp.array([0, 3, 2, 3])
    q_mask, kv_mask = qkv_cu_seqlens_to_qkv_masks(
        q_pairs, max_q_len=2, cu_seqlens_kv=kv_pairs, max_kv_len=3, dtype=int
    )
    assert q_mask.tolist() == [[1, 0], [0, 1]]
    assert kv_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    mask = qkv_cu_seqlens_to_attention_mask(
        q_pairs, max_q_len=2, cu_seqlens_kv=kv_pairs, max_kv_len=3
    )
    assert mask.shape == (2, 1, 2, 3)
    found = attention_mask_to_qkv_cu_seqlens(mask)
    assert [part.tolist() for part in found] == [q_pairs.tolist(), kv_pairs.tolist()]
    found = attention_mask_to_qkv_cu_seqlens(mask[:, 0], out_dtype=jnp.int16)
    assert [part.dtype for part in found] == [jnp.int16] * 2


def test_heads_are_reduced_as_asked():
    mask = jnp.array([[[[1, 0], [0, 0]], [[1, 0], [0, 1]]]])
    found = {
        how: attention_mask_to_qkv_cu_seqlens(mask, reduce_heads=how)[0].tolist()
        for how in ("any", "all", "first")
    }
    assert found == {"any": [0, 2], "all": [0, 1], "first": [0, 1]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mask_to_segment_ids([1, 1, 1]), "mask_to_segment_ids: the rank must be 2, 3 or"),
        (lambda: cu_seqlens_to_mask(jnp.array([0, 1, 2]), 3), "one array of even length"),
        (lambda: attention_mask_to_qkv_cu_seqlens(np.eye(2, dtype=int)), "must have rank 3 or 4"),
        (
            lambda: unchecked(attention_mask_to_qkv_cu_seqlens)(
                jnp.ones((1, 2, 2), int), reduce_heads="none"
            ),
            "reduce_heads must be any, all or first, got 'none'",
        ),
        (lambda: mask_to_segment_ids(jnp.eye(3)), "mask must be boolean, or integers 0 and 1, got"),
        (lambda: qkv_masks_to_cu_seqlens(jnp.eye(3)), "q_mask must be boolean, or integers"),
        (lambda: attention_mask_to_qkv_cu_seqlens(jnp.ones((1, 2, 2))), "must be boolean, or int"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
