"""The operations as the commands see them: found from the package, nothing listed by hand."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, Literal

import typer

from ejkernel.kernels import OPS
from ejkernel.ops import default_executor
from ejkernel.ops.implementation import Op, Source
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.workload import Workload

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Subject:
    """One operation: its public function, its table of implementations, its named calls."""

    name: str
    function: Callable[..., Any]
    op: Op
    workloads: tuple[Workload, ...]

    def invocation(self, arguments: dict[str, Any]) -> Invocation:
        """The call that the function would make with these arguments."""
        return default_executor().invocation(self.function, **arguments)


def label(source: Source) -> str:
    """An implementation in words."""
    return f"{source.platform.value} ({source.backend.value})"


def every() -> list[Subject]:
    """All operations of the package."""
    return [one(name) for name in OPS]


def one(name: str) -> Subject:
    """The operation of this name."""
    if name not in OPS:
        raise typer.BadParameter(f"no operation {name!r}; there are {', '.join(OPS)}.")
    folder = f"ejkernel.kernels.{name}"
    return Subject(
        name=name,
        function=getattr(importlib.import_module(f"{folder}.api"), name),
        op=importlib.import_module(folder).OP,
        workloads=tuple(importlib.import_module(f"{folder}.workloads").WORKLOADS),
    )


def chosen(names: list[str] | None) -> list[Subject]:
    """The operations asked for on the command line; all when none is named."""
    return [one(name) for name in names] if names else every()
