"""Small masks, written out."""

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types import MaskInfo

LARGEST = 2**31 - 1


def rows(mask, batch=0):
    """The rows of a mask as strings of 0 and 1."""
    return ["".join(str(int(x)) for x in row) for row in np.asarray(mask.attention_mask)[batch, 0]]


def ones(batch, length):
    return MaskInfo.from_attention_mask(jnp.ones((batch, length), jnp.int32))


def test_segments():
    mask = MaskInfo.from_segments(jnp.array([[1, 1, 2, 2, -1]]))
    assert (mask.batch_size, mask.q_len, mask.kv_len, mask.shape) == (1, 5, 5, (1, 5, 5))
    assert rows(mask) == ["11000", "11000", "00110", "00110", "00000"]
    assert mask.attention_mask.shape == (1, 1, 5, 5)
    assert mask.attention_mask.dtype == bool
    assert mask.q_segment_ids.tolist() == [[1, 1, 2, 2, -1]]
    assert mask.kv_segment_ids.tolist() == [[1, 1, 2, 2, -1]]
    assert mask.q_attention_mask.tolist() == [[1, 1, 1, 1, 0]]
    assert mask.q_attention_mask.dtype == jnp.int32
    assert mask.q_position_ids.tolist() == [[0, 1, 0, 1, -1]]
    q_positions, kv_positions = mask.get_or_compute_positions()
    assert q_positions.tolist() == [[0, 1, 0, 1, -1]]
    assert kv_positions.tolist() == [[0, 1, 0, 1, LARGEST]]
    assert mask.cu_seqlens_q.tolist() == [0, 4]
    assert mask.q_lens.tolist() == [4]
    assert mask.kv_lens.tolist() == [4]


def test_any_negative_id_is_padding_and_zero_is_an_id():
    assert rows(MaskInfo.from_segments(jnp.array([[0, -7, -7, 0]]))) == [
        "1001",
        "0000",
        "0000",
        "1001",
    ]


def test_cross_attention_segments():
    mask = MaskInfo.from_segments(jnp.array([[1, 2]]), jnp.array([[1, 1, 2, 3]]))
    assert rows(mask) == ["1100", "0010"]
    assert mask.shape == (1, 2, 4)
    assert mask.is_self_attention() is False


def test_token_mask():
    mask = MaskInfo.from_attention_mask(jnp.array([[1, 1, 1, 0, 0], [1, 2, 0, 0, 0]]))
    assert mask.q_segment_ids.tolist() == [[0, 0, 0, -1, -1], [0, 0, -1, -1, -1]]
    assert mask.q_lens.tolist() == [3, 2]
    assert mask.cu_seqlens_q.tolist() == [0, 3, 0, 2]
    assert rows(mask, 1) == ["11000", "11000", "00000", "00000", "00000"]


def test_pairs_of_lengths():
    pairs = jnp.array([0, 3, 0, 5, 0, 4])
    mask = MaskInfo.from_cu_seqlens(pairs, max_q_len=5)
    assert mask.shape == (3, 5, 5)
    assert mask.q_lens.tolist() == [3, 5, 4]
    assert mask.cu_seqlens_q.tolist() == pairs.tolist()
    cross = MaskInfo.from_cu_seqlens(
        pairs, max_q_len=5, cu_seqlens_kv=jnp.array([0, 6, 0, 8, 0, 7]), max_kv_len=8
    )
    assert cross.shape == (3, 5, 8)
    assert cross.kv_lens.tolist() == [6, 8, 7]
    assert cross.cu_seqlens_kv.tolist() == [0, 6, 0, 8, 0, 7]


def test_causal_with_one_offset_per_row():
    mask = ones(3, 8).apply_causal(offset=jnp.array([0, 2, 4]))
    assert [rows(mask, b)[0] for b in range(3)] == ["10000000", "11100000", "11111000"]


