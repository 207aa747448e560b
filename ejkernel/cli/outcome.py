"""What became of a call on one implementation: correct, unsupported or wrong."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from ejkernel.cli import oracle
from ejkernel.cli.oracle import Dtype, Truth
from ejkernel.errors import UnsupportedError


class Outcome(NamedTuple):
    """The result of one case; `excess` is the error of a wrong result over the allowed error.

    It is infinite for an exception.
    """

    verdict: Literal["correct", "unsupported", "wrong"]
    detail: str
    excess: float = 0.0


def outcome_of(run: Callable[[], tuple[Any, Any]], truth: Truth, dtype: Dtype) -> Outcome:
    """Outputs and gradients, None for no gradients, compared with the truth."""
    try:
        outputs, gradients = run()
        outputs, gradients = oracle.arrays(outputs), oracle.arrays(gradients)
    except UnsupportedError as refusal:
        return Outcome("unsupported", str(refusal))
    except Exception as error:  # a crash of one implementation must not hide the others
        return crash(error)
    parts = [("value", truth.of_values, outputs), ("gradient", truth.of_gradients, gradients)]
    for name, judge, found in parts[: 2 if gradients else 1]:
        if not (deviation := oracle.worst(judge(found, dtype))).fine:
            excess = deviation.error / deviation.allowed
            return Outcome("wrong", f"{name} off by {deviation}", excess)
    return Outcome("correct", "")


def crash(error: Exception) -> Outcome:
    """The outcome of a call that raised."""
    return Outcome("wrong", f"{type(error).__name__}: {error}", float("inf"))
