"""`ejkernel check`: every implementation against its reference, on this machine."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

from ejkernel import settings
from ejkernel.cli import oracle, output, provenance, subjects
from ejkernel.cli.oracle import Dtype
from ejkernel.cli.outcome import Outcome as Outcome
from ejkernel.cli.outcome import outcome_of
from ejkernel.cli.random_calls import run as random_calls
from ejkernel.cli.random_calls.run import CallResult, Options
from ejkernel.cli.subjects import Subject
from ejkernel.ops import executor
from ejkernel.ops.executor import Request
from ejkernel.ops.implementation import Source
from ejkernel.ops.platform import Platform, device_of
from ejkernel.ops.workload import Workload

Counts = dict[tuple[str, str], Counter[str]]


class Case(NamedTuple):
    """A named call of an operation on one implementation."""

    subject: Subject
    source: Source
    workload: Workload

    @property
    def row(self) -> tuple[str, str]:
        """The row of the table that counts it."""
        return self.subject.name, subjects.label(self.source)


def examine(case: Case, dtype: Dtype) -> Outcome:
    """Value and gradients of a workload on one platform, compared with the reference."""
    subject, source, workload = case
    if reason := source.unavailable_on(device_of(())):
        return Outcome("unsupported", reason)
    truth = oracle.Truth(lambda seed: subject.invocation(workload.build(seed)))
    call = subject.invocation(workload.build())
    request = Request(platform=source.platform.value)
    run = oracle.with_gradients(lambda x: executor.run(call.op, x, call.spec, request))
    return outcome_of(lambda: run(oracle.with_dtype(call.inputs, dtype)), truth, dtype)


def _progress(console: Console) -> Progress:
    """One line in a terminal: how many are done, and the one under way."""
    columns = (
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _examined(console: Console, cases: list[Case], dtype: Dtype) -> Iterator[tuple[Case, Outcome]]:
    """Each case with its outcome; a terminal shows the one under way."""
    with _progress(console) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=f"{' '.join(case.row)} {case.workload.name}")
            yield case, examine(case, dtype)
            progress.advance(task)


def _table(counts: Counts) -> Table:
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


def _check_names(wanted: list[str], chosen: list[Subject]) -> None:
    """Refuse a named call that no chosen operation has."""
    names = {call.name: None for subject in chosen for call in subject.workloads}
    if unknown := [name for name in wanted if name not in names]:
        said = f"no operation has a named call {unknown[0]!r}."
        if len(chosen) == 1:
            said = f"{chosen[0].name} has no named call {unknown[0]!r}; it has {', '.join(names)}."
        raise typer.BadParameter(said, param_hint="--workload")


def check(
    op: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An operation; by default all.")
    ] = None,
    platform: Annotated[
        Platform | None, typer.Option(metavar="NAME", help=f"{', '.join(Platform)}.")
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A named call; by default those of the tests."),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16.")
    ] = "float32",
    random: Annotated[
        int | None, typer.Option(min=1, help="Number of random calls, instead of named ones.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="With --random: which calls.")] = 0,
    first: Annotated[
        int, typer.Option(min=0, help="With --random: the number of the first call.")
    ] = 0,
    gradients: Annotated[bool, typer.Option(help="With --random: compare gradients, too.")] = True,
    workers: Annotated[
        int, typer.Option(min=1, help="With --random: processes that share the device.")
    ] = 1,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="With --random: also write this file.")
    ] = None,
) -> None:
    """Compare values and gradients with the reference on this machine."""
    of_named = {"--workload": bool(workload), "--dtype": dtype != "float32"}
    of_random = {"--seed": seed != 0, "--first": first != 0, "--no-gradients": not gradients}
    of_random |= {"--workers": workers > 1, "--json": json_path is not None}
    _check_options(random is not None, of_named, of_random)
    chosen = subjects.chosen(op)
    if random is not None:
        output.check(json_path, "--json")
        wanted = random_calls.indices(first, random, [x.name for x in chosen])
        _check_random(Options(seed, platform, gradients), wanted, workers, json_path)
    else:
        _check_names(workload or [], chosen)
        _check_named(_cases(chosen, platform, workload), dtype)


def _check_options(random: bool, of_named: dict[str, bool], of_random: dict[str, bool]) -> None:
    """Refuse options that are given, but belong to the other kind of calls."""
    if random and any(of_named.values()):
        raise typer.BadParameter("--random cannot be combined with --workload or --dtype.")
    for option in (name for name, given in of_random.items() if given and not random):
        raise typer.BadParameter("it is for random calls; use it with --random.", param_hint=option)


def _cases(
    chosen: list[Subject], platform: Platform | None, workload: list[str] | None
) -> list[Case]:
    """The named calls on the implementations that the options select; at least one."""
    cases = [
        Case(subject, source, call)
        for subject in chosen
        for source in subject.op.sources
        for call in subject.workloads
        if platform in (None, source.platform.value)
        and (call.name in workload if workload else "test" in call.tags)
    ]
    if not cases:
        raise typer.BadParameter("no implementation and named call match these options.")
    return cases


def _check_named(cases: list[Case], dtype: Dtype) -> None:
    """Compare named calls and print a table; exit code 1 if one is wrong."""
    console = Console()
    counts: Counts = {}
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


def _check_random(
    options: Options, wanted: list[int], workers: int, json_path: Path | None
) -> None:
    """Compare random calls; print, and record, those that are wrong as programs."""
    console = Console()
    counts: Counts = {}
    wrong: list[CallResult] = []
    with _progress(console) as progress:
        task = progress.add_task("", total=len(wanted))
        for call in random_calls.every(options, wanted, workers):
            for one in call:
                counts.setdefault((one.operation, one.label), Counter())[one.outcome.verdict] += 1
                wrong += [one] if one.outcome.verdict == "wrong" else []
            said = f"{call[0].operation} done, {len(wrong)} wrong" if call else ""
            progress.update(task, advance=1, description=said)
        programs = dict(_programs(options, wrong, workers, progress))
    if not counts:
        raise typer.BadParameter("no implementation for this device matches these options.")
    console.print(_table(dict(sorted(counts.items()))))
    for one in wrong:
        console.print(_sentence(one), style="red", markup=False, highlight=False)
        if one in programs:
            console.print(programs[one], markup=False, highlight=False, soft_wrap=True)
    total = sum(counts.values(), Counter())
    last = wanted[-1]
    console.print(
        f"seed {options.seed}, calls {wanted[0]} to {last}: {total['correct']} correct, "
        f"{total['wrong']} wrong, {total['unsupported']} unsupported",
        highlight=False,
    )
    if json_path is not None:
        record = _record(options, wanted, counts, wrong, programs)
        output.write(json_path, json.dumps(record, indent=1) + "\n", "--json")
    if wrong:
        raise typer.Exit(1)


def _sentence(one: CallResult) -> str:
    detail = " ".join(one.outcome.detail.split())
    return f"call {one.index}, {one.operation} {one.label}: {detail}"


def _programs(
    options: Options, wrong: list[CallResult], workers: int, progress: Progress
) -> Iterator[tuple[CallResult, str]]:
    """The program of the first wrong call of each operation and platform, minimised."""
    first = {(one.operation, one.platform): one for one in reversed(wrong)}
    task = progress.add_task("minimising", total=len(first), visible=bool(first))
    for one in first.values():
        if workers == 1:
            yield one, random_calls.minimised(options, one)
        else:
            yield one, random_calls.run_in_process(random_calls.minimised, options, one)
        progress.advance(task)


def _record(
    options: Options,
    wanted: list[int],
    counts: Counts,
    wrong: list[CallResult],
    programs: dict[CallResult, str],
) -> dict[str, Any]:
    """What `--json` writes; docs/cli.md documents the keys."""
    return provenance.provenance() | {
        "seed": options.seed,
        "first": wanted[0],
        "last": wanted[-1],
        "calls": len(wanted),
        "gradients": options.gradients,
        "interpreted": settings.interpret(),
        "counts": [
            {"operation": operation, "platform": label, **counts[operation, label]}
            for operation, label in sorted(counts)
        ],
        "wrong": [
            {
                "call": one.index,
                "operation": one.operation,
                "platform": one.label,
                "detail": one.outcome.detail,
                "program": programs.get(one),
            }
            for one in wrong
        ],
    }
