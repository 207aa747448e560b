"""The tool that looks for growing memory runs, and says what grows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "long_run.py"


@pytest.mark.slow
def test_two_shapes_in_three_rounds_are_recorded(tmp_path):
    path = tmp_path / "run.json"
    options = ["--shapes", "2", "--rounds", "3", "--threads", "2", "--json", str(path)]
    done = subprocess.run([sys.executable, TOOL, *options], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # so few calls may still grow
    assert path.exists(), done.stderr
    record = json.loads(path.read_text())
    assert [one["round"] for one in record["rounds"]] == [1, 2, 3]
    assert all(one["resident_mib"] > 0 and one["maps"] > 0 for one in record["rounds"])
    assert record["rounds"][-1]["calls_remembered"] > 0
    assert record["growth"].keys() == {"resident_mib", "maps"}
    assert "growth from the second round to the last" in done.stdout
    assert done.returncode == any(x > 0.02 for x in record["growth"].values())
