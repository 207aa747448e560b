"""Compiled programs that are kept, within the number of memory maps that Linux allows a process.

A program that XLA compiles for a CPU takes between three and two hundred maps, about twice as many
with its gradient. A process that needs more than `vm.max_map_count`, 65,530, is killed.
"""

import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

_MOST = 4096  # programs of one store
_CHECKED_EVERY = 16  # programs, of all stores together
_DEFAULT_MAPS = 65_530

_uses = itertools.count()
_additions = itertools.count(1)
_STORES: "weakref.WeakSet[KeptPrograms]" = weakref.WeakSet()


class _Kept:
    """A program, and when it was used last."""

    __slots__ = ("program", "used")

    def __init__(self, program: Callable[..., Any]) -> None:
        self.program = program
        self.used = next(_uses)


class KeptPrograms:
    """Programs by key; those used least recently are dropped first.

    Half of the programs of every store are dropped when the process has more than half of the maps
    that it may have.
    """

    def __init__(self) -> None:
        self._programs: dict[Hashable, _Kept] = {}
        _STORES.add(self)

    def get(self, key: Hashable) -> Callable[..., Any] | None:
        """The program of a key, if it is still there."""
        kept = self._programs.get(key)
        if kept is None:
            return None
        kept.used = next(_uses)
        return kept.program

    def put(self, key: Hashable, program: Callable[..., Any]) -> None:
        """Keep a program."""
        if len(self._programs) >= _MOST:
            self.drop_older_half()
        self._programs[key] = _Kept(program)
        if next(_additions) % _CHECKED_EVERY == 0 and memory_maps() > _most_maps():
            for store in list(_STORES):
                store.drop_older_half()
            gc.collect()  # programs are parts of reference cycles

    def drop_older_half(self) -> None:
        """Forget the programs that were used least recently."""
        found = sorted(self._programs.copy().items(), key=lambda item: item[1].used)
        for key, _ in found[: (len(found) + 1) // 2]:
            self._programs.pop(key, None)

    def clear(self) -> None:
        """Forget every program."""
        self._programs.clear()

    def __len__(self) -> int:
        return len(self._programs)


def memory_maps() -> int:
    """How many memory maps this process has; 0 where the system does not say."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


@functools.cache
def _most_maps() -> int:
    """Half of the maps that a process may have."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text()) // 2
    except (OSError, ValueError):
        return _DEFAULT_MAPS // 2
