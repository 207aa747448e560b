"""Lists of tiles of a static mask: computed by NumPy, equal to those that XLA computes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.flash_attention.pallas_tpu import schedule as tpu_schedule
from ejkernel.kernels.flash_attention.static_arrays import static_arrays
from ejkernel.types.block_map import block_map
from ejkernel.types.kernel_mask import kernel_mask
from ejkernel.types.rules import Band, Chunks, Everything, KeyLength, QueryLength

RULES = {
    "everything": Everything(),
    "causal": Band(None, 0),
    "window": Band(-100, 20),
    "chunks": Chunks(96),
    "lengths": Band(None, 0) & KeyLength(300) & QueryLength(280),
    "union": Band(None, -50) | Band(10, 60),
    "nothing": KeyLength(0),
}
SIZES = ((512, 512, 128, 128), (300, 700, 64, 128), (65, 1, 64, 64))


def state(rule, *sizes):
    return block_map(rule, *sizes)


def normal_form(rule, q_len, kv_len, block_q, block_k):
    return kernel_mask(rule, q_len, kv_len, -(-q_len // block_q) * block_q, kv_len)


def equal(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert isinstance(x, np.ndarray)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("function", [state, normal_form])
def test_numpy_gives_what_xla_gives(name, function):
    for sizes in SIZES:
        equal(static_arrays(function, RULES[name], *sizes), function(RULES[name], *sizes))


def test_tile_lists_of_a_static_mask_are_those_of_a_traced_one():
    # Of a mask whose blocks differ, and of one that has rows without any.
    for rule, by_keys in itertools.product((RULES["lengths"], RULES["nothing"]), (False, True)):
        for sizes in SIZES[:2]:
            static = tpu_schedule.tile_schedule(rule, *sizes, by_keys=by_keys)
            # The same mask with a length that is an array: none of it is known at trace time.
            traced = rule & KeyLength(jnp.array([sizes[1]]))
            other = tpu_schedule.tile_schedule(traced, *sizes, by_keys=by_keys)
            assert int(static.count) == int(other.count)
            count = int(other.count)
            np.testing.assert_array_equal(static.result, other.result[:count])
            np.testing.assert_array_equal(static.packed >> 2, other.packed[:count] >> 2)


def test_nothing_is_compiled_while_a_program_is_traced(compilations):
    def program(x):
        bounds = static_arrays(state, Band(-77, 3), 640, 640, 64, 64)
        return x + bounds.rows.count.sum()

    jax.make_jaxpr(program)(jnp.ones(3))
    compilations.clear()
    jax.make_jaxpr(program)(jnp.ones(3))
    assert not compilations


def rounded(n):
    return jnp.round(jnp.linspace(0.0, n, 5)).astype(jnp.int32), n


def test_what_numpy_cannot_evaluate_is_one_program(compilations):
    jax.block_until_ready(jnp.ones(3))
    compilations.clear()
    numbers, n = jax.eval_shape(lambda: static_arrays(rounded, 8)) and static_arrays(rounded, 8)
    assert numbers.tolist() == [0, 2, 4, 6, 8]
    assert n == 8
    assert len(compilations) == 1


def test_results_are_shared_and_cannot_be_changed():
    first = static_arrays(state, Band(None, 0), 256, 256, 64, 64)
    again = static_arrays(state, Band(None, 0), 256, 256, 64, 64)
    assert first.state is again.state
    with pytest.raises(ValueError, match="read-only"):
        first.state[...] = 0
