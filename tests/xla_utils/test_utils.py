"""Packed sequences: what the helpers say is what a loop over the sequences says."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from ejkernel.xla_utils import utils

LENGTHS = st.lists(st.integers(0, 9), min_size=0, max_size=6)
CU = jnp.array([0, 3, 5, 9])
BY_TOKEN = (
    utils.prepare_position_ids,
    utils.prepare_sequence_ids,
    utils.prepare_token_indices,
)


@pytest.fixture
def without_shape_checks():
    """The library as users call it: nobody but the function itself looks at the arguments."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def _cumulative(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _tokens(lengths):
    return [[s, p] for s, length in enumerate(lengths) for p in range(length)]


def _chunks(lengths, size):
    return [[s, c] for s, length in enumerate(lengths) for c in range(-(-length // size))]


def _padded(rows, count):
    return np.array(rows + [[-1, -1]] * (count - len(rows)), np.int32).reshape(count, 2)


def test_the_documented_example():
    assert utils.prepare_lens(CU).tolist() == [3, 2, 4]
    assert utils.prepare_position_ids(CU).tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert utils.prepare_sequence_ids(CU).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert utils.prepare_chunk_offsets(CU, 2).tolist() == [0, 2, 3, 5]
    assert utils.prepare_chunk_indices(CU, 2).tolist() == [[0, 0], [0, 1], [1, 0], [2, 0], [2, 1]]


def test_an_empty_sequence_keeps_its_number():
    cu = jnp.array([0, 0, 3, 3, 5, 5])
    assert utils.prepare_sequence_ids(cu).tolist() == [1, 1, 1, 3, 3]
    assert utils.prepare_position_ids(cu).tolist() == [0, 1, 2, 0, 1]
    assert utils.prepare_chunk_indices(cu, 2).tolist() == [[1, 0], [1, 1], [3, 0]]


@given(LENGTHS)
@examples(20)
def test_every_token_knows_its_sequence_and_its_position(lengths):
    cu = _cumulative(lengths)
    expected = _padded(_tokens(lengths), sum(lengths))
    np.testing.assert_array_equal(utils.prepare_token_indices(cu), expected)
    np.testing.assert_array_equal(utils.prepare_sequence_ids(cu), expected[:, 0])
    np.testing.assert_array_equal(utils.prepare_position_ids(cu), expected[:, 1])
    np.testing.assert_array_equal(utils.prepare_lens(cu), lengths)


@given(LENGTHS, st.integers(1, 10))
@examples(20)
def test_every_chunk_knows_its_sequence_and_its_number(lengths, size):
    cu = _cumulative(lengths)
    expected = _chunks(lengths, size)
    np.testing.assert_array_equal(
        utils.prepare_chunk_indices(cu, size), _padded(expected, len(expected))
    )
    counts = [-(-length // size) for length in lengths]
    np.testing.assert_array_equal(utils.prepare_chunk_offsets(cu, size), _cumulative(counts))
    enough = -(-sum(lengths) // size) + len(lengths)
    np.testing.assert_array_equal(
        utils.prepare_chunk_indices(cu, size, total_chunks=enough), _padded(expected, enough)
    )


@pytest.mark.parametrize("lengths", [[3, 0, 2], [0, 0], [12]])
def test_a_given_size_works_under_jit_and_fills_with_minus_one(lengths):
    cu = jnp.asarray(_cumulative(lengths))
    tokens = jax.jit(lambda cu: utils.prepare_token_indices(cu, total_length=12))(cu)
    np.testing.assert_array_equal(tokens, _padded(_tokens(lengths), 12))
    chunks = jax.jit(lambda cu: utils.prepare_chunk_indices(cu, 2, total_chunks=9))(cu)
    np.testing.assert_array_equal(chunks, _padded(_chunks(lengths, 2), 9))
    offsets = jax.jit(lambda cu: utils.prepare_chunk_offsets(cu, 2))(cu)
    np.testing.assert_array_equal(offsets, utils.prepare_chunk_offsets(cu, 2))


def test_rows_of_a_batch_are_mapped_over():
    cu = jnp.array([[0, 3, 5], [0, 0, 4]])
    ids = jax.vmap(lambda cu: utils.prepare_sequence_ids(cu, total_length=6))(cu)
    assert ids.tolist() == [[0, 0, 0, 1, 1, -1], [1, 1, 1, 1, -1, -1]]


@pytest.mark.parametrize("function", BY_TOKEN)
def test_known_values_need_no_size_inside_jit(function):
    inside = jax.jit(lambda: function(CU))()
    np.testing.assert_array_equal(inside, function(CU))


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
def test_results_have_the_dtype_of_the_lengths(dtype):
    cu = np.array([0, 100, 120], dtype)
    results = [function(cu, total_length=300) for function in BY_TOKEN]
    results += [utils.prepare_lens(cu), utils.prepare_chunk_offsets(cu, 200)]
    results += [utils.prepare_chunk_indices(cu, 200)]
    assert {result.dtype for result in results} == {np.dtype(dtype)}
    assert utils.prepare_position_ids(cu, total_length=300).max() == 99
    assert utils.prepare_chunk_offsets(cu, 200).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [bool, np.int32])
def test_lengths_come_from_a_padding_mask(dtype):
    mask = np.array([[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]], dtype)
    lens = utils.prepare_lens_from_mask(mask)
    assert (lens.tolist(), lens.dtype) == ([3, 0, 1], jnp.int32)
    cu = utils.prepare_cu_seqlens_from_mask(mask, out_dtype=jnp.int16)
    assert (cu.tolist(), cu.dtype) == ([0, 3, 3, 4], jnp.int16)
    np.testing.assert_array_equal(jax.jit(utils.prepare_cu_seqlens_from_mask)(mask), cu)


@given(st.integers(-50, 50), st.integers(1, 9))
@examples(20)
def test_cdiv_rounds_up(a, b):
    expected = int(np.ceil(a / b))
    assert utils.cdiv(a, b) == expected
    assert utils.cdiv(np.array([a]), b).tolist() == [expected]
    assert utils.cdiv(jnp.array([a]), b).tolist() == [expected]


@pytest.mark.parametrize("function", BY_TOKEN)
def test_tracing_without_a_size_names_the_argument(function):
    with pytest.raises(ValueError, match=rf"{function.__name__}: .*pass total_length="):
        jax.jit(function)(CU)


def test_tracing_without_a_number_of_chunks_names_the_argument():
    with pytest.raises(ValueError, match=r"prepare_chunk_indices: .*pass total_chunks="):
        jax.jit(lambda cu: utils.prepare_chunk_indices(cu, 2))(CU)


@pytest.mark.parametrize("as_array", [np.array, jnp.array])
@pytest.mark.parametrize(
    "call",
    [
        *BY_TOKEN,
        utils.prepare_lens,
        lambda cu: utils.prepare_chunk_indices(cu, 2),
        lambda cu: utils.prepare_chunk_offsets(cu, 2),
    ],
)
def test_falling_lengths_are_refused(call, as_array):
    with pytest.raises(ValueError, match=r"must not decrease, got \[0, 5, 3\]"):
        call(as_array([0, 5, 3]))


@pytest.mark.parametrize("function", BY_TOKEN)
def test_lengths_that_do_not_begin_with_zero_are_refused(function):
    with pytest.raises(ValueError, match="must begin with 0"):
        function(np.array([1, 4]))


@pytest.mark.parametrize("function", BY_TOKEN)
def test_a_size_that_is_too_small_is_refused(function):
    with pytest.raises(ValueError, match="holds 9 tokens, more than total_length=8"):
        function(CU, total_length=8)
    with pytest.raises(ValueError, match="total_length must not be negative"):
        function(CU, total_length=-1)


def test_too_few_chunks_are_refused():
    with pytest.raises(ValueError, match="holds 5 chunks, more than total_chunks=4"):
        utils.prepare_chunk_indices(CU, 2, total_chunks=4)


@pytest.mark.parametrize("size", [0, -1])
def test_a_chunk_size_must_be_positive(size):
    with pytest.raises(ValueError, match="prepare_chunk_indices: chunk_size must be positive"):
        utils.prepare_chunk_indices(CU, size)
    with pytest.raises(ValueError, match="prepare_chunk_offsets: chunk_size must be positive"):
        utils.prepare_chunk_offsets(CU, size)
    with pytest.raises(ValueError, match="cdiv: the divisor must be positive"):
        utils.cdiv(3, size)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("cu", [np.zeros((2, 2), int), np.zeros(0, int), np.int32(3)])
def test_lengths_of_a_wrong_rank_are_refused(cu):
    with pytest.raises(ValueError, match=r"prepare_lens: cu_seqlens must be \[num_seqs \+ 1\]"):
        utils.prepare_lens(cu)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("dtype", [np.float32, np.uint32])
def test_lengths_must_be_signed_integers(dtype):
    with pytest.raises(ValueError, match="must hold signed integers"):
        utils.prepare_lens(np.array([0, 1], dtype))


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("name", ["prepare_lens_from_mask", "prepare_cu_seqlens_from_mask"])
def test_a_padding_mask_has_two_axes(name):
    with pytest.raises(ValueError, match=rf"{name}: mask must be \[batch, seq_len\]"):
        getattr(utils, name)(np.ones(3, bool))


def test_the_identity_keeps_values_and_converts_gradients():
    in_float32 = utils.identity_dtype_convert(jnp.float32)
    x = jnp.array([1.5, -2.0], jnp.bfloat16)
    value, gradient = jax.value_and_grad(lambda x: (in_float32(x) * 3).sum())(x)
    assert value.dtype == jnp.bfloat16
    assert in_float32(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(in_float32(x), x)
    assert (gradient.tolist(), gradient.dtype) == ([3.0, 3.0], jnp.float32)


def test_the_identity_may_stand_behind_a_cast():
    in_float32 = utils.identity_dtype_convert(jnp.float32)
    loss = lambda weight: in_float32(weight.astype(jnp.bfloat16)).sum()
    assert jax.jit(jax.grad(loss))(jnp.ones(2)).tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("as_a_user_calls")
@pytest.mark.parametrize("function", ["prepare_lens_from_mask", "prepare_cu_seqlens_from_mask"])
def test_a_float_mask_is_refused(function):
    with pytest.raises(ValueError, match=r"mask must be boolean, or .* float32; \.astype\(bool"):
        getattr(utils, function)(jnp.ones((2, 3)))
