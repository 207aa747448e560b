"""How tests drive a browser, with a program in its place that needs no browser."""

import sys

import browser
import pytest

# Answers the commands of the debugging pipe; the value of an expression counts the evaluations.
STAND_IN = """
import json, os
buffer, count = b"", 0
while received := os.read(3, 1 << 16):
    *messages, buffer = (buffer + received).split(b"\\0")
    for message in map(json.loads, messages):
        result = {"targetId": "t", "sessionId": "s"}
        if message["method"] == "Runtime.evaluate":
            count += 1
            result = {"result": {"value": count}}
        answers = [{"id": message["id"], "result": result}]
        if message["method"] == "Page.navigate":
            answers.append({"method": "Page.loadEventFired", "params": {}})
        os.write(4, b"".join(json.dumps(x).encode() + b"\\0" for x in answers))
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A function that installs a script as the browser."""

    def install(first_line, text):
        path = tmp_path / "chromium"
        path.write_text(f"#!{first_line}\n{text}")
        path.chmod(0o755)
        monkeypatch.setenv("CHROMIUM", str(path))

    return install


def test_commands_are_answered_and_values_are_waited_for(installed):
    installed(sys.executable, STAND_IN)
    with browser.browser() as tab:
        tab.open("http://localhost/")
        assert tab.value("1") == 1
        assert tab.wait_for("1", 4) == 4
        assert tab.problems == []


def test_a_browser_that_does_not_answer_is_ended(installed, monkeypatch):
    monkeypatch.setattr(browser, "_SECONDS", 0.2)
    installed("/bin/sh", "exec sleep 100")
    with pytest.raises(TimeoutError, match="did not answer"), browser.browser():
        pass


def test_a_browser_that_ends_is_an_error(installed):
    installed("/bin/sh", "exit 1")
    with pytest.raises((RuntimeError, BrokenPipeError)), browser.browser():
        pass
