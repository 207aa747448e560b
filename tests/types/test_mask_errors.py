"""One clear sentence for each wrong call, naming the method."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types import MaskInfo

IDS = jnp.array([[0, 0, 1, -1], [1, 1, 1, 1]])
MASK = MaskInfo.from_segments(IDS)
PER_HEAD = jnp.ones((1, 2, 3, 3), bool)
WRONG = {
    "from_segments: q_segment_ids must be an array of integers of rank 2": [
        lambda: MaskInfo.from_segments(IDS[0]),
        lambda: MaskInfo.from_segments(IDS.astype(float)),
    ],
    "from_segments: q_segment_ids and kv_segment_ids must have the same batch": [
        lambda: MaskInfo.from_segments(IDS, jnp.zeros((3, 4), int)),
    ],
    r"from_segments: q_positions must have shape \(2, 4\), got \(2, 3\)": [
        lambda: MaskInfo.from_segments(IDS, q_positions=jnp.zeros((2, 3), int)),
    ],
    r"from_attention_mask: the mask must be \(B, S\), \(B, Q, K\) or \(B, H, Q, K\)": [
        lambda: MaskInfo.from_attention_mask(jnp.ones(4, bool)),
        lambda: MaskInfo.from_attention_mask(jnp.ones((1, 1, 1, 4, 4), bool)),
    ],
    r"from_attention_mask: attention_mask must be boolean, or integers 0 and 1, got float32; "
    r"\.astype\(bool\) makes a mask of 0 and 1 boolean, and what is added .* is the bias= of the": [
        lambda: MaskInfo.from_attention_mask(jnp.ones((2, 4))),
        lambda: MaskInfo.from_attention_mask(jnp.ones((2, 4, 4)), mask_is_valid=False),
        lambda: MaskInfo.dynamic_init(attention_mask=np.ones((2, 4), np.float32)),
        lambda: MASK.replace(attention_mask=jnp.zeros((2, 4, 4))),
    ],
    r"from_segments: q_segment_ids must be boolean, or .* got float32; \.astype\(bool\)": [
        lambda: MaskInfo.from_segments(jnp.ones((2, 4)), is_attn_mask=True),
    ],
    'from_cu_seqlens: cu_seqlens_q must hold start and end pairs.*format="packed"': [
        lambda: MaskInfo.from_cu_seqlens(jnp.array([0, 3, 5]), max_q_len=5),
    ],
    "from_cu_seqlens: cu_seqlens_q must hold pairs 0 <= start <= end <= 5": [
        lambda: MaskInfo.from_cu_seqlens(jnp.array([0, 6]), max_q_len=5),
        lambda: MaskInfo.from_cu_seqlens(jnp.array([3, 2]), max_q_len=5),
        lambda: MaskInfo.from_cu_seqlens(np.array([-1, 2]), max_q_len=5),
    ],
    "from_cu_seqlens: cu_seqlens_q must begin with 0, not decrease and end by 5": [
        lambda: MaskInfo.from_cu_seqlens(jnp.array([0, 4, 3]), max_q_len=5, format="packed"),
        lambda: MaskInfo.from_cu_seqlens(jnp.array([0, 6]), max_q_len=5, format="packed"),
        lambda: MaskInfo.from_cu_seqlens(jnp.array([1, 4]), max_q_len=5, format="packed"),
    ],
    "from_cu_seqlens: cu_seqlens_q and cu_seqlens_kv must have the same length": [
        lambda: MaskInfo.from_cu_seqlens(
            jnp.array([0, 2]), max_q_len=5, cu_seqlens_kv=jnp.array([0, 2, 0, 2])
        ),
    ],
    "from_cu_seqlens: max_q_len must be at least 1, got 0": [
        lambda: MaskInfo.from_cu_seqlens(jnp.array([0, 0]), max_q_len=0),
    ],
    "from_random: sparsity must be within 0 and 1, got 1.5": [
        lambda: MaskInfo.from_random(1, 4, sparsity=1.5),
    ],
    "dynamic_init: give mask_info, attention_mask, input_ids or inputs_embeds": [
        lambda: MaskInfo.dynamic_init(),
    ],
    r"dynamic_init: input_ids must have rank 2, got \(4,\)": [
        lambda: MaskInfo.dynamic_init(input_ids=jnp.zeros(4)),
    ],
    "create_chunked_attention_mask: chunk_size must be at least 1, got 0": [
        lambda: MaskInfo.create_chunked_attention_mask(0, 4),
    ],
    "apply_causal: offset must be one number or one per batch row, 2 of them": [
        lambda: MASK.apply_causal(jnp.zeros(3, int)),
        lambda: MASK.apply_causal(jnp.zeros((2, 1), int)),
    ],
    "apply_causal: offset must be an integer or an array of integers, got 1.5": [
        lambda: MASK.apply_causal(1.5),
    ],
    "apply_causal: offset must be one number per row": [
        lambda: jax.vmap(lambda mask: mask.apply_causal(jnp.zeros(2, int)).attention_mask)(MASK),
    ],
    "apply_sliding_window: sliding_window must not be negative, got -1": [
        lambda: MASK.apply_sliding_window(-1),
    ],
    r"apply_sliding_window: sliding_window must not be negative, got \(2, -1\)": [
        lambda: MASK.apply_sliding_window((2, -1)),
    ],
    r"apply_sliding_window: sliding_window must be an int or a pair \(left, right\) of ints": [
        lambda: MASK.apply_sliding_window((1, 2, 3)),
        lambda: MASK.apply_sliding_window(None),
        lambda: jax.jit(lambda w: MASK.apply_sliding_window(w).attention_mask)(3.0),
    ],
    'apply_sliding_window: mode="prefill" cuts the mask to its window, so the window must be kno': [
        lambda: jax.jit(lambda w: MASK.apply_sliding_window(w, mode="prefill").bias)(3),
    ],
    "apply_sliding_window: mode must be one of None, 'default', 'decode', 'prefill', got 'de": [
        lambda: MASK.apply_sliding_window(2, mode="decoding"),
    ],
    'apply_sliding_window: mode="decode" and index go together': [
        lambda: MASK.apply_sliding_window(2, mode="decode"),
        lambda: MASK.apply_sliding_window(2, index=3),
    ],
    "apply_chunked: chunk_size must be positive, got 0": [lambda: MASK.apply_chunked(0)],
    "apply_token_type_ids: token types must have the mask's length 4": [
        lambda: MASK.apply_token_type_ids(jnp.zeros((2, 5), int)),
    ],
    "apply_token_type_ids: token types must have the mask's batch 2": [
        lambda: MASK.apply_token_type_ids(jnp.zeros((3, 4), int)),
    ],
    "apply_token_type_ids: token_type_ids must be an array of integers of rank 2": [
        lambda: MASK.apply_token_type_ids(jnp.zeros(4, int)),
    ],
    "apply_token_type_ids: a tuple of token types must be a pair, got 3": [
        lambda: MASK.apply_token_type_ids((IDS, IDS, IDS)),
    ],
    "apply_token_type_ids: combine must be one of 'union', 'intersect', 'replace', got 'xor'": [
        lambda: MASK.apply_token_type_ids(IDS, combine="xor"),
    ],
    "apply_token_type_ids: zero_policy must be one of 'q', 'kv', 'both', 'none', got 'k'": [
        lambda: MASK.apply_token_type_ids(IDS, zero_policy="k"),
    ],
    "apply_kv_lengths: q_len and end_index go together": [
        lambda: MASK.apply_kv_lengths(jnp.array([1, 2]), q_len=1),
        lambda: MASK.apply_kv_lengths(jnp.array([1, 2]), end_index=1),
    ],
    "apply_kv_lengths: q_len must be at most 4, got 5": [
        lambda: MASK.apply_kv_lengths(2, q_len=5, end_index=1),
    ],
    "apply_kv_lengths: sliding_window must be at least 1, got 0": [
        lambda: MASK.apply_kv_lengths(2, sliding_window=0),
    ],
    "materialize_segment_ids: a mask stores one id per token": [
        lambda: MaskInfo.from_attention_mask(PER_HEAD).materialize_segment_ids(per_head=True),
    ],
    "to_packed_cu_seqlens: segment ids must not decrease along a row": [
        lambda: MaskInfo.from_segments(jnp.array([[1, 0]])).to_packed_cu_seqlens(4),
    ],
    "to_packed_cu_seqlens: max_segments must be at least 3, got 2": [
        lambda: MASK.to_packed_cu_seqlens(2),
    ],
    r"replace: attention_mask must be of this mask's lengths \(4, 4\), got \(3, 4\)": [
        lambda: MASK.replace(attention_mask=jnp.ones((2, 3, 4), bool)),
    ],
    "replace: give q_segment_ids or cu_seqlens_q, not both": [
        lambda: MASK.replace(q_segment_ids=IDS, cu_seqlens_q=jnp.array([0, 1, 0, 1])),
    ],
    r"replace: kv_segment_ids must have shape \(2, 4\), got \(3, 4\)": [
        lambda: MASK.replace(kv_segment_ids=jnp.zeros((3, 4), int)),
    ],
}


@pytest.mark.parametrize(
    ("message", "call"),
    [(message, call) for message, calls in WRONG.items() for call in calls],
    ids=[f"{m.split(':')[0]}-{i}" for i, (m, calls) in enumerate(WRONG.items()) for _ in calls],
)
@pytest.mark.usefixtures("as_a_user_calls")
def test_a_wrong_call_is_explained(message, call):
    with pytest.raises(ValueError, match=f"MaskInfo.{message}"):
        call()


def test_values_that_are_not_at_hand_are_not_looked_at():
    pairs = jax.jit(lambda cu: MaskInfo.from_cu_seqlens(cu, max_q_len=3).q_lens)(jnp.array([2, 9]))
    assert pairs.tolist() == [1]
    counts = jax.jit(lambda mask: mask.segment_lens(1)[0])(MASK)
    assert counts.tolist() == [[2], [0]]


def test_a_misspelt_field_is_refused():
    with pytest.raises(TypeError, match="q_segments"):
        MASK.replace(q_segments=IDS)


def test_a_mask_cannot_be_changed():
    with pytest.raises(AttributeError):
        MASK.q_len = 3
