"""Configurations on disk: the user's cache, shared by processes, and the tables that ship with us.

One JSON file per op:

    {
      "format": "ejkernel tuned configurations",
      "schema": 1,
      "devices": {
        "NVIDIA H200|cuda 13000": {
          "flash_attention@v1": {
            "0123456789abcdef": {"platform": "pallas", "fwd_params": {"q_blocksize": 128}}
          }
        }
      }
    }
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ejkernel import settings
from ejkernel.errors import CacheWarning
from ejkernel.ops.keys import short_hash

_FORMAT = "ejkernel tuned configurations"
_SCHEMA = 1
_LOCK_SECONDS = 10.0
_DEEPEST = 32  # levels of a file: the table has five, a configuration few

Key = tuple[str, str, str]  # device fingerprint, op@version, call key
_Entries = dict[Key, Any]  # configurations as JSON holds them


class _NewerSchemaError(OSError, ValueError):
    """The file is one of ours, of a later version: nothing may be moved or overwritten."""


class PersistentCache:
    """The tuned configurations of one op in a JSON file that any number of processes may share.

    Nothing is created before the first write. A write merges with what others have written and
    replaces the file as a whole, under a lock. A file that cannot be understood is set aside under
    another name; where nothing can be written, or a later version of the package has written the
    file, entries stay in memory until it works again. All are a `CacheWarning`, never an error.

    Args:
        opname: The op, which names the file.
        path: The file; None: `<opname>.json` in `settings.cache_dir()`, asked for at every use.
        cfg_type: The class of the configurations, rebuilt by its `from_dict` or from its fields;
            None: they come back as dictionaries.

    >>> import tempfile
    >>> cache = PersistentCache("scale", Path(tempfile.mkdtemp()) / "scale.json")
    >>> cache.put(("cpu|cpu", "scale@v1", "0123456789abcdef"), {"block": 64})
    >>> cache.get(("cpu|cpu", "scale@v1", "0123456789abcdef"))
    {'block': 64}
    """

    def __init__(
        self,
        opname: str,
        path: str | os.PathLike[str] | None = None,
        cfg_type: type[Any] | None = None,
    ) -> None:
        self.opname = opname
        self.cfg_type = cfg_type
        self._path = None if path is None else Path(path).expanduser()
        self._files: dict[Path, _SharedFile] = {}

    @property
    def path(self) -> Path:
        """The file, whether or not it exists yet."""
        return self._path or settings.cache_dir() / _file_name(self.opname)

    def get(self, key: Key) -> Any:
        """The configuration of a key, or None."""
        return _decoded(self._file.get(key), key, self.cfg_type)

    def put(self, key: Key, value: object) -> None:
        """Store a configuration: a dataclass, a dictionary or a plain JSON value."""
        self.update({key: value})

    def update(self, entries: Mapping[Key, object]) -> None:
        """Store many configurations in one write."""
        encoded = {}
        for key, value in entries.items():
            try:
                encoded[key] = _encoded(value)
            except (TypeError, ValueError) as error:
                _warn(f"a configuration of {key[1]} cannot be kept as JSON: {error}")
        if encoded:
            self._file.update(encoded)

    def items(self) -> list[tuple[Key, Any]]:
        """Every key with its configuration."""
        pairs = ((key, _decoded(value, key, self.cfg_type)) for key, value in self._file.items())
        return [(key, value) for key, value in pairs if value is not None]

    def clear(self) -> None:
        """Forget every configuration, here and on disk."""
        self._file.clear()

    def export_to(self, path: str | os.PathLike[str]) -> int:
        """Write every configuration to another file and return how many there are."""
        entries = dict(self._file.items())
        _write(Path(path), entries)
        return len(entries)

    def import_from(self, path: str | os.PathLike[str]) -> int:
        """Take over the configurations of an exported file, which win, and return how many.

        Raises:
            ValueError: the file is not one of ours.
        """
        try:
            entries = read_table(Path(path))
        except ValueError as error:
            raise ValueError(f"PersistentCache: cannot import {path}: {error}.") from None
        self._file.update(entries)
        return len(entries)

    @property
    def _file(self) -> "_SharedFile":
        path = self.path
        return self._files.setdefault(path, _SharedFile(path))


class ShippedTable:
    """The configurations of one op that ship with the package, by the name of the device.

    They live in `data/tuned/<device>/<op>.json`; a file is read when its device is first asked for.
    A driver's version plays no part: the device of a key counts up to its `|`.
    """

    def __init__(self, opname: str, root: Path | None = None) -> None:
        self.opname = opname
        self._root = root
        self._loaded: dict[str, _Entries] = {}

    @classmethod
    @functools.cache
    def for_op(cls, opname: str) -> "ShippedTable":
        """The table of an op, one per process."""
        return cls(opname)

    def get(self, key: Key) -> Any:
        """The configuration of a key as plain values, or None."""
        device = _device_name(key)
        if device not in self._loaded:
            self._loaded[device] = self._load(device)
        return self._loaded[device].get((device, *key[1:]))

    def _load(self, device: str) -> _Entries:
        root = self._root
        if root is None:
            import importlib.resources

            root = importlib.resources.files("ejkernel") / "data" / "tuned"
        file = root / _slug(device) / _file_name(self.opname)
        try:
            return _parsed(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            _warn(f"the shipped table {file} cannot be read: {error}")
            return {}


def write_tuned(root: Path, opname: str, entries: Mapping[Key, object]) -> list[Path]:
    """Merge measured configurations into the tables under `root` that `ShippedTable` reads.

    Returns:
        The files written, one per device.
    """
    tables: dict[str, _Entries] = {}
    for key, value in entries.items():
        device = _device_name(key)
        tables.setdefault(device, {})[device, key[1], key[2]] = _encoded(value)
    written = []
    for device, table in tables.items():
        path = root / _slug(device) / _file_name(opname)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, (read_table(path) if path.exists() else {}) | table)
        written.append(path)
    return written


class _SharedFile:
    """The entries of one file, as far as they are known here, and those it does not hold yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: _Entries = {}
        self._unwritten: _Entries = {}
        self._signature: tuple[int, int, int] | None = None
        self._failing = False
        self._guard = threading.RLock()

    def get(self, key: Key) -> Any:
        with self._guard:
            self._refresh()
            return self._unwritten.get(key, self._known.get(key))

    def items(self) -> list[tuple[Key, Any]]:
        with self._guard:
            self._refresh()
            return sorted((self._known | self._unwritten).items(), key=lambda item: item[0])

    def update(self, entries: _Entries) -> None:
        with self._guard:
            self._unwritten |= entries
            with self._reported("written"):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self._locked():
                    merged = self._read_or_set_aside() | self._unwritten
                    _write(self.path, merged)
                    self._signature = _signature(self.path)
                self._known, self._unwritten = merged, {}
                self._failing = False

    def clear(self) -> None:
        with self._guard:
            self._known, self._unwritten = {}, {}
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
            except _NewerSchemaError:
                raise
            except ValueError:
                with self._locked():
                    self._known = self._read_or_set_aside()

    def _read_or_set_aside(self) -> _Entries:
        """What the file holds; only the owner of the lock may move a bad file out of the way."""
        try:
            return read_table(self.path)
        except FileNotFoundError:
            return {}
        except _NewerSchemaError:
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
            self._signature = None
            _warn(f"{self.path} cannot be understood ({error}); it is now {aside.name}")
            return {}

    def _locked(self) -> AbstractContextManager[object]:
        import filelock

        # Once it has failed, nobody waits again for a lock that may never come.
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
                _warn(f"{self.path} cannot be {action} ({error}); going on in memory")


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def read_table(path: Path) -> _Entries:
    """The entries of a file by key; a `ValueError` if it is not one of ours."""
    return _parsed(path.read_text(encoding="utf-8"))


