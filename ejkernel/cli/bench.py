"""`ejkernel bench`: measure the figures that have a target on this machine."""

import json
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
    provenance,
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
    """Measure the figures of docs/benchmarks.md and compare them with their targets."""
    names = [figure.name for figure in FIGURES]
    if unknown := sorted(set(only or ()) - set(names)):
        raise typer.BadParameter(f"no figure {', '.join(unknown)}; there are {', '.join(names)}.")
    console = Console()
    table = Table("figure", "measured", "target", "result", title=provenance.device())
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
        verdict = "met" if outcomes[-1]["holds"] else "missed"
        table.add_row(figure.what, shown, f"{limit} {figure.bound:g} {figure.unit}", verdict)
    console.print(table)
    if json_path is not None:
        report = {**provenance.provenance(), "figures": outcomes}
        target = _file(json_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report, indent=2, ensure_ascii=False)
        target.write_text(text + "\n")
    if wrong:
        console.print(*wrong, sep="\n", style="red")
        raise typer.Exit(1)
