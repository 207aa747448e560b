"""The folder of examples is complete: scripts, their paragraphs, runs and notebooks."""

import json
import subprocess
import sys

import pytest
from examples.examples_list import EXAMPLES, RUNS

HELPERS = {"common.py"}
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in HELPERS)
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def test_every_script_is_run():
    assert sorted({run.script for run in RUNS}) == SCRIPTS


@pytest.mark.parametrize("page", ["examples/README.md", "docs/examples.md"])
def test_a_page_names_every_example(page):
    text = (EXAMPLES.parent / page).read_text()
    names = [*SCRIPTS, *(path.name for path in NOTEBOOKS)]
    linked = lambda name: f"({name})" in text or f"/{name})" in text
    assert [name for name in names if not linked(name)] == []


def test_the_notebooks_are_those_of_their_scripts():
    command = [sys.executable, str(EXAMPLES.parent / "tools" / "notebooks.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_has_no_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def test_a_near_tie_is_no_other_token():
    code = (
        "import numpy as np; from common import same_choice; "
        "scores = np.array([[0.0, 1.0], [1.0, 1.0005], [1.0, 1.1]]); "
        "print(*same_choice(scores, np.array([1, 0, 0]), 1e-3))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, check=True)
    assert done.stdout == "[ True False False] [False  True False]\n"


@pytest.mark.parametrize(
    ("holds", "status", "printed"), [("True", 0, "ok"), ("False", 1, "FAILED")]
)
def test_a_claim_that_does_not_hold_ends_a_script(holds, status, printed):
    code = f"from common import check; check('a claim', {holds}); print('goes on')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True)
    assert done.returncode == status
    assert done.stdout.splitlines()[0] == f"{printed}: a claim"
    assert ("goes on" in done.stdout) == (holds == "True")
