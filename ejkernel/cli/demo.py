"""`ejkernel demo`: every operation on this machine's best platform, checked and timed."""

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

from ejkernel.cli import measure, oracle, subjects
from ejkernel.cli.subjects import Direction, Subject
from ejkernel.ops import default_executor, executor, record_invocations
from ejkernel.ops.executor import Request
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.workload import Workload

_COLUMNS = (
    "operation",
    "platform, and why",
    "configuration",
    "error vs reference",
    "time",
    "plain JAX",
    "peak memory",
)
_MOST_CALLS = 14  # with a call for each operation at least, two minutes on a CPU
_TIMED_SECONDS = 0.3


def shown(subject: Subject, most: int) -> tuple[Workload, ...]:
    """The calls worth showing: those that stand for the others, else the first ones."""
    core = tuple(call for call in subject.workloads if "core" in call.tags)
    return (core or subject.workloads)[:most]


def why(subject: Subject, direction: Direction, arguments: dict[str, Any], served: str) -> str:
    """Who else could have taken the call, or the reasons of those that could not."""
    able, reasons = subject.serving(direction, arguments)
    said = [f"{name} {reason}" for name, reason in reasons.items()]
    said += [f"chosen over {name}" for name in able if name != served]
    return "; ".join(said) or "the only one"


def _chosen(calls: dict[Any, Invocation], direction: Direction) -> tuple[str, str]:
    """Implementation and configuration of the recorded call in this direction."""
    (call,) = (call for call in calls.values() if call.direction == direction)
    choice = default_executor().chooser.choose(call)
    settings = choice.params.to_dict() if hasattr(choice.params, "to_dict") else {}
    short = {name.replace("blocksize", "").strip("_"): value for name, value in settings.items()}
    configuration = ", ".join(f"{name} {value}" for name, value in short.items())
    return subjects.label(choice.source), configuration or "-"


def _time(ours: Callable[[], Any], plain: Callable[[], Any]) -> list[float]:
    slowest = max(measure.interleaved(ours, plain, rounds=1))
    return measure.interleaved(ours, plain, rounds=max(2, min(50, int(_TIMED_SECONDS / slowest))))


def rows(subject: Subject, workload: Workload) -> tuple[list[tuple[str, ...]], bool]:
    """A row for the forward pass and one for the gradient, and whether the results are right."""
    arguments = workload.build()
    call = subject.invocation(arguments)
    run = lambda x: executor.run(call.op, x, call.spec, Request())
    reference = oracle.definition(call)
    passes: tuple[tuple[Direction, Any, Any], ...] = (
        ("forward", run, reference),
        ("backward", oracle.with_gradients(run), oracle.with_gradients(reference)),
    )
    truth = oracle.Truth(lambda seed: subject.invocation(workload.build(seed)))
    table, right = [], True
    for direction, ours, plain in passes:
        ours, plain = jax.jit(ours), jax.jit(plain)
        with record_invocations() as calls:
            compiled = ours.lower(call.inputs).compile()
        results = compiled(call.inputs)
        forward = direction == "forward"
        deviation = oracle.worst(
            truth.of_values(results, jnp.float32)
            if forward
            else truth.of_gradients(results[1], jnp.float32)
        )
        right &= deviation.fine
        mark = "" if deviation.fine else "WRONG "
        times = _time(lambda c=compiled: c(call.inputs), lambda p=plain: p(call.inputs))
        served, configuration = _chosen(calls, direction)
        title = f"{subject.name}\n  {workload.name}" if forward else "  with gradient"
        table.append(
            (
                title,
                f"{served}: {why(subject, direction, arguments, served)}",
                configuration,
                f"{mark}{deviation}",
                *(f"{seconds * 1e3:.2f} ms" for seconds in times),
                f"{measure.memory(compiled).peak / 1e6:.2f} MB",
            )
        )
    return table, right


def demo(
    op: Annotated[list[str] | None, typer.Option(help="An operation; all by default.")] = None,
) -> None:
    """Run every operation on the best platform of this machine: checked, timed, weighed."""
    chosen = subjects.chosen(op)
    most = max(1, _MOST_CALLS // len(chosen))
    calls = [(subject, call) for subject in chosen for call in shown(subject, most)]
    console = Console()
    device = jax.devices()[0]
    roomy = console.width >= 100
    columns = [
        Column(name, overflow="fold", no_wrap=roomy and name == "operation") for name in _COLUMNS
    ]
    table = Table(*columns, title=f"ejkernel on {device.device_kind} ({device.platform})")
    progress = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    task = progress.add_task("", total=len(calls))
    all_right = True
    with Live(Group(table, progress), console=console, refresh_per_second=4):
        for subject, call in calls:
            progress.update(task, description=f"{subject.name} {call.name}")
            try:
                lines, right = rows(subject, call)
            except Exception as error:  # one operation that fails must not hide the others
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                lines, right = [(f"{subject.name}\n  {call.name}", f"FAILED, {reason}")], False
            all_right &= right
            for line in lines:
                table.add_row(*line, style=None if right else "red")
            progress.advance(task)
        progress.update(task, description="done")
    if not all_right:
        raise typer.Exit(1)
