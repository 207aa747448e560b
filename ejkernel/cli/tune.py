"""`ejkernel tune`: measure configurations for this device and write the table that ships."""

import dataclasses
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from filelock import FileLock
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


class Outcome(NamedTuple):
    """What tuning a named call gave: rows of the table shown, entries of that which ships."""

    rows: list[tuple[str, ...]]
    entries: dict[Any, Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """Tunes named calls of an operation; a process of its own gets it by pickling."""

    op: str
    dtype: Dtype
    rounds: int
    until: float | None = None  # when no call is begun any more
    lock: Path | None = None  # of the device, where several processes tune on it

    def __call__(self, name: str) -> Outcome:
        if self.until is not None and time.time() > self.until:
            return Outcome([(name, "", "no time left", "", "", "")], {})
        subject = subjects.one(self.op)
        turn = None if self.lock is None else FileLock(self.lock)
        tuner = Tuner(warmup=1, iters=self.rounds, turn=turn)
        selector = ConfigSelectorChain(ConfigCache(), tuner=tuner)
        rows, entries = [], {}
        with settings.override(autotune_progress=True):
            for call in calls_of(subject, _workloads(subject, [name])[0], self.dtype):
                tuned = selector.tune(call)
                if tuned is None:
                    rows.append((name, call.direction, "none works", "", "", "all"))
                    continue
                tried = len(tuned.measurements) + len(tuned.dropped)
                fastest = f"{subjects.label(tuned.best.source)} {tuned.best.params}"
                if tried > 1:  # a single candidate is no choice, and nothing to remember
                    entries[call.key] = selector.cache.get(call.key)
                numbers = (f"{tuned.seconds * 1e3:.3f} ms", str(tried), str(len(tuned.dropped)))
                rows.append((name, call.direction, fastest, *numbers))
        return Outcome(rows, entries)


def _outcomes(task: Task, names: list[str], workers: int) -> Iterator[Outcome]:
    """As they come, from here or from as many processes."""
    if workers == 1:
        yield from map(task, names)
        return
    # Each takes what it needs of the device's memory, not most of it as it would alone.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
        ) as pool,
    ):
        task = dataclasses.replace(task, lock=Path(folder) / "device.lock")
        for done in as_completed(pool.submit(task, name) for name in names):
            yield done.result()


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
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that compile; one at a time uses the device.")
    ] = 1,
    output: Annotated[Path, typer.Option(help="Folder of the tables.")] = SHIPPED,
) -> None:
    """Tune named calls of an operation for this device and write the table that ships."""
    names = [one.name for one in _workloads(subjects.one(op), workload)]
    until = None if seconds is None else time.time() + seconds
    console = Console()
    table = Table("call", "pass", "fastest", "time", "candidates", "dropped", title=op)
    written: set[Path] = set()
    for outcome in _outcomes(Task(op, dtype, rounds, until), names, workers):
        for row in outcome.rows:
            table.add_row(*row)
        # After every call, so that whoever stops half-way keeps what is known.
        written |= set(write_tuned(output, op, outcome.entries))
    console.print(table)
    for path in sorted(written):
        console.print(f"written: {path}", soft_wrap=True)
    if not written:
        console.print("nothing to write: no call has more than one candidate that works.")
