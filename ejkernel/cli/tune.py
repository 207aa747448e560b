"""`ejkernel tune`: measure configurations for this device and keep the fastest."""

import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import typer
from filelock import FileLock
from rich.console import Console

from ejkernel import settings
from ejkernel.cli import oracle, subjects
from ejkernel.cli.info import SHIPPED
from ejkernel.cli.oracle import Dtype
from ejkernel.cli.progress import TuningProgress
from ejkernel.cli.subjects import Direction, Subject
from ejkernel.errors import CacheWarning, TuningWarning
from ejkernel.ops import ConfigCache, ConfigSelectorChain, PersistentCache, Tuner
from ejkernel.ops.autotuning import calls_of
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.persistent import read_table, write_tuned
from ejkernel.ops.tuner import Progress, Tuned, describe
from ejkernel.ops.workload import Workload

Entries = dict[Any, Any]
Report = Callable[[str, Progress], None]


class Pass(NamedTuple):
    """One direction of a named call."""

    call: str
    direction: Direction

    def __str__(self) -> str:
        return f"{self.call} {self.direction}"


class Outcome(NamedTuple):
    """What tuning a pass gave: a sentence for the user and entries for the table."""

    said: str
    entries: Entries
    failed: bool = False


def call_of(subject: Subject, workload: Workload, direction: Direction, dtype: Dtype) -> Invocation:
    """A pass of a workload; integers keep the values they have."""
    call = subject.invocation(workload.build())
    inputs = oracle.with_dtype(call.inputs, dtype)
    return dataclasses.replace(call, inputs=inputs, direction=direction)


def _workloads(subject: Subject, names: list[str] | None) -> list[Workload]:
    known = {call.name: call for call in subject.workloads}
    if not names:
        marked = [call for call in subject.workloads if "tune" in call.tags]
        if not marked:
            raise typer.BadParameter(
                f"no named call of {subject.name} is marked for tuning; choose some with "
                f"--workload from {', '.join(known)}."
            )
        return marked
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(
            f"{subject.name} has no named call {', '.join(unknown)}; it has {', '.join(known)}."
        )
    return [known[name] for name in names]


def _passes(subject: Subject, workloads: list[Workload], dtype: Dtype) -> list[Pass]:
    """The passes that leave a choice: more than one candidate runs on this device."""
    selector = ConfigSelectorChain(ConfigCache())
    found = []

    def look(workload: Workload, direction: Direction) -> None:
        if len(selector.candidates(call_of(subject, workload, direction, dtype))) > 1:
            found.append(Pass(workload.name, direction))

    for one in itertools.product(workloads, subjects.DIRECTIONS):
        jax.eval_shape(lambda one=one: look(*one))  # only shapes matter: nothing is allocated
    return found


@dataclasses.dataclass(frozen=True)
class Task:
    """Tunes a pass of a named call of an operation; another process gets it by pickling."""

    op: str
    dtype: Dtype
    rounds: int
    until: float | None = None  # when no call is begun any more
    lock: Path | None = None  # of the device, where several processes tune on it

    def __call__(self, one: Pass, report: Report) -> Outcome:
        if self.until is not None and time.time() > self.until:
            return Outcome(f"{one}: not tuned, no time left", {})
        try:
            return self._tuned(one, report)
        except Exception as error:  # such as no memory left; the other passes go on
            return _failure(one, error)

    def _tuned(self, one: Pass, report: Report) -> Outcome:
        subject = subjects.one(self.op)
        tuner = Tuner(
            warmup=1,
            iters=self.rounds,
            device_lock=None if self.lock is None else FileLock(self.lock),
            report=lambda progress: report(str(one), progress),
        )
        selector = ConfigSelectorChain(ConfigCache(), tuner=tuner)
        workload = _workloads(subject, [one.call])[0]
        call = call_of(subject, workload, one.direction, self.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TuningWarning)  # the outcome names the dropped ones
            tuned = selector.tune(call)
        if tuned is None:
            return Outcome(f"{one}: failed, no candidate works", {}, failed=True)
        return Outcome(_said(str(one), tuned), {call.key: selector.cache.get(call.key)})


def _said(name: str, tuned: Tuned) -> str:
    """The outcome of a pass in a line."""
    tried = len(tuned.measurements) + len(tuned.dropped)
    said = f"{name}: {tuned.seconds * 1e3:.3f} ms, {describe(tuned.best)}; best of {tried}"
    if tuned.dropped:
        choice, reason = tuned.dropped[0]
        said += f", {len(tuned.dropped)} dropped, e.g. {describe(choice)}: {reason}"
    return said


def _failure(one: Pass, error: BaseException) -> Outcome:
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    return Outcome(f"{one}: failed, {reason}", {}, failed=True)