def test_windows():
    assert rows(ones(1, 8).apply_sliding_window(2))[4] == "00111110"
    assert rows(ones(1, 8).apply_sliding_window((2, 0)))[4] == "00111000"
    assert rows(ones(1, 8).apply_sliding_window((1, 1), offset=2))[4] == "00000111"
    assert rows(ones(1, 4).apply_sliding_window(1000)) == ["1111"] * 4


def test_decode():
    assert ones(3, 8).apply_sliding_window(2, mode="decode", index=5).attention_mask.shape == (
        3,
        1,
        1,
        5,
    )
    last = ones(1, 8).apply_causal().apply_sliding_window(2, mode="decode", index=7)
    assert rows(last) == ["00111"]
    assert last.q_position_ids.tolist() == [[7]]
    assert last.kv_position_ids.tolist() == [[3, 4, 5, 6, 7]]
    wide = ones(1, 10).apply_causal().apply_sliding_window((2, 1), mode="decode", index=4)
    assert rows(wide) == ["1110"]
    assert wide.kv_position_ids.tolist() == [[2, 3, 4, 5]]
    moved = ones(1, 10).apply_sliding_window((2, 1), offset=3, mode="decode", index=4)
    assert rows(moved) == ["1111"]
    assert moved.kv_position_ids.tolist() == [[5, 6, 7, 8]]


def test_decode_at_one_index_per_row():
    mask = MaskInfo.from_segments(jnp.array([[0, 0, 0, 1, 1, 1], [2, 2, 2, 2, 2, -1]]))
    step = mask.apply_causal().apply_sliding_window((2, 0), mode="decode", index=jnp.array([4, 9]))
    assert step.q_segment_ids.tolist() == [[1], [-1]]
    assert step.kv_segment_ids.tolist() == [[0, 1, 1], [2, 2, -1]]
    assert [rows(step, 0), rows(step, 1)] == [["011"], ["000"]]


def test_prefill():
    mask = ones(3, 8).apply_sliding_window(3, mode="prefill")
    assert mask.attention_mask.shape == (3, 1, 8, 3)
    assert mask.shape == (3, 8, 3)
    assert rows(mask) == ["000", "000", "100", "110", "111", "111", "111", "111"]
    assert ones(1, 8).apply_sliding_window((3, 0), mode="prefill").shape == (1, 8, 4)


def test_chunks():
    mask = ones(1, 4).apply_chunked(2)
    assert rows(mask) == ["1000", "1100", "0010", "0011"]
    assert mask.q_segment_ids.tolist() == [[1, 1, 2, 2]]
    assert mask.q_position_ids.tolist() == [[0, 1, 2, 3]]


def test_chunks_keep_the_segments_and_the_padding():
    mask = MaskInfo.from_segments(jnp.array([[5, 6, 6, 6, 6, -1]])).apply_chunked(3)
    assert rows(mask) == ["100000", "010000", "011000", "000100", "000110", "000000"]
    assert mask.q_segment_ids.tolist() == [[1, 1, 1, 2, 2, -1]]
    assert mask.q_position_ids.tolist() == [[0, 0, 1, 2, 3, -1]]


def test_token_types():
    types = jnp.array([[1, 1, 2, 2, 0, 0]])
    mask = ones(1, 6).apply_token_type_ids(types, combine="intersect", zero_policy="both")
    assert mask.q_segment_ids.tolist() == [[1, 1, 2, 2, -1, -1]]
    assert rows(mask) == ["110000", "110000", "001100", "001100", "000000", "000000"]
    every = ones(1, 6).apply_token_type_ids(types, combine="intersect", zero_policy="none")
    assert rows(every)[4:] == ["000011", "000011"]
    assert every.q_segment_ids.tolist() == [[1, 1, 2, 2, 0, 0]]


def test_a_union_of_token_types_adds_pairs_and_keeps_the_ids():
    mask = ones(1, 4).apply_causal().apply_token_type_ids(jnp.array([[0, 3, 3, 0]]))
    assert rows(mask) == ["1000", "1110", "1110", "1111"]
    assert mask.q_segment_ids.tolist() == [[0, 0, 0, 0]]
    limited = mask.apply_kv_lengths(2)
    assert rows(limited) == ["1000", "1100", "1100", "1100"]
    assert limited.kv_segment_ids.tolist() == [[0, 0, -1, -1]]


