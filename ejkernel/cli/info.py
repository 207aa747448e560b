"""`ejkernel info`: what is installed, what is there, and who would serve each operation."""

import importlib.metadata
import platform
from collections.abc import Iterator

import jax
from rich.console import Console
from rich.table import Table

from ejkernel import __version__, settings
from ejkernel.cli import subjects

_OPTIONAL_PACKAGES = ("jax-triton", "triton", "libtpu")
_SETTINGS = (
    settings.autotune_policy,
    settings.autotune_progress,
    settings.deterministic,
    settings.cache_dir,
    settings.interpret,
    settings.mask_debug,
    settings.record,
)


def versions() -> dict[str, str]:
    """Versions of all that decides how a call runs; optional packages where they are installed."""
    found = {"ejkernel": __version__, "python": platform.python_version()}
    for package in ("jax", "jaxlib", *_OPTIONAL_PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _settings() -> Iterator[tuple[str, str]]:
    for read in _SETTINGS:
        value = read()
        yield f"EJKERNEL_{read.__name__.upper()}", "default" if value is None else str(value)


def info() -> None:
    """Versions, devices, settings, and which implementation would serve each operation here."""
    console = Console()
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    kinds = [device.device_kind for device in jax.devices()]
    for kind in dict.fromkeys(kinds):
        console.print(f"{kinds.count(kind)} x {kind} ({jax.default_backend()})")

    table = Table("setting", "value", title="Settings", title_justify="left")
    for row in _settings():
        table.add_row(*row)
    console.print(table)

    table = Table("operation", "pass", "served by", "others", title="Operations")
    table.title_justify = "left"
    for subject in subjects.every():
        for direction in subjects.DIRECTIONS:
            able, reasons = subject.serving(direction)
            served, *rest = able or ["nobody"]
            others = [f"{name} can as well" for name in rest]
            others += [f"{name} {reason}" for name, reason in reasons.items()]
            table.add_row(subject.name, direction, served, "; ".join(others) or "none")
    console.print(table)
