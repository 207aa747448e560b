"""Each script of examples/ runs as a user runs it, small, and what it claims holds.

The scripts check their claims themselves: a claim that does not hold ends them with status 1.
"""

import os
import subprocess
import sys

import pytest
from examples.examples_list import EXAMPLES, RUNS, run_id

pytest.importorskip("nbclient", reason="needs Flax and others: make test-examples")


@pytest.mark.parametrize(
    "run",
    [pytest.param(x, id=run_id(x), marks=pytest.mark.xdist_group(run_id(x))) for x in RUNS],
)
def test_a_script_holds_what_it_claims(run, tmp_path):
    plot = tmp_path / "curve.png"
    done = as_a_user([arg.format(plot=plot) for arg in run.arguments], run.script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("ok: ") for line in lines) == run.claims, done.stdout
    for text in run.shows:
        assert text in done.stdout
    assert any(line.startswith("---") for line in lines)  # a table
    if "{plot}" in run.arguments:
        assert plot.read_bytes().startswith(b"\x89PNG")


def as_a_user(arguments, script):
    """The script in a process of its own, without the settings of the tests."""
    names = ("XLA_FLAGS", "EJKERNEL_INTERPRET", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment["PYTHONPATH"] = str(EXAMPLES.parent)
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
