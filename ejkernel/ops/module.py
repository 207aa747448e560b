"""The two public forms of an operation: a function, and a class that an `Executor` takes."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from ejkernel.ops.implementation import Op

P = ParamSpec("P")
R = TypeVar("R")


def public(function: Callable[Concatenate[Op, P], R], op: Op, module: str, doc: str | None = None):
    """The public function of `op`: `function` with the op filled in, under the op's name.

    Ops that take the same call share one `function`, and so one signature.
    """
    signature = inspect.signature(function)
    _, *parameters = signature.parameters.values()

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(op, *args, **kwargs)

    call.__name__ = call.__qualname__ = op.name
    call.__module__ = module
    call.__doc__ = doc or function.__doc__
    call.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return call


class Module:
    """An operation as an object: `executor(FlashAttention(), query=..., ...)`.

    Called directly it is the function of the same name.
    """

    function: ClassVar[Callable[..., Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self).function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
