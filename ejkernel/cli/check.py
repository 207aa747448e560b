"""`ejkernel check`: every implementation against its reference, on this machine."""

from typing import Annotated, Literal, NamedTuple

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ejkernel.cli import oracle, subjects
from ejkernel.cli.subjects import Subject
from ejkernel.errors import UnsupportedError
from ejkernel.ops import executor
from ejkernel.ops.executor import Request
from ejkernel.ops.implementation import Source
from ejkernel.ops.workload import Workload

Dtype = Literal["float32", "bfloat16", "float16"]


class Outcome(NamedTuple):
    """What became of one workload on one implementation."""

    verdict: Literal["right", "refused", "wrong"]
    detail: str


def examine(subject: Subject, source: Source, workload: Workload, dtype: Dtype) -> Outcome:
    """Value and gradients of a workload on one platform, compared with the reference."""
    truth = oracle.Truth(lambda seed: subject.invocation(workload.build(seed)))
    call = subject.invocation(workload.build())
    request = Request(platform=source.platform.value)
    if reason := source.elsewhere(call.device):
        return Outcome("refused", reason)
    run = oracle.with_gradients(lambda x: executor.run(call.op, x, call.spec, request))
    try:
        outputs, gradients = run(oracle.with_dtype(call.inputs, dtype))
    except UnsupportedError as refusal:
        return Outcome("refused", str(refusal))
    except Exception as error:  # a crash of one implementation must not hide the others
        return Outcome("wrong", f"{type(error).__name__}: {error}")
    for name, deviations in (
        ("value", truth.of_values(outputs, dtype)),
        ("gradient", truth.of_gradients(gradients, dtype)),
    ):
        if not (deviation := oracle.worst(deviations)).fine:
            return Outcome("wrong", f"{name} off by {deviation}")
    return Outcome("right", "")


def check(
    op: Annotated[list[str] | None, typer.Option(help="An operation; all by default.")] = None,
    platform: Annotated[str | None, typer.Option(help="Only this platform.")] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="A named call; all by default.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of the arrays.")] = "float32",
) -> None:
    """Compare every implementation with its reference: value and gradients of every named call."""
    cases = [
        (subject, source, call)
        for subject in subjects.chosen(op)
        for source in subject.op.sources
        for call in subject.workloads
        if platform in (None, source.platform.value)
        and (call.name in workload if workload else "test" in call.tags)
    ]
    if not cases:
        raise typer.BadParameter("no implementation and named call fit these options.")
    console = Console()
    counts: dict[tuple[str, str], dict[str, int]] = {}
    wrong = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        for subject, source, call in cases:
            where = (subject.name, subjects.label(source))
            progress.update(task, description=f"{' '.join(where)} {call.name}")
            outcome = examine(subject, source, call, dtype)
            row = counts.setdefault(where, {"right": 0, "refused": 0, "wrong": 0})
            row[outcome.verdict] += 1
            if outcome.verdict == "wrong":
                wrong.append(f"{' '.join(where)} {call.name}: {outcome.detail}")
            progress.advance(task)
    table = Table("operation", "implementation", "right", "refused", "wrong", title=dtype)
    for where, row in counts.items():
        table.add_row(*where, *map(str, row.values()))
    console.print(table)
    if wrong:
        console.print(*wrong, sep="\n", style="red", markup=False)
        raise typer.Exit(1)
