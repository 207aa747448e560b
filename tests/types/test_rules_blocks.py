"""A rule of blocks is the dense mask of those blocks, wherever it is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types.block_map import block_map
from ejkernel.types.rules import Band, Blocks


def dense_of(mask, block_q, block_k, q_len, kv_len):
    return np.repeat(np.repeat(mask, block_q, -2), block_k, -1)[..., :q_len, :kv_len]


def draw(*shape, seed=0):
    return np.random.default_rng(seed).random(shape) < 0.4


CASES = [
    (draw(1, 1, 4, 5), 8, 4, 30, 19),
    (draw(2, 3, 4, 5), 8, 4, 32, 20),
    (draw(2, 1, 3, 3), 5, 7, 15, 20),
]


@pytest.mark.parametrize(("mask", "block_q", "block_k", "q_len", "kv_len"), CASES)
def test_dense_slice_row_and_head_are_those_of_the_dense_mask(
    mask, block_q, block_k, q_len, kv_len
):
    rule = Blocks(jnp.asarray(mask), block_q, block_k)
    expected = dense_of(mask, block_q, block_k, q_len, kv_len)
    got = rule.dense(q_len, kv_len)
    np.testing.assert_array_equal(jnp.broadcast_to(got, expected.shape), expected)
    assert rule.heads == mask.shape[1]
    part = rule.slice(3, 6, jnp.int32(2), 9).dense(6, 9)
    np.testing.assert_array_equal(
        jnp.broadcast_to(part, (*mask.shape[:2], 6, 9)), expected[..., 3:9, 2:11]
    )
    last = mask.shape[0] - 1
    alone = rule.row(last).head(mask.shape[1] - 1).dense(q_len, kv_len)
    np.testing.assert_array_equal(alone[0], expected[last, -1])
    starts = jnp.arange(mask.shape[0])
    apart = rule.slice(starts, 5, 0, kv_len).dense(5, kv_len)
    for b in range(mask.shape[0]):
        np.testing.assert_array_equal(
            apart[b] if apart.ndim == 4 else apart, expected[b, :, b : b + 5]
        )


@pytest.mark.parametrize("tile", [(8, 4), (4, 4), (16, 8), (7, 3), (64, 64)])
@pytest.mark.parametrize(("mask", "block_q", "block_k", "q_len", "kv_len"), CASES)
def test_the_block_map_is_exact(mask, block_q, block_k, q_len, kv_len, tile):
    rule = Blocks(jnp.asarray(mask), block_q, block_k)
    expected = dense_of(mask, block_q, block_k, q_len, kv_len)
    state = jax.jit(lambda r: block_map(r, q_len, kv_len, *tile))(rule).state
    state = np.broadcast_to(state, (*mask.shape[:2], *state.shape[2:]))
    for i in range(state.shape[2]):
        for j in range(state.shape[3]):
            part = expected[..., i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
            some, every = part.any((-1, -2)), part.all((-1, -2))
            np.testing.assert_array_equal(state[..., i, j], some.astype(int) + (some & every))


def test_it_joins_other_rules():
    mask = draw(1, 1, 4, 4)
    rule = Blocks(jnp.asarray(mask), 4, 4) & Band(None, 0)
    expected = dense_of(mask, 4, 4, 16, 16)[0] & np.tril(np.ones((16, 16), bool))
    np.testing.assert_array_equal(rule.row(0).dense(16, 16), expected)
    assert rule.features() == {"blocks", "causal"}
