"""Reads recorded results: figures with targets, timed calls, and runs of `ejkernel demo`.

A file is an object with `device`, `versions`, `date` and `commit`, and one of

- `figures`: a list of values, each with its unit and target, as `ejkernel bench --json` writes it;
- `cases`: calls by name. A call holds the rates of implementations by name, or one value by its
  unit; `calls` may describe each in words, and `summary` may hold ratios with targets;
- `rows`: operations by name, as `ejkernel demo --json` writes them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ejkernel.cli.figures import Figure
from ejkernel.cli.report.limits import LIMITS
from ejkernel.cli.report.rows import AUTO, Bar, Result, Row, Source
from ejkernel.kernels import OPS

KINDS = ("figures", "cases", "rows")
UNITS = {"TB/s": "TB/s", "us": "µs", "TFLOP/s": "TFLOP/s"}  # as cases name them
_OPERATION = re.compile(r"`(\w+)`")
_PROBLEMS = {"wrong": "wrong result", "failed": "failed"}
RATIO = re.compile(r"(.*) \((at most|at least) ([\d.]+)\)", re.DOTALL)


class ResultsError(ValueError):
    """A file does not hold results; the message is one sentence."""


class _Reader:
    """Takes values out of a file, and says which of them is not what it must be."""

    def __init__(self, file: str, known: Mapping[str, Figure]) -> None:
        self.file, self.known = file, known

    def error(self, where: str, must: str, value: object) -> ResultsError:
        text = repr(value)
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        return ResultsError(f"{self.file}: {where} must be {must}, got {shown}.")

    def object(self, value: object, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(where, "an object", value)
        return value

    def text(self, values: Mapping[str, Any], key: str, where: str = "") -> str | None:
        value = values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(f"{where}{key}", "text", value)
        return value

    def required(self, values: Mapping[str, Any], key: str, where: str) -> str:
        value = self.text(values, key, where)
        if value is None:
            raise self.error(f"{where}{key}", "text", None)
        return value

    def number(self, values: Mapping[str, Any], key: str, where: str) -> float | None:
        value = values.get(key)
        if value is None:
            return None
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not -1e300 < value < 1e300:  # NaN and integers beyond floats included
            raise self.error(f"{where}{key}", "a finite number", value)
        return float(value)

    def words(self, values: Mapping[str, Any], key: str, where: str) -> tuple[str, ...] | None:
        value = values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise self.error(f"{where}{key}", "a list of texts", value)
        return tuple(value)

    def better(self, values: Mapping[str, Any], where: str) -> str:
        value = values.get("better")
        if value not in ("lower", "higher"):
            raise self.error(f"{where}better", '"lower" or "higher"', value)
        return value

    def source(self, data: Mapping[str, Any]) -> Source:
        versions = self.object(data.get("versions", {}), "versions")
        return Source(
            self.file,
            self.text(data, "device"),
            {name: self.required(versions, name, "versions.") for name in versions},
            self.text(data, "date"),
            self.text(data, "commit"),
            self.text(data, "note"),
        )

    def figures(self, data: Mapping[str, Any]) -> Iterator[Row]:
        if not isinstance(data["figures"], list):
            raise self.error("figures", "a list", data["figures"])
        for i, value in enumerate(data["figures"]):
            where = f"figures[{i}]."
            figure = self.object(value, where[:-1])
            name = self.required(figure, "name", where)
            known = self.known.get(name)
            measured = self.number(figure, "value", where)
            problem = "wrong result" if measured is None else None
            what = known.what if known else self.required(figure, "what", where)
            yield Row(
                name,
                what,
                self.required(figure, "unit", where),
                self.better(figure, where),
                (Bar("ours", measured, problem=problem),),
                self.number(figure, "bound", where),
                operation=known.operation if known else self._operation(figure, what, where),
                dtype=known.dtype if known else self.text(figure, "dtype", where),
                mask=known.mask if known else self.words(figure, "mask", where),
            )

    def _operation(self, figure: Mapping[str, Any], what: str, where: str) -> str | None:
        """The operation that is recorded, or the first that the words name."""
        named = (name for name in _OPERATION.findall(what) if name in OPS)
        return self.text(figure, "operation", where) or next(named, None)

    def cases(self, data: Mapping[str, Any]) -> Iterator[Row]:
        described = self.object(data.get("calls", {}), "calls")
        limits = LIMITS.get(data.get("device") or "", {})
        for name, value in self.object(data["cases"], "cases").items():
            where = f"cases[{name!r}]"
            found = self.object(value, where)
            call = self.object(described.get(name, {}), f"calls[{name!r}]")
            told = f"calls[{name!r}]."
            compared = bool(found) and all(isinstance(one, dict) for one in found.values())
            read = self._compared if compared else self._alone
            unit, bars = read(found, call, where)
            yield Row(
                name,
                self.text(call, "call", told) or name,
                unit,
                "lower" if unit in ("µs", "ms") else "higher",
                bars,
                self.number(call, "bound", told) or self.number(found, "bar", f"{where}."),
                limits.get(unit),
                self.text(data, "operation"),
                self.text(call, "dtype", told) or self.text(data, "dtype"),
                self.words(call, "mask", told),
                self.text(call, "pass", told),
                rate=unit in ("TFLOP/s", "TB/s"),
            )
        yield from self.summary(data)

    def _compared(
        self, found: dict[str, Any], call: dict[str, Any], where: str
    ) -> tuple[str, tuple[Bar, ...]]:
        """Implementations by name, the unit that limits them, and their rates."""
        size = self.number(call, "bytes", f"{where}.")
        weights = any("weights TB/s" in one for one in found.values())
        bars = []
        for who, one in found.items():
            inside = f"{where}[{who!r}]."
            numbers = self._numbers(one, inside)
            rate = numbers.get("weights TB/s" if weights else "tflops")
            if size is not None and numbers.get("ms"):
                rate = size / numbers["ms"] / 1e9
            bars.append(Bar(who, rate, who.startswith("ours"), numbers, self._problem(one, rate)))
        bars.sort(key=lambda bar: (not bar.ours, bar.name != AUTO))
        return ("TB/s" if weights or size is not None else "TFLOP/s"), tuple(bars)

    def _alone(
        self, found: dict[str, Any], call: dict[str, Any], where: str
    ) -> tuple[str, tuple[Bar, ...]]:
        """The one value of a call, and its unit."""
        key = next((key for key in UNITS if key in found), "ms")
        value = self.number(found, key, f"{where}.")
        numbers = self._numbers(found, f"{where}.")
        bar = Bar("ours", value, True, numbers, self._problem(found, value))
        return UNITS.get(key, key), (bar,)

    def _numbers(self, one: Mapping[str, Any], where: str) -> dict[str, float]:
        """The numbers of a timing; those of a wrong result may be NaN and are left out."""
        if any(key in one for key in _PROBLEMS):
            return {}
        plain = [k for k, x in one.items() if isinstance(x, int | float | str | bool | None)]
        found = {key: self.number(one, key, where) for key in plain if key not in ("bar", "cfg")}
        return {key: value for key, value in found.items() if value is not None}

    @staticmethod
    def _problem(one: Mapping[str, Any], value: float | None) -> str | None:
        found = next((said for key, said in _PROBLEMS.items() if key in one), None)
        return found or ("not measured" if value is None else None)

    def summary(self, data: Mapping[str, Any]) -> Iterator[Row]:
        """Ratios of two cases, with the target in the name."""
        ratios = self.object(data.get("summary", {}), "summary")
        described = self.object(data.get("calls", {}), "calls")
        for key in ratios:
            found = RATIO.fullmatch(key)
            name, limit, bound = found.groups() if found else (key, "at least", "")
            call = self.object(described.get(name, {}), f"calls[{name!r}]")
            value = self.number(ratios, key, "summary: ")
            try:
                target = float(bound) if bound else None
            except ValueError:
                raise self.error(f"the target of {key!r}", "a number", bound) from None
            yield Row(
                name,
                self.text(call, "call", f"calls[{name!r}].") or name,
                "x",
                "lower" if limit == "at most" else "higher",
                (Bar("ours", value, problem=None if value is not None else "not measured"),),
                target,
                operation=self.text(data, "operation"),
                dtype=self.text(call, "dtype", "calls.") or self.text(data, "dtype"),
                mask=self.words(call, "mask", "calls."),
            )

    def demo(self, data: Mapping[str, Any]) -> Iterator[Row]:
        """Speed and memory of every operation; plain JAX is 1."""
        shown = {
            "speedup": ("forward", "speed, relative to plain JAX"),
            "gradient_speedup": ("forward + backward", "speed, relative to plain JAX"),
            "memory": ("forward + backward", "memory of plain JAX, relative to ours"),
        }
        plain = Bar("plain JAX", 1.0, ours=False)
        for operation, value in self.object(data["rows"], "rows").items():
            where = f"rows[{operation!r}]."
            row = self.object(value, where[:-1])
            numbers = self._numbers(row, where)
            for key, (direction, what) in shown.items():
                if key not in row:
                    continue
                measured = self.number(row, key, where)
                bars = (Bar("ours", measured, numbers=_timing(key, numbers)), plain)
                yield Row(
                    f"{operation} {key}",
                    what,
                    "x",
                    "higher",
                    bars,
                    operation=operation,
                    dtype=self.text(data, "dtype"),
                    direction=direction,
                )


def _timing(key: str, numbers: Mapping[str, float]) -> dict[str, float]:
    """The seconds that belong to a speed-up, in milliseconds."""
    seconds = {"speedup": "seconds", "gradient_speedup": "gradient_seconds"}.get(key, "")
    return {"ms": 1e3 * numbers[seconds]} if seconds in numbers else {}


def parse(data: object, file: str, known: Mapping[str, Figure]) -> Result:
    """The rows of a file.

    Args:
        data: what the file holds.
        file: its name, for messages and for the page; empty for what no file holds.
        known: the figures of `ejkernel bench` by name; they describe files that are older.

    Raises:
        ResultsError: it is not what it must be, or holds no results.
    """
    reader = _Reader(file, known)
    found = reader.object(data, "the file")
    if not _has_results(found):
        raise ResultsError(f"{file}: holds no results: none of {', '.join(KINDS)} is in it.")
    source = reader.source(found)
    read = {"figures": reader.figures, "cases": reader.cases, "rows": reader.demo}
    rows = [row for kind in KINDS if kind in found for row in read[kind](found)]
    return Result(source, tuple(rows))


def _has_results(data: object) -> bool:
    return isinstance(data, dict) and any(kind in data for kind in KINDS)


def load(path: Path) -> object:
    """What a JSON file holds."""
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ResultsError(f"{path}: is not JSON: it is not UTF-8 text.") from None
    except RecursionError:
        raise ResultsError(f"{path}: is nested too deeply.") from None
    except ValueError as error:
        raise ResultsError(f"{path}: is not JSON: {error}.") from None


def read(paths: list[Path], known: Mapping[str, Figure]) -> list[Result]:
    """The results of files, and of all files in folders; what else a folder holds is ignored.

    Raises:
        ResultsError: a file cannot be read or is not what it must be, or there are no results.
    """
    found = []
    for path in paths:
        if path.is_dir():
            files = {
                str(file.relative_to(path)): load(file) for file in sorted(path.rglob("*.json"))
            }
            files = {name: data for name, data in files.items() if _has_results(data)}
        else:
            files = {path.name: load(path)}
        found += [parse(data, name, known) for name, data in files.items()]
    if not any(result.rows for result in found):
        raise ResultsError(f"{', '.join(map(str, paths))}: no results found.")
    return found
