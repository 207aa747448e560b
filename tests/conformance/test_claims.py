"""An implementation may claim only what some workload proves, and refuses the rest in words."""

import dataclasses
import functools
import re

import jax
import pytest
from conformance import cases
from conformance.cases import Case, all_cases, as_shapes, function_of, workloads_of

from ejkernel.errors import UnsupportedError
from ejkernel.kernels import OPS
from ejkernel.ops import default_executor, kernel_registry
from ejkernel.ops.implementation import ALL_FEATURES, Implementation, Pass, features_used
from ejkernel.ops.platform import Device, Platform, device_of

# Proven by tests over a mesh, which a workload on one device cannot use, or under a trace, as the
# arrays of a workload are known.
ELSEWHERE_PROVEN = {
    "ring_attention": {"axis_name", "hops", "method", "placement"},
    "page_attention": {"float32_out"},
    "ragged_page_attention_v2": {"float32_out"},
    "ragged_page_attention_v3": {"float32_out"},
    "native_sparse_attention": {"traced_window"},
}


@functools.cache
def calls_of(name, dtype=jax.numpy.float32):
    """The workloads of an op as calls of shapes."""
    call = lambda x: default_executor().invocation(function_of(name), **x.build(dtype=dtype))
    tested = [x for x in workloads_of(name).WORKLOADS if "test" in x.tags]
    return [as_shapes(functools.partial(call, x)) for x in tested]


@functools.cache
def exercised(name):
    """The features that the workloads of an op use; an output dtype is one if it is not theirs."""
    calls = [*calls_of(name), *calls_of(name, jax.numpy.bfloat16)]
    return frozenset().union(*(features_used(c.inputs, c.spec) for c in calls))


def passes_of(implementation):
    return [x for x in (implementation.forward, implementation.backward) if x is not None]


@pytest.mark.parametrize("name", OPS)
def test_every_claimed_feature_is_proven_by_a_workload(name):
    """By one of its own, or of another op that the same code supports."""
    for source in kernel_registry.op(name).sources:
        sharing = [other for other in OPS if source in kernel_registry.op(other).sources]
        proven = frozenset().union(*map(exercised, sharing), ELSEWHERE_PROVEN.get(name, ()))
        for one in passes_of(source.load()):
            if one.features != ALL_FEATURES:
                assert one.features <= proven, source


@pytest.mark.parametrize("name", OPS)
def test_only_xla_claims_everything(name):
    for source in kernel_registry.op(name).sources:
        for one in passes_of(source.load()):
            assert (one.features == ALL_FEATURES) == (source.platform is Platform.XLA), source


@pytest.mark.parametrize("name", OPS)
def test_an_argument_that_no_accelerator_knows_is_refused_by_all(name):
    """A new argument of an op costs nothing on platforms that do not list it: they refuse it."""
    call = calls_of(name)[0]
    kind = type(call.spec)
    field = ("unheard_of", int, dataclasses.field(default=0))
    extended = dataclasses.make_dataclass("Spec", [field], bases=(kind,), frozen=True, kw_only=True)
    given = {x.name: getattr(call.spec, x.name) for x in dataclasses.fields(kind)}
    refused = 0
    for source in kernel_registry.op(name).sources:
        for one in passes_of(source.load()):
            reason = one.refusal(call.inputs, extended(**given, unheard_of=1), call.device)
            if source.platform is not Platform.XLA:
                assert re.fullmatch(r"does not support (\w+, )*unheard_of", str(reason))
                refused += 1
            # Left at its default it changes nothing.
            unused = one.refusal(call.inputs, extended(**given), call.device)
            assert unused == one.refusal(call.inputs, call.spec, call.device)
    assert refused


def test_a_registered_function_supports_what_it_lists(monkeypatch):
    op = kernel_registry.op("mean_pooling")
    monkeypatch.setattr(op, "sources", list(op.sources))
    monkeypatch.setattr(op, "revision", op.revision)
    register = functools.partial(kernel_registry.register, op.name, "xla", "any", priority=9)
    x, mask = jax.numpy.ones((2, 4, 3)), jax.numpy.ones((2, 4), bool)
    calls = []

    def pool(inputs, spec, params):
        calls.append(inputs)
        device, by_xla = device_of([x]), op.sources[-1].load().forward
        assert params is None, "a function has no parameters of its own"
        return by_xla(inputs, spec, by_xla.heuristic(inputs, spec, device), device=device)

    register()(pool)
    function_of(op.name)(x)
    assert len(calls) == 1
    function_of(op.name)(x, attention_mask=mask)
    assert len(calls) == 1, "a feature that it does not list goes to the next implementation"
    with pytest.raises(ValueError, match=r"^kernel_registry: features= is for a function"):
        register(features=["attention_mask"])(op.sources[-1].load())
    register(features=["attention_mask"])(pool)
    function_of(op.name)(x, attention_mask=mask)
    assert len(calls) == 2


def test_a_pass_is_given_the_device_if_it_has_a_parameter_for_it():
    device = Device("gpu", "NVIDIA H20", (9, 0), "", 78)
    with_device = Pass(run=lambda x, device: (x, device), features=frozenset())
    without = Pass(run=lambda x: x, features=frozenset())
    assert with_device(1, device=device) == (1, device)
    assert without(1, device=device) == 1
    assert Implementation(forward=without).run_with_residuals(2, device=device) == 2


@pytest.mark.parametrize("name", OPS)
def test_every_op_runs_anywhere(name):
    """XLA supports every workload, forward and backward."""
    for call in calls_of(name):
        for direction in ("forward", "backward"):
            supported, reasons = call.op.supporting(
                direction, call.inputs, call.spec, call.device, Platform.XLA
            )
            assert supported, reasons


@pytest.mark.parametrize("case", all_cases())
def test_a_refusal_names_the_platform_and_who_can(case: Case):
    """An implementation that does not support a workload says so before anything runs."""
    call = case.shapes()
    device = device_of(jax.tree.leaves(call.inputs))
    supported, _ = call.op.supporting("forward", call.inputs, call.spec, device, call.platform)
    if supported:
        return
    arguments = case.workload.build()
    with pytest.raises(UnsupportedError, match=f"platform='{call.platform}' does not support"):
        function_of(case.op.name)(**arguments, platform=call.platform)


def test_the_shapes_of_a_call_are_found_without_moving_data(monkeypatch):
    """On an accelerator moving data converts it to NumPy, which a trace forbids."""
    monkeypatch.setattr(cases, "moved", lambda tree: pytest.fail("data was moved"))
    case = all_cases()[0].values[0]
    assert case.shapes().inputs.query.shape == case.workload.build()["query"].shape
