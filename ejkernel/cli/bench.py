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
    output,
    provenance,
)
from ejkernel.cli.measure import WrongResultError
from ejkernel.cli.report import page, results

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
        "operation": figure.operation,
        "dtype": figure.dtype,
        "mask": None if figure.mask is None else list(figure.mask),
    }


def bench(
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A figure by name; may be given several times."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write a file, or the device's file in a folder.")
    ] = None,
    html_path: Annotated[
        Path | None, typer.Option("--html", help="Write a page with charts of the results.")
    ] = None,
    recorded: Annotated[
        list[Path] | None,
        typer.Option(
            "--results",
            metavar="PATH",
            help="With --html: measure nothing, show this file or all files in this folder; "
            "may be given several times.",
        ),
    ] = None,
) -> None:
    """Measure the CPU figures of docs/benchmarks.md and compare them with their targets."""
    output.check(None if json_path is None else _file(json_path), "--json")
    output.check(html_path, "--html")
    console = Console()
    if recorded:
        path = _page_of_recorded(only, json_path, html_path)
        _write_page(console, path, *_read(recorded))
        return
    names = [figure.name for figure in FIGURES]
    if unknown := sorted(set(only or ()) - set(names)):
        raise typer.BadParameter(f"no figure {', '.join(unknown)}; there are {', '.join(names)}.")
    outcomes, wrong = _measured(console, [x for x in FIGURES if not only or x.name in only])
    report = {**provenance.provenance(), "figures": outcomes}
    if json_path is not None:
        text = json.dumps(report, indent=2, ensure_ascii=False)
        output.write(_file(json_path), text + "\n", "--json")
    if html_path is not None:
        _write_page(console, html_path, results.parse(report, "", _known()))
    if wrong:
        console.print(*wrong, sep="\n", style="red", markup=False)
        raise typer.Exit(1)


def _measured(
    console: Console, chosen: list[figures.Figure]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure and print figures; also what is said of those that gave a wrong result."""
    table = Table("figure", "measured", "target", "result", title=provenance.device())
    outcomes, wrong = [], []
    for figure in chosen:
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
    return outcomes, wrong


def _page_of_recorded(
    only: list[str] | None, json_path: Path | None, html_path: Path | None
) -> Path:
    """The page to write; options that have no meaning where nothing is measured are refused."""
    if html_path is None:
        raise typer.BadParameter("the page needs a file: --html FILE.", param_hint="--results")
    if only or json_path is not None:
        option = "--only" if only else "--json"
        said = "is for figures that are measured; --results measures nothing."
        raise typer.BadParameter(said, param_hint=option)
    return html_path


def _known() -> dict[str, figures.Figure]:
    return {figure.name: figure for figure in FIGURES}


def _read(paths: list[Path]) -> list[results.Result]:
    try:
        return results.read(paths, _known())
    except results.ResultsError as error:
        raise typer.BadParameter(str(error), param_hint="--results") from None


def _write_page(console: Console, path: Path, *found: results.Result) -> None:
    output.write(path, page.page(list(found)), "--html")
    count = sum(len(result.rows) for result in found)
    console.print(f"Written to {path}; figures and calls: {count}", markup=False, highlight=False)
