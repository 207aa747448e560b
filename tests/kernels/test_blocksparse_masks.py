"""Masks of block-sparse attention: what they allow, and that they are values like any other."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as oracle
from tiers import examples

from ejkernel.kernels._pallas.tpu.blocksparse_attention import _masks as masks

SHAPE = (24, 36)
WHOLE = (slice(None), slice(None))
RANDOM = np.random.default_rng(0).random(SHAPE) < 0.5

KINDS = {
    "causal": lambda m: m.CausalMask(SHAPE),
    "causal ahead": lambda m: m.CausalMask(SHAPE, offset=5),
    "causal behind": lambda m: m.CausalMask(SHAPE, offset=-7, shard_count=2),
    "window": lambda m: m.LocalMask(SHAPE, window_size=(3, 2), offset=0),
    "moved window": lambda m: m.LocalMask(SHAPE, (3, 0), 6),
    "open to the left": lambda m: m.LocalMask(SHAPE, (None, 2), 0),
    "open to the right": lambda m: m.LocalMask(SHAPE, (4, None), -3),
    "open on both sides": lambda m: m.LocalMask(SHAPE, (None, None), 0),
    "window without width": lambda m: m.LocalMask(SHAPE, (-3, 1), 0),
    "chunked": lambda m: m.ChunkedCausalMask(SHAPE, chunk_size=5),
    "full": lambda m: m.FullMask(SHAPE),
    "array": lambda m: m.NumpyMask(RANDOM),
    "and": lambda m: m.CausalMask(SHAPE) & m.LocalMask(SHAPE, (4, 4), 0),
    "or": lambda m: m.ChunkedCausalMask(SHAPE, 6) | m.LocalMask(SHAPE, (1, 1), 0),
    "and or": lambda m: (m.CausalMask(SHAPE) & m.NumpyMask(RANDOM)) | m.ChunkedCausalMask(SHAPE, 4),
}
COMPUTABLE = [name for name in KINDS if name not in ("full", "array", "and", "or", "and or")]


@pytest.fixture
def without_shape_checks():
    """The library as users call it: nobody but the function itself looks at the arguments."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_allows_what_the_oracle_allows(kind):
    ours, theirs = KINDS[kind](masks), KINDS[kind](oracle)
    assert ours.shape == theirs.shape
    np.testing.assert_array_equal(ours[WHOLE], theirs[WHOLE])
    assert ours[WHOLE].dtype == bool


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "part", [np.s_[3:9, 30:], np.s_[-5:, ::2], np.s_[20:3:-4, 7:8], np.s_[5:5, :]], ids=str
)
def test_a_part_is_cut_out_of_the_whole(kind, part):
    mask = KINDS[kind](masks)
    np.testing.assert_array_equal(mask[part], mask[WHOLE][part])


@pytest.mark.parametrize("kind", COMPUTABLE)
def test_a_formula_gives_the_mask_on_the_host_and_on_the_device(kind):
    mask, theirs = KINDS[kind](masks), KINDS[kind](oracle)
    np.testing.assert_array_equal(mask.q_sequence, theirs.q_sequence)
    assert mask.q_sequence.dtype == theirs.q_sequence.dtype
    q_ids, kv_ids = mask.q_sequence[:, None], np.arange(SHAPE[1])[None, :]
    np.testing.assert_array_equal(mask.mask_function(q_ids, kv_ids), mask[WHOLE])
    evaluate = jax.jit(lambda function, q, kv: function(q, kv), static_argnums=0)
    on_device = evaluate(mask.mask_function, jnp.asarray(q_ids), jnp.asarray(kv_ids))
    np.testing.assert_array_equal(on_device, mask[WHOLE])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [(4, 4), (3, 9), (24, 2), (1, 1)], ids=str)
def test_states_of_blocks_are_what_the_blocks_hold(kind, blocks):
    mask = KINDS[kind](masks)
    np.testing.assert_array_equal(mask.block_states(*blocks), _states_by_looking(mask, *blocks))


@given(st.data())
@examples(200)
def test_states_of_formulas_are_exact(data):
    integer = lambda low, high: data.draw(st.integers(low, high))
    block_q, block_kv = integer(1, 5), integer(1, 5)
    shape = (block_q * integer(1, 5), block_kv * integer(1, 5))
    window = data.draw(st.tuples(*[st.none() | st.integers(-4, 9)] * 2))
    mask = data.draw(
        st.sampled_from(
            [
                masks.CausalMask(shape, integer(-9, 9)),
                masks.LocalMask(shape, window, integer(-9, 9)),
                masks.ChunkedCausalMask(shape, integer(1, 12)),
            ]
        )
    )
    expected = _states_by_looking(mask, block_q, block_kv)
    np.testing.assert_array_equal(mask.block_states(block_q, block_kv), expected)


