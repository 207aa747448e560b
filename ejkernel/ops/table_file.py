"""The format of files of tuned configurations.

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
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ejkernel.errors import CacheWarning

_FORMAT = "ejkernel tuned configurations"
_SCHEMA = 1
_DEEPEST = 32  # levels of a file: the table has five, a configuration few

Key = tuple[str, str, str]  # device fingerprint, op@version, call key
Entries = dict[Key, Any]  # configurations as JSON holds them


class NewerSchemaError(OSError, ValueError):
    """The file is one of ours, of a later version: nothing may be moved or overwritten."""


def read_table(path: Path) -> Entries:
    """The entries of a file by key; a `ValueError` if it is not one of ours."""
    return parsed(path.read_text(encoding="utf-8"))


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
    write_entries(path, {key: encoded(value) for key, value in entries.items()})


def parsed(text: str) -> Entries:
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
        raise NewerSchemaError(
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
        raise ValueError("entries must be nested as device, op@version, call key") from None


def _is_deep(tree: Any) -> bool:
    """Whether JSON values are nested so deeply that reading them recursively may fail."""
    level: list[Any] = [tree]
    for _ in range(_DEEPEST):
        inner = (x.values() if isinstance(x, dict) else x for x in level)
        level = [x for values in inner for x in values if isinstance(x, dict | list)]
        if not level:
            return False
    return True


def write_entries(path: Path, entries: Entries) -> None:
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


def encoded(value: object) -> Any:
    """A configuration as JSON gives it back."""
    if isinstance(value, _HasFields):
        value = value.to_dict()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return json.loads(json.dumps(value))


def warn(message: str) -> None:
    """A `CacheWarning` about a file or an entry."""
    warnings.warn(f"Tuned configurations: {message}.", CacheWarning, stacklevel=3)
