"""Random calls as test cases: few are quick, some run with the slow tests, all at night."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from ejkernel.cli.oracle import Dtype
from ejkernel.cli.random_calls.run import Options, choices_of, indices, judged

SEED = 0


def cases(operations: Sequence[str], quick: int, slow: int, nightly: int) -> list[Any]:
    """So many calls of these operations, each number counting those before."""
    found = []
    for i, index in enumerate(indices(0, nightly, operations)):
        name = f"{choices_of(SEED, index).operation}-{index}"
        marks = [pytest.mark.xdist_group(name)]
        marks += [] if i < quick else [pytest.mark.slow]
        marks += [] if i < slow else [pytest.mark.nightly]
        found.append(pytest.param(index, id=name, marks=marks))
    return found


def check(index: int, platform: str, *dtypes: Dtype) -> None:
    """The call on this platform is correct, or refused in words.

    A platform that takes only some dtypes is given the others' calls in the first of them.
    """
    choices = choices_of(SEED, index)
    if dtypes and choices.dtype not in dtypes:
        choices = dataclasses.replace(choices, dtype=dtypes[0])
    (one,) = judged(Options(SEED, platform), choices, index)
    if one.outcome.verdict == "unsupported":
        pytest.skip(one.outcome.detail)
    assert one.outcome.verdict == "correct", f"{one.outcome.detail}\n{choices.program(platform)}"
