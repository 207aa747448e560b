"""Running sums restart where they must, forwards and backwards."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.xla_utils import chunk_global_cumsum, chunk_local_cumsum

CU = np.array([0, 5, 5, 12])
LENGTH = 15


def _values(batch=1, dtype=np.float32):
    rng = np.random.default_rng(0)
    # Quarters: sums are exact in every order.
    return (rng.integers(-8, 8, (batch, LENGTH, 2)) / 4).astype(dtype)


def _sum_by_parts(values, bounds, reverse):
    out = np.zeros_like(values)
    for start, stop in itertools.pairwise(bounds):
        part = values[:, start:stop]
        summed = np.cumsum(part[:, ::-1], axis=1)[:, ::-1] if reverse else np.cumsum(part, axis=1)
        out[:, start:stop] = summed
    return out


@pytest.mark.parametrize("reverse", [False, True])
def test_local_sums_restart_at_every_chunk(reverse):
    values = _values(batch=2)
    expected = _sum_by_parts(values, [0, 4, 8, 12, 15], reverse)
    np.testing.assert_array_equal(chunk_local_cumsum(values, 4, reverse=reverse), expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_chunks_begin_anew_with_every_sequence(reverse):
    expected = _sum_by_parts(_values(), [0, 4, 5, 9, 12], reverse)
    summed = jax.jit(lambda g, cu: chunk_local_cumsum(g, 4, reverse=reverse, cu_seqlens=cu))
    np.testing.assert_array_equal(summed(_values(), CU), expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_global_sums_run_over_the_sequence(reverse):
    values = _values(batch=2)
    expected = _sum_by_parts(values, [0, LENGTH], reverse)
    np.testing.assert_array_equal(chunk_global_cumsum(values, reverse=reverse), expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_global_sums_restart_at_every_packed_sequence(reverse):
    expected = _sum_by_parts(_values(), CU, reverse)
    summed = jax.jit(lambda s, cu: chunk_global_cumsum(s, reverse=reverse, cu_seqlens=cu))
    np.testing.assert_array_equal(summed(_values(), CU), expected)


def test_a_late_chunk_is_summed_as_exactly_as_an_early_one():
    values = jnp.full((1, 64, 1), 1 / 3).at[:, :32].set(1e6)
    late = chunk_local_cumsum(values, 32)[:, 32:]
    alone = chunk_local_cumsum(values[:, 32:], 32)
    np.testing.assert_array_equal(late, alone)


def test_the_gradient_of_a_sum_is_the_sum_the_other_way():
    weights = jnp.asarray(_values())
    gradient = jax.grad(lambda g: (chunk_local_cumsum(g, 4) * weights).sum())(_values())
    np.testing.assert_array_equal(gradient, chunk_local_cumsum(weights, 4, reverse=True))


def test_sums_are_kept_in_float32_unless_asked_otherwise():
    values = jnp.ones((1, 600, 1), jnp.bfloat16)
    assert chunk_global_cumsum(values).dtype == jnp.float32
    assert chunk_global_cumsum(values)[0, -1, 0] == 600
    assert chunk_global_cumsum(values, output_dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_wrong_calls_are_refused():
    with pytest.raises(ValueError, match="chunk_local_cumsum: chunk_size must be positive"):
        chunk_local_cumsum(_values(), 0)
    with pytest.raises(ValueError, match="one packed row, got a batch of 2"):
        chunk_local_cumsum(_values(batch=2), 4, cu_seqlens=CU)
    with pytest.raises(ValueError, match="one packed row, got a batch of 2"):
        chunk_global_cumsum(_values(batch=2), cu_seqlens=CU)
    with pytest.raises(ValueError, match="holds 20 tokens, more than total_length=15"):
        chunk_global_cumsum(_values(), cu_seqlens=np.array([0, 20]))
