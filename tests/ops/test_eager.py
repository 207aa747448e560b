"""A warm eager call is looked up; whatever could change its result is looked at again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.kernels.flash_attention import OP, xla
from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    kernel_registry,
    record_invocations,
)
from ejkernel.ops.config import FwdParams
from ejkernel.ops.eager import NOT_COMPILED, EagerPrograms

X = jax.random.normal(jax.random.key(0), (1, 24, 2, 8))


def programs():
    """The programs of a function that notes how often it is traced or run."""
    ran = []

    def function(x, *, factor=1, **options):
        ran.append(options)
        return x * factor

    return EagerPrograms(function), ran


def test_the_function_runs_once_for_each_kind_of_call():
    eager, ran = programs()
    for x in (X, X + 1):
        np.testing.assert_array_equal(eager((x,), {"factor": 3}), x * 3)
    assert len(ran) == 1
    eager((X[:, 1:],), {"factor": 3})
    eager((X,), {"factor": 3.0})  # not the same as 3, nor is True the same as 1
    eager((X,), {"factor": 1})
    eager((X,), {"factor": True})
    assert len(ran) == 5


def test_another_dropout_seed_needs_no_other_program(compilations):
    """Of an integer the last 32 bits count, with or without a program."""
    call = lambda x, seed: ejkernel.flash_attention(x, x, x, dropout_prob=0.5, dropout_seed=seed)
    x = X[:, :16]
    first = call(x, 3)
    compilations.clear()
    others = [call(x, seed) for seed in (-3, 2**31, 2**32 + 3)]
    assert not compilations
    assert not (others[0] == first).all()
    np.testing.assert_array_equal(others[2], first)
    np.testing.assert_allclose(others[1], call(x, jnp.int32(-(2**31))), rtol=1e-6)


def test_a_pair_a_single_number_and_a_tuple_of_one_are_told_apart():
    eager, ran = programs()
    for factor in (5, (5,), (5, 5), (5.0,), (True,)):
        eager((X,), {"other": factor})
    assert [x["other"] for x in ran] == [5, (5,), (5, 5), (5.0,), (True,)]


@pytest.mark.parametrize(
    "argument",
    [
        jnp.ones((1, 2, 3), int),
        jnp.ones((2, 3)),
        np.ones((1, 2, 3)),
        [1.0],
        float("nan"),
        (1.0, float("nan")),
        ejkernel.MaskInfo.from_segments(jnp.zeros((1, 4), int)),
    ],
    ids=["integers", "two axes", "NumPy", "a list", "NaN", "a tuple with NaN", "a mask"],
)
def test_arguments_whose_values_matter_are_not_looked_up(argument):
    eager, ran = programs()
    assert eager((X,), {"other": argument}) is NOT_COMPILED
    assert not ran


def test_traced_arrays_and_other_devices_are_not_looked_up():
    eager, _ = programs()
    found = []
    jax.make_jaxpr(lambda x: found.append(eager((x,), {})))(X)
    found.append(eager((jax.device_put(X, jax.devices()[1]),), {}))
    with jax.set_mesh(jax.make_mesh((2,), ("x",))):
        found.append(eager((X,), {}))
    assert found == [NOT_COMPILED] * 3


def test_results_stay_on_the_device_of_the_arrays():
    device = jax.devices()[2]
    x = jax.device_put(X, device)
    assert ejkernel.flash_attention(x, x, x).devices() == {device}


def test_an_implementation_that_is_registered_later_is_used(monkeypatch):
    monkeypatch.setattr(OP, "sources", list(OP.sources))
    before = ejkernel.flash_attention(X, X, X, causal=True)

    @kernel_registry.register("flash_attention", "xla", "any", priority=9, features={"causal"})
    def twice(inputs, spec, params):
        outputs, residuals = xla.run_forward(inputs, spec, FwdParams(q_blocksize=8, kv_blocksize=8))
        return outputs._replace(out=2 * outputs.out), residuals

    np.testing.assert_allclose(
        ejkernel.flash_attention(X, X, X, causal=True), 2 * before, rtol=1e-4
    )


def test_special_cases_of_an_operation_use_its_new_implementations():
    call = lambda: ejkernel.scaled_dot_product_attention(X, X, X, causal=True)
    before, sources = call(), list(OP.sources)

    @kernel_registry.register("flash_attention", "xla", "any", priority=9, features={"causal"})
    def twice(inputs, spec, params):
        outputs, residuals = xla.run_forward(inputs, spec, FwdParams(q_blocksize=8, kv_blocksize=8))
        return outputs._replace(out=2 * outputs.out), residuals

    try:
        np.testing.assert_allclose(call(), 2 * before, rtol=1e-4)
    finally:
        OP.sources[:] = sources
        kernel_registry.registrations += 1


def test_whoever_watches_sees_every_call():
    events = []
    chain = ConfigSelectorChain(ConfigCache(), on_event=lambda name, **_: events.append(name))
    for _ in range(3):
        Executor(chain)(ejkernel.flash_attention, X, X, X)
    assert len(events) == 3
    ejkernel.flash_attention(X, X, X)
    with record_invocations() as calls:
        ejkernel.flash_attention(X, X, X)
    assert len(calls) == 1


def test_a_platform_that_does_not_exist_is_refused_every_time():
    for _ in range(2):
        with pytest.raises(ValueError, match="platform must be one of"):
            ejkernel.flash_attention(X, X, X, platform="nonsense")
