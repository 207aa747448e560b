"""How much slower the heuristics are than the fastest configuration, on calls drawn at random.

python benchmarks/regret.py --json benchmarks/results/h200/regret.json
python benchmarks/regret.py --ops flash_attention --first 20 --count 20 --workers 5 --minutes 6
python benchmarks/regret.py --summary --json benchmarks/results/h200/regret.json

Call number i of an operation is always the same one, so that several runs add up: passes that the
file holds already are not measured again, and each names the run (device, versions, commit) that
measured it. Of each call every candidate is checked and timed, forward and
backward; the fastest and the heuristic's choice are then timed again, interleaved. The regret is
the time of the latter over that of the former, minus one; zero where they are the same.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from filelock import FileLock
from regret_calls import OPS, draw

from ejkernel import modules
from ejkernel.cli.provenance import provenance
from ejkernel.errors import TuningWarning
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Tuner
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.tuner import describe

Task = tuple[str, int, str]  # operation, number and direction of a pass
DIRECTIONS = ("forward", "backward")


def call(op: str, number: int) -> Invocation:
    """The call of this number, with shapes in place of arrays of floats."""
    arrays, rest = draw(op, number)
    executor = Executor(ConfigSelectorChain(ConfigCache()))
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in arrays.items()}
    inv = executor.invocation(getattr(modules, op), **zeros, **rest)
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_float(x) else x
    return dataclasses.replace(inv, inputs=jax.tree.map(shape, inv.inputs))


def measured(inv: Invocation, lock: Path) -> dict[str, Any]:
    """The times of all candidates, and the regret of the heuristic."""
    tuner = Tuner(device_lock=FileLock(lock), report=lambda _: None)
    selector = ConfigSelectorChain(ConfigCache(), tuner=tuner)
    choices = selector.candidates(inv)
    row: dict[str, Any] = {"heuristic": describe(choices[0]), "candidates": len(choices)}
    if len(choices) == 1:
        return row | {"best": row["heuristic"], "regret": 0.0}
    start = time.perf_counter()
    tuned = tuner.autotune(inv, choices)
    row["seconds"] = round(time.perf_counter() - start, 2)
    if tuned is None:
        return row | {"failed": "no candidate ran"}
    row["times"] = {describe(choice): seconds for choice, seconds in tuned.measurements}
    row["dropped"] = {describe(choice): reason[:200] for choice, reason in tuned.dropped}
    row["best"] = describe(tuned.best)
    if tuned.best is choices[0]:
        return row | {"regret": 0.0}
    again = tuner.compare(inv, [tuned.best, choices[0]])
    if again is None or len(again.measurements) < 2:
        return row | {"failed": "the heuristic's choice does not run"}
    best, guess = (seconds for _, seconds in again.measurements)
    return row | {"regret": max(0.0, guess / best - 1)}


def shapes(inv: Invocation) -> str:
    """The call in one line."""
    named = zip(getattr(inv.inputs, "_fields", ()), inv.inputs, strict=False)
    arrays = [f"{name}{list(x.shape)}" for name, x in named if hasattr(x, "shape")]
    mask = getattr(inv.inputs, "mask", None)
    return " ".join(arrays) + ("" if mask is None else f" {mask!r}")


def work(tasks: list[Task], results: Path, lock: Path, until: float) -> None:
    """Measure some passes in this process; each is a line of the file."""
    warnings.simplefilter("ignore", TuningWarning)
    for op, number, direction in tasks:
        if time.time() > until:
            return
        row: dict[str, Any] = {"op": op, "number": number, "direction": direction}
        try:
            inv = dataclasses.replace(call(op, number), direction=direction)
            supported, _ = inv.op.supporting(direction, inv.inputs, inv.spec, inv.device, None)
            row["call"] = shapes(inv)
            if inv.op.backward_follows_forward and direction == "backward":
                row["nothing"] = "it runs as the forward pass does"
            elif not supported:
                row["nothing"] = "no platform supports it"
            else:
                row |= measured(inv, lock)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        with FileLock(f"{results}.lock"), results.open("a") as file:
            file.write(json.dumps(row) + "\n")


def task_of(row: dict[str, Any]) -> Task:
    return row["op"], row["number"], row["direction"]


def missing(rows: list[dict[str, Any]], wanted: list[tuple[str, int]]) -> list[Task]:
    """The passes of these calls that no run has measured; one that failed is tried again."""
    known = {task_of(row) for row in rows if "failed" not in row}
    passes = [(op, number, direction) for op, number in wanted for direction in DIRECTIONS]
    return [x for x in passes if x not in known]


def merged(
    before: dict[str, Any], rows: list[dict[str, Any]], run: dict[str, Any]
) -> dict[str, Any]:
    """What the file holds after one more run: each row names the place of its run in `runs`."""
    runs = [*before["runs"], run]
    new = {task_of(row): row | {"run": len(runs) - 1} for row in rows}
    old = {task_of(row): row for row in before["calls"]}
    return {"runs": runs, "calls": list((old | new).values())}


def summary(rows: list[dict[str, Any]]) -> None:
    """Median and 90th percentile of the regret, by operation and direction."""
    print(f"{'operation':28}{'pass':10}{'calls':>6}{'median':>9}{'90th':>9}{'worst':>9}  failed")
    for op in OPS:
        for direction in DIRECTIONS:
            some = [x for x in rows if (x["op"], x["direction"]) == (op, direction)]
            some = [x for x in some if "nothing" not in x]
            found = sorted(x["regret"] for x in some if "regret" in x)
            if not some:
                continue
            figures = (
                ""
                if not found
                else "".join(
                    f"{100 * x:8.1f}%"
                    for x in (statistics.median(found), float(np.quantile(found, 0.9)), found[-1])
                )
            )
            print(f"{op:28}{direction:10}{len(found):6d}{figures}  {len(some) - len(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--summary", action="store_true", help="of what the file holds, only")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        task = json.loads(options.work)
        work(task["tasks"], Path(task["results"]), Path(task["lock"]), task["until"])
        return
    held: dict[str, Any] = {"runs": [], "calls": []}
    with contextlib.suppress(FileNotFoundError):
        held = json.loads(options.json.read_text())
    if not options.summary:
        wanted = [
            (op, i)
            for op in options.ops.split(",")
            for i in range(options.first, options.first + (options.count or OPS[op][1]))
        ]
        tasks = missing(held["calls"], wanted)
        rows = run(tasks, options.workers, time.time() + 60 * options.minutes)
        if rows:
            held = merged(held, rows, provenance())
            options.json.write_text(json.dumps(held, indent=1) + "\n")
    summary(held["calls"])


def run(tasks: list[Task], workers: int, until: float) -> list[dict[str, Any]]:
    """Measure with several processes: all compile, one at a time uses the device."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        results.touch()
        processes = []
        for i in range(workers):
            task = {
                "tasks": tasks[i::workers],
                "results": str(results),
                "lock": f"{folder}/device.lock",
                "until": until,
            }
            command = [sys.executable, __file__, "--json", "none", "--work", json.dumps(task)]
            processes.append(subprocess.Popen(command, env=environment))
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(1.0, until + 30 - time.time()))
            process.kill()
        return [json.loads(line) for line in results.read_text().splitlines()]


if __name__ == "__main__":
    main()
