"""Which tests are quick, and a pytest plugin that ends a run by saying what was not selected."""

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# In this order: a slow test of a TPU kernel is counted as one of a TPU kernel.
_TIERS = {
    "gpu": ("need an NVIDIA GPU", "pytest -m gpu, on a machine with one"),
    "tpu": ("of TPU kernels, interpreted and compiled", "make test-tpu"),
    "nightly": ("nightly: all workloads under transformations", "make test-nightly"),
    "slow": ("slow: all workloads, dtypes and candidates", "make test-all"),
}
# Whole files or environments that a run does not see, and so cannot count.
_ELSEWHERE = {
    "of NVIDIA kernels, interpreted and compiled": "make test-gpu",
    "of the drop-ins for Flax and Equinox": "make test-integrations",
    "of the scripts and notebooks in examples/": "make test-examples",
    "of the documentation site": "make test-docs",
    "of the package as a user installs it": "make test-package",
}
_LINES = (Path(__file__).parent / "slow.txt").read_text().splitlines()
SLOW = frozenset(line for line in _LINES if not line.startswith("#"))
_ACCELERATORS = re.compile("triton|cuda|gpu|tpu")
_deselected: Counter[str] = Counter()


def quick(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Values of a parameter, of which those that are not among the chosen are marked slow."""
    values = list(values)
    if missing := [x for x in chosen if x not in values]:
        raise ValueError(f"no such values: {missing}")
    return [x if x in chosen else pytest.param(x, marks=pytest.mark.slow) for x in values]


def examples(count: int, **options: Any) -> hypothesis.settings:
    """Settings of a property test: so many examples with `EXAMPLES=all`, else a quarter of them."""
    if os.environ.get("EXAMPLES") != "all":
        count = max(5, count // 4)
    return hypothesis.settings(max_examples=count, deadline=None, **options)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests, and run the tests of a file in one process.

    They compile the same small operations. Kernels for accelerators are few files with long tests,
    which are better spread.
    """
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker(pytest.mark.slow)
        spread = _ACCELERATORS.search(item.path.stem) or item.get_closest_marker("xdist_group")
        if not spread:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        if tier := next((x for x in _TIERS if item.get_closest_marker(x)), None):
            _deselected[tier] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        session.config.workeroutput["deselected"] = dict(_deselected)  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # Every worker of pytest-xdist selects from all tests, so that one of them speaks for all.
    _deselected.update(
        Counter(getattr(node, "workeroutput", {}).get("deselected", {})) - _deselected
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _deselected:
        return
    terminalreporter.section("not run")
    for name, (what, how) in _TIERS.items():
        if count := _deselected[name]:
            terminalreporter.write_line(f"{count:>5} tests {what}: {how}")
    for what, how in _ELSEWHERE.items():
        terminalreporter.write_line(f"      tests {what}: {how}")
