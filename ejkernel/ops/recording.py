"""Remember the calls a program makes, and tune them later."""

import contextlib
import contextvars
import dataclasses
import itertools
import os
from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ejkernel import settings
from ejkernel.ops.cache import ConfigCache, overlay_cache
from ejkernel.ops.invocation import Invocation, Key
from ejkernel.ops.table_file import StoredConfig, read_table, write_table

_RECORDED: dict[Key, Invocation] = {}
# The surrounding blocks, each with a number of its own.
_SCOPES: contextvars.ContextVar[tuple[tuple[int, dict[Key, Invocation]], ...]] = (
    contextvars.ContextVar("recordings", default=())
)
_NUMBERS = itertools.count()
# The overlays of surrounding results, the innermost last.
_ENTERED: contextvars.ContextVar[tuple[AbstractContextManager[None], ...]] = contextvars.ContextVar(
    "entered", default=()
)


def active() -> bool:
    """Whether anybody records: a surrounding `record_invocations()` or `EJKERNEL_RECORD=1`."""
    return bool(_SCOPES.get()) or settings.record()


def state() -> tuple[Hashable, ...]:
    """Who records: a program that was traced for others has not told these of its calls."""
    return (settings.record(), *[number for number, _ in _SCOPES.get()])


def add(inv: Invocation) -> None:
    """Keep one call, as shapes; the arrays are not kept alive."""
    abstract = inv.abstract()
    for _, calls in _SCOPES.get():
        calls.setdefault(inv.key, abstract)
    if settings.record():
        _RECORDED.setdefault(inv.key, abstract)


def get_invocations() -> list[Invocation]:
    """The calls recorded under `EJKERNEL_RECORD=1` so far."""
    return list(_RECORDED.values())


@contextlib.contextmanager
def record_invocations() -> Iterator[dict[Key, Invocation]]:
    """Record the calls made in a block, by key.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import flash_attention
    >>> from ejkernel.ops import record_invocations
    >>> x = jnp.ones((1, 16, 2, 8))
    >>> with record_invocations() as calls:
    ...     _ = flash_attention(x, x, x)
    >>> [call.op_id for call in calls.values()]
    ['flash_attention']
    """
    calls: dict[Key, Invocation] = {}
    token = _SCOPES.set((*_SCOPES.get(), (next(_NUMBERS), calls)))
    try:
        yield calls
    finally:
        _SCOPES.reset(token)


@dataclasses.dataclass(frozen=True)
class AutotuningResult:
    """Measured configurations by key; as a context manager, an overlay.

    >>> import tempfile
    >>> from pathlib import Path
    >>> path = Path(tempfile.mkdtemp()) / "tuned.json"
    >>> AutotuningResult({("cpu|cpu", "scale@v1", "0123456789abcdef"): {"block": 64}}).save(path)
    >>> AutotuningResult.load(path).entries
    {('cpu|cpu', 'scale@v1', '0123456789abcdef'): {'block': 64}}
    """

    entries: dict[Key, Any]

    def __enter__(self) -> "AutotuningResult":
        overlay = overlay_cache(self.entries)
        overlay.__enter__()
        _ENTERED.set((*_ENTERED.get(), overlay))
        return self

    def __exit__(self, *exception: object) -> None:
        *outer, overlay = _ENTERED.get()
        _ENTERED.set(tuple(outer))
        overlay.__exit__(None, None, None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the configurations to a file, for `load` on another day or machine.

        Keys name the device they were measured on: on another kind of device they are not used.
        """
        write_table(Path(path), self.entries)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "AutotuningResult":
        """The configurations of a file that `save` has written.

        Raises:
            ValueError: the file is not such a file.
            FileNotFoundError: there is none.
        """
        try:
            entries = read_table(Path(path))
            return cls({key: StoredConfig.of(value) for key, value in entries.items()})
        except ValueError as error:
            raise ValueError(f"AutotuningResult: cannot load {path}: {error}.") from None


@runtime_checkable
class Selector(Protocol):
    """What tunes: a `ConfigSelectorChain`."""

    cache: ConfigCache

    def tune(self, inv: Invocation) -> object:
        """Measure the call and remember the fastest configuration; None where none runs."""


def autotune_recorded(
    selector: Selector, invocations: Iterable[Invocation] | None = None
) -> AutotuningResult:
    """Measure recorded calls; one that no candidate can run is left out.

    Args:
        selector: the `ConfigSelectorChain` whose caches receive the winners.
        invocations: the calls; by default those recorded under `EJKERNEL_RECORD=1`.
    """
    entries = {}
    for inv in get_invocations() if invocations is None else invocations:
        if selector.tune(inv) is not None:
            entries[inv.key] = selector.cache.get(inv.key)
    return AutotuningResult(entries)
