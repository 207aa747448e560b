"""Figures that have a target: what was measured, what it must reach, and whether it does."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from benchmarks.report import calls, results
from ejkernel.cli import bench

MISSED = "**missed**"
_PAGED_UNITS = ("TB/s", "us", "TFLOP/s")
# How `paged_gpu.py` names the ratios of its summary.
_PAGED_RATIOS = {
    "beside / one_long": "time of one sequence of 131072 with 63 of 512, relative to it alone",
    "fp8 over bfloat16": "speed-up of a cache in float8_e4m3fn over bfloat16",
    "fp8_e5m2 over bfloat16": "speed-up of a cache in float8_e5m2 over bfloat16",
    "int8 over bfloat16": "speed-up of a cache in int8 over bfloat16",
    "prefill over flash": "speed of prefill relative to `flash_attention` on the same lengths",
    "mixed / apart": "time of decode and prefill in one call, relative to two calls",
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """A measured value; `bound` is None where there is no target."""

    what: str
    value: float | None
    unit: str
    better: str
    bound: float | None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.bound is None:
            return None
        if self.value is None:
            return False
        return self.value <= self.bound if self.better == "lower" else self.value >= self.bound

    def row(self) -> list[str]:
        target = ""
        if self.bound is not None:
            limit = "at most" if self.better == "lower" else "at least"
            target = f"{limit} {amount(self.bound, self.unit)}"
        verdict = {None: "", True: "met", False: MISSED}[self.met]
        return [self.what, amount(self.value, self.unit), target, verdict]


def amount(value: float | None, unit: str) -> str:
    """Three digits and the unit; "x" is a ratio."""
    if value is None:
        return "wrong result"
    digits = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{digits}x" if unit == "x" else f"{digits} {unit}"


def of_file(name: str) -> list[Figure]:
    """The figures of a file that `ejkernel bench` or a script for TPUs has written."""
    result = results.load(name)
    labels = {figure.name: figure.what for figure in bench.FIGURES}
    return [
        Figure(labels.get(x["name"], x["what"]), x["value"], x["unit"], x["better"], x["bound"])
        for x in (result["figures"] if result else ())
    ]


def of_pages() -> list[Figure]:
    """The figures of attention over a paged cache on an H200."""
    result = results.load("h200/ragged_page_attention_v3")
    return [*_cases(result["cases"]), *_ratios(result["summary"])] if result else []


def _cases(cases: dict[str, Any]) -> Iterator[Figure]:
    for name, found in cases.items():
        unit = next((unit for unit in _PAGED_UNITS if unit in found), None)
        if unit is not None:
            better = "lower" if unit == "us" else "higher"
            value = found[unit]
            yield Figure(
                calls.PAGED[name], value, unit.replace("us", "µs"), better, found.get("bar")
            )


def _ratios(summary: dict[str, float]) -> Iterator[Figure]:
    for key, value in summary.items():
        name, limit, bound = re.fullmatch(r"(.*) \((at most|at least) ([\d.]+)\)", key).groups()
        better = "lower" if limit == "at most" else "higher"
        yield Figure(_PAGED_RATIOS[name], value, "x", better, float(bound))


def of_grouped_matmul() -> list[Figure]:
    """The rates of grouped matmul on an H200 that have a target."""
    result = results.load("h200/grouped_matmul")
    known = {case.name: case for case in calls.grouped_matmul_gpu.CASES}
    figures = []
    for key, found in (result["cases"] if result else {}).items():
        name, _, direction = key.rpartition(" ")
        ours = [one for who, one in found.items() if who.startswith("ours ") and "ms" in one]
        case = known[name]
        if direction in case.bars and ours:
            field, unit = ("weights TB/s", "TB/s") if case.few else ("tflops", "TFLOP/s")
            best = max(one[field] for one in ours)
            what = f"{calls.GROUPED_MATMUL[name]}, {direction}"
            figures.append(Figure(what, best, unit, "higher", case.bars[direction]))
    return figures


def table(figures: list[Figure]) -> str:
    """Figures in Markdown."""
    header = ["figure", "measured", "target", "result"]
    return results.table(header, [figure.row() for figure in figures])


def summary() -> str:
    """How many targets are met, and which are missed."""
    groups = {
        "CPU": of_file("cpu"),
        "H200, `grouped_matmul`": of_grouped_matmul(),
        "H200, `ragged_page_attention_v3`": of_pages(),
        "TPU, static schedules": of_file("tpu_schedule"),
        "TPU, compilation": of_file("tpu_shapes"),
    }
    judged = [(group, x) for group, found in groups.items() for x in found if x.met is not None]
    missed = [(group, x) for group, x in judged if not x.met]
    lines = [f"{len(judged) - len(missed)} of {len(judged)} targets are met."]
    if missed:
        lines += [f"{len(missed)} missed:", ""]
        for group, figure in missed:
            what, measured, target, _ = figure.row()
            lines.append(f"- {group}: {what}: {measured}, target {target}")
    return "\n".join(lines)
