"""Dropout bits are the documented ones, look random, and depend on nothing but their indices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.flash_attention.dropout import bits, keep, threshold

MASK = 2**32 - 1


def mix(x):
    x = (x ^ x >> 16) * 0x85EBCA6B & MASK
    x = (x ^ x >> 13) * 0xC2B2AE35 & MASK
    return x ^ x >> 16


def documented_bits(seed, batch, head, row, column):
    """The docstring of the module, in Python's integers."""
    numbers = []
    for start in (seed & MASK, (seed & MASK) ^ 0x5BD1E995):
        x = mix(start)
        for counter in (batch, head, row):
            x = mix((x + counter * 0x9E3779B9) & MASK)
        numbers.append(x)
    a, b = numbers
    x = (a + column * 0x9E3779B9) & MASK
    x = (x ^ x >> 16) * 0x7FEB352D & MASK
    x = (x ^ x >> 15 ^ b) * 0x846CA68B & MASK
    return x ^ x >> 16


@pytest.mark.parametrize("seed", [0, 1, -5, 2**31 - 1])
def test_the_bits_are_the_documented_ones(seed):
    indices = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 3, 0, 7), (2, 5, 4095, 131071), (7, 127, 1, 0)]
    for index in indices:
        assert int(bits(jnp.int32(seed), *map(jnp.int32, index))) == documented_bits(seed, *index)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint32])
def test_the_bits_do_not_depend_on_the_dtype_of_the_indices(dtype):
    with jax.enable_x64(True):
        assert int(bits(dtype(-1 if dtype != np.uint32 else 2**32 - 1), 1, 2, 3, 4)) == (
            documented_bits(-1, 1, 2, 3, 4)
        )


@pytest.mark.parametrize(
    ("probability", "expected"), [(0.0, 0), (0.5, 2**31), (0.25, 2**30), (1 - 2**-40, 2**32 - 2)]
)
def test_the_threshold_is_the_probability_in_32_bits(probability, expected):
    assert threshold(probability) == expected


def grid(seed=11, batch=2, heads=2, rows=256, columns=256):
    axes = np.ix_(*(range(size) for size in (batch, heads, rows, columns)))
    return np.asarray(bits(seed, *axes))


def test_every_bit_is_as_often_one_as_zero():
    drawn = grid()
    ones = [(drawn >> bit & 1).mean() for bit in range(32)]
    deviation = 0.5 / np.sqrt(drawn.size)
    assert np.abs(np.array(ones) - 0.5).max() < 5 * deviation


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9])
def test_the_kept_fraction_is_one_minus_the_probability(probability):
    axes = np.ix_(range(2), range(2), range(256), range(256))
    kept = np.asarray(keep(probability, 3, *axes))
    deviation = np.sqrt(probability * (1 - probability) / kept.size)
    assert abs(kept.mean() - (1 - probability)) < 5 * deviation


@pytest.mark.parametrize("axis", range(4))
def test_neighbours_along_every_axis_are_independent(axis):
    drawn = grid() / 2.0**32 - 0.5
    here, there = np.moveaxis(drawn, axis, 0)[:-1], np.moveaxis(drawn, axis, 0)[1:]
    correlation = (here * there).mean() * 12
    assert abs(correlation) < 5 / np.sqrt(here.size)


def test_seeds_give_independent_masks():
    one, other = (grid(seed) / 2.0**32 - 0.5 for seed in (11, 12))
    assert abs((one * other).mean() * 12) < 5 / np.sqrt(one.size)


def test_no_two_rows_share_their_numbers():
    """Nor a shifted or permuted copy of them: 2**18 draws of 32 bits rarely meet more than this."""
    drawn = grid(rows=256, columns=256).reshape(-1)
    pairs = drawn.size**2 / 2 / 2**32
    assert drawn.size - np.unique(drawn).size < pairs + 5 * np.sqrt(pairs)


def test_a_tile_has_the_bits_of_its_place():
    whole = np.asarray(bits(5, 1, 2, np.arange(64)[:, None], np.arange(96)))
    tile = np.asarray(bits(5, 1, 2, np.arange(16, 32)[:, None], np.arange(40, 72)))
    np.testing.assert_array_equal(tile, whole[16:32, 40:72])
