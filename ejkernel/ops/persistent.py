"""Configurations on disk: the user's cache, shared by processes, and the tables that ship with us.

`table_file` shows the format.
"""

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ejkernel import settings
from ejkernel.ops.keys import short_hash
from ejkernel.ops.shared_file import SharedFile
from ejkernel.ops.table_file import Entries, Key, encoded, parsed, read_table, warn, write_entries


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
        self._files: dict[Path, SharedFile] = {}

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
        written = {}
        for key, value in entries.items():
            try:
                written[key] = encoded(value)
            except (TypeError, ValueError) as error:
                warn(f"a configuration of {key[1]} cannot be kept as JSON: {error}")
        if written:
            self._file.update(written)

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
        write_entries(Path(path), entries)
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
    def _file(self) -> "SharedFile":
        path = self.path
        return self._files.setdefault(path, SharedFile(path))


class ShippedTable:
    """The configurations of one op that ship with the package, by the name of the device.

    They live in `data/tuned/<device>/<op>.json`; a file is read when its device is first asked for.
    A driver's version plays no part: the device of a key counts up to its `|`.
    """

    def __init__(self, opname: str, root: Path | None = None) -> None:
        self.opname = opname
        self._root = root
        self._loaded: dict[str, Entries] = {}

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

    def _load(self, device: str) -> Entries:
        root = self._root
        if root is None:
            import importlib.resources

            root = importlib.resources.files("ejkernel") / "data" / "tuned"
        file = root / _slug(device) / _file_name(self.opname)
        try:
            return parsed(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            warn(f"the shipped table {file} cannot be read: {error}")
            return {}


def write_tuned(root: Path, opname: str, entries: Mapping[Key, object]) -> list[Path]:
    """Merge measured configurations into the tables under `root` that `ShippedTable` reads.

    Returns:
        The files written, one per device.
    """
    tables: dict[str, Entries] = {}
    for key, value in entries.items():
        device = _device_name(key)
        tables.setdefault(device, {})[device, key[1], key[2]] = encoded(value)
    written = []
    for device, table in tables.items():
        path = root / _slug(device) / _file_name(opname)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_entries(path, (read_table(path) if path.exists() else {}) | table)
        written.append(path)
    return written


def _decoded(value: object, key: Key, cfg_type: type[Any] | None) -> Any:
    value = _with_tuples(value)
    if value is None or cfg_type is None:
        return value
    try:
        return getattr(cfg_type, "from_dict", lambda fields: cfg_type(**fields))(value)
    except (TypeError, ValueError) as error:
        warn(f"a stored configuration of {key[1]} is not a {cfg_type.__name__} any more: {error}")
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
