"""Debug mode: one printed line for each use of a watched class, and no cost while it is off.

Switching it on puts a printing version of every public method and property into the class, and
switching it off takes them out again.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ejkernel import settings
from ejkernel.types.rule_tree import summary

_Class = TypeVar("_Class", bound=type)

_watched: list[type] = []
_inside = threading.local()
_enabled = False


def set_debug_mode(enabled: bool) -> None:
    """Switch the tracing of `MaskInfo` on or off, and say so.

    Args:
        enabled: whether each method call and property access prints a line.

    >>> from ejkernel.types import MaskInfo
    >>> mask = MaskInfo.from_random(batch_size=1, q_len=3)
    >>> set_debug_mode(True)
    [MaskInfo Debug] on
    >>> mask = mask.apply_causal(offset=1)
    [MaskInfo Debug] apply_causal(offset=1) -> MaskInfo(1, 3, 3)
    >>> set_debug_mode(False)
    [MaskInfo Debug] off
    """
    _switch(bool(enabled))
    print(f"[MaskInfo Debug] {'on' if enabled else 'off'}")


def get_debug_mode() -> bool:
    """Whether debug mode is on.

    >>> get_debug_mode()
    False
    """
    return _enabled


def watch(cls: _Class) -> _Class:
    """Class decorator: debug mode prints the uses of this class."""
    _watched.append(cls)
    if settings.mask_debug():
        _switch(True)
    return cls


def _switch(enabled: bool) -> None:
    global _enabled
    for cls in _watched:
        _uninstall(cls)
        if enabled:
            _install(cls)
    _enabled = enabled


def _install(cls: type) -> None:
    originals: dict[str, Any] = {}
    for name in dir(cls):
        attribute = inspect.getattr_static(cls, name)
        if name.startswith("_") or (printing := _printing(name, attribute)) is None:
            continue
        originals[name] = vars(cls).get(name)
        setattr(cls, name, printing)
    cls._debug_originals = originals  # type: ignore


def _uninstall(cls: type) -> None:
    for name, original in vars(cls).get("_debug_originals", {}).items():
        if original is None:  # inherited: the printing version stood in front of it
            delattr(cls, name)
        else:
            setattr(cls, name, original)
    cls._debug_originals = {}  # type: ignore


def _printing(
    name: str, attribute: object
) -> property | classmethod | staticmethod | Callable | None:
    """`attribute` with a printed line, or None if it is neither a method nor a property."""
    if isinstance(attribute, property) and attribute.fget is not None:
        return property(_printing_function(name, attribute.fget, 1, is_property=True))
    if isinstance(attribute, classmethod):
        return classmethod(_printing_function(name, attribute.__func__, 1))
    if isinstance(attribute, staticmethod):
        return staticmethod(_printing_function(name, attribute.__func__, 0))
    return _printing_function(name, attribute, 1) if inspect.isfunction(attribute) else None


def _printing_function(
    name: str, function: Callable, skipped: int, is_property: bool = False
) -> Callable:
    @functools.wraps(function)
    def printing(*args: object, **kwargs: object) -> object:
        if getattr(_inside, "call", False):  # only what the user called, not what that calls
            return function(*args, **kwargs)
        _inside.call = True
        try:
            result = function(*args, **kwargs)
            shown = [_shown(value) for value in args[skipped:]]
            shown += [f"{key}={_shown(value)}" for key, value in kwargs.items()]
            call = "" if is_property else f"({', '.join(shown)})"
            print(f"[MaskInfo Debug] {name}{call} -> {_shown(result)}")
        finally:
            _inside.call = False
        return result

    return printing


def _shown(value: object) -> str:
    if type(value) in _watched:
        shape = getattr(value, "shape", ())
        return f"{type(value).__name__}({', '.join(map(str, shape))})"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_shown, value))})"
    text = summary(value)
    return text if len(text) <= 60 and "\n" not in text else f"{text.splitlines()[0][:57]}..."