def test_replacing_by_token_types_forgets_the_rest():
    mask = MaskInfo.from_segments(jnp.array([[0, 0, -1]])).apply_causal()
    mask = mask.apply_token_type_ids(jnp.array([[1, 2, 1]]), combine="replace")
    assert rows(mask) == ["101", "010", "101"]
    assert mask.q_segment_ids.tolist() == [[1, 2, 1]]


def test_key_lengths():
    mask = MaskInfo.from_segments(jnp.array([[1, 1, 2, 2, 3], [1, 2, 2, 3, 3]]))
    step = mask.apply_kv_lengths(jnp.array([4, 3]), q_len=2, end_index=jnp.array([5, 4]))
    assert step.attention_mask.shape == (2, 1, 2, 5)
    assert step.q_segment_ids.tolist() == [[2, 3], [2, 3]]
    assert step.kv_segment_ids.tolist() == [[1, 1, 2, 2, -1], [1, 2, 2, -1, -1]]
    assert [rows(step, 0), rows(step, 1)] == [["00110", "00000"], ["01100", "00000"]]
    assert step.q_position_ids.tolist() == [[1, 0], [1, 0]]


def test_key_lengths_alone_only_hide_keys():
    mask = ones(2, 4).apply_kv_lengths(jnp.array([1, 9]))
    assert [rows(mask, 0), rows(mask, 1)] == [["1000"] * 4, ["1111"] * 4]
    assert mask.kv_lens.tolist() == [1, 4]
    assert mask.q_lens.tolist() == [4, 4]
    assert mask.kv_position_ids.tolist() == [[0, LARGEST, LARGEST, LARGEST], [0, 1, 2, 3]]


def test_key_lengths_with_a_window_keep_the_newest_keys():
    mask = ones(2, 6).apply_kv_lengths(jnp.array([5, 2]), q_len=1, end_index=4, sliding_window=3)
    assert mask.shape == (2, 1, 3)
    assert [rows(mask, 0), rows(mask, 1)] == [["111"], ["110"]]
    assert mask.kv_position_ids.tolist() == [[2, 3, 4], [0, 1, LARGEST]]
    assert mask.q_position_ids.tolist() == [[3], [3]]


def test_a_chunked_mask_of_pairs():
    mask = MaskInfo.create_chunked_attention_mask(2, 4, kv_len=3, offset=1, dtype=jnp.int8)
    assert mask.tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1], [0, 0, 1]]
    assert mask.dtype == jnp.int8


def test_bias():
    mask = MaskInfo.from_segments(jnp.array([[0, 1]]))
    assert mask.bias.tolist() == [[[[0.0, -np.inf], [-np.inf, 0.0]]]]
    assert mask.bias.dtype == jnp.float32
    assert mask.create_bias(dtype=jnp.float16).dtype == jnp.float16
    assert np.isneginf(np.asarray(mask.create_bias("float16")[0, 0, 0, 1]))
    assert mask.create_bias("float32", masked_value=-5)[0, 0, 0].tolist() == [0.0, -5.0]
    with pytest.raises(ValueError, match=r"MaskInfo.create_bias: dtype must be floating-point"):
        mask.create_bias(jnp.int32)


def test_dtypes_of_the_mask():
    mask = MaskInfo.from_segments(jnp.array([[0, 1]])).apply_causal()
    half = mask.to_dtype(jnp.float16)
    assert half.attention_mask.dtype == jnp.float16
    assert half.attention_mask.tolist() == [[[[1.0, 0.0], [0.0, 1.0]]]]
    assert half.to_dtype(bool).attention_mask.dtype == bool
    assert mask.materialize_attention_mask("int8").attention_mask.dtype == jnp.int8
    assert mask.attention_mask.dtype == bool
    assert half.bias.tolist() == mask.bias.tolist()


