"""An implementation may claim only what some workload proves, and refuses the rest in words."""

import functools

import jax
import pytest
from conformance import cases
from conformance.cases import Case, all_cases, as_shapes, function_of, workloads_of

from ejkernel.errors import UnsupportedError
from ejkernel.kernels import OPS
from ejkernel.ops import default_executor, kernel_registry
from ejkernel.ops.implementation import features_used
from ejkernel.ops.platform import Platform, device_of


@functools.cache
def calls_of(name):
    """The workloads of an op as calls of shapes."""
    call = lambda x: default_executor().invocation(function_of(name), **x.build())
    tested = [x for x in workloads_of(name).WORKLOADS if "test" in x.tags]
    return [as_shapes(functools.partial(call, x)) for x in tested]


@functools.cache
def exercised(name):
    """The features that the workloads of an op use."""
    return frozenset().union(*(features_used(c.inputs, c.spec) for c in calls_of(name)))


@pytest.mark.parametrize("name", OPS)
def test_every_claimed_feature_is_proven_by_a_workload(name):
    """By one of its own, or of another op that the same code serves."""
    for source in kernel_registry.op(name).sources:
        implementation = source.load()
        sharing = [other for other in OPS if source in kernel_registry.op(other).sources]
        proven = frozenset().union(*map(exercised, sharing))
        for one in (implementation.forward, implementation.backward):
            if one is not None and one.features is not None:
                assert one.features <= proven, source


@pytest.mark.parametrize("name", OPS)
def test_every_op_runs_anywhere(name):
    """XLA serves every workload, forward and backward."""
    for call in calls_of(name):
        for direction in ("forward", "backward"):
            able, reasons = call.op.serving(
                direction, call.inputs, call.spec, call.device, Platform.XLA
            )
            assert able, reasons


@pytest.mark.parametrize("case", all_cases())
def test_a_refusal_names_the_platform_and_who_can(case: Case):
    """Whoever cannot serve a workload says so before anything runs, and is never replaced."""
    call = case.shapes()
    device = device_of(jax.tree.leaves(call.inputs))
    able, _ = call.op.serving("forward", call.inputs, call.spec, device, call.platform)
    if able:
        return
    arguments = case.workload.build()
    with pytest.raises(UnsupportedError, match=f"platform='{call.platform}' cannot serve"):
        function_of(case.op.name)(**arguments, platform=call.platform)


def test_the_shapes_of_a_call_are_found_without_moving_data(monkeypatch):
    """On an accelerator moving data converts it to NumPy, which a trace forbids."""
    monkeypatch.setattr(cases, "moved", lambda tree: pytest.fail("data was moved"))
    case = all_cases()[0].values[0]
    assert case.shapes().inputs.query.shape == case.workload.build()["query"].shape
