"""Tokens in the order of a placement, and back; masks as a shard sees them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.parallel import permute_sequence, restore_sequence
from ejkernel.types.placement import PLACEMENTS, ShardPositions, placed_rule
from ejkernel.types.rules import (
    Band,
    Chunks,
    Dense,
    Everything,
    KeyLength,
    QueryLength,
    Segments,
    TokenTypes,
)


def held(shard, shards, placement, length):
    """The tokens of a shard, by the definition of each placement."""
    tokens = np.arange(length)
    if placement == "contiguous":
        return tokens[tokens // (length // shards) == shard]
    if placement == "striped":
        return tokens[tokens % shards == shard]
    part = tokens // (length // (2 * shards))
    return tokens[(part == shard) | (part == 2 * shards - 1 - shard)]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_each_shard_holds_the_tokens_of_its_placement(shards, placement):
    length = 6 * shards
    placed = permute_sequence(np.arange(length), shards=shards, placement=placement, axis=0)
    for shard, tokens in enumerate(np.split(placed, shards)):
        np.testing.assert_array_equal(tokens, held(shard, shards, placement, length))
        share = ShardPositions.of(shard, shards, placement, 6)
        np.testing.assert_array_equal(share.positions(), tokens)
        a, b, c, d = np.asarray(share.affine())
        index = np.arange(6)
        np.testing.assert_array_equal(a + b * index + np.where(index >= c, d, 0), tokens)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [np.int32, np.bool_, jnp.bfloat16, np.float64])
def test_restoring_undoes_permuting(placement, dtype):
    x = np.arange(2 * 16 * 3).reshape(2, 16, 3).astype(dtype)
    for axis in (1, -2):
        options = {"shards": 4, "placement": placement, "axis": axis}
        placed = permute_sequence(x, **options)
        assert isinstance(placed, np.ndarray)
        assert placed.dtype == x.dtype
        np.testing.assert_array_equal(restore_sequence(placed, **options), x)
        traced = jax.jit(lambda x, options=options: permute_sequence(x, **options))(jnp.asarray(x))
        np.testing.assert_array_equal(np.asarray(traced), placed.astype(traced.dtype))
        back = jax.jit(lambda x, options=options: restore_sequence(x, **options))(traced)
        np.testing.assert_array_equal(np.asarray(back), x.astype(back.dtype))


@pytest.mark.usefixtures("as_a_user_calls")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": 4, "placement": "snake"}, "one of contiguous, zigzag, striped, got 'snake'"),
        ({"shards": 4, "placement": "zigzag"}, "must be a multiple of 8, got 12"),
        ({"shards": 5, "placement": "striped"}, "must be a multiple of 5, got 12"),
        ({"shards": 0, "placement": "striped"}, "shards must be positive, got 0"),
        ({"shards": 2.0, "placement": "striped"}, "must be ints, got 2.0 and 1"),
        ({"shards": 2, "placement": "striped", "axis": 2}, "axis 2 is not an axis"),
    ],
)
@pytest.mark.parametrize("function", [permute_sequence, restore_sequence])
def test_a_mistake_is_named(function, options, message):
    with pytest.raises(ValueError, match=f"{function.__name__}: .*{message}"):
        function(np.zeros((3, 12)), **options)


LENGTH, SHARDS = 24, 3
IDS = jnp.asarray(np.random.default_rng(0).integers(-1, 3, (2, LENGTH)), jnp.int32)
RULES = {
    "everything": Everything(),
    "causal": Band(None, 0),
    "window": Band(-5, 2),
    "row_windows": Band(jnp.array([-3, 1]), jnp.array([4, 6])),
    "positions": Band(-2, 3, jnp.arange(LENGTH, dtype=jnp.int32)[None] // 2),
    "chunks": Chunks(5, q_start=2, k_start=1),
    "lengths": KeyLength(13) & QueryLength(jnp.array([7, 20])),
    "segments": Segments(IDS, IDS[::-1]),
    "types": TokenTypes(IDS + 1, IDS[::-1] + 1),
    "dense": Dense(jax.random.bernoulli(jax.random.key(0), 0.5, (2, 3, LENGTH, LENGTH))),
    "key_padding": Dense(jax.random.bernoulli(jax.random.key(0), 0.5, (2, 1, 1, LENGTH))),
    "union": (Band(None, -4) & Chunks(7)) | Segments(IDS, IDS),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", RULES)
def test_a_placed_rule_is_the_rule_at_the_positions(name, placement):
    """Pairs, and blocks that are empty or full, for shards that are known only at run time."""
    rule, size = RULES[name], LENGTH // SHARDS
    shares = lambda *shards: (ShardPositions.of(shard, SHARDS, placement, size) for shard in shards)

    @jax.jit
    def placed(i, j):
        part = placed_rule(rule, *shares(i, j))
        return part.dense(size, size), part.blocks(size, size, 3, 2)

    whole = np.asarray(rule.dense(LENGTH, LENGTH))
    for i in range(SHARDS):
        for j in range(SHARDS):
            rows, columns = (held(shard, SHARDS, placement, LENGTH) for shard in (i, j))
            expected = whole[..., rows[:, None], columns]
            dense, (some, every) = placed(i, j)
            np.testing.assert_array_equal(np.broadcast_to(dense, expected.shape), expected)
            static = placed_rule(rule, *shares(i, j)).dense(size, size)
            np.testing.assert_array_equal(static, dense)
            for a in range(3):
                for b in range(4):
                    block = expected[..., 3 * a : 3 * a + 3, 2 * b : 2 * b + 2]
                    assert (np.asarray(some)[..., a, b] | ~block.any((-1, -2))).all()
                    assert (~np.asarray(every)[..., a, b] | block.all((-1, -2))).all()
