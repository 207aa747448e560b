"""The notebooks of examples/ run from top to bottom, and every claim in them holds."""

import os

import pytest
from examples.examples_list import EXAMPLES, RUNS, run_id

nbclient = pytest.importorskip("nbclient", reason="needs nbclient: make test-examples")
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.xdist_group(f"notebook-{x}")) for x in NAMES]
)
@pytest.mark.filterwarnings("ignore")  # of the client; the scripts run without any
def test_a_notebook_runs(name, monkeypatch):
    import nbformat

    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES.parent), str(EXAMPLES)]))
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    resources = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources=resources
    ).execute()
    outputs = [x for cell in notebook.cells for x in cell.get("outputs", ())]
    printed = "".join(x.get("text", "") for x in outputs).splitlines()
    (run,) = (x for x in RUNS if run_id(x) == name)
    assert sum(line.startswith("ok: ") for line in printed) == run.claims
    assert not any(line.startswith("FAILED") for line in printed)
