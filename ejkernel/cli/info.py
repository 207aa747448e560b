"""`ejkernel info`: versions, devices, settings, and the platform of each operation."""

import collections
import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

import ejkernel
from ejkernel import settings
from ejkernel.cli import provenance, subjects
from ejkernel.cli.subjects import Subject
from ejkernel.kernels import OPS
from ejkernel.ops.implementation import Source
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.persistent import PersistentCache, read_table
from ejkernel.ops.platform import Backend, Platform, target, target_device

SHIPPED = Path(ejkernel.__file__).parent / "data" / "tuned"

_OPTIONAL_PACKAGES = ("triton", "jax-triton", "libtpu")
# For each kind of device, one that stands for it.
_DEVICES = {Backend.CPU: "cpu", Backend.GPU: "NVIDIA H200", Backend.TPU: "TPU v5 lite"}
_SETTINGS: dict[str, Callable[[], Any]] = {
    f"EJKERNEL_{read.__name__.upper()}": read
    for read in (
        settings.autotune_policy,
        settings.autotune_progress,
        settings.cache_dir,
        settings.deterministic,
        settings.interpret,
        settings.mask_debug,
        settings.record,
    )
}
_MOST_REASONS = 6  # of unavailable platforms; all are in the JSON


def invalid_settings() -> Iterator[str]:
    """What is wrong with each environment variable of ours that has no valid value."""
    for read in _SETTINGS.values():
        try:
            read()
        except ValueError as error:
            yield str(error)


def collect() -> dict[str, Any]:
    """Everything that `ejkernel info --json` prints; docs/cli.md documents the keys."""
    kinds = collections.Counter((device.device_kind, device.platform) for device in jax.devices())
    return {
        "versions": provenance.versions(),
        "not_installed": [name for name in _OPTIONAL_PACKAGES if not _installed(name)],
        "devices": [
            {"kind": kind, "platform": platform, "count": count}
            for (kind, platform), count in kinds.items()
        ],
        "settings": {name: _plain(read()) for name, read in _SETTINGS.items()},
        "cache": _cache(),
        "shipped": _shipped(),
        "operations": {subject.name: _operation(subject) for subject in subjects.every()},
    }


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def _cache() -> dict[str, Any]:
    """The user's cache: its directory and the number of tuned configurations per operation."""
    counts = {}
    for op in OPS:
        try:
            counts[op] = len(read_table(PersistentCache(op).path))
        except (OSError, ValueError):  # absent, or set aside by the next call that tunes
            continue
    return {"directory": str(settings.cache_dir()), "configurations": counts}


def _shipped() -> dict[str, dict[str, int]]:
    """Per device, the number of tuned configurations in the package for each operation."""
    tables: dict[str, dict[str, int]] = {}
    for path in sorted(SHIPPED.glob("*/*.json")):
        devices = collections.Counter(device for device, _, _ in read_table(path))
        for device, count in devices.items():
            tables.setdefault(device, {})[path.stem] = count
    return tables


def _operation(subject: Subject) -> dict[str, Any]:
    """The platforms of an operation: here per pass, and per kind of device."""
    found: dict[str, Any] = {}

    # What models use: many kernels for accelerators take no float32.
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16

    def look() -> None:
        call = subject.invocation(subject.workloads[0].build(dtype=dtype))
        for direction in subjects.DIRECTIONS:
            supported, reasons = subject.op.supporting(
                direction, call.inputs, call.spec, call.device, None
            )
            names = [source.platform.value for source, _ in supported]
            found[direction] = {"platforms": names, "unavailable": reasons}
        found["devices"] = {device.value: _platforms(call, device) for device in _DEVICES}

    jax.eval_shape(look)  # only shapes matter: nothing is computed or compiled
    return found


def _platforms(call: Invocation, backend: Backend) -> list[str]:
    """The platforms for a kind of device, in the order that the forward pass prefers them in."""
    sources = [x for x in call.op.sources if x.backend in (backend, Backend.ANY)]
    ordered = sorted(sources, key=lambda source: _yields_to_xla(source, call, backend))
    return [source.platform.value for source in ordered]


