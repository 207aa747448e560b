"""What the constructors accept, and `replace`."""

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types import MaskInfo

IDS = jnp.array([[0, 0, 1, -1], [2, 2, 2, 2]])


def test_numpy_and_lists_will_do():
    mask = MaskInfo.from_segments(np.asarray(IDS))
    np.testing.assert_array_equal(mask.q_segment_ids, IDS)
    assert MaskInfo.from_cu_seqlens([0, 3], max_q_len=4).q_lens.tolist() == [3]
    assert mask.apply_causal([0, 1]).attention_mask[1, 0, 0].tolist() == [True, True, False, False]


def test_token_masks_in_place_of_ids():
    mask = MaskInfo.from_segments(
        jnp.array([[1, 1, 0]]), jnp.array([[True, False]]), is_attn_mask=True
    )
    assert mask.q_segment_ids.tolist() == [[0, 0, -1]]
    assert mask.kv_segment_ids.tolist() == [[0, -1]]


def test_a_batch_of_one_serves_the_other_side():
    mask = MaskInfo.from_segments(IDS, IDS[:1])
    assert mask.shape == (2, 4, 4)
    assert mask.kv_segment_ids.tolist() == [IDS[0].tolist()] * 2


@pytest.mark.parametrize("dtype", [bool, int, "uint8"])
def test_whatever_is_not_zero_is_allowed(dtype):
    pairs = jnp.array([[[1, 0], [1, 1]]], dtype)
    mask = MaskInfo.from_attention_mask(pairs * (1 if dtype is bool else 2))
    assert mask.attention_mask.shape == (1, 1, 2, 2)
    np.testing.assert_array_equal(mask.attention_mask[:, 0], pairs != 0)
    inverted = MaskInfo.from_attention_mask(pairs, mask_is_valid=False)
    np.testing.assert_array_equal(inverted.attention_mask[:, 0], pairs == 0)


def test_an_inverted_mask_of_tokens():
    mask = MaskInfo.from_attention_mask(jnp.array([[0, 0, 1]]), mask_is_valid=False)
    assert mask.q_segment_ids.tolist() == [[0, 0, -1]]


def test_heads_stay():
    mask = MaskInfo.from_attention_mask(jnp.ones((2, 8, 6, 6), bool)).apply_causal()
    assert mask.attention_mask.shape == (2, 8, 6, 6)
    assert mask.shape == (2, 6, 6)


def test_random_masks():
    mask = MaskInfo.from_random(batch_size=2, q_len=64, kv_len=128, sparsity=0.25, seed=3)
    assert mask.attention_mask.shape == (2, 1, 64, 128)
    # 16384 draws: three standard deviations are 0.0102.
    assert abs(float(mask.attention_mask.mean()) - 0.75) < 0.0102
    again = MaskInfo.from_random(batch_size=2, q_len=64, kv_len=128, sparsity=0.25, seed=3)
    np.testing.assert_array_equal(mask.attention_mask, again.attention_mask)
    assert not MaskInfo.from_random(1, 8, sparsity=1.0).attention_mask.any()
    assert MaskInfo.from_random(1, 8, sparsity=0.0).attention_mask.all()


def test_dynamic_init_takes_the_first_that_says_most():
    existing = MaskInfo.from_segments(IDS)
    assert MaskInfo.dynamic_init(mask_info=existing, attention_mask=IDS) is existing
    mask = MaskInfo.dynamic_init(attention_mask=jnp.array([[1, 2, 0]]), input_ids=jnp.ones((1, 3)))
    assert mask.q_segment_ids.tolist() == [[0, 0, -1]]
    mask = MaskInfo.dynamic_init(inputs_embeds=jnp.ones((2, 3, 4)))
    assert mask.shape == (2, 3, 3)
    assert mask.q_segment_ids.tolist() == [[0, 0, 0]] * 2


def test_positions_that_were_given():
    positions = jnp.array([[5, 6, 7, 8]])
    mask = MaskInfo.from_segments(IDS, q_positions=positions, kv_positions=positions)
    assert mask.q_position_ids.tolist() == positions.tolist() * 2
    step = mask.apply_kv_lengths(3, q_len=1, end_index=2)
    assert step.q_position_ids.tolist() == [[6]] * 2
    assert step.kv_position_ids.tolist() == [[5, 6, 7, 2**31 - 1]] * 2


def test_packed_bounds_for_queries_and_keys():
    mask = MaskInfo.from_cu_seqlens(
        jnp.array([0, 1, 3]),
        max_q_len=3,
        cu_seqlens_kv=jnp.array([0, 2, 4]),
        max_kv_len=5,
        format="packed",
    )
    assert mask.attention_mask[0, 0].astype(int).tolist() == [
        [1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 0],
    ]


def test_replacing_ids_keeps_the_other_rules():
    mask = MaskInfo.from_segments(IDS).apply_causal().apply_chunked(2)
    zeros = jnp.zeros_like(IDS)
    replaced = mask.replace(q_segment_ids=zeros, kv_segment_ids=zeros)
    expected = MaskInfo.from_segments(zeros).apply_causal().apply_chunked(2)
    np.testing.assert_array_equal(replaced.attention_mask, expected.attention_mask)
    assert replaced.q_segment_ids.tolist() == zeros.tolist()


