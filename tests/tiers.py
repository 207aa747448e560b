"""A pytest plugin that ends a run by saying which tests were not selected, and how to run them."""

from collections import Counter
from typing import Any

import pytest

# In this order: a slow test of a TPU kernel is counted as one of a TPU kernel.
_TIERS = {
    "gpu": ("need an NVIDIA GPU", "pytest -m gpu, on a machine with one"),
    "tpu": ("of TPU kernels, interpreted and compiled", "make test-tpu"),
    "slow": ("slow: all workloads, dtypes and candidates", "make test-all"),
    None: ("of NVIDIA kernels, interpreted and compiled", "make test-gpu"),
}
_deselected: Counter[str | None] = Counter()


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        if tier := next((x for x in _TIERS if x and item.get_closest_marker(x)), None):
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
        if _deselected[name] or name is None:  # whole files, not counted
            count = _deselected[name] or ""
            terminalreporter.write_line(f"{count:>5} tests {what}: {how}")
