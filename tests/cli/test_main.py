"""The command itself: help, version, exit codes, Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from cli.commands import WIDTHS, run, sentence, too_wide

from docs import documents
from ejkernel import __version__

COMMANDS = ("info", "demo", "check", "bench", "tune", "mask")
PAGE = (documents.ROOT / "docs" / "cli.md").read_text()


def test_the_help_lists_every_command_and_the_exit_codes():
    for option in ("--help", "-h"):
        shown = run(option)
        assert shown.exit_code == 0
        assert all(f" {command} " in shown.output for command in COMMANDS)
        assert "130 interrupted" in sentence(shown)


def test_without_arguments_it_shows_the_help():
    assert "Usage: ejkernel" in run().output


def test_the_version_is_one_line():
    shown = run("--version")
    assert (shown.exit_code, shown.output) == (0, f"ejkernel {__version__}\n")


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_the_terminal(command, columns):
    shown = run(command, "-h", columns=columns)
    assert shown.exit_code == 0
    assert too_wide(shown, columns) == []


def test_without_its_packages_it_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from ejkernel.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "ejkernel: the command line needs typer: in a checkout of ejkernel, pip install '.[cli]'.\n"
    )


def test_a_setting_without_a_valid_value_is_wrong_usage():
    shown = run("mask", "--length", "8", EJKERNEL_INTERPRET="maybe")
    assert shown.exit_code == 2
    assert "EJKERNEL_INTERPRET must be 0 or 1, got 'maybe'." in sentence(shown)


def _is_gone(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_ctrl_c_ends_tuning_and_its_processes_and_leaves_no_file(tmp_path):
    """As in a terminal, every process of the group receives the signal."""
    cache = tmp_path / "tuned"
    options = ["--workload", "plain", "--dtype", "float32", "--rounds", "1000000"]
    code = "from ejkernel.cli import main; main()"
    command = [sys.executable, "-c", code, "tune", "mean_pooling", *options, "--workers", "2"]
    tuning = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "EJKERNEL_CACHE_DIR": str(cache)},
        start_new_session=True,
    )
    assert tuning.stdout is not None
    assert "skipped" in tuning.stdout.readline()
    time.sleep(1)  # a worker has started by now
    os.killpg(tuning.pid, signal.SIGINT)
    _, errors = tuning.communicate(timeout=60)
    assert (tuning.returncode, errors) == (130, "ejkernel: interrupted.\n")
    deadline = time.monotonic() + 30
    while not _is_gone(tuning.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _is_gone(tuning.pid)
    assert not cache.exists()


@pytest.mark.parametrize("module", ["typer", "numpy", "jax", "jaxlib._jax", "ejkernel.cli.info"])
def test_ctrl_c_while_a_module_is_imported_is_one_line(module):
    code = f"""
import os, signal, sys

class Interrupts:
    def find_spec(self, name, *others):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
sys.argv = ["ejkernel", "info"]
from ejkernel.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "ejkernel: interrupted.\n")


def test_the_page_documents_every_command():
    assert [name for name in COMMANDS if f"## `ejkernel {name}`" not in PAGE] == []


_SCREENS = re.findall(
    r"```bash\nejkernel (--version|mask.*?)\n```\n+```text\n(.*?)\n```", PAGE, re.DOTALL
)


@pytest.mark.parametrize(("arguments", "screen"), _SCREENS)
def test_the_screens_of_the_page_are_what_the_command_prints(arguments, screen):
    shown = run(*arguments.split(), columns=80)
    assert [line.rstrip() for line in shown.output.splitlines()] == screen.splitlines()


def test_the_page_shows_such_screens():
    assert len(_SCREENS) >= 3