def _yields_to_xla(source: Source, call: Invocation, backend: Backend) -> bool:
    """Whether XLA, the last of the sources, is preferred to this one."""
    chosen = source.load().forward
    with target_device(_DEVICES[backend]):
        device = target() or call.device
    return chosen is not None and Platform.XLA in chosen.yields_to(call.inputs, call.spec, device)


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print all as one JSON object.")] = False,
    list_settings: Annotated[
        bool, typer.Option("--settings", help="Print all settings and what they mean.")
    ] = False,
) -> None:
    """Show versions, devices, settings and the platform of each operation."""
    console = Console()
    if list_settings:
        _print_settings(console)
        return
    try:
        facts = collect()
    except (RuntimeError, AssertionError) as error:
        # JAX_PLATFORMS names a backend that this machine lacks; JAX may assert without words.
        said = str(error) or f"JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS')!r}"
        typer.echo(f"ejkernel: JAX cannot use a device: {said}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    summary = Table.grid(padding=(0, 2))
    summary.add_column(style="bold")
    summary.add_column(overflow="fold")
    for name, text in _summary(facts):
        summary.add_row(name, escape(text))
    console.print(summary)
    console.print()
    console.print(_operations_table(facts))
    _print_reasons(console, facts)
    console.print(
        "xla runs on every device. More: ejkernel info --json, ejkernel info --settings",
        style="dim",
        highlight=False,
    )


def _summary(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines above the table: a name and what there is."""
    yield "versions", ", ".join(f"{name} {text}" for name, text in facts["versions"].items())
    if facts["not_installed"]:
        yield "missing", ", ".join(facts["not_installed"]) + " (optional)"
    yield "devices", ", ".join(f"{x['count']} x {x['kind']}" for x in facts["devices"])
    given = {n: value for n, value in facts["settings"].items() if os.environ.get(n)}
    yield "settings", ", ".join(f"{n}={v}" for n, v in given.items()) or "all default"
    yield "cache", facts["cache"]["directory"] + f" ({_counts(facts['cache']['configurations'])})"
    kind = facts["devices"][0]["kind"]
    here = facts["shipped"].get(kind)
    others = ", ".join(device for device in facts["shipped"] if device != kind)
    yield "shipped", (_counts(here) if here else f"no tuned table for {kind}; there is {others}")


def _counts(tables: dict[str, int]) -> str:
    return ", ".join(f"{op}: {count} tuned" for op, count in tables.items()) or "nothing tuned"


def _operations_table(facts: dict[str, Any]) -> Table:
    here = jax.default_backend()
    others = [device.value for device in _DEVICES if device.value != here]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("operation", "forward", "backward", *(f"on {x.upper()}" for x in others)):
        table.add_column(column, no_wrap=True)
    for name, operation in facts["operations"].items():
        passes = [operation[direction]["platforms"] for direction in subjects.DIRECTIONS]
        chosen = [platforms[0] if platforms else "none" for platforms in passes]
        elsewhere = [_specific(operation["devices"][device]) for device in others]
        table.add_row(name, *chosen, *elsewhere)
    return table


def _specific(platforms: list[str]) -> str:
    """The platforms that are preferred to XLA, in order; XLA where there is none."""
    return " ".join(platforms[: platforms.index("xla")]) or "xla"


def _print_reasons(console: Console, facts: dict[str, Any]) -> None:
    """Why platforms made for this device are unavailable, one line per reason."""
    here = f"({jax.default_backend()})"
    reasons: dict[tuple[str, str], set[str]] = {}
    for name, operation in facts["operations"].items():
        for direction in subjects.DIRECTIONS:
            for label, reason in operation[direction]["unavailable"].items():
                if label.endswith(here):
                    reasons.setdefault((label, reason), set()).add(name)
    for (label, reason), names in list(reasons.items())[:_MOST_REASONS]:
        text = f"{label.partition(' ')[0]} unavailable for {len(names)}: {reason}"
        console.print(text, markup=False, no_wrap=True, overflow="ellipsis")


def _print_settings(console: Console) -> None:
    """Every setting with its value, and what the module that reads it says about it."""
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", settings.__doc__ or "", re.MULTILINE)
    meanings = {name: f"{meaning} (default: {default})" for name, meaning, default in rows}
    for name, read in _SETTINGS.items():
        value = "default" if read() is None else str(read())
        console.print(f"{name} = {value}", style="bold", markup=False, highlight=False)
        meaning = Padding(meanings.get(name, "").replace("`", ""), (0, 0, 0, 4))
        console.print(meaning, highlight=False)