def _outcomes(
    task: Task, passes: list[Pass], workers: int, report: Report
) -> Generator[tuple[Pass, Outcome]]:
    """As they come, from this process or from several."""
    if workers == 1:
        yield from ((one, task(one, report)) for one in passes)
        return
    # Each takes what it needs of the device's memory, not most of it as it would alone.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with tempfile.TemporaryDirectory() as folder:
        task = dataclasses.replace(task, lock=Path(folder) / "device.lock")
        again = []
        # Closed, and with it the processes, before the folder of the lock is removed.
        with contextlib.closing(_from_processes(task, passes, workers, report)) as found:
            for one, outcome in found:
                if isinstance(outcome, BrokenProcessPool):
                    again.append(one)
                else:
                    yield one, outcome
        # One dead worker breaks the pool; retry unfinished passes in separate processes.
        for pass_ in again:
            with contextlib.closing(_from_processes(task, [pass_], 1, report)) as found:
                for one, outcome in found:
                    if isinstance(outcome, BrokenProcessPool):
                        outcome = _failure(one, outcome)
                    yield one, outcome


def _from_processes(
    task: Task, passes: list[Pass], workers: int, report: Report
) -> Generator[tuple[Pass, Outcome | BrokenProcessPool]]:
    """The outcome of each pass, or `BrokenProcessPool` where a process died."""
    with _pool(workers, report) as pool:
        under_way, unsubmitted = {}, []
        with _interrupts_held_back():
            for one in passes:
                try:
                    under_way[pool.submit(_in_worker, task, one)] = one
                except BrokenProcessPool as error:  # a worker has died already
                    unsubmitted.append((one, error))
        yield from unsubmitted
        for done in as_completed(under_way):
            one, error = under_way[done], done.exception()
            if isinstance(error, BrokenProcessPool):
                yield one, error
            else:
                yield one, done.result() if error is None else _failure(one, error)


@contextlib.contextmanager
def _pool(workers: int, report: Report) -> Iterator[ProcessPoolExecutor]:
    """Processes whose progress is reported here; they end with the block, however it ends."""
    context = multiprocessing.get_context("spawn")
    events = context.SimpleQueue()

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):  # closed here, with every worker ended
            while True:
                report(*events.get())

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    pool = ProcessPoolExecutor(
        workers,
        mp_context=context,
        initializer=_connect,
        initargs=(events,),
        max_tasks_per_child=1,
    )
    try:
        yield pool
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        events.close()
        listener.join(timeout=1)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Processes and threads started here leave Ctrl-C to this process, which ends them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_EVENTS: Any = None  # in a worker process: where its progress goes


def _connect(events: SimpleQueue) -> None:
    global _EVENTS
    _EVENTS = events


def _in_worker(task: Task, one: Pass) -> Outcome:
    return task(one, lambda *event: _EVENTS.put(event))


def _write(op: str, entries: Entries, folder: Path | None) -> set[Path]:
    """Merge entries into the user's cache, or into the tables of a folder; the files written."""
    if not entries:
        return set()
    if folder is not None:
        try:
            return set(write_tuned(folder, op, entries))
        except (OSError, ValueError) as error:
            typer.echo(f"ejkernel: cannot write the table of {op} in {folder}: {error}", err=True)
            return set()
    cache = PersistentCache(op)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CacheWarning)
        cache.update(entries)
    for warning in caught:
        typer.echo(f"ejkernel: {warning.message}", err=True)
    with contextlib.suppress(OSError, ValueError):
        if entries.keys() <= read_table(cache.path).keys():
            return {cache.path}
    return set()


def tune(
    op: Annotated[
        str,
        typer.Argument(
            metavar="OP | PATH.py:FUNCTION",
            help="An operation, or a function whose calls of operations are tuned.",
        ),
    ],
    workload: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A named call; by default those marked for tuning."),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16.")
    ] = "bfloat16",
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Start no pass after this many seconds.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each candidate.")] = 10,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that compile; one at a time uses the device.")
    ] = 1,
    ship: Annotated[
        bool, typer.Option("--ship", help="For maintainers: write the table of the package.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="With --ship: another folder of tables.")
    ] = None,
) -> None:
    """Tune an operation for this device; results go to your cache.

    For PATH.py:FUNCTION the file also defines `arguments`: the arguments of
    the function as a tuple, or a function that returns them. Of the options
    only --rounds applies to it.
    """
    if output is not None and not ship:
        raise typer.BadParameter("--output is a folder of shipped tables; use it with --ship.")
    if ".py:" in op:
        if workload or ship or workers > 1 or seconds is not None or dtype != "bfloat16":
            raise typer.BadParameter("PATH.py:FUNCTION takes no option but --rounds.")
        _tune_function(op, rounds)
        return
    if op.endswith(".py"):
        raise typer.BadParameter(f"{op} names no function: {op}:FUNCTION.")
    folder = (output or SHIPPED) if ship else None
    _tune_operation(Task(op, dtype, rounds), workload, seconds, workers, folder)


