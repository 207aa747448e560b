"""Integers of every size and dtype mean the number that they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.modules import (
    blocksparse_attention,
    flash_attention,
    gla_attention,
    grouped_matmul,
    lightning_attention,
    mean_pooling,
    native_sparse_attention,
    page_attention,
    ring_attention,
)
from ejkernel.parallel import combine, dispatch, permute_sequence, restore_sequence
from ejkernel.types import MaskInfo
from ejkernel.types.placement import PLACEMENTS

pytestmark = pytest.mark.usefixtures("as_a_user_calls")

LENGTH = 300  # tiles of the XLA pass do not divide it
Q, K, V = jax.random.normal(jax.random.key(0), (3, 1, LENGTH, 2, 8))
ALL = flash_attention(Q, K, V)
CAUSAL = flash_attention(Q, K, V, causal=True)
LARGE = [2**31 - 1, 2**31, 10**30]


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


# Numbers beyond any length


@pytest.mark.parametrize("number", LARGE)
@pytest.mark.parametrize("op", [flash_attention, blocksparse_attention])
def test_a_window_beyond_the_length_hides_nothing(op, number):
    close(op(Q, K, V, sliding_window=number), ALL)
    close(op(Q, K, V, sliding_window=(number, 0)), CAUSAL)


@pytest.mark.parametrize("number", LARGE)
def test_an_offset_beyond_the_length_shows_all_or_nothing(number):
    attend = lambda offset, **options: flash_attention(
        Q, K, V, causal=True, causal_offset=offset, **options
    )
    close(attend(number), ALL)
    close(attend(-number), 0)
    close(attend(number, cum_seqlens_q=[0, LENGTH]), ALL)


@pytest.mark.parametrize("number", [2**31 - 1, 2**31, 2**40])
def test_offsets_of_rows_beyond_the_length(number):
    attend = lambda offset, **options: flash_attention(
        Q, K, V, causal=True, causal_offset=np.array(offset), **options
    )
    close(attend([number]), ALL)
    close(attend([-number]), 0)
    split = {"cum_seqlens_q": [0, 100, LENGTH]}
    packed = attend([number, -number], **split)
    close(packed[:, :100], flash_attention(Q[:, :100], K[:, :100], V[:, :100]))
    close(packed[:, 100:], 0)


@pytest.mark.parametrize("number", LARGE)
def test_numbers_of_a_mask_beyond_its_length(number):
    whole = MaskInfo.from_segments(jnp.zeros((1, LENGTH), jnp.int32))
    attend = lambda mask: flash_attention(Q, K, V, mask_info=mask)
    close(attend(whole.apply_causal(offset=number)), ALL)
    close(attend(whole.apply_causal(offset=-number)), 0)
    close(attend(whole.apply_sliding_window(number)), ALL)
    close(attend(whole.apply_sliding_window((number, 3), offset=-number)), 0)
    close(attend(whole.apply_chunked(number)), CAUSAL)
    close(attend(whole.apply_kv_lengths(number)), ALL)
    step = whole.apply_sliding_window(number, mode="decode", index=5)
    assert step.shape == (1, 1, LENGTH)
    assert step.attention_mask.all()


@pytest.mark.parametrize("number", LARGE[:2])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_numbers_of_a_ring_beyond_its_length(placement, number):
    if len(jax.devices()) < 8:
        pytest.skip("a ring of eight devices is needed")
    order = {"shards": 8, "placement": placement}
    arrays = [x[:, :64] for x in (Q, K, V)]
    mesh = Mesh(np.array(jax.devices()[:8]), ("sp",))

    def ring(**options):
        placed = (permute_sequence(x, **order) for x in arrays)
        call = {"axis_name": "sp", "mesh": mesh, "method": "ring", "placement": placement}
        return restore_sequence(ring_attention(*placed, **call, **options), **order)

    causal = flash_attention(*arrays, causal=True)
    close(ring(causal=True, sliding_window=number), causal)
    close(ring(chunk_size=number), causal)
    close(ring(causal=True, causal_offset=number), flash_attention(*arrays))


@pytest.mark.parametrize("number", LARGE)
def test_a_window_over_pages_beyond_the_context(number):
    close(paged(np.int32, sliding_window=number), paged(np.int32))


@pytest.mark.parametrize("number", LARGE)
def test_a_window_of_native_sparse_attention_beyond_the_length(number):
    attend = lambda window: native_sparse_attention(
        Q, K, V, block_size=64, block_counts=1, sliding_window=window
    )
    close(attend(number), attend(LENGTH))


# Dtypes that cannot hold the numbers of groups or tokens


def paged(dtype, **options):
    pages = jax.random.normal(jax.random.key(1), (300, 4, 2, 8))
    lengths, table = np.array([200], dtype), np.arange(60, dtype=dtype)[None]
    run = lambda lengths, table: page_attention(Q[:, 0], pages, pages, lengths, table, **options)
    return jax.jit(run)(lengths, table)


def packed(function):
    """With cumulative lengths that are known, and with traced ones."""
    ends = np.array([0, 100, 200])
    return lambda dtype: [function(ends.astype(dtype)), jax.jit(function)(ends.astype(dtype))]


def of_mask(make, *numbers):
    """Attention by a mask that is made under a trace."""

    def run(dtype):
        mask = jax.jit(make)(np.array(numbers, dtype))
        return flash_attention(Q, K, V, mask_info=mask)

    return run


WEIGHTS = jnp.arange(256.0)[:, None, None]


def through_experts(ids):
    def layer(rows, ids):
        rows, sizes, plan = dispatch(rows, ids, axis_name="ep", experts=256)
        return combine(grouped_matmul(rows, WEIGHTS, group_sizes=sizes), plan)

    mesh, split = Mesh(np.array(jax.devices()[:1]), ("ep",)), P("ep")
    run = jax.shard_map(layer, mesh=mesh, in_specs=split, out_specs=split)
    return jax.jit(run)(jnp.ones((3, 1)), ids)


ZEROS = jnp.zeros((1, LENGTH), jnp.uint8)
NARROW = {
    "group_ids": lambda dtype: grouped_matmul(
        jnp.ones((3, 1)), WEIGHTS, jnp.array([1, 7, 255], dtype)
    ),
    "dispatch": lambda dtype: through_experts(jnp.array([1, 7, 255], dtype)),
    "group_sizes": lambda dtype: jax.vmap(
        lambda x: grouped_matmul(x, WEIGHTS[:3], group_sizes=np.full(3, 100, dtype))
    )(jnp.ones((2, LENGTH, 1))),
    "group_offset": lambda dtype: grouped_matmul(
        jnp.ones((3, 1)), WEIGHTS[:99], jnp.array([1, 7, 255], dtype), jnp.array(200, dtype)
    ),
    "flash": packed(lambda ends: flash_attention(Q, K, V, cum_seqlens_q=ends, causal=True)),
    "flash_keys": packed(
        lambda ends: flash_attention(Q, K, V, cum_seqlens_q=ends // 2, cum_seqlens_k=ends)
    ),
    "gla": packed(lambda ends: gla_attention(Q, K, V, cu_seqlens=ends)),
    "native_sparse": packed(
        lambda ends: native_sparse_attention(
            Q, K, V, block_size=32, block_counts=1, cu_seqlens=ends
        )
    ),
    "mean_pooling": packed(lambda ends: mean_pooling(Q[0, :, 0], cu_seqlens=ends)),
    "layer": lambda dtype: lightning_attention(
        Q, K, V, layer_idx=jnp.array(3, dtype), num_layers=300
    ),
    "pages": paged,
    "blocks": lambda dtype: native_sparse_attention(
        Q,
        K,
        V,
        block_size=1,
        block_indices=jnp.minimum(jnp.arange(LENGTH), 255)[None, :, None].astype(dtype),
        block_counts=jnp.array(1, dtype),
    ),
    "mask_packed": of_mask(
        lambda ends: MaskInfo.from_cu_seqlens(ends, max_q_len=LENGTH, format="packed"), 0, 100, 200
    ),
    "mask_pairs": of_mask(lambda ends: MaskInfo.from_cu_seqlens(ends, max_q_len=LENGTH), 0, 200),
    "mask_lengths": of_mask(lambda x: MaskInfo.from_segments(ZEROS).apply_kv_lengths(x), 200),
    "mask_chunks": of_mask(lambda x: MaskInfo.from_segments(ZEROS).apply_chunked(x), 200),
    "mask_offset": of_mask(lambda x: MaskInfo.from_segments(ZEROS).apply_causal(offset=x), 200),
}


@pytest.mark.parametrize("name", NARROW)
def test_unsigned_integers_of_eight_bits(name):
    jax.tree.map(close, NARROW[name](np.uint8), NARROW[name](np.int32))


def test_signed_integers_of_eight_bits():
    ids = jnp.array([1, 127, -1], jnp.int8)
    assert grouped_matmul(jnp.ones((3, 1)), WEIGHTS[:128], ids).ravel().tolist() == [1, 127, 0]


@pytest.mark.parametrize("ids", [np.array([1, 2**32 + 5]), [1, 2**32 + 5]], ids=["array", "list"])
def test_an_id_beyond_int32_has_no_group(ids):
    """It does not wrap around to that of another."""
    assert grouped_matmul(jnp.ones((2, 1)), WEIGHTS, ids).ravel().tolist() == [1, 0]
    assert grouped_matmul(jnp.ones((1, 1)), WEIGHTS, [7], 2**33).ravel().tolist() == [0]


def test_integers_that_are_refused():
    with pytest.raises(ValueError, match="never decrease, got"):
        flash_attention(Q, K, V, cum_seqlens_q=np.array([0, 100, 50], np.uint8))
    with pytest.raises(ValueError, match="ends at 4294967396, past the 300 tokens"):
        flash_attention(Q, K, V, cum_seqlens_q=[0, 2**32 + 100])
    with pytest.raises(ValueError, match="group_ids must be an array of numbers, got a list that"):
        grouped_matmul(jnp.ones((1, 1)), WEIGHTS, [10**30])
    for ids in (np.full((1, 3), 2**40), jnp.full((1, 3), 2**32 - 1, jnp.uint32)):
        with pytest.raises(ValueError, match=f"q_segment_ids must fit in int32, got {ids[0, 0]}"):
            MaskInfo.from_segments(ids)
