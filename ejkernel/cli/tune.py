"""`ejkernel tune`: measure configurations for this device and write the table that ships."""

import dataclasses
import itertools
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
from rich.markup import escape
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


def call_of(
    subject: Subject, workload: Workload, direction: subjects.Direction, dtype: Dtype
) -> Invocation:
    """A pass of a workload; integers keep the values they have."""
    call = subject.invocation(workload.build())
    inputs = oracle.with_dtype(call.inputs, dtype)
    return dataclasses.replace(call, inputs=inputs, direction=direction)


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
    """What tuning gave: a row of the table that is shown, entries of that which ships."""

    row: tuple[str, ...]
    entries: dict[Any, Any]
    failed: bool = False


@dataclasses.dataclass(frozen=True)
class Task:
    """Tunes a pass of a named call of an operation; another process gets it by pickling."""

    op: str
    dtype: Dtype
    rounds: int
    until: float | None = None  # when no call is begun any more
    lock: Path | None = None  # of the device, where several processes tune on it

    def __call__(self, name: str, direction: subjects.Direction) -> Outcome:
        if self.until is not None and time.time() > self.until:
            return Outcome((name, direction, "no time left", "", "", ""), {})
        try:
            return self._tuned(name, direction)
        except Exception as error:  # such as no memory left beside others; they go on
            return _failure(name, direction, error)

    def _tuned(self, name: str, direction: subjects.Direction) -> Outcome:
        subject = subjects.one(self.op)
        turn = None if self.lock is None else FileLock(self.lock)
        tuner = Tuner(warmup=1, iters=self.rounds, turn=turn)
        selector = ConfigSelectorChain(ConfigCache(), tuner=tuner)
        call = call_of(subject, _workloads(subject, [name])[0], direction, self.dtype)
        with settings.override(autotune_progress=True):
            tuned = selector.tune(call)
        if tuned is None:
            return Outcome((name, direction, "none works", "", "", "all"), {})
        tried = len(tuned.measurements) + len(tuned.dropped)
        fastest = f"{subjects.label(tuned.best.source)} {tuned.best.params}"
        row = (name, direction, fastest, f"{tuned.seconds * 1e3:.3f} ms", str(tried))
        # A single candidate is no choice, and nothing to remember.
        entries = {call.key: selector.cache.get(call.key)} if tried > 1 else {}
        return Outcome((*row, str(len(tuned.dropped))), entries)


def _failure(name: str, direction: str, error: Exception) -> Outcome:
    reason = escape(f"{type(error).__name__}: {error}".partition("\n")[0])
    return Outcome((name, direction, f"failed: {reason}", "", "", ""), {}, failed=True)


def _outcomes(task: Task, names: list[str], workers: int) -> Iterator[Outcome]:
    """As they come, from here or from as many processes."""
    passes = itertools.product(names, subjects.DIRECTIONS)
    if workers == 1:
        yield from itertools.starmap(task, passes)
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
        under_way = {pool.submit(task, *one): one for one in passes}
        for done in as_completed(under_way):
            # A process that was killed raises here, for itself and for those that wait.
            error = done.exception()
            if isinstance(error, Exception):
                yield _failure(*under_way[done], error)
            else:
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
    failed = 0
    for outcome in _outcomes(Task(op, dtype, rounds, until), names, workers):
        table.add_row(*outcome.row)
        # After every pass, so that whoever stops half-way keeps what is known.
        written |= set(write_tuned(output, op, outcome.entries))
        failed += outcome.failed
    console.print(table)
    for path in sorted(written):
        console.print(f"written: {path}", soft_wrap=True)
    if failed:
        hint = ": with fewer --workers each has more memory" if workers > 1 else ""
        console.print(f"{failed} of these failed{hint}.")
        raise typer.Exit(1)
    if not written:
        console.print("nothing to write: no call has more than one candidate that works.")
