"""The lists of a block map against the states they are compacted from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from ejkernel.types.block_map import EMPTY, FULL, PARTIAL, block_map
from ejkernel.types.rules import Band, Chunks, Dense, Everything, KeyLength, Segments

EXAMPLES = examples(40)


def check_lists(blocks, active):
    """`blocks` visits exactly the active blocks of each row of `active` [b, n, i, j]."""
    for place in np.ndindex(active.shape[:3]):
        expected = np.flatnonzero(active[place])
        count = int(blocks.count[place])
        visited = [int(blocks.at(*place, step)) for step in range(count)]
        assert visited == expected.tolist()
        assert int(blocks.first[place]) == (expected[0] if len(expected) else 0)
        if blocks.index is not None:
            last = expected[-1] if len(expected) else 0
            assert (np.array(blocks.index[place])[count:] == last).all()


dense_of = jax.jit(lambda rule, q_len, kv_len: rule.dense(q_len, kv_len), static_argnums=(1, 2))
jitted = jax.jit(block_map, static_argnums=(1, 2, 3, 4))


def check(rule, q_len, kv_len, block_q, block_k):
    found = jax.tree.map(np.array, jitted(rule, q_len, kv_len, block_q, block_k))
    check_lists(found.rows, found.state != EMPTY)
    check_lists(found.columns, (found.state != EMPTY).swapaxes(-1, -2))
    dense = np.array(dense_of(rule, q_len, kv_len))
    dense = dense[None] if dense.ndim == 3 else dense
    assert found.state.dtype == np.int8
    assert found.state.shape[:2] == dense.shape[:2]
    for i, j in np.ndindex(found.state.shape[2:]):
        tile = dense[..., i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
        state = found.state[..., i, j]
        assert (tile.any((-1, -2))[state == EMPTY] == 0).all()
        assert (tile.all((-1, -2))[state == FULL]).all()
    return found


@EXAMPLES
@given(st.lists(st.integers(-1, 4), min_size=26, max_size=26), st.sampled_from([None, 0, 3]))
def test_segments_and_windows(ids, window):
    ids = jnp.array(ids, jnp.int32).reshape(2, 13)
    rule = Segments(ids, ids) & Band(None if window is None else -window, 0)
    found = check(rule, 13, 13, 4, 3)
    assert found.rows.index is not None
    assert found.state.shape == (2, 1, 4, 5)


@EXAMPLES
@given(
    st.lists(st.integers(-3, 16), min_size=3, max_size=3),
    st.sampled_from([(1, -4), (3, 0), (7, -2), (5, 3)]),
)
def test_ranges_need_no_index(lengths, numbers):
    size, low = numbers
    rule = KeyLength(jnp.array(lengths)) & Chunks(size) & Band(low, low + 4)
    found = check(rule, 10, 13, 3, 4)
    assert found.rows.index is None
    assert found.columns.index is None
    assert found.state.shape == (3, 1, 4, 4)


@EXAMPLES
@given(st.lists(st.integers(0, 12), min_size=10, max_size=10))
def test_positions_are_ranges_by_row_only(positions):
    found = check(Band(-3, 0, jnp.array([positions], jnp.int32)), 10, 13, 3, 4)
    assert found.rows.index is None
    assert found.columns.index is not None


@EXAMPLES
@given(st.integers(0, 1000))
def test_dense_masks_keep_their_heads(seed):
    mask = np.random.default_rng(seed).random((2, 3, 9, 7)) < 0.3
    found = check(Dense(jnp.array(mask)), 9, 7, 4, 2)
    assert found.state.shape == (2, 3, 3, 4)


def test_a_mask_that_is_the_same_everywhere_has_one_row_and_one_head():
    found = block_map(Everything(), 8, 8, 4, 4)
    assert found.state.shape == (1, 1, 2, 2)
    assert (found.state == FULL).all()


def test_each_batch_row_has_its_own_map():
    ids = jnp.array([[0, 0, 0, 0], [0, 0, 1, 1]])
    found = block_map(Segments(ids, ids), 4, 4, 2, 2)
    assert found.state[:, 0].tolist() == [[[FULL, FULL]] * 2, [[FULL, EMPTY], [EMPTY, FULL]]]


def test_a_short_last_block_can_be_full():
    found = block_map(Band(None, 0), 5, 5, 2, 2)
    assert found.state[0, 0].tolist() == [
        [PARTIAL, EMPTY, EMPTY],
        [FULL, PARTIAL, EMPTY],
        [FULL, FULL, FULL],
    ]


def test_at_shares_axes_of_size_one():
    found = block_map(Band(None, 0), 8, 8, 4, 4)
    assert int(found.rows.at(5, 3, 1, 1)) == 1
    ids = jnp.zeros((1, 8), jnp.int32)
    found = block_map(Segments(ids, ids), 8, 8, 4, 4)
    assert int(found.rows.at(5, 3, 1, 1)) == 1


def test_block_sizes_must_be_positive():
    with pytest.raises(ValueError, match="block_map: block sizes must be positive, got 0 and 4"):
        block_map(Everything(), 8, 8, 0, 4)


def test_a_long_map_makes_nothing_of_the_size_of_the_mask():
    length = 1 << 15
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    rule = lambda ids: Segments(ids, ids) & Band(-512, 0)
    compiled = (
        jax.jit(lambda ids: block_map(rule(ids), length, length, 128, 128)).lower(ids).compile()
    )
    memory = compiled.memory_analysis()
    blocks = (length // 128) ** 2
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 40 * blocks
