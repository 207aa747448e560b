"""Every (op, implementation, workload) of the package, read from it: nothing to list by hand."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ejkernel.cli.oracle import Truth, moved, on_the_host, with_dtype
from ejkernel.kernels import OPS
from ejkernel.ops import default_executor, kernel_registry
from ejkernel.ops.implementation import Op, Source
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.platform import device_of
from ejkernel.ops.workload import Workload


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
            arguments = self.workload.build(seed, jnp.float32)
            invocation = default_executor().invocation(function_of(self.op.name), **arguments)
            inputs = with_dtype(invocation.inputs, dtype)
        inputs = moved(inputs)
        return dataclasses.replace(
            invocation,
            inputs=inputs,
            device=device_of(jax.tree.leaves(inputs)),
            platform=self.source.platform.value,
        )


def as_shapes(make: Callable[[], Invocation]) -> Invocation:
    """The call that `make` gives, its arrays as shapes: nothing is drawn."""
    found = []
    jax.eval_shape(lambda: found.append(make().abstract()))
    return found[0]


def function_of(name: str) -> Any:
    return getattr(importlib.import_module(f"ejkernel.kernels.{name}.api"), name)


def workloads_of(name: str) -> Any:
    return importlib.import_module(f"ejkernel.kernels.{name}.workloads")


def chosen(hardware: str, workloads: list[Workload]) -> list[str]:
    """The workloads that stand for all the others."""
    core = [x.name for x in workloads if "core" in x.tags]
    return core[-1:] if hardware == "tpu" else core


def all_cases(
    thorough: bool = True,
    distinct: bool = False,
    interpreted: bool = True,
) -> list[Any]:
    """Every case as a pytest parameter; those of other hardware carry its mark.

    TPU kernels are interpreted where there is no TPU.

    Where not `thorough`, what is no core workload is marked slow; interpreters are slow, so that
    of TPU kernels only the last core workload, the fullest, is not. Where `distinct`, so is what
    the code of another op serves, whose workloads stand for it; of TPU kernels, where not
    `thorough`, always, and else but for that core workload. Where not `interpreted`, all those of
    TPU kernels are slow, which have tests of their own beside these.
    """
    cases = []
    for name in OPS:
        op = kernel_registry.op(name)
        for source in op.sources:
            hardware = source.backend.value
            calls = [x for x in workloads_of(name).WORKLOADS if "test" in x.tags]
            for workload in calls:
                marks = [getattr(pytest.mark, hardware)] if hardware in ("gpu", "tpu") else []
                borrowed = f".{name}." not in str(source.where)
                core = thorough and not (borrowed and hardware == "tpu")
                core = core or workload.name in chosen(hardware, calls)
                apart = distinct or (hardware == "tpu" and not thorough)
                core = core and (interpreted or hardware != "tpu")
                if not core or (apart and borrowed):
                    marks.append(pytest.mark.slow)
                case = Case(op, source, workload)
                cases.append(pytest.param(case, id=case.name, marks=marks))
    return cases


def refuses(case: Case, invocation: Invocation, direction: Any) -> str | None:
    """Why the implementation does not take this pass of a call; None: it does."""
    device = device_of(jax.tree.leaves(invocation.inputs))
    if reason := case.source.elsewhere(device):
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
    return [getattr(case.source.load(), direction) for direction in directions]