def _states_by_looking(mask, block_q, block_kv):
    q_len, kv_len = mask.shape
    dense = mask[WHOLE].reshape(q_len // block_q, block_q, kv_len // block_kv, block_kv)
    return np.where(dense.all((1, 3)), 2, np.where(dense.any((1, 3)), 1, 0))


def test_a_long_formula_is_never_written_out(monkeypatch):
    def refuse(self, index):
        raise AssertionError(f"{index} was read")

    monkeypatch.setattr(masks.ComputableMask, "__getitem__", refuse)
    states = masks.CausalMask((2**20, 2**20)).block_states(2**12, 2**12)
    assert np.bincount(states.ravel()).tolist() == [32640, 256, 32640]


def test_a_combination_looks_only_where_both_parts_are_partial(monkeypatch):
    size = 64
    both = masks.CausalMask((size, size)) & masks.LocalMask((size, size), (16, 16))
    read = []
    plain = masks.LogicalAnd.__getitem__
    monkeypatch.setattr(
        masks.LogicalAnd,
        "__getitem__",
        lambda self, index: read.append(index) or plain(self, index),
    )
    states = both.block_states(8, 8)
    assert read == []
    assert np.bincount(states.ravel()).tolist() == [43, 14, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_masks_are_equal_and_hash_alike(kind):
    one, other = KINDS[kind](masks), KINDS[kind](masks)
    assert one == other
    assert hash(one) == hash(other)
    assert not one != other  # noqa: SIM202


def test_different_masks_differ():
    different = [build(masks) for build in KINDS.values()]
    different += [masks.CausalMask((24, 24)), masks.NumpyMask(~RANDOM), masks.FullMask((24, 24))]
    assert len(set(different)) == len(different)
    assert masks.CausalMask(SHAPE) != "a mask"


def test_and_differs_from_or():
    left, right = masks.CausalMask(SHAPE), masks.FullMask(SHAPE)
    assert (left & right) != (left | right)
    assert isinstance(left & right, masks.LogicalAnd)
    assert isinstance(left | right, masks.LogicalOr)


def test_an_array_mask_keeps_a_copy():
    array = RANDOM.copy()
    mask = masks.NumpyMask(array)
    before = hash(mask)
    array[:] = False
    np.testing.assert_array_equal(mask[WHOLE], RANDOM)
    assert hash(mask) == before
    with pytest.raises(ValueError, match="read-only"):
        mask.array[0, 0] = True


def test_heads_have_masks_of_their_own():
    causal, full = masks.CausalMask(SHAPE), masks.FullMask(SHAPE)
    both = masks.MultiHeadMask([causal, full])
    assert both.shape == (2, *SHAPE)
    assert both == masks.MultiHeadMask((causal, full))
    assert both != masks.MultiHeadMask((full, causal))
    assert hash(both) == hash(masks.MultiHeadMask((causal, full)))
    np.testing.assert_array_equal(both[0, :, 2:], causal[:, 2:])
    np.testing.assert_array_equal(both[:, 1:, :], np.stack([causal[1:, :], full[1:, :]]))
    np.testing.assert_array_equal(both.block_states(4, 4)[1], full.block_states(4, 4))


def test_heads_are_combined_one_by_one():
    causal, full = masks.CausalMask(SHAPE), masks.FullMask(SHAPE)
    both = masks.MultiHeadMask([causal, full])
    turned = masks.MultiHeadMask([full, causal])
    everything = (slice(None), *WHOLE)
    np.testing.assert_array_equal(
        (both & turned)[everything], both[everything] & turned[everything]
    )
    np.testing.assert_array_equal(
        (both | turned)[everything], both[everything] | turned[everything]
    )


class EveryThirdKey(masks.ComputableMask):
    """A mask of a user's own."""

    shape = (6, 6)

    @property
    def mask_function(self):
        return every_third_key


def every_third_key(q_ids, kv_ids):
    return (kv_ids % 3 == 0) & (q_ids == q_ids)


def test_a_formula_of_ones_own_needs_nothing_but_its_function():
    mask = EveryThirdKey()
    assert mask[0:1, :].tolist() == [[True, False, False] * 2]
    assert mask.block_states(2, 2).tolist() == [[1, 1, 0]] * 3
    assert (mask & masks.FullMask((6, 6))).block_states(6, 1).tolist() == [[2, 0, 0, 2, 0, 0]]


@pytest.mark.parametrize(
    ("build", "dense"),
    [
        (lambda m: m.CausalMask((6, 9), 2), lambda m: m.make_causal_mask((6, 9), offset=2)),
        (
            lambda m: m.LocalMask((6, 9), (1, None), 2),
            lambda m: m.make_local_attention_mask((6, 9), (1, None), offset=2),
        ),
        (
            lambda m: m.ChunkedCausalMask((6, 9), 4),
            lambda m: m.make_chunk_attention_mask((6, 9), 4),
        ),
    ],
    ids=["causal", "local", "chunk"],
)
def test_helpers_write_a_mask_out(build, dense):
    np.testing.assert_array_equal(dense(masks), build(masks)[WHOLE])
    np.testing.assert_array_equal(dense(masks), dense(oracle))


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 1.0])
def test_a_random_mask_comes_from_its_seed_alone(sparsity):
    np.random.seed(5)
    expected_state = np.random.get_state()[1].copy()
    one = masks.make_random_mask((40, 50), sparsity, seed=3)
    np.testing.assert_array_equal(np.random.get_state()[1], expected_state)
    np.testing.assert_array_equal(one, masks.make_random_mask((40, 50), sparsity, seed=3))
    np.testing.assert_array_equal(one, oracle.make_random_mask((40, 50), sparsity, 3))


