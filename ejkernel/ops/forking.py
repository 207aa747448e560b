"""Locks in a forked child, where a thread that held one in the parent does not exist."""

import os
import weakref
from typing import Protocol, runtime_checkable


@runtime_checkable
class _HasLocks(Protocol):
    def renew_locks(self) -> None: ...


_OWNERS: weakref.WeakSet[_HasLocks] = weakref.WeakSet()


def renew_in_children(owner: _HasLocks) -> None:
    """Call `owner.renew_locks()` in every process forked from this one."""
    _OWNERS.add(owner)


def _renew() -> None:
    for owner in list(_OWNERS):
        owner.renew_locks()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew)
