"""Every environment variable and option, in one place, read when used.

| variable | meaning | default |
|---|---|---|
| `EJKERNEL_AUTOTUNE_POLICY` | `autotune` or `heuristics`, for unknown calls | by device |
| `EJKERNEL_AUTOTUNE_PROGRESS` | `1` shows a line per candidate, `0` none | on a terminal |
| `EJKERNEL_CACHE_DIR` | directory of the tuned configurations | the user's cache directory |
| `EJKERNEL_DETERMINISTIC` | `1` excludes passes that do not give the same bits in every run | `0` |
| `EJKERNEL_INTERPRET` | `1` lets Pallas and Triton kernels run in their interpreters | `0` |
| `EJKERNEL_MASK_DEBUG` | `1` prints a line for each access to a `MaskInfo` | `0` |
| `EJKERNEL_RECORD` | `1` records the calls for tuning them later | `0` |
"""

import contextlib
import contextvars
import os
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

_NAMES = (
    "autotune_policy",
    "autotune_progress",
    "cache_dir",
    "deterministic",
    "interpret",
    "record",
)

_OVERRIDES: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar(
    "overrides", default=types.MappingProxyType({})
)


def _read(name: str) -> str | None:
    override = _OVERRIDES.get()
    return override[name] if name in override else os.environ.get(name)


def _flag(name: str) -> bool | None:
    value = _read(name)
    if value is None or value == "":
        return None
    if value not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {value!r}.")
    return value == "1"


@contextlib.contextmanager
def override(**values: str | bool | os.PathLike) -> Iterator[None]:
    """Set settings for a block: `with settings.override(interpret=True): ...`."""
    if "mask_debug" in values:
        raise ValueError(
            "settings: mask_debug is read once, at import; "
            "ejkernel.types.set_debug_mode(True) changes it later."
        )
    if unknown := [name for name in values if name not in _NAMES]:
        raise ValueError(
            f"settings: unknown setting {', '.join(unknown)}; there are {', '.join(_NAMES)}."
        )
    named = {
        f"EJKERNEL_{name.upper()}": str(int(value)) if isinstance(value, bool) else str(value)
        for name, value in values.items()
    }
    token = _OVERRIDES.set({**_OVERRIDES.get(), **named})
    try:
        yield
    finally:
        _OVERRIDES.reset(token)


def autotune_policy() -> str | None:
    """`autotune`, `heuristics`, or None: let the device decide."""
    value = _read("EJKERNEL_AUTOTUNE_POLICY") or None
    if value not in (None, "autotune", "heuristics"):
        raise ValueError(f"EJKERNEL_AUTOTUNE_POLICY must be autotune or heuristics, got {value!r}.")
    return value


def autotune_progress() -> bool | None:
    """Whether tuning reports what it does; None: only on a terminal."""
    return _flag("EJKERNEL_AUTOTUNE_PROGRESS")


def shows_autotuning() -> bool:
    """`autotune_progress` for the standard error of this process."""
    wanted = autotune_progress()
    return sys.stderr.isatty() if wanted is None else wanted


def cache_dir() -> Path:
    """Where tuned configurations are kept; not created until something is written."""
    if value := _read("EJKERNEL_CACHE_DIR"):
        return Path(value).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("ejkernel"))


def deterministic() -> bool:
    """Whether only what gives the same bits in every run may be chosen."""
    return bool(_flag("EJKERNEL_DETERMINISTIC"))


def interpret() -> bool:
    """Whether kernels may run in an interpreter where their hardware is missing."""
    return bool(_flag("EJKERNEL_INTERPRET"))


def mask_debug() -> bool:
    """Whether `MaskInfo` starts in debug mode."""
    return bool(_flag("EJKERNEL_MASK_DEBUG"))


def record() -> bool:
    """Whether calls are recorded for offline tuning."""
    return bool(_flag("EJKERNEL_RECORD"))
