"""A result says which sources it was measured on."""

import re

import pytest

from ejkernel.cli import provenance


@pytest.fixture
def repository(monkeypatch):
    """What git says, by the first word of the command."""
    said = {}
    monkeypatch.setattr(provenance, "git", lambda command, *_: said.get(command))
    monkeypatch.delenv(provenance.COMMIT_VARIABLE, raising=False)
    return said


def test_outside_a_checkout_the_commit_is_the_variable_or_unknown(repository, monkeypatch):
    assert provenance.commit() is None
    monkeypatch.setenv(provenance.COMMIT_VARIABLE, "0123456789ab")
    assert provenance.commit() == "0123456789ab"


def test_the_variable_wins_over_the_history_of_a_copy(repository, monkeypatch):
    repository["rev-parse"] = str(provenance.ROOT)
    monkeypatch.setenv(provenance.COMMIT_VARIABLE, "0123456789ab")
    assert provenance.commit() == "0123456789ab"


def test_the_checkout_of_another_project_is_not_ours(monkeypatch):
    monkeypatch.setattr(provenance, "git", lambda *_: "/somewhere/else")
    monkeypatch.delenv(provenance.COMMIT_VARIABLE, raising=False)
    assert provenance.commit() is None


@pytest.mark.parametrize(("changes", "mark"), [("", ""), (" M ejkernel/x.py", "-changed")])
def test_changed_sources_are_marked(changes, mark, monkeypatch):
    root = str(provenance.ROOT)
    said = {"--show-toplevel": root, "--short=12": "0123456789ab", "--porcelain": changes}
    monkeypatch.setattr(provenance, "git", lambda _, option, *rest: said[option])
    assert provenance.commit() == f"0123456789ab{mark}"


def test_a_result_has_a_device_versions_and_a_date_in_utc():
    found = provenance.provenance()
    assert tuple(found) == provenance.PROVENANCE
    assert found["device"]
    assert {"ejkernel", "python", "jax"} <= found["versions"].keys()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["date"])


def test_the_device_may_be_named():
    assert provenance.provenance("no TPU")["device"] == "no TPU"
