"""Calls that no documentation allows are refused in one sentence that names the operation.

`illegal_calls` says what is spoiled and how. All ways of 14 calls, one of each operation, are in
the quick selection, and some pairs of them; of 70 more calls those that differ come with the slow
tests. `illegal_elsewhere` does the same for masks and other functions that are no operations.
"""

import numpy as np
import pytest
from conformance import illegal_calls, illegal_elsewhere
from conformance.illegal_calls import Illegal

from ejkernel.kernels import OPS

pytestmark = pytest.mark.usefixtures("as_a_user_calls")
CALLS = len(OPS)


@pytest.mark.parametrize("index", range(CALLS), ids=lambda i: f"{OPS[i % CALLS]}-{i}")
def test_every_way_to_spoil_a_call(index):
    check(illegal_calls.every(index))


@pytest.mark.slow
@pytest.mark.parametrize("index", range(CALLS, 6 * CALLS), ids=lambda i: f"{OPS[i % CALLS]}-{i}")
def test_other_calls(index):
    check(others(index))


def others(index):
    """The ways to spoil a call that the first one of its operation does not have."""
    known = {x.why for x in illegal_calls.every(index % CALLS)}
    return [x for x in illegal_calls.every(index) if x.why not in known]


@pytest.mark.parametrize("index", range(CALLS), ids=lambda i: OPS[i])
def test_two_ways_at_once(index):
    check(illegal_calls.pairs(index, 25))


@pytest.mark.slow
@pytest.mark.parametrize("index", range(CALLS, 3 * CALLS), ids=lambda i: f"{OPS[i % CALLS]}-{i}")
def test_two_ways_at_once_in_other_calls(index):
    check(illegal_calls.pairs(index, 100))


@pytest.mark.parametrize("name", illegal_elsewhere.NAMES)
def test_every_way_to_spoil_a_call_of_what_is_no_operation(name):
    check(illegal_elsewhere.every(name))


def check(calls):
    found = {f"{x.operation}, {x.why}": illegal_calls.complaint(x) for x in calls}
    assert {name: text for name, text in found.items() if text is not None} == {}


def test_an_accepted_call_is_a_complaint():
    legal = {"x": np.ones((1, 4, 8), np.float32)}
    assert illegal_calls.complaint(Illegal("mean_pooling", legal, "nothing")) == "accepted"


def test_the_words_of_others_are_a_complaint():
    others = Illegal("flash_attention", {"query": 0}, "no key, no value")
    assert "in other words" in str(illegal_calls.complaint(others))


@pytest.mark.slow
def test_the_calls_that_are_checked_are_more_than_two_thousand():
    quick = sum(len(illegal_calls.every(index)) for index in range(CALLS))
    slow = sum(len(others(index)) for index in range(CALLS, 6 * CALLS))
    assert quick > 1400
    assert quick + slow > 2000
