"""Configurations in memory: the cache of a process, and overlays for a block of code."""

import contextlib
import contextvars
import threading
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

from ejkernel.ops.forking import renew_in_children


class ConfigCache:
    """Configurations by (device fingerprint, `op@version`, call key), safe to share by threads.

    >>> cache = ConfigCache()
    >>> cache.put(("cpu|cpu", "scale@v1", "0123456789abcdef"), {"block": 64})
    >>> cache.get(("cpu|cpu", "scale@v1", "0123456789abcdef"))
    {'block': 64}
    >>> len(cache), cache.version
    (1, 1)
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, Any] = {}
        self._version = 0
        self.renew_locks()
        renew_in_children(self)

    def renew_locks(self) -> None:
        """Forget who holds the lock: in a forked child, nobody."""
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        """Grows with every change, so that what was derived from the cache can tell it is stale.

        Not with `record`.
        """
        return self._version

    def get(self, key: Hashable, default: object = None) -> Any:
        """The configuration of a key, else the default."""
        return self._entries.get(key, default)

    def put(self, key: Hashable, value: object) -> None:
        """Store a configuration."""
        with self._lock:
            if key in self._entries and self._entries[key] == value:
                return
            self._entries[key] = value
            self._version += 1

    def record(self, key: Hashable, value: object) -> None:
        """Store what a choice came to: later ones for the same call come to the same."""
        with self._lock:
            self._entries[key] = value

    def clear(self) -> None:
        """Forget every configuration."""
        with self._lock:
            if self._entries:
                self._entries = {}
                self._version += 1

    def size(self) -> int:
        """The number of configurations."""
        return len(self._entries)

    def keys(self) -> list[Hashable]:
        """The keys as they are now."""
        with self._lock:
            return list(self._entries)

    def __len__(self) -> int:
        return self.size()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries


class _Overlay(NamedTuple):
    entries: dict[Hashable, Any]
    state: frozenset[tuple[Hashable, object]]


_BARE = _Overlay({}, frozenset())
_OVERLAY: contextvars.ContextVar[_Overlay] = contextvars.ContextVar("overlay", default=_BARE)


@contextlib.contextmanager
def overlay_cache(mapping: Mapping[Any, object]) -> Iterator[None]:
    """Configurations that win over every cache inside the block; of nested blocks the innermost.

    Args:
        mapping: Configurations by key, as in `ConfigCache`; taken as they are on entry.

    Raises:
        ValueError: a configuration is not hashable.

    >>> with overlay_cache({("cpu|cpu", "scale@v1", "0123456789abcdef"): 64}):
    ...     current_overlay(("cpu|cpu", "scale@v1", "0123456789abcdef"))
    64
    """
    merged = {**_OVERLAY.get().entries, **mapping}
    try:
        state = frozenset(merged.items())
    except TypeError as error:
        raise ValueError(
            f"overlay_cache: configurations must be hashable, like a frozen dataclass; {error}."
        ) from None
    token = _OVERLAY.set(_Overlay(merged, state))
    try:
        yield
    finally:
        _OVERLAY.reset(token)


def current_overlay(key: Hashable) -> Any:
    """The configuration that an overlay has for this key, or None."""
    return _OVERLAY.get().entries.get(key)


def overlay_state() -> Hashable:
    """Equal for equal overlays; part of the keys of compiled calls."""
    return _OVERLAY.get().state
