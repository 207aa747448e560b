"""The steps of .ci/run fit into its time."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / ".ci" / "run").read_text()
MINUTES = {name: int(n) for name, n in re.findall(r'^ *step "(.*?)" (\d+) ', TEXT, re.MULTILINE)}


def test_the_budgets_are_at_most_an_hour():
    """The suite runs a second time with either the oldest or the newest versions."""
    at_newest = sum(n for name, n in MINUTES.items() if name.startswith("newest versions"))
    assert sum(MINUTES.values()) - min(MINUTES["oldest versions"], at_newest) <= 60


def test_every_step_is_described():
    described = re.findall(r"^#   (make \S+)\s", TEXT, re.MULTILINE)
    assert {name for name in MINUTES if name.startswith("make ")} <= set(described)


def test_steps_end_with_the_time_that_is_left():
    """The function `step`, without the steps, in a script whose time is nearly over."""
    functions = TEXT[TEXT.index("deadline=") : TEXT.index("find_python()")]
    script = (
        f'{functions}\ndeadline=1\nstep "slow" 1 sleep 20\nstep "late" 2 echo never\n'
        'printf "%s\\n" "$budget" "${failed[@]}"'
    )
    done = subprocess.run(["bash", "-uc", script], capture_output=True, text=True, timeout=15)
    assert done.stdout.splitlines()[-3:] == ["3", "slow", "late (NOT RUN: no time left)"]
    assert "never" not in done.stdout.splitlines()
