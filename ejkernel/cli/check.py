"""`ejkernel check`: every implementation against its reference, on this machine."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

from ejkernel.cli import oracle, subjects
from ejkernel.cli.subjects import Subject
from ejkernel.errors import UnsupportedError
from ejkernel.ops import executor
from ejkernel.ops.executor import Request
from ejkernel.ops.implementation import Source
from ejkernel.ops.platform import device_of
from ejkernel.ops.workload import Workload

Dtype = Literal["float32", "bfloat16", "float16"]


class Case(NamedTuple):
    """A named call of an operation on one implementation."""

    subject: Subject
    source: Source
    workload: Workload

    @property
    def row(self) -> tuple[str, str]:
        """The row of the table that counts it."""
        return self.subject.name, subjects.label(self.source)


class Outcome(NamedTuple):
    """The result of one case."""

    verdict: Literal["correct", "unsupported", "wrong"]
    detail: str


def examine(case: Case, dtype: Dtype) -> Outcome:
    """Value and gradients of a workload on one platform, compared with the reference."""
    subject, source, workload = case
    if reason := source.unavailable_on(device_of(())):
        return Outcome("unsupported", reason)
    truth = oracle.Truth(lambda seed: subject.invocation(workload.build(seed)))
    call = subject.invocation(workload.build())
    request = Request(platform=source.platform.value)
    run = oracle.with_gradients(lambda x: executor.run(call.op, x, call.spec, request))
    try:
        outputs, gradients = run(oracle.with_dtype(call.inputs, dtype))
    except UnsupportedError as refusal:
        return Outcome("unsupported", str(refusal))
    except Exception as error:  # a crash of one implementation must not hide the others
        return Outcome("wrong", f"{type(error).__name__}: {error}")
    for name, deviations in (
        ("value", truth.of_values(outputs, dtype)),
        ("gradient", truth.of_gradients(gradients, dtype)),
    ):
        if not (deviation := oracle.worst(deviations)).fine:
            return Outcome("wrong", f"{name} off by {deviation}")
    return Outcome("correct", "")


def _examined(console: Console, cases: list[Case], dtype: Dtype) -> Iterator[tuple[Case, Outcome]]:
    """Each case with its outcome; a terminal shows the one under way."""
    columns = (
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=f"{' '.join(case.row)} {case.workload.name}")
            yield case, examine(case, dtype)
            progress.advance(task)


def _table(counts: dict[tuple[str, str], Counter[str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("operation", "platform"):
        table.add_column(name, no_wrap=True)
    verdicts = get_args(Outcome.__annotations__["verdict"])
    for name in verdicts:
        table.add_column(name, justify="right", no_wrap=True)
    for row, count in counts.items():
        style = "red" if count["wrong"] else None
        table.add_row(*row, *(str(count[name]) for name in verdicts), style=style)
    return table


def check(
    op: Annotated[list[str] | None, typer.Option(help="An operation; by default all.")] = None,
    platform: Annotated[str | None, typer.Option(help="Only this platform.")] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="A named call; by default all.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of the arrays.")] = "float32",
) -> None:
    """Compare values and gradients with the reference on this machine."""
    cases = [
        Case(subject, source, call)
        for subject in subjects.chosen(op)
        for source in subject.op.sources
        for call in subject.workloads
        if platform in (None, source.platform.value)
        and (call.name in workload if workload else "test" in call.tags)
    ]
    if not cases:
        raise typer.BadParameter("no implementation and named call match these options.")
    console = Console()
    counts: dict[tuple[str, str], Counter[str]] = {}
    wrong = []
    for case, outcome in _examined(console, cases, dtype):
        counts.setdefault(case.row, Counter())[outcome.verdict] += 1
        if outcome.verdict == "wrong":
            wrong.append(f"{' '.join(case.row)} {case.workload.name}: {outcome.detail}")
    console.print(_table(counts))
    for line in wrong:
        console.print(line, style="red", markup=False, highlight=False)
    total = sum(counts.values(), Counter())
    console.print(
        f"{dtype}: {total['correct']} correct, {total['wrong']} wrong, "
        f"{total['unsupported']} unsupported on this device",
        highlight=False,
    )
    if wrong:
        raise typer.Exit(1)