SMALL = masks.FullMask((2, 2))
CAUSAL = masks.CausalMask(SHAPE)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CAUSAL & SMALL, r"&: masks must have the same shape, got \(24, 36\) and \(2, 2\)"),
        (lambda: CAUSAL | SMALL, r"\|: masks must have the same shape"),
        (lambda: masks.LogicalAnd(CAUSAL, SMALL), "LogicalAnd: masks must have the same shape"),
        (
            lambda: masks.LogicalOr(*[masks.MultiHeadMask([SMALL])] * 2),
            r"LogicalOr: masks of several heads are combined with & and \|",
        ),
        (lambda: masks.MultiHeadMask([]), "MultiHeadMask: at least one mask"),
        (
            lambda: masks.MultiHeadMask([CAUSAL, SMALL]),
            "all masks must have one shape",
        ),
        (
            lambda: masks.MultiHeadMask([masks.MultiHeadMask([SMALL])]),
            "MultiHeadMask: a mask of several heads cannot be a head itself",
        ),
        (lambda: masks.MultiHeadMask([SMALL])[0, :], r"read it as mask\[head, q_slice, kv_slice\]"),
        (lambda: masks.CausalMask((24,)), "CausalMask: shape must be"),
        (lambda: masks.FullMask((4, 0)), "FullMask: shape must be"),
        (lambda: masks.CausalMask((24, 24), shard_count=5), "shard_count squared, got 24 and"),
        (lambda: masks.CausalMask((24, 24), shard_count=0), "shard_count squared, got 24 and"),
        (
            lambda: masks.LocalMask((24, 24), (1,)),
            r"window_size must be \(left, right\)",
        ),
        (lambda: masks.ChunkedCausalMask((24, 24), 0), "chunk_size must be positive, got 0"),
        (lambda: masks.NumpyMask(np.ones((2, 2))), "NumpyMask: the array must be of bool"),
        (lambda: masks.NumpyMask(np.ones(2, bool)), "NumpyMask: shape must be"),
        (lambda: CAUSAL[3], r"CausalMask: read it as mask\[q_slice, kv_slice\], got 3"),
        (lambda: CAUSAL[3, 4], r"read it as mask\[q_slice, kv_slice\]"),
        (lambda: masks.NumpyMask(RANDOM)[2:, 3], r"NumpyMask: read it as"),
        (lambda: masks.make_random_mask((2, 2), 1.5, 0), r"sparsity must lie in \[0, 1\]"),
    ],
)
def test_wrong_masks_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_several_heads_and_one_do_not_combine():
    class Cube(masks.Mask):
        shape = (1, 2, 2)

        def __getitem__(self, index):
            raise NotImplementedError

    with pytest.raises(ValueError, match="&: a mask of several heads is combined with another one"):
        masks.MultiHeadMask([SMALL]) & Cube()


def test_a_mask_has_no_truth_value():
    with pytest.raises(NotImplementedError, match=r"combined with & and \|"):
        bool(CAUSAL)


@pytest.mark.usefixtures("without_shape_checks")
def test_a_mask_combines_with_masks_only():
    with pytest.raises(TypeError, match="unsupported operand"):
        CAUSAL & RANDOM.tolist()
