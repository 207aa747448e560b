"""`ejkernel demo`: every operation on this machine, checked against plain JAX and timed."""

import collections
import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from ejkernel import __version__
from ejkernel.cli import demo_rows, output, provenance, subjects
from ejkernel.cli.demo_calls import BASELINES
from ejkernel.cli.demo_rows import Comparison, Row
from ejkernel.kernels import OPS

_NAME = max(map(len, OPS))
_ROOMY = 120  # columns from which configurations and reasons are shown in the rows
_CONFIGURATION = 25
_LEGEND = "error: percent of what is allowed; speed, memory: times better than plain JAX"
_NEXT = (
    ("ejkernel info", "versions, devices and platforms"),
    ("ejkernel mask", "draw attention masks"),
    ("ejkernel check --op flash_attention", "every platform against its definition"),
)


class Failure(NamedTuple):
    """An operation that raised."""

    operation: str
    reason: str


class Problem(NamedTuple):
    """Why an operation is not correct."""

    operation: str
    text: str


def header(width: int) -> list[str]:
    """The two lines above the rows."""
    names = f"{'operation':{_NAME}} {'on':6} {'error':>5}  {'ms':>5} {'speed':>5}  {'ms':>5} "
    names += f"{'speed':>5}  {'memory':>6}"
    groups = f"{'':{_NAME + 13}}  {'forward':^11}  {'gradient':^11}".rstrip()
    if width >= _ROOMY:
        names += f"  {'configuration':{_CONFIGURATION}}  not chosen"
    return [groups[:width], names.rstrip()[:width]]


def line(row: Row | Failure, width: int) -> Text:
    """One operation in one line."""
    if isinstance(row, Failure):
        return _cut(Text(f"{row.operation:{_NAME}} FAILED {row.reason}", "red"), width)
    share = 100 * row.deviation.error / row.deviation.allowed
    text = Text(f"{row.operation:{_NAME}} {row.platforms[0]:6} ")
    if row.deviation.fine:
        text.append(f"{max(share, 1):4.0f}%", "green")
    else:
        text.append("WRONG", "bold red")
    for comparison in (row.forward, row.gradient):
        text.append(f"  {_number(comparison.seconds * 1e3):>5} ")
        text.append(f"{_times(comparison.speedup):>5}", _style(comparison))
    text.append(f"  {_times(row.memory):>6}")
    if width >= _ROOMY:
        configuration = _cut(Text(row.configuration), _CONFIGURATION).plain
        text.append(f"  {configuration:{_CONFIGURATION}}  {_reason(row)}", "dim")
    return _cut(text, width)


def verdict(rows: list[Row | Failure], seconds: float) -> str:
    """How many operations are correct, and the median speed-ups of those."""
    correct = [row for row in rows if isinstance(row, Row) and row.deviation.fine]
    text = f"{len(correct)} of {len(rows)} correct in {seconds:.0f} s"
    if correct:
        forward = statistics.median(row.forward.speedup for row in correct)
        gradient = statistics.median(row.gradient.speedup for row in correct)
        text += f"; median {forward:.1f}x as fast as plain JAX, {gradient:.1f}x with gradients"
    return text


def problems(rows: list[Row | Failure]) -> list[Problem]:
    """What is wrong, in full."""
    found = []
    for row in rows:
        if isinstance(row, Failure):
            found.append(Problem(row.operation, row.reason))
        elif not row.deviation.fine:
            found.append(Problem(row.operation, f"off by {row.deviation}"))
    return found


def platforms(rows: list[Row | Failure]) -> list[str]:
    """The platforms that ran and the devices that others need; then why others did not run."""
    measured = [row for row in rows if isinstance(row, Row)]
    counts = collections.Counter(_platforms(row) for row in measured)
    missing = sorted({device for row in measured for device in row.missing})
    lines = [", ".join(f"{name} for {count} of {len(rows)}" for name, count in counts.items())]
    if missing:
        lines[0] += f"; no {', '.join(missing)}"
    reasons = collections.Counter(reason for row in measured for reason in row.unavailable)
    return lines[: len(measured)] + [f"{text} ({n} of {len(rows)})" for text, n in reasons.items()]


def _platforms(row: Row) -> str:
    forward, backward = row.platforms
    return forward if forward == backward else f"{forward} with gradients by {backward}"


