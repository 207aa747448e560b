"""Several processes, each with devices of its own, compute what one does, and end together."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")
CALLS = ("flash", "ring", "zigzag", "grouped", "experts", "linear", "paged", "pages")
LONGEST = 240  # seconds that the processes of a test may take


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def start(tmp_path, count, *calls):
    """The processes, and the files that they write to."""
    port, logs = str(free_port()), [tmp_path / f"{i}.txt" for i in range(count)]
    running = []
    for i, log in enumerate(logs):
        with log.open("w") as out:
            caches = {"EJKERNEL_CACHE_DIR": str(tmp_path / f"cache{i}")}
            environment = {**os.environ, **caches, "PYTHONPATH": str(ROOT)}
            command = [sys.executable, str(WORKER), port, str(count), str(i), *calls]
            running.append(
                subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
            )
    return running, logs


@pytest.fixture
def processes(tmp_path):
    """`start`, after which no process outlives the test."""
    started = []

    def run(count, *calls):
        running, logs = start(tmp_path, count, *calls)
        started.extend(running)
        return running, logs

    yield run
    for process in started:
        process.kill()
        process.wait()


def ended(running, seconds):
    """The exit codes of processes that end in time."""
    deadline = time.monotonic() + seconds
    return [process.wait(max(0.1, deadline - time.monotonic())) for process in running]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_compute_what_one_does(processes, count):
    """Forward and backward over a mesh of all their devices, and with the same configurations.

    Each has a cache of its own, with another configuration of the same call.
    """
    running, logs = processes(count, *CALLS, "tuned")
    codes = ended(running, LONGEST)
    written = [log.read_text() for log in logs]
    assert codes == [0] * count, written
    for text in written:
        equal = [line for line in text.splitlines() if line.startswith("equal ")]
        assert equal == [f"equal {name}" for name in CALLS]
    printed = lambda word: {x for text in written for x in text.splitlines() if x.startswith(word)}
    assert len(printed("chosen ")) == 1
    assert len(printed("alone ")) == count


@pytest.mark.slow
@pytest.mark.parametrize(("count", "killed"), [(2, 0), (2, 1), (4, 2)])
def test_a_killed_process_ends_the_rest(processes, count, killed):
    """With an error, within a minute, at a heartbeat of ten seconds; also if it coordinates."""
    running, logs = processes(count, "wait")
    deadline = time.monotonic() + LONGEST
    while not all("waiting" in log.read_text() for log in logs):
        assert time.monotonic() < deadline, [log.read_text() for log in logs]
        assert [process.poll() for process in running] == [None] * count
        time.sleep(0.2)
    running.pop(killed).kill()
    assert 0 not in ended(running, 60)