def test_masks_of_tokens_and_pairs_together():
    mask = MaskInfo.from_segments(jnp.zeros((1, 4), jnp.int32)).apply_causal()
    q_mask, kv_mask, pairs = mask.get_qkv_masks()
    assert q_mask.tolist() == kv_mask.tolist() == [[True] * 4]
    assert int(pairs.sum()) == 10
    assert [part.dtype for part in mask.get_qkv_masks(jnp.int8)] == [jnp.int8] * 3


def test_segment_lengths():
    mask = MaskInfo.from_segments(jnp.array([[0, 2, 2, -1], [1, 1, 1, 1]]))
    q_counts, kv_counts = mask.segment_lens(3)
    assert q_counts.tolist() == kv_counts.tolist() == [[1, 0, 2], [0, 4, 0]]
    with pytest.raises(ValueError, match="max_segments must exceed the largest id 2, got 2"):
        mask.segment_lens(2)


def test_packed_lengths():
    mask = MaskInfo.from_segments(jnp.array([[0, 0, 1, 1], [0, 0, 0, -1]]))
    assert mask.to_packed_cu_seqlens(4)[0].tolist() == [0, 2, 4, 7, 7]
    assert MaskInfo.from_segments(jnp.array([[1, 1, 1, 1]])).to_packed_cu_seqlens(1)[
        0
    ].tolist() == [0, 4]
    big = MaskInfo.from_segments(jnp.array([[500, 900, 900]]))
    assert big.to_packed_cu_seqlens(3)[0].tolist() == [0, 1, 3, 3]
    cross = MaskInfo.from_segments(jnp.array([[0, 0, 2]]), jnp.array([[0, 1, 2, 2]]))
    q_packed, kv_packed = cross.to_packed_cu_seqlens(3)
    assert q_packed.tolist() == [0, 2, 2, 3]
    assert kv_packed.tolist() == [0, 1, 2, 4]


def test_packed_lengths_are_the_inverse_of_the_packed_constructor():
    bounds = jnp.array([0, 3, 8, 12])
    mask = MaskInfo.from_cu_seqlens(bounds, max_q_len=13, format="packed")
    assert mask.shape == (1, 13, 13)
    assert mask.q_segment_ids.tolist() == [[0] * 3 + [1] * 5 + [2] * 4 + [-1]]
    assert mask.to_packed_cu_seqlens(3)[0].tolist() == bounds.tolist()


def test_an_empty_sequence_keeps_its_number():
    mask = MaskInfo.from_cu_seqlens(jnp.array([0, 3, 3, 5]), max_q_len=5, format="packed")
    assert mask.q_segment_ids.tolist() == [[0, 0, 0, 2, 2]]


def test_rows_without_tokens():
    mask = MaskInfo.from_segments(jnp.array([[-1, -1, -1], [-1, 0, -1]]))
    assert mask.cu_seqlens_q.tolist() == [0, 0, 1, 2]
    assert mask.q_lens.tolist() == [0, 1]
    assert mask.to_packed_cu_seqlens(1)[0].tolist() == [0, 1]


def test_several_sequences_or_one():
    assert MaskInfo.from_segments(jnp.array([[0, 0, -1], [1, 2, 2]])).is_multi_sequence is True
    assert MaskInfo.from_segments(jnp.array([[0, 0, -1], [2, 2, 2]])).is_multi_sequence is False


def test_self_attention_is_told_by_the_ids():
    ids = jnp.array([[0, 0, 1]])
    assert MaskInfo.from_segments(ids).is_self_attention() is True
    assert MaskInfo.from_segments(ids, ids + 0).is_self_attention() is True
    assert MaskInfo.from_segments(ids, ids + 1).is_self_attention() is False
    assert MaskInfo.from_random(1, 4, 4).is_self_attention() is True
    assert MaskInfo.from_random(1, 4, 5).is_self_attention() is False
