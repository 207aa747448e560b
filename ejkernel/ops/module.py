"""The two public forms of an operation: a function, and a class that an `Executor` takes."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar, cast

from ejkernel.ops.config import Config

Function = TypeVar("Function", bound=Callable[..., Any])

# What other libraries call an argument, where the nearest spelling would not find it.
_NAMES_ELSEWHERE = {
    "is_causal": "causal",
    "mask": "attention_mask",
    "scale": "softmax_scale",
    "segment_ids": "mask_info",
    "sm_scale": "softmax_scale",
    "softcap": "logits_soft_cap",
    "window_size": "sliding_window",
}


def operation(function: Function) -> Function:
    """Decorator of a public function: for an unknown keyword the error names the nearest argument.

    Signature, docstring and source remain those of the function.
    """
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in names:
                raise TypeError(_unknown_argument(function.__name__, name, names))
        return function(*args, **kwargs)

    return cast(Function, checked)


def _unknown_argument(function: str, name: str, names: list[str]) -> str:
    nearest = [x for x in (_NAMES_ELSEWHERE.get(name),) if x in names]
    nearest += difflib.get_close_matches(name, names, n=1)
    hint = f"the nearest is {nearest[0]!r}" if nearest else f"it has {', '.join(names)}"
    return f"{function}: unknown argument {name!r}; {hint}."


class BoundFunction(Generic[Function]):
    """A function as the `__call__` of a class without state: `self` is not passed on."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def __get__(self, instance: object, owner: type) -> Function:
        return self.function if instance is not None else self._unbound

    @functools.cached_property
    def _unbound(self) -> Function:
        """What the class itself has: the function with a parameter `self` before its own."""

        @functools.wraps(self.function)
        def unbound(self_: object, *args: Any, **kwargs: Any) -> Any:
            return self.function(*args, **kwargs)

        signature = inspect.signature(self.function)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = signature.replace(parameters=[own, *signature.parameters.values()])
        unbound.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        return cast(Function, unbound)


class Module:
    """An operation as an object: `executor(FlashAttention(), query=..., ...)`.

    Called directly it is the function of the same name. A subclass names that function,
    `__call__: Final = BoundFunction(function)`, and the class of its configurations.
    """

    config: ClassVar[type[Config]]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