def _tune_operation(
    task: Task,
    workload: list[str] | None,
    seconds: float | None,
    workers: int,
    folder: Path | None,
) -> None:
    """Tune the named calls of an operation, for the user's cache or the tables of a folder."""
    op = task.op
    subject = subjects.one(op)
    workloads = _workloads(subject, workload)
    passes = _passes(subject, workloads, task.dtype)
    console = Console()
    if not passes:
        kind = jax.devices()[0].device_kind
        console.print(f"Nothing to tune: {op} has a single candidate per call on {kind}.")
        return
    if skipped := len(workloads) * len(subjects.DIRECTIONS) - len(passes):
        console.print(f"Passes with a single candidate, skipped: {skipped}", highlight=False)
    if seconds is not None:
        task = dataclasses.replace(task, until=time.time() + seconds)
    progress = TuningProgress(len(passes), console)
    paths: set[Path] = set()
    tuned = failed = 0
    outcomes = contextlib.closing(_outcomes(task, passes, workers, progress.update))
    with progress.shown(), outcomes as found:
        for one, outcome in found:
            progress.finish(str(one))
            console.print(outcome.said, markup=False, highlight=False)
            # After every pass: what has been measured stays, whenever tuning is stopped.
            paths |= _write(op, outcome.entries, folder)
            tuned += len(outcome.entries)
            failed += outcome.failed
    _conclude(console, tuned, failed, paths, folder is not None, workers)


def _tune_function(place: str, rounds: int) -> None:
    """Tune the calls that a function of a file makes."""
    function, args = _function_of(place)
    try:
        calls = calls_of(function, *args)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console()
    progress = TuningProgress(len(calls), console)
    failed = 0
    with progress.shown():
        for call in calls:
            name = call.op.identifier(call.direction).partition("@")[0]
            tuner = Tuner(iters=rounds, report=functools.partial(progress.update, name))
            selector = ConfigSelectorChain(ConfigCache(), tuner=tuner, persistent=PersistentCache)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TuningWarning)  # `_said` names the dropped ones
                tuned = selector.tune(call)
            progress.finish(name)
            failed += tuned is None
            said = f"{name}: failed, no candidate works" if tuned is None else _said(name, tuned)
            console.print(said, markup=False, highlight=False)
    console.print(
        f"Calls tuned: {len(calls) - failed}. Later calls of these shapes find the configurations "
        f"in {settings.cache_dir()}.",
        soft_wrap=True,
        highlight=False,
    )
    if failed:
        raise typer.Exit(1)


def _function_of(place: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that PATH.py:FUNCTION names, and its arguments."""
    path, _, name = place.rpartition(":")
    if not Path(path).is_file():
        raise typer.BadParameter(f"there is no file {path}.")
    sys.path.insert(0, str(Path(path).resolve().parent))  # it may import its neighbours
    names = runpy.run_path(path)
    if not callable(names.get(name)):
        raise typer.BadParameter(f"{path} defines no function {name}.")
    arguments = names.get("arguments")
    if arguments is None:
        raise typer.BadParameter(
            f"{path} must define `arguments`: a tuple of the arguments of {name}, or a function "
            "that returns one."
        )
    if callable(arguments):
        arguments = arguments()
    if not isinstance(arguments, tuple):
        raise typer.BadParameter(
            f"`arguments` of {path} must be a tuple, got {type(arguments).__name__}."
        )
    return names[name], arguments


def _conclude(
    console: Console, tuned: int, failed: int, paths: set[Path], ship: bool, workers: int
) -> None:
    """Say where the results are and what to do with them; exit code 1 if something failed."""
    if paths:
        console.print(f"Configurations written: {tuned}")
        for path in sorted(paths):
            console.print(f"  {path}", soft_wrap=True, highlight=False)
    if paths and not ship:
        console.print(
            "Calls of these shapes use them from now on. To see or remove them, open or delete the "
            "file; `ejkernel info` counts them.",
            highlight=False,
        )
    if failed:
        hint = ": with fewer --workers each has more memory" if workers > 1 else ""
        console.print(f"Failed passes: {failed}{hint}.")
    elif tuned and not paths:
        console.print("The configurations could not be written.")
    elif not tuned:
        console.print("No configuration was written.")
    if failed or (tuned and not paths):
        raise typer.Exit(1)
