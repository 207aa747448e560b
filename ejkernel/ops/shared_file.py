"""A file of tuned configurations that threads and processes read and write at the same time."""

import atexit
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ejkernel.ops.forking import renew_in_children
from ejkernel.ops.table_file import (
    Entries,
    Key,
    NewerSchemaError,
    read_table,
    warn,
    write_entries,
)

_LOCK_SECONDS = 10.0
_EXIT_SECONDS = 2.0  # for all files together


class SharedFile:
    """The entries of one file, as far as they are known here, and those it does not hold yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: Entries = {}
        self._unwritten: Entries = {}
        self._signature: tuple[int, int, int] | None = None
        self._failing = False
        self.renew_locks()
        renew_in_children(self)

    def renew_locks(self) -> None:
        """Forget who holds the lock of this object: in a forked child, nobody."""
        self._guard = threading.RLock()

    def get(self, key: Key) -> Any:
        _retry(self.path)
        with self._guard:
            self._refresh()
            return self._unwritten.get(key, self._known.get(key))

    def items(self) -> list[tuple[Key, Any]]:
        _retry(self.path)
        with self._guard:
            self._refresh()
            return sorted((self._known | self._unwritten).items(), key=lambda item: item[0])

    def update(self, entries: Entries) -> None:
        _retry(self.path, but=self)
        with self._guard:
            self._unwritten |= entries
            # Once it has failed, nobody waits again for a lock that may never come.
            self._write_unwritten(0.0 if self._failing else _LOCK_SECONDS)

    def flush(self, seconds: float) -> int:
        """Try again to write what could not be written; how many entries are left."""
        if not self._guard.acquire(timeout=seconds):
            return len(self._unwritten)
        try:
            if self._unwritten:
                self._write_unwritten(seconds)
            return len(self._unwritten)
        finally:
            self._guard.release()

    def _write_unwritten(self, patience: float) -> None:
        _PENDING.add(self)
        with self._reported("written"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked(patience):
                merged = self._read_or_set_aside() | self._unwritten
                write_entries(self.path, merged)
                self._signature = _signature(self.path)
            self._known, self._unwritten = merged, {}
            self._failing = False
            _PENDING.discard(self)

    def clear(self) -> None:
        with self._guard:
            self._known, self._unwritten = {}, {}
            _PENDING.discard(self)
            self._signature = _signature(self.path)
            if self._signature is not None:
                with self._reported("cleared"), self._locked():
                    self.path.unlink(missing_ok=True)
                    self._signature = None

    def _refresh(self) -> None:
        """Read the file again if another process has replaced it."""
        # Taken before reading: a file replaced in between is read once more, not missed.
        signature = _signature(self.path)
        if signature == self._signature:
            return
        self._signature = signature
        with self._reported("read"):
            try:
                self._known = read_table(self.path) if signature else {}
            except FileNotFoundError:
                self._known = {}
            except NewerSchemaError:
                raise
            except ValueError:
                with self._locked():
                    self._known = self._read_or_set_aside()

    def _read_or_set_aside(self) -> Entries:
        """What the file holds; only the owner of the lock may move a bad file out of the way."""
        try:
            return read_table(self.path)
        except FileNotFoundError:
            return {}
        except NewerSchemaError:
            raise
        except ValueError as error:
            aside = next(
                path
                for number in itertools.count(1)
                if not (path := self.path.with_name(f"{self.path.name}.corrupt-{number}")).exists()
            )
            os.rename(self.path, aside)
            # What was read before the file broke goes back with the next write.
            self._known, self._unwritten = {}, self._known | self._unwritten
            _PENDING.add(self)
            self._signature = None
            warn(f"{self.path} cannot be understood ({error}); it is now {aside.name}")
            return {}

    def _locked(self, patience: float | None = None) -> AbstractContextManager[object]:
        import filelock

        if patience is None:
            patience = 0.0 if self._failing else _LOCK_SECONDS
        return filelock.FileLock(
            self.path.with_name(self.path.name + ".lock"), timeout=patience, poll_interval=0.01
        )

    @contextlib.contextmanager
    def _reported(self, action: str) -> Iterator[None]:
        """Turn a failing disk into one warning, until a write succeeds again."""
        try:
            yield
        except (OSError, NotImplementedError) as error:  # a lock that times out is an OSError too
            if not self._failing:
                self._failing = True
                warn(f"{self.path} cannot be {action} ({error}); going on in memory")


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


_PENDING: set[SharedFile] = set()  # with entries that could not be written yet


def _retry(path: Path, but: SharedFile | None = None) -> None:
    """Write what earlier writes to this file could not, without waiting."""
    for file in list(_PENDING):
        if file.path == path and file is not but:
            file.flush(0.0)


@atexit.register
def _write_at_exit() -> None:
    """The last try; a warning says what is lost."""
    deadline = time.monotonic() + _EXIT_SECONDS
    lost = {file.path: file.flush(max(0.0, deadline - time.monotonic())) for file in list(_PENDING)}
    for path, count in lost.items():
        if count:
            warn(f"{count} could not be written to {path} and are lost")
