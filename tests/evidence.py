"""A pytest plugin that records what the tests prove: `--evidence FILE`.

A test states what it proves with `proves(...)`; nothing is read from the names of tests. The file
counts the tests that passed and failed for each operation, platform, direction, kind of proof and
target, with the device, versions, date and commit of the run. A file of the same commit, device and
versions is added to, so that one record may come from several runs; any other file is replaced.
"""

import functools
import importlib
import json
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import pytest

if TYPE_CHECKING:
    from ejkernel.ops.implementation import Direction, Source

How = Literal["run", "interpreted", "compiled"]
FIELDS = ("operation", "platform", "backend", "direction", "how", "target")
_CLAIM, _DEVICE = "proves", "device"
_SECONDS_BETWEEN_WRITES = 10

_running: list[pytest.Item] = []


def proves(
    operation: str, source: "Source", *directions: "Direction", compiled_for: str | None = None
) -> None:
    """State that the running test proves directions of an operation on one platform.

    Args:
        operation: the name of the operation.
        source: the platform and backend that the test exercises.
        *directions: "forward", "backward" or both.
        compiled_for: the target of a test that only compiles: "sm_90", "v5e". Any other test runs
            on the default device, or is interpreted where the settings say so.
    """
    how, target = ("compiled", compiled_for) if compiled_for else _how_it_runs()
    properties = _running[-1].user_properties
    # Workers name the device: the process that writes the record has not initialised one.
    properties.append((_DEVICE, _device()))
    for direction in directions:
        claim = (operation, source.platform.value, source.backend.value, direction, how, target)
        if (_CLAIM, claim) not in properties:
            properties.append((_CLAIM, claim))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--evidence", type=Path, help="record what the tests prove in this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--evidence")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path), "evidence_recorder")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()


def _how_it_runs() -> tuple[How, str]:
    """Interpreted, or run on the default device of this process."""
    if importlib.import_module("ejkernel.settings").interpret():
        return "interpreted", ""
    return "run", jax.devices()[0].device_kind


def _provenance() -> Any:
    """Imported late: the package must not be imported before its run-time type checks are on."""
    return importlib.import_module("ejkernel.cli.provenance")


@functools.cache
def _device() -> str:
    return _provenance().device()


class Recorder:
    """Counts the outcomes of claims, in the process that receives the reports of all workers."""

    def __init__(self, path: Path):
        self._path = path
        self._device: str | None = None
        self._tests: Counter[str] = Counter()
        self._claims: dict[tuple[str, ...], Counter[str]] = {}
        self._failures: set[str] = set()
        self._earlier = json.loads(path.read_text()) if path.exists() else None
        self._written = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # One outcome for each test, and another failure for a teardown that fails.
        if report.when != "call" and report.passed:
            return
        self._tests[report.outcome] += 1
        if report.failed:
            self._failures.add(report.nodeid)
        for name, value in report.user_properties:
            if name == _DEVICE:
                self._device = value
            elif name == _CLAIM and not report.skipped:
                self._claims.setdefault(tuple(value), Counter())[report.outcome] += 1
        # A run that is stopped by a time limit keeps what it has found.
        if time.monotonic() - self._written > _SECONDS_BETWEEN_WRITES:
            self._write()

    def pytest_sessionfinish(self) -> None:
        self._write()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        said = f"written to {self._path}" if self._claims else "no test stated what it proves"
        terminalreporter.write_line(f"evidence: {said}")

    def _write(self) -> None:
        if not self._claims:
            return
        record = {
            **_provenance().provenance(self._device),
            "tests": {name: self._tests[name] for name in ("passed", "failed", "skipped")},
            "failures": sorted(self._failures),
            "evidence": [
                dict(zip(FIELDS, claim, strict=True))
                | {"passed": outcomes["passed"], "failed": outcomes["failed"]}
                for claim, outcomes in sorted(self._claims.items())
            ],
        }
        text = _text(merged(self._earlier, record))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f"{self._path.name}.partial")
        temporary.write_text(text)
        temporary.replace(self._path)
        self._written = time.monotonic()


def merged(earlier: dict[str, Any] | None, record: dict[str, Any]) -> dict[str, Any]:
    """A record with the counts of an earlier one, where both are of the same unchanged commit."""
    same = earlier is not None and all(
        earlier.get(name) == record[name] for name in ("device", "versions", "commit")
    )
    if not same or record["commit"] is None or record["commit"].endswith(_provenance().CHANGED):
        return record
    counts: dict[tuple[str, ...], Counter[str]] = {}
    for entry in (*earlier["evidence"], *record["evidence"]):
        claim = tuple(entry[name] for name in FIELDS)
        counts.setdefault(claim, Counter()).update(passed=entry["passed"], failed=entry["failed"])
    return record | {
        "tests": {name: count + earlier["tests"][name] for name, count in record["tests"].items()},
        "failures": sorted({*earlier["failures"], *record["failures"]}),
        "evidence": [
            dict(zip(FIELDS, claim, strict=True)) | dict(count)
            for claim, count in sorted(counts.items())
        ],
    }


def _text(record: dict[str, Any]) -> str:
    """JSON with one line for each entry, which a reader can compare."""
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in record["evidence"])
    head = json.dumps({name: x for name, x in record.items() if name != "evidence"}, indent=1)
    return f'{head[:-2]},\n "evidence": [\n{lines}\n ]\n}}\n'
