"""Every implementation of every op computes what its reference defines, and the right gradients."""

import functools

import jax
import jax.numpy as jnp
import pytest
from conformance.cases import all_cases, refuses, served, workloads_of
from conformance.oracle import assert_as_good_as_rounding, assert_same
from evidence import proves

from ejkernel.cli.oracle import VALUE_FLOOR, with_gradients
from ejkernel.ops import executor
from ejkernel.ops.differentiable import DerivativeRule, Passes, apply
from ejkernel.ops.executor import Request


def through_the_executor(call, cfg=None):
    request = Request(platform=call.platform, cfg=cfg)
    return lambda inputs: executor.run(call.op, inputs, call.spec, request)


def check(case, dtype, cfg=None):
    call = case.call(dtype)
    served(case, call, "forward")
    run = through_the_executor(call, cfg)
    if refuses(case, call, "backward"):
        assert_as_good_as_rounding(case, dtype, "values", run(call.inputs))
        return
    proves(case.op.name, case.source, "backward")
    outputs, gradients = with_gradients(run)(call.inputs)
    assert_as_good_as_rounding(case, dtype, "values", outputs)
    assert_as_good_as_rounding(case, dtype, "gradients", gradients)
    for gradient, x in zip(
        gradients,
        (x for x in jax.tree.leaves(call.inputs) if jnp.issubdtype(x.dtype, jnp.floating)),
        strict=True,
    ):
        assert gradient.dtype == x.dtype


@pytest.mark.parametrize("case", all_cases("fullest", "core", "none", borrowed="fullest"))
def test_value_and_gradient_are_those_of_the_reference(case):
    check(case, jnp.float32)


def in_half_precision():
    """On a CPU only flash attention is quick; of float16, which rounds less, only there too."""
    for case in all_cases("fullest", "core", "fullest", borrowed="none"):
        for dtype in (jnp.bfloat16, jnp.float16):
            flash = case.id.startswith("flash_attention")
            quick = flash or (dtype == jnp.bfloat16 and "-xla-" not in case.id)
            marks = [*case.marks, *([] if quick else [pytest.mark.slow])]
            marks += [] if flash or dtype == jnp.bfloat16 else [pytest.mark.nightly]
            yield pytest.param(*case.values, dtype, id=f"{case.id}-{dtype.__name__}", marks=marks)


@pytest.mark.parametrize(("case", "dtype"), list(in_half_precision()))
def test_half_precision_is_as_good_as_rounding(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize("case", all_cases("none", "core", "none", borrowed="none"))
def test_the_value_under_differentiation_is_the_plain_value(case):
    call = case.call()
    served(case, call, "forward", "backward")
    run = through_the_executor(call)
    assert_same(with_gradients(run)(call.inputs)[0], run(call.inputs), VALUE_FLOOR, "value")


@pytest.mark.parametrize("case", all_cases("none", "all", "none", borrowed="none"))
def test_in_small_blocks_too(case):
    """Every workload in blocks so small that it has several of them."""
    for cfg in workloads_of(case.op.name).CONFIGS or (None,):
        check(case, jnp.float32, cfg)


@pytest.mark.parametrize("case", all_cases("none", "core", "fullest", borrowed="none"))
def test_every_candidate_configuration_agrees(case):
    """The tuner may choose any of them, so each must be right: forward, then backward."""
    call = case.call()
    forward, backward = served(case, call, "forward", "backward")
    for params in forward.choices(call.inputs, call.spec, call.device):
        run = jax.jit(lambda x, params=params: forward(x, call.spec, params, device=call.device))
        outputs, _ = run(call.inputs)
        assert_as_good_as_rounding(case, jnp.float32, "values", outputs, str(params))
    for other in backward.choices(call.inputs, call.spec, call.device):
        run = jax.jit(with_gradients(paired(call, forward, params, backward, other)))
        _, gradients = run(call.inputs)
        assert_as_good_as_rounding(case, jnp.float32, "gradients", gradients, str(other))


def paired(call, forward, params, backward, other):
    """A forward and a backward pass with these parameters, as a function of the inputs."""
    spec, device = call.spec, call.device
    passes = Passes(
        value=lambda x: forward(x, spec, params, device=device)[0],
        forward=lambda x: forward(x, spec, params, device=device),
        backward=lambda x, saved, d_outputs: backward(
            x, saved, d_outputs, spec, other, device=device
        ),
    )
    return functools.partial(apply, DerivativeRule.of(call.op, passes))
