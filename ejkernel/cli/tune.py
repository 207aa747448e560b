"""`ejkernel tune`: measure configurations for this device and write the table that ships."""

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import ejkernel
from ejkernel import settings
from ejkernel.cli import oracle, subjects
from ejkernel.cli.check import Dtype
from ejkernel.cli.subjects import Subject
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Tuner
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.persistent import write_tuned
from ejkernel.ops.workload import Workload

SHIPPED = Path(ejkernel.__file__).parent / "data" / "tuned"


def calls_of(subject: Subject, workload: Workload, dtype: Dtype) -> list[Invocation]:
    """The forward and the backward pass of a workload; integers keep the values they have."""
    call = subject.invocation(workload.build())
    inputs = oracle.with_dtype(call.inputs, dtype)
    return [
        dataclasses.replace(call, inputs=inputs, direction=direction)
        for direction in subjects.DIRECTIONS
    ]


def _workloads(subject: Subject, names: list[str] | None) -> list[Workload]:
    if not names:
        marked = [call for call in subject.workloads if "tune" in call.tags]
        if not marked:
            raise typer.BadParameter(
                f"no named call of {subject.name} is marked for tuning; name some with --workload."
            )
        return marked
    known = {call.name: call for call in subject.workloads}
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(
            f"{subject.name} has no named call {', '.join(unknown)}; it has {', '.join(known)}."
        )
    return [known[name] for name in names]


def tune(
    op: Annotated[str, typer.Argument(help="The operation.")],
    workload: Annotated[
        list[str] | None, typer.Option(help="A named call; those marked for tuning by default.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of the arrays.")] = "bfloat16",
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Begin no call after so many seconds.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each candidate.")] = 10,
    output: Annotated[Path, typer.Option(help="Folder of the tables.")] = SHIPPED,
) -> None:
    """Tune named calls of an operation for this device and write the table that ships."""
    subject = subjects.one(op)
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(warmup=1, iters=rounds))
    console = Console()
    table = Table("call", "pass", "fastest", "time", "candidates", "dropped", title=op)
    written: set[Path] = set()
    begin = time.monotonic()
    with settings.override(autotune_progress=True):
        for one in _workloads(subject, workload):
            if seconds is not None and time.monotonic() - begin > seconds:
                table.add_row(one.name, "", "no time left", "", "", "")
                continue
            entries = {}
            for call in calls_of(subject, one, dtype):
                tuned = selector.tune(call)
                if tuned is None:
                    table.add_row(one.name, call.direction, "none works", "", "", "all")
                    continue
                tried = len(tuned.measurements) + len(tuned.dropped)
                fastest = f"{subjects.label(tuned.best.source)} {tuned.best.params}"
                if tried > 1:  # a single candidate is no choice, and nothing to remember
                    entries[call.key] = selector.cache.get(call.key)
                numbers = (f"{tuned.seconds * 1e3:.3f} ms", str(tried), str(len(tuned.dropped)))
                table.add_row(one.name, call.direction, fastest, *numbers)
            # After every call, so that whoever stops half-way keeps what is known.
            written |= set(write_tuned(output, subject.name, entries))
    console.print(table)
    for path in sorted(written):
        console.print(f"written: {path}", soft_wrap=True)
    if not written:
        console.print("nothing to write: no call has more than one candidate that works.")
