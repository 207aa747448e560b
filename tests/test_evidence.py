"""The record of what tests prove counts each outcome once, for one commit alone."""

import json
import types

import evidence
import pytest

from ejkernel.ops import kernel_registry

SOURCE = kernel_registry.op("flash_attention").sources[0]
CLAIM = ("flash_attention", "pallas", "tpu", "forward", "compiled", "v5e")


def report(outcome, when="call", claims=(CLAIM,)):
    return types.SimpleNamespace(
        when=when,
        outcome=outcome,
        nodeid=f"{outcome}-{when}",
        user_properties=[("device", "a device"), *(("proves", claim) for claim in claims)],
        **{name: name == outcome for name in ("passed", "failed", "skipped")},
    )


def recorded(path, *reports):
    recorder = evidence.Recorder(path)
    for one in reports:
        recorder.pytest_runtest_logreport(one)
    recorder.pytest_sessionfinish()
    return json.loads(path.read_text())


@pytest.fixture
def commit(monkeypatch):
    """Sets the commit that records are made at."""
    source = evidence._provenance()
    choose = lambda name: monkeypatch.setattr(source, "commit", lambda: name)
    choose("0123456789ab")
    return choose


def test_only_calls_that_ran_count(tmp_path, commit):
    reports = (
        *(report("passed", when) for when in ("setup", "call", "teardown")),
        *(report("failed", when) for when in ("setup", "call", "teardown")),
        report("skipped"),
        report("passed", claims=()),
    )
    record = recorded(tmp_path / "record.json", *reports)
    assert record["tests"] == {"passed": 2, "failed": 3, "skipped": 1}
    assert record["failures"] == ["failed-call", "failed-setup", "failed-teardown"]
    (entry,) = record["evidence"]
    assert tuple(entry.values()) == (*CLAIM, 1, 3)
    assert (record["device"], record["commit"]) == ("a device", "0123456789ab")


@pytest.mark.parametrize(
    ("first", "second", "passed"),
    [
        ("0123456789ab", "0123456789ab", 3),
        ("0123456789ab", "ba9876543210", 1),
        ("0123456789ab-changed", "0123456789ab-changed", 1),
        (None, None, 1),
    ],
)
def test_runs_add_up_at_one_commit_alone(tmp_path, commit, first, second, passed):
    path = tmp_path / "record.json"
    commit(first)
    recorded(path, report("passed"), report("passed"))
    commit(second)
    assert recorded(path, report("passed"))["evidence"][0]["passed"] == passed


def test_a_run_without_claims_writes_nothing(tmp_path, commit):
    recorder = evidence.Recorder(tmp_path / "record.json")
    recorder.pytest_runtest_logreport(report("passed", claims=()))
    recorder.pytest_sessionfinish()
    assert not (tmp_path / "record.json").exists()


def test_a_test_states_what_it_proves(request):
    before = len(request.node.user_properties)
    evidence.proves("flash_attention", SOURCE, "forward", "forward", compiled_for="v5e")
    _, *claims = request.node.user_properties[before:]
    assert claims == [("proves", CLAIM)]
    evidence.proves("flash_attention", SOURCE, "backward")
    assert request.node.user_properties[-1][1][-3:-1] == ("backward", "run")
    del request.node.user_properties[before:]  # this test proves nothing of flash attention