class StoredConfig(dict[str, Any]):
    """The fields of a configuration as a file has them: a dictionary that can be part of a key."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(json.dumps(self, sort_keys=True))

    @classmethod
    def of(cls, value: object) -> Any:
        """A dictionary in this form; any other value as it is."""
        return cls(value) if isinstance(value, dict) else value


def write_table(path: Path, entries: Mapping[Key, object]) -> None:
    """Write configurations to a file of their own, which `read_table` reads."""
    _write(path, {key: _encoded(value) for key, value in entries.items()})


def _parsed(text: str) -> _Entries:
    """The entries of a file; a `ValueError` says what is wrong with it."""
    try:
        table = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(table, dict) or table.get("format") != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT!r}")
    if _is_deep(table):
        raise ValueError("it is nested too deeply")
    schema = table.get("schema")
    if type(schema) is int and schema > _SCHEMA:
        raise _NewerSchemaError(
            f"it has schema {schema} of a later version, this one reads {_SCHEMA}"
        )
    if schema != _SCHEMA:
        raise ValueError(f"its schema is {schema!r}, not {_SCHEMA}")
    try:
        return {
            (device, op, call): value
            for device, ops in table["devices"].items()
            for op, calls in ops.items()
            for call, value in calls.items()
        }
    except (AttributeError, KeyError):
        raise ValueError("it does not go by device, op and call") from None


def _is_deep(tree: Any) -> bool:
    """Whether JSON values are nested so deeply that reading them recursively may fail."""
    level: list[Any] = [tree]
    for _ in range(_DEEPEST):
        inner = (x.values() if isinstance(x, dict) else x for x in level)
        level = [x for values in inner for x in values if isinstance(x, dict | list)]
        if not level:
            return False
    return True


def _write(path: Path, entries: _Entries) -> None:
    """Replace the file as a whole: readers see the old one or the new one."""
    devices: dict[str, Any] = {}
    for (device, op, call), value in sorted(entries.items(), key=lambda item: item[0]):
        devices.setdefault(device, {}).setdefault(op, {})[call] = value
    table = {"format": _FORMAT, "schema": _SCHEMA, "devices": devices}
    # A fixed name: writers of a shared file hold its lock, and overwrite what a killed one left.
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(json.dumps(table, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # also Ctrl-C: no half-written file stays behind
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@runtime_checkable
class _HasFields(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


def _encoded(value: object) -> Any:
    """A configuration as JSON gives it back."""
    if isinstance(value, _HasFields):
        value = value.to_dict()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return json.loads(json.dumps(value))


def _decoded(value: object, key: Key, cfg_type: type[Any] | None) -> Any:
    value = _with_tuples(value)
    if value is None or cfg_type is None:
        return value
    try:
        return getattr(cfg_type, "from_dict", lambda fields: cfg_type(**fields))(value)
    except (TypeError, ValueError) as error:
        _warn(f"a stored configuration of {key[1]} is not a {cfg_type.__name__} any more: {error}")
        return None


def _with_tuples(value: object) -> Any:
    """A configuration is hashable: what JSON calls a list was a tuple."""
    if isinstance(value, dict):
        return {name: _with_tuples(item) for name, item in value.items()}
    return tuple(_with_tuples(item) for item in value) if isinstance(value, list) else value


def _device_name(key: Key) -> str:
    return key[0].partition("|")[0]


def _slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def _file_name(opname: str) -> str:
    safe = re.sub(r"[^\w.-]", "-", opname, flags=re.ASCII)
    return f"{safe}.json" if safe == opname else f"{safe}-{short_hash(opname)}.json"


def _warn(message: str) -> None:
    warnings.warn(f"Tuned configurations: {message}.", CacheWarning, stacklevel=3)
