"""What the benchmarks of single operations on a GPU share: checks, interleaved timings, reports."""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from programs import interleaved

from ejkernel.cli.provenance import provenance
from ejkernel.ops import default_executor, policy_override

PASSES = ("forward", "gradients")
_REPEATS = 20


class Program(NamedTuple):
    """An implementation of one pass.

    Attributes:
        check: () -> {"errors": ...} or {"wrong": ...}; None: it is not checked.
        seconds: times one call.
        run: () -> results whose bits must be the same in every run; None: they may differ.
    """

    check: Callable[[], dict[str, Any]] | None
    seconds: Callable[[], float]
    run: Callable[[], Any] | None = None


def gives_equal_bits(run: Callable[[], Any], repeats: int = _REPEATS) -> bool:
    """Whether repeated runs give the same bits."""
    first = jax.tree.leaves(run())
    return all(
        bool((x == y).all())
        for _ in range(repeats)
        for x, y in zip(first, jax.tree.leaves(run()), strict=True)
    )


def timed(programs: dict[str, Program], bar: float | None = None) -> dict[str, dict[str, Any]]:
    """Milliseconds and errors of every program, or why there are none.

    What is wrong, or gives other bits when it is repeated, is not timed. `bar` are milliseconds to
    reach by our own programs, whose names begin with "ours".
    """
    results: dict[str, dict[str, Any]] = {}
    timers = {}
    for name, program in programs.items():
        try:
            results[name] = _checked(program)
            if "wrong" not in results[name]:
                program.seconds()
                timers[name] = program.seconds
        except Exception as failure:  # one that does not support the case must not end the others
            results[name] = {"failed": f"{type(failure).__name__}: {failure}"[:300]}
    for name, seconds in interleaved(timers).items():
        results[name] |= {"ms": 1e3 * seconds[len(seconds) // 2], "best ms": 1e3 * seconds[0]}
        if bar is not None and name.startswith("ours"):
            results[name]["of bar"] = bar / results[name]["ms"]
    for result in results.values():
        if "ms" in result and "ms" in results.get("fla", {}):
            result["of fla"] = results["fla"]["ms"] / result["ms"]
    return results


def _checked(program: Program) -> dict[str, Any]:
    found = {} if program.check is None else program.check()
    if "wrong" in found or program.run is None or gives_equal_bits(program.run):
        return found
    return {"wrong": "other bits"}


def options(
    description: str, cases: Sequence[Any], platforms: Sequence[str], peers: Sequence[str]
) -> argparse.ArgumentParser:
    """The command line of a benchmark with named cases."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cases", default=",".join(case.name for case in cases))
    parser.add_argument("--platforms", default=",".join(platforms))
    parser.add_argument("--passes", default=",".join(PASSES), help="gradients: with the forward")
    if peers:
        parser.add_argument("--peers", default=",".join(peers), help="empty: our platforms alone")
        parser.add_argument("--candidates", action="store_true", help="time every configuration")
    parser.add_argument("--tune", action="store_true", help="measure every candidate first")
    parser.add_argument("--json", help="where to write the figures, after each pass")
    return parser


def report(
    cases: Sequence[Any],
    chosen: argparse.Namespace,
    measure: Callable[[Any, str, Any, argparse.Namespace], dict[str, dict[str, Any]]],
    passes_of: Callable[[Any, Sequence[str]], Sequence[str]] = lambda case, passes: passes,
) -> None:
    """Measure the chosen cases and passes; print every result, and write all as JSON."""
    figures: dict[str, Any] = {**provenance(), "cases": {}}
    for case in (x for x in cases if x.name in chosen.cases.split(",")):
        with policy_override(default_executor().chooser, allow_autotune=chosen.tune):
            arrays = case.arrays()
            for which in passes_of(case, chosen.passes.split(",")):
                results = measure(case, which, arrays, chosen)
                figures["cases"][f"{case.name} {which}"] = results
                _print(case.name, which, results)
                if chosen.json:
                    with open(chosen.json, "w") as file:
                        json.dump(figures, file, indent=2)


def _print(name: str, which: str, results: dict[str, dict[str, Any]]) -> None:
    for who, result in results.items():
        shown = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in result.items()
        )
        print(f"{name:16} {which:10} {who:24} {shown}", flush=True)
