"""Every implementation of every op computes what its reference defines, and the right gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.cases import all_cases, served, workloads_of
from conformance.oracle import (
    GRADIENT_FLOOR,
    VALUE_FLOOR,
    assert_as_good_as,
    assert_same,
    expected,
    value_and_gradients,
)

from ejkernel.ops import executor
from ejkernel.ops.executor import Request


def through_the_executor(call, cfg=None):
    request = Request(platform=call.platform, cfg=cfg)
    return lambda inputs: executor.run(call.op, inputs, call.spec, request)


def check(case, dtype, cfg=None):
    call = case.call(dtype)
    served(case, call)
    outputs, gradients = value_and_gradients(through_the_executor(call, cfg), call.inputs)
    truth = expected(case, dtype)
    assert_as_good_as(outputs, truth.values, truth.rounded_values, VALUE_FLOOR, "output")
    assert_as_good_as(
        gradients, truth.gradients, truth.rounded_gradients, GRADIENT_FLOOR, "gradient"
    )
    for gradient, x in zip(
        gradients,
        (x for x in jax.tree.leaves(call.inputs) if jnp.issubdtype(x.dtype, jnp.floating)),
        strict=True,
    ):
        assert gradient.dtype == x.dtype
    return call, outputs


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("case", all_cases())
def test_value_and_gradient_are_those_of_the_reference(case, dtype):
    call, under_vjp = check(case, dtype)
    plain = through_the_executor(call)(call.inputs)
    assert_same(under_vjp, plain, VALUE_FLOOR, "value under vjp")


@pytest.mark.parametrize("case", all_cases())
def test_small_blocks_change_nothing(case):
    for cfg in workloads_of(case.op.name).CONFIGS:
        check(case, jnp.float32, cfg)


@pytest.mark.parametrize("case", all_cases())
def test_every_candidate_configuration_agrees(case):
    """The tuner may choose any of them, so each must be right: forward, then backward."""
    call = case.call()
    forward = served(case, call)
    truth = expected(case, jnp.float32)
    for params in forward.choices(call.inputs, call.spec, call.device):
        run = jax.jit(lambda x, params=params: forward.run(x, call.spec, params))
        outputs, residuals = run(call.inputs)
        assert_as_good_as(outputs, truth.values, truth.rounded_values, VALUE_FLOOR, str(params))
    backward = served(case, call, "backward")
    _, once = value_and_gradients(through_the_executor(call), call.inputs)
    ones = jax.tree.map(jnp.ones_like, outputs)
    results = []
    for params in backward.choices(call.inputs, call.spec, call.device):
        run = jax.jit(lambda x, r, d, params=params: backward.run(x, r, d, call.spec, params))
        results.append(run(call.inputs, residuals, ones))
    for other in results[1:]:
        assert_same(other, results[0], GRADIENT_FLOOR, "gradient of a candidate")
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in once)
