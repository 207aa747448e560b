"""Judgements of the oracle as assertions."""

from typing import Any, Literal

from conformance.cases import Case

from ejkernel.cli.oracle import arrays, distance, largest


def assert_as_good_as_rounding(
    case: Case, dtype: Any, which: Literal["values", "gradients"], actual: Any, what: str = ""
) -> None:
    """Every array is as near the truth as its dtype allows."""
    judge = case.truth.of_values if which == "values" else case.truth.of_gradients
    for i, deviation in enumerate(judge(actual, dtype)):
        assert deviation.fine, f"{which} {i} {what}: off by {deviation}"


def assert_same(actual: Any, other: Any, floor: float, what: str) -> None:
    """Two runs of one implementation agree up to a few float32 roundings."""
    for i, (a, b) in enumerate(zip(arrays(actual), arrays(other), strict=True)):
        allowed = floor * largest(b)
        assert distance(a, b) <= allowed, f"{what} {i}: {distance(a, b):.3e} > {allowed:.3e}"
