"""The mapped axis joins the batch where it can; the calls run in turn where it cannot."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from ejkernel.ops.implementation import Op
from ejkernel.ops.primitive import Stage, bind


class Pair(NamedTuple):
    rows: Float[Array, "b t"]
    weight: Float[Array, "h"]
    shift: Float[Array, "#b t"]


class Result(NamedTuple):
    out: Float[Array, "b t"]


class Summed(NamedTuple):
    total: Float[Array, "t"]


def weighted(pair):
    return Result(pair.rows * pair.weight.sum() + pair.shift)


def summed(pair):
    return Summed((pair.rows + pair.shift).sum(0))


def batchable(run, pair):
    """`run(pair)` as JAX sees it inside an op."""
    stage = Stage(
        op=Op(name="pairs", sources=[]),
        run=run,
        reselect=lambda device: run,
        partitionable=lambda: run,
        device=None,
        jvp=lambda trees, tangents: (None, None),
    )
    return bind(stage, pair)


def make(batch=3, shift=1, seed=0):
    draw = np.random.default_rng(seed).standard_normal
    return Pair(jnp.asarray(draw((batch, 4))), jnp.asarray(draw(2)), jnp.asarray(draw((shift, 4))))


def calls_made(function, *args):
    """How often the program runs the function one by one: a loop shows as a scan."""
    return str(jax.make_jaxpr(function)(*args)).count("scan[")


@pytest.mark.parametrize("shift", [1, 3])
@pytest.mark.parametrize("mapped", [(0, None, None), (0, None, 0), (None, None, 0), (0, 0, 0)])
@pytest.mark.parametrize("run", [weighted, summed])
def test_every_way_of_mapping_equals_a_loop(run, mapped, shift):
    pairs = [make(shift=shift, seed=seed) for seed in (0, 1, 2)]
    stacked = Pair(
        *(
            jnp.stack(leaves) if axis == 0 else leaves[0]
            for leaves, axis in zip(zip(*pairs, strict=True), mapped, strict=True)
        )
    )
    call = jax.vmap(lambda pair: batchable(run, pair), in_axes=(Pair(*mapped),))
    got = call(stacked)[0]
    for i, pair in enumerate(pairs):
        chosen = Pair(
            *(
                mine if axis == 0 else first
                for mine, first, axis in zip(pair, pairs[0], mapped, strict=True)
            )
        )
        np.testing.assert_allclose(got[i], run(chosen)[0], rtol=1e-6)


def test_rows_are_folded_not_looped():
    call = jax.vmap(lambda rows: batchable(weighted, make()._replace(rows=rows)))
    assert calls_made(call, jnp.ones((5, 3, 4))) == 0


def test_a_sum_over_the_batch_is_not_folded():
    call = jax.vmap(lambda rows: batchable(summed, make()._replace(rows=rows)))
    assert calls_made(call, jnp.ones((5, 3, 4))) == 1


def test_nested_maps_fold_twice():
    call = jax.vmap(jax.vmap(lambda rows: batchable(weighted, make()._replace(rows=rows))))
    rows = jnp.arange(2 * 5 * 3 * 4.0).reshape(2, 5, 3, 4)
    assert calls_made(call, rows) == 0
    np.testing.assert_allclose(
        call(rows).out[1, 4], weighted(make()._replace(rows=rows[1, 4])).out, rtol=1e-6
    )


@pytest.mark.parametrize("mapped", [(0, None, None), (None, 0, None), (0, 0, 0)])
@pytest.mark.parametrize("run", [weighted, summed])
def test_a_map_over_nothing_has_results_of_no_calls(run, mapped):
    pair = Pair(*(x[None][:0] if axis == 0 else x for x, axis in zip(make(), mapped, strict=True)))
    call = jax.vmap(lambda pair: batchable(run, pair), in_axes=(Pair(*mapped),))
    (got,), (one,) = call(pair), run(make())
    assert (got.shape, got.dtype) == ((0, *one.shape), one.dtype)


class Optional(NamedTuple):
    """Arrays that may have a batch axis or none."""

    rows: Float[Array, "t"] | Float[Array, "b t"]
    weight: Float[Array, "h"]
    shift: Float[Array, "t"] | Float[Array, "b t"]


class OptionalResult(NamedTuple):
    out: Float[Array, "t"] | Float[Array, "b t"]


def optional(pair):
    return OptionalResult(pair.rows * pair.weight.sum() + pair.shift)


def optional_sum(pair):
    return Summed(pair.rows * jnp.ones(()) + pair.shift if pair.rows.ndim == 1 else pair.rows[0])


@pytest.mark.parametrize("mapped", [(0, None, 0), (0, None, None), (None, None, 0), (0, 0, None)])
@pytest.mark.parametrize("run", [optional, optional_sum])
def test_a_call_without_a_batch_axis_gets_one(run, mapped):
    """Unless an array that is mapped has no such form, or a result is not kept apart."""
    draw = np.random.default_rng(0).standard_normal
    shapes = [
        (5, *shape) if axis == 0 else shape
        for shape, axis in zip([(4,), (2,), (4,)], mapped, strict=True)
    ]
    pair = Optional(*(jnp.asarray(draw(shape), jnp.float32) for shape in shapes))
    call = jax.vmap(lambda pair: batchable(run, pair), in_axes=(Optional(*mapped),))
    lifted = run is optional and mapped[1] is None
    assert calls_made(call, pair) == (not lifted)
    got = call(pair)[0]
    for i in range(5):
        one = Optional(*(x[i] if axis == 0 else x for x, axis in zip(pair, mapped, strict=True)))
        np.testing.assert_allclose(got[i], run(one)[0], rtol=1e-6)


def test_a_batch_axis_that_a_map_gave_folds_with_the_next():
    pair = Optional(jnp.arange(24.0).reshape(2, 3, 4), jnp.ones(2), jnp.ones(4))
    call = jax.vmap(jax.vmap(lambda rows: batchable(optional, pair._replace(rows=rows))))
    assert calls_made(call, pair.rows) == 0
    np.testing.assert_allclose(call(pair.rows).out, pair.rows * 2 + 1)
