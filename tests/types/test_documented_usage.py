"""The calls that the documentation shows, each with what it promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from ejkernel.types import MaskInfo

PACKED = MaskInfo.from_segments(jnp.array([[1, 1, 2, 2, -1]]))
LONG = MaskInfo.from_segments(jnp.zeros((3, 200), jnp.int32))
SENTENCE = MaskInfo.from_segments(jnp.zeros((1, 6), jnp.int32))
TYPES = jnp.array([[1, 1, 2, 2, 0, 0]])
CAUSAL = jnp.tril(jnp.ones((1, 8, 8), bool))
LENGTHS = jnp.array([100, 150, 80])

# What is called, and the shape and number of allowed pairs of the mask that comes back.
CALLS = {
    "one segment and padding": (
        lambda: MaskInfo.from_segments(jnp.array([[0, 0, 0, 0, -1, -1]])),
        (1, 1, 6, 6),
        16,
    ),
    "packed sequences": (
        lambda: MaskInfo.from_segments(jnp.array([[1, 1, 2, 2, 3, 3, 3, -1]])),
        (1, 1, 8, 8),
        4 + 4 + 9,
    ),
    "cross-attention": (
        lambda: MaskInfo.from_segments(jnp.array([[1, 1, 2, 2]]), jnp.array([[1, 1, 1, 2, 2, 2]])),
        (1, 1, 4, 6),
        12,
    ),
    "padding mask": (
        lambda: MaskInfo.from_attention_mask(jnp.array([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])),
        (2, 1, 5, 5),
        9 + 4,
    ),
    "mask of pairs": (lambda: MaskInfo.from_attention_mask(CAUSAL), (1, 1, 8, 8), 36),
    "mask of heads": (
        lambda: MaskInfo.from_attention_mask(jnp.ones((2, 8, 64, 64), bool)),
        (2, 8, 64, 64),
        2 * 8 * 64 * 64,
    ),
    "inverted mask": (
        lambda: MaskInfo.from_attention_mask(~CAUSAL, mask_is_valid=False),
        (1, 1, 8, 8),
        36,
    ),
    "lengths": (
        lambda: MaskInfo.from_cu_seqlens(jnp.array([0, 3, 0, 5, 0, 4]), max_q_len=5),
        (3, 1, 5, 5),
        9 + 25 + 16,
    ),
    "lengths of queries and keys": (
        lambda: MaskInfo.from_cu_seqlens(
            jnp.array([0, 3, 0, 5, 0, 4]),
            max_q_len=5,
            cu_seqlens_kv=jnp.array([0, 6, 0, 8, 0, 7]),
            max_kv_len=8,
        ),
        (3, 1, 5, 8),
        18 + 40 + 28,
    ),
    "input ids": (
        lambda: MaskInfo.dynamic_init(input_ids=jnp.ones((2, 8), int)),
        (2, 1, 8, 8),
        128,
    ),
    "attention mask": (
        lambda: MaskInfo.dynamic_init(attention_mask=CAUSAL),
        (1, 1, 8, 8),
        36,
    ),
    "existing mask": (lambda: MaskInfo.dynamic_init(mask_info=PACKED), (1, 1, 5, 5), 8),
    "causal": (lambda: PACKED.apply_causal(), (1, 1, 5, 5), 6),
    "causal with an offset": (lambda: PACKED.apply_causal(offset=5), (1, 1, 5, 5), 8),
    "causal with an offset per row": (
        lambda: PACKED.apply_causal(offset=jnp.array([0, 2, 4])),
        (3, 1, 5, 5),
        6 + 8 + 8,
    ),
    "window": (lambda: PACKED.apply_sliding_window(256), (1, 1, 5, 5), 8),
    "window to the left": (lambda: PACKED.apply_sliding_window((512, 0)), (1, 1, 5, 5), 6),
    "decode": (
        lambda: LONG.apply_sliding_window(50, mode="decode", index=120),
        (3, 1, 1, 101),
        3 * 101,
    ),
    "prefill": (
        lambda: LONG.apply_sliding_window(50, mode="prefill"),
        (3, 1, 200, 50),
        3 * sum(1 for q in range(200) for k in range(150, 200) if abs(q - k) <= 50),
    ),
    "chunks": (lambda: LONG.apply_chunked(chunk_size=128), (3, 1, 200, 200), 3 * (8256 + 2628)),
    "token types added": (lambda: SENTENCE.apply_token_type_ids(TYPES), (1, 1, 6, 6), 36),
    "token types alone": (
        lambda: SENTENCE.apply_token_type_ids(TYPES, combine="intersect", zero_policy="both"),
        (1, 1, 6, 6),
        8,
    ),
    "key lengths": (
        lambda: LONG.apply_kv_lengths(LENGTHS),
        (3, 1, 200, 200),
        200 * (100 + 150 + 80),
    ),
    "key lengths of a step": (
        lambda: LONG.apply_kv_lengths(LENGTHS, q_len=1, end_index=90, sliding_window=64),
        (3, 1, 1, 64),
        3 * 64,
    ),
    "materialized": (
        lambda: PACKED.materialize_attention_mask().materialize_segment_ids(),
        (1, 1, 5, 5),
        8,
    ),
    "chained": (
        lambda: PACKED.apply_causal().apply_sliding_window(256),
        (1, 1, 5, 5),
        6,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_documented_masks(name):
    call, shape, pairs = CALLS[name]
    mask = call().attention_mask
    assert mask.shape == shape
    assert mask.dtype == bool
    assert int(mask.sum()) == pairs


def test_the_documented_mesh():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), axis_names=("dp", "tp"))
    mask = MaskInfo.from_segments(
        jnp.zeros((2, 8), int),
        batch_axis_name=("dp", "fsdp"),
        sequence_axis_name="sp",
        qheads_axis_name="tp",
    )
    for sequence_parallel in (False, True):
        found = mask.get_shardings(mesh=mesh, sequence_parallel=sequence_parallel)
        assert tuple(found.attention_mask.spec) == ("dp", None, None, None)


def test_the_documented_random_mask():
    mask = MaskInfo.from_random(batch_size=2, q_len=128, kv_len=256, sparsity=0.5, seed=42)
    assert mask.attention_mask.shape == (2, 1, 128, 256)
    assert MaskInfo.from_random(batch_size=2, q_len=128, kv_len=None).shape == (2, 128, 128)


def test_the_documented_names():
    import ejkernel.types

    assert ejkernel.types.__all__ == ["MaskInfo", "get_debug_mode", "set_debug_mode"]
