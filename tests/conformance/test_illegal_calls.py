"""Calls that no documentation allows are refused in one sentence that names the operation.

`illegal_calls` says what is spoiled and how. All ways of 14 calls, one of each operation, are in
the quick selection; of 70 more calls those that differ come with the slow tests.
"""

import numpy as np
import pytest
from conformance import illegal_calls
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
    known = {x.why for x in illegal_calls.every(index % CALLS)}
    check([x for x in illegal_calls.every(index) if x.why not in known])


def check(calls):
    found = {f"{x.operation}, {x.why}": illegal_calls.complaint(x) for x in calls}
    assert {name: text for name, text in found.items() if text is not None} == {}


def test_an_accepted_call_is_a_complaint():
    legal = {"x": np.ones((1, 4, 8), np.float32)}
    assert illegal_calls.complaint(Illegal("mean_pooling", legal, "nothing")) == "accepted"


def test_the_words_of_others_are_a_complaint():
    others = Illegal("flash_attention", {"query": 0}, "no key, no value")
    assert "in other words" in str(illegal_calls.complaint(others))


def test_the_calls_are_more_than_two_thousand():
    assert sum(len(illegal_calls.every(index)) for index in range(3 * CALLS)) > 2000
