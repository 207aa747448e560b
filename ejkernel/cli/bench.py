"""`ejkernel bench`: the figures that the package answers for, measured here."""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table

from ejkernel.cli import (
    figures,
    figures_blocksparse,
    figures_gla,
    figures_grouped_matmul,
    figures_native_sparse,
    figures_paged,
    figures_ring,
    info,
)
from ejkernel.cli.measure import WrongResultError

FIGURES = (
    *figures.FIGURES,
    *figures_grouped_matmul.FIGURES,
    *figures_blocksparse.FIGURES,
    *figures_native_sparse.FIGURES,
    *figures_ring.FIGURES,
    *figures_paged.FIGURES,
    *figures_gla.FIGURES,
)


def device() -> str:
    """The machine in words: what the figures were measured on."""
    kind = jax.devices()[0].device_kind
    if kind != "cpu":
        return kind
    facts = Path("/proc/cpuinfo")  # JAX calls every processor "cpu"
    lines = facts.read_text().splitlines() if facts.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {models[0] if models else platform.machine()}"


def commit() -> str | None:
    """The commit of the source tree, marked if it was changed since; None outside a checkout."""
    folder = Path(__file__).parent
    try:
        run = {"cwd": folder, "capture_output": True, "text": True, "check": True}
        name = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **run).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", ".."], **run).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{name}-changed" if changed else name


def _file(path: Path) -> Path:
    """`path`, or the file of this device in it where it is a folder."""
    if path.suffix == ".json":
        return path
    words = jax.devices()[0].device_kind.lower().split()
    return path / f"{'-'.join(words)}.json"


def _outcome(figure: figures.Figure, value: float | None) -> dict[str, Any]:
    return {
        "name": figure.name,
        "what": figure.what,
        "value": value,
        "unit": figure.unit,
        "better": figure.better,
        "bound": figure.bound,
        "holds": value is not None and figure.holds(value),
    }


def bench(
    only: Annotated[
        list[str] | None, typer.Option(help="A figure by name; may be given several times.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write a file, or the device's file in a folder.")
    ] = None,
) -> None:
    """Measure the figures of the README; a wrong result is reported instead of a figure."""
    names = [figure.name for figure in FIGURES]
    if unknown := sorted(set(only or ()) - set(names)):
        raise typer.BadParameter(f"no figure {', '.join(unknown)}; there are {', '.join(names)}.")
    console = Console()
    table = Table("figure", "measured", "asked for", "", title=device())
    outcomes, wrong = [], []
    for figure in FIGURES:
        if only and figure.name not in only:
            continue
        with console.status(figure.what):
            try:
                value = figure.measure()
            except WrongResultError as error:
                wrong.append(f"{figure.name}: {error}")
                value = None
        outcomes.append(_outcome(figure, value))
        limit = "<=" if figure.better == "lower" else ">="
        shown = "wrong result" if value is None else f"{value:.3g} {figure.unit}"
        verdict = "holds" if outcomes[-1]["holds"] else "falls short"
        table.add_row(figure.what, shown, f"{limit} {figure.bound:g} {figure.unit}", verdict)
    console.print(table)
    if json_path is not None:
        report = {"device": device(), "versions": info.versions(), "commit": commit()}
        target = _file(json_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report | {"figures": outcomes}, indent=2, ensure_ascii=False)
        target.write_text(text + "\n")
    if wrong:
        console.print(*wrong, sep="\n", style="red")
        raise typer.Exit(1)