def test_replacing_one_side_or_lengths():
    mask = MaskInfo.from_segments(IDS)
    one_side = mask.replace(kv_segment_ids=jnp.array([[1, 1, 0, 0]]))
    expected = MaskInfo.from_segments(IDS, jnp.array([[1, 1, 0, 0]]))
    np.testing.assert_array_equal(one_side.attention_mask, expected.attention_mask)
    lengths = mask.replace(cu_seqlens_q=[0, 1, 0, 2], cu_seqlens_kv=[0, 4, 0, 3])
    assert (lengths.q_lens.tolist(), lengths.kv_lens.tolist()) == ([1, 2], [4, 3])


def test_replacing_ids_in_a_mask_that_has_none_adds_them():
    pairs = jnp.tril(jnp.ones((2, 4, 4), bool))
    mask = MaskInfo.from_attention_mask(pairs).replace(q_segment_ids=IDS, kv_segment_ids=IDS)
    expected = MaskInfo.from_segments(IDS).apply_causal()
    np.testing.assert_array_equal(mask.attention_mask, expected.attention_mask)
    np.testing.assert_array_equal(mask.q_segment_ids, IDS)


def test_replacing_ids_keeps_the_lengths():
    mask = MaskInfo.from_segments(IDS).apply_kv_lengths(2)
    replaced = mask.replace(q_segment_ids=IDS, kv_segment_ids=jnp.zeros_like(IDS))
    assert replaced.kv_segment_ids.tolist() == [[0, 0, -1, -1]] * 2
    free = mask.replace(kv_segment_ids=None)
    assert free.kv_lens.tolist() == [2, 2]
    assert free.q_lens.tolist() == [4, 4]
    union = mask.apply_token_type_ids(jnp.ones_like(IDS)).replace(q_segment_ids=IDS)
    assert union.attention_mask.all()
    assert union.kv_lens.tolist() == [2, 2]


def test_none_clears_and_what_is_not_named_stays():
    mask = MaskInfo.from_segments(IDS, q_positions=IDS, batch_axis_name="data").apply_causal()
    same = mask.replace()
    np.testing.assert_array_equal(same.attention_mask, mask.attention_mask)
    np.testing.assert_array_equal(same.q_position_ids, IDS)
    assert same.batch_axis_name == "data"
    assert mask.replace(q_positions=None).q_position_ids.tolist() == [[0, 1, 0, -1], [0, 1, 2, 3]]
    free = mask.replace(q_segment_ids=None)
    np.testing.assert_array_equal(free.attention_mask[0, 0], jnp.tril(jnp.ones((4, 4), bool)))
    assert free.shape == mask.shape
    only_ids = mask.replace(attention_mask=None)
    np.testing.assert_array_equal(
        only_ids.attention_mask, MaskInfo.from_segments(IDS).attention_mask
    )


def test_replacing_the_mask_of_pairs_replaces_all_rules():
    pairs = jnp.triu(jnp.ones((2, 4, 4), bool))
    mask = MaskInfo.from_segments(IDS).apply_causal().replace(attention_mask=pairs)
    np.testing.assert_array_equal(mask.attention_mask[:, 0], pairs)


def test_a_new_mask_of_pairs_and_the_old_mask_have_one_batch():
    pairs = jnp.tril(jnp.ones((1, 4, 4), bool))
    mask = MaskInfo.from_segments(IDS).replace(attention_mask=pairs)
    assert mask.shape == (2, 4, 4)
    np.testing.assert_array_equal(mask.attention_mask[:, 0], jnp.repeat(pairs, 2, axis=0))
    one = MaskInfo.from_segments(IDS[:1], q_positions=jnp.array([[3, 2, 1, 0]]))
    grown = one.replace(attention_mask=jnp.repeat(pairs, 3, 0), q_segment_ids=jnp.ones((3, 4), int))
    assert grown.shape == (3, 4, 4)
    assert grown.q_position_ids.tolist() == [[3, 2, 1, 0]] * 3
    with pytest.raises(ValueError, match=r"attention_mask must have 2 batch rows .* got 3"):
        MaskInfo.from_segments(IDS).replace(attention_mask=jnp.repeat(pairs, 3, axis=0))


def test_materialized_ids_are_kept_as_they_are():
    blocks = jnp.array([[[1, 1, 0], [1, 1, 0], [0, 0, 1]]])
    mask = MaskInfo.from_attention_mask(blocks).materialize_segment_ids()
    assert mask.q_ids.tolist() == mask.q_segment_ids.tolist() == [[0, 0, 1]]
    np.testing.assert_array_equal(mask.attention_mask[:, 0], blocks)


def test_a_mask_prints_its_shape_and_rules_and_nothing_of_its_values():
    mask = MaskInfo.from_segments(IDS).apply_causal().apply_kv_lengths(jnp.array([1, 2]))
    assert repr(mask) == (
        "MaskInfo(batch_size=2, q_len=4, kv_len=4, rule=And(Segments(q_ids=int32[2,4], "
        "kv_ids=int32[2,4]), Band(high=0), KeyLength(length=int32[2])))"
    )
