"""Every (op, implementation, workload) of the package, read from it: nothing to list by hand."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import pytest
from evidence import proves

from ejkernel.cli.oracle import Truth, moved, on_the_host, with_dtype
from ejkernel.kernels import OPS
from ejkernel.ops import default_executor, kernel_registry
from ejkernel.ops.implementation import Op, Source
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.platform import device_of
from ejkernel.ops.workload import Workload

# Of the workloads of an op: none, the last core one, which uses most features, the core, or all.
Share = Literal["none", "fullest", "core", "all"]
SHARES = get_args(Share)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One workload of one op on one implementation; itself the key of what is known of it."""

    op: Op
    source: Source
    workload: Workload

    @property
    def name(self) -> str:
        where = self.source.platform.value
        if self.source.backend.value != "any":
            where += f"_{self.source.backend.value}"
        return f"{self.op.name}-{where}-{self.workload.name}"

    @functools.cached_property
    def truth(self) -> Truth:
        return Truth(lambda seed: self.call(seed=seed))

    def call(self, dtype: Any = jnp.float32, seed: int = 0) -> Invocation:
        """The workload as the public function canonicalises it, floats in `dtype`."""
        with on_the_host():
            drawn = self._drawn(seed)
            inputs = with_dtype(drawn.inputs, dtype)
        inputs = moved(inputs)
        device = device_of(jax.tree.leaves(inputs))
        return dataclasses.replace(drawn, inputs=inputs, device=device)

    def shapes(self) -> Invocation:
        """The same call with shapes in place of arrays: nothing is drawn or moved."""
        return as_shapes(self._drawn)

    def _drawn(self, seed: int = 0) -> Invocation:
        arguments = self.workload.build(seed, jnp.float32)
        invocation = default_executor().invocation(function_of(self.op.name), **arguments)
        return dataclasses.replace(invocation, platform=self.source.platform.value)


def as_shapes(make: Callable[[], Invocation]) -> Invocation:
    """The call that `make` gives, its arrays as shapes: nothing is drawn."""
    found = []
    jax.eval_shape(lambda: found.append(make().abstract()))
    return found[0]


def function_of(name: str) -> Any:
    return getattr(importlib.import_module(f"ejkernel.kernels.{name}.api"), name)


def workloads_of(name: str) -> Any:
    return importlib.import_module(f"ejkernel.kernels.{name}.workloads")


def all_cases(
    xla: Share = "all",
    gpu: Share = "all",
    tpu: Share = "all",
    borrowed: Share = "all",
    daily: Share = "all",
) -> list[Any]:
    """Every case as a pytest parameter; those of other hardware carry its mark.

    `xla`, `gpu` and `tpu` say which workloads of an op the quick selection runs on these platforms,
    `borrowed` which of an op whose implementation is another op's; the others are marked slow, and
    those that are not among the `daily` ones, or borrowed where `borrowed` is none, nightly. TPU
    kernels are interpreted where there is no TPU. The tests of a case run in one process, so that
    they compile what they share once.
    """
    parameters = []
    for op, source, cases in _implementations():
        hardware = source.backend.value
        share = {"gpu": gpu, "tpu": tpu}.get(hardware, xla)
        is_borrowed = f".{op.name}." not in str(source.where)
        if is_borrowed:
            share = min(share, borrowed, key=SHARES.index)
        core = [case for case in cases if "core" in case.workload.tags]
        shares = {"all": cases, "core": core, "fullest": core[-1:], "none": []}
        for case in cases:
            marks = [pytest.mark.xdist_group(case.name)]
            marks += [getattr(pytest.mark, hardware)] if hardware in ("gpu", "tpu") else []
            marks += [] if case in shares[share] else [pytest.mark.slow]
            is_daily = case in shares[daily] and not (is_borrowed and borrowed == "none")
            marks += [] if is_daily else [pytest.mark.nightly]
            parameters.append(pytest.param(case, id=case.name, marks=marks))
    return parameters


@functools.cache
def _implementations() -> list[tuple[Op, Source, list[Case]]]:
    """The cases of every implementation: the same objects for all tests, which share a truth."""
    return [
        (
            op,
            source,
            [Case(op, source, x) for x in workloads_of(name).WORKLOADS if "test" in x.tags],
        )
        for name in OPS
        for op in [kernel_registry.op(name)]
        for source in op.sources
    ]


def refuses(case: Case, invocation: Invocation, direction: Any) -> str | None:
    """Why the implementation does not take this pass of a call; None: it does."""
    device = device_of(jax.tree.leaves(invocation.inputs))
    if reason := case.source.unavailable_on(device):
        return reason
    chosen = getattr(case.source.load(), direction)
    if chosen is None:
        return f"no {direction}"
    return chosen.refusal(invocation.inputs, invocation.spec, device)


def served(case: Case, invocation: Invocation, *directions: Any) -> Any:
    """The passes that take the call; skips, with its own words, a call that one refuses."""
    for direction in directions:
        if reason := refuses(case, invocation, direction):
            pytest.skip(f"{case.source.platform.value}: {reason}")
    proves(case.op.name, case.source, *directions)
    return [getattr(case.source.load(), direction) for direction in directions]