def _reason(row: Row) -> str:
    missing = [f"no {', '.join(row.missing)}"] if row.missing else []
    return "; ".join([*missing, *row.unavailable])


class Screen:
    """Rows above a progress bar in a terminal; the rows alone elsewhere."""

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            expand=True,
            disable=not console.is_terminal or console.is_dumb_terminal,
        )
        self._task = self._progress.add_task("starting", total=total)

    def __enter__(self) -> "Screen":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def report(self, operation: str, step: str) -> None:
        """Say what is happening."""
        self._progress.update(self._task, description=f"{operation}: {step}", refresh=True)

    def add(self, row: Row | Failure) -> None:
        """Show a finished operation."""
        self.print(line(row, self.console.width))
        self._progress.update(self._task, advance=1, refresh=True)

    def print(self, text: str | Text, style: str = "", wrap: bool = False) -> None:
        """One line, cut at the edge of the screen unless it may wrap."""
        self.console.print(
            text, style=style, markup=False, highlight=False, no_wrap=not wrap, crop=not wrap
        )


def demo(
    op: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An operation; all by default.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the rows to this file.")
    ] = None,
) -> None:
    """Run every operation and compare it with plain JAX."""
    output.check(json_path, "--json")
    names = [subject.name for subject in subjects.chosen(op)]
    screen = Screen(Console(), len(names))
    began = time.perf_counter()
    rows: list[Row | Failure] = []
    _print_top(screen)
    try:
        with screen:
            for name in names:
                rows.append(_measured(name, screen))
                screen.add(rows[-1])
    except BaseException as stop:
        if not isinstance(stop, Exception):  # Ctrl-C
            screen.print(f"Interrupted after {len(rows)} of {len(names)} operations.")
        raise
    seconds = time.perf_counter() - began
    _print_bottom(screen, rows, seconds)
    if json_path is not None:
        record = provenance.provenance() | {"seconds": seconds, "rows": _recorded(rows)}
        output.write(json_path, json.dumps(record, indent=1) + "\n", "--json")
    if problems(rows):
        raise typer.Exit(1)


def _recorded(rows: list[Row | Failure]) -> dict[str, dict[str, Any]]:
    """What each operation measured, by name; a failure has its reason alone."""
    return {
        row.operation: {"failed": row.reason}
        if isinstance(row, Failure)
        else {
            "platforms": row.platforms,
            "error": row.deviation.error,
            "allowed": row.deviation.allowed,
            "seconds": row.forward.seconds,
            "speedup": row.forward.speedup,
            "gradient_seconds": row.gradient.seconds,
            "gradient_speedup": row.gradient.speedup,
            "memory": row.memory,
        }
        for row in rows
    }


def _measured(name: str, screen: Screen) -> Row | Failure:
    try:
        return demo_rows.measure_row(name, BASELINES[name], lambda step: screen.report(name, step))
    except Exception as error:  # one operation that fails must not hide the others
        return Failure(name, " ".join(f"{type(error).__name__}: {error}".split()))


def _print_top(screen: Screen) -> None:
    device = jax.devices()[0]
    dtype = jnp.dtype(demo_rows.default_dtype()).name
    screen.print(
        f"ejkernel {__version__}, JAX {jax.__version__}, {device.device_kind}, {dtype}", "bold"
    )
    for text in header(screen.console.width):
        screen.print(text, "dim")


def _print_bottom(screen: Screen, rows: list[Row | Failure], seconds: float) -> None:
    screen.print(_LEGEND, "dim")
    for text in platforms(rows):
        screen.print(text, "dim", wrap=True)
    for problem in problems(rows):
        screen.print(f"{problem.operation}: {problem.text}", "red", wrap=True)
    screen.print(verdict(rows, seconds), "red" if problems(rows) else "bold green", wrap=True)
    for index, (command, what) in enumerate(_NEXT):
        screen.print(f"{'' if index else 'Next:':5} {command:36} {what}")


def _cut(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    return text


def _number(value: float) -> str:
    """Three digits in at most five characters."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _times(ratio: float) -> str:
    return f"{_number(ratio) if ratio < 9.995 else f'{ratio:.0f}'}x"


def _style(comparison: Comparison) -> str:
    return "green" if comparison.speedup >= 1 else "yellow"
