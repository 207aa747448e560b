"""Processes that are killed, and disks that really fill up, lose no entry that was written."""

import contextlib
import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import ejkernel
from ejkernel.errors import CacheWarning
from ejkernel.ops.persistent import PersistentCache

# Writes entries for ever, and says which have been written.
WRITER = """
import itertools, sys, time
from ejkernel.ops import persistent
from ejkernel.ops.persistent import PersistentCache
persistent._LOCK_SECONDS = 120.0
cache = PersistentCache("scale", sys.argv[1])
for number in itertools.count():
    cache.put(("cpu|cpu", "scale@v1", f"{sys.argv[2]}{number}"), {"block": number})
    print(f"{sys.argv[2]}{number}", flush=True)
    time.sleep(0.005)  # the other writer polls for the lock
"""


def key(call):
    return ("cpu|cpu", "scale@v1", call)


def writer(path, name):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", WRITER, str(path), name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(ejkernel.__file__).parents[1])},
    )


def on_disk(path):
    table = json.loads(path.read_text())
    return {call for ops in table["devices"].values() for calls in ops.values() for call in calls}


@pytest.mark.slow
def test_two_writers_killed_at_random_times_lose_nothing_that_was_written(tmp_path):
    path, written, chance = tmp_path / "scale.json", set(), random.Random(0)
    for number in range(6):
        writers = [writer(path, f"{name}{number}-") for name in "ab"]
        for one in writers:
            assert one.stdout
            line = one.stdout.readline().strip()
            assert line, one.communicate()[1]
            written.add(line)
        for one in writers:
            time.sleep(chance.uniform(0, 0.3))
            one.send_signal(signal.SIGKILL)
            written |= set(one.communicate()[0].split())
        assert written <= on_disk(path)
    cache = PersistentCache("scale", path)
    cache.put(key("last"), {"block": 1})
    assert written | {"last"} <= on_disk(path)
    assert {x.name for x in tmp_path.iterdir()} == {"scale.json", "scale.json.lock"}


@contextlib.contextmanager
def files_of_at_most(size):
    """While this lasts, the process writes no file of more bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an OSError in its place
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("more", [0, 1, 100])
def test_a_disk_that_fills_up_leaves_the_file_whole(tmp_path, more):
    path = tmp_path / "scale.json"
    cache = PersistentCache("scale", path)
    cache.put(key("a"), {"block": 1})
    before = path.read_bytes()
    warned = pytest.warns(CacheWarning, match=r"cannot be written .*; going on in memory")
    with warned, files_of_at_most(len(before) + more):
        cache.put(key("b" * 200), {"block": 2})
    assert path.read_bytes() == before
    assert not path.with_name("scale.json.tmp").exists()
    cache.put(key("c"), {"block": 3})
    assert on_disk(path) == {"a", "b" * 200, "c"}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_file_has_the_permissions_of_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        path = tmp_path / "new" / "scale.json"
        PersistentCache("scale", path).put(key("a"), {"block": 1})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o022 == 0


# Root writes everywhere, so the child gives up its rights once everything is imported.
READ_ONLY = """
import os, sys, warnings
from ejkernel.errors import CacheWarning
from ejkernel.ops.persistent import PersistentCache
if os.geteuid() == 0:
    os.setuid(65534)
key = lambda call: ("cpu|cpu", "scale@v1", call)
cache = PersistentCache("scale", sys.argv[1])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for call in "bc":
        cache.put(key(call), {"block": 2})
assert [x.category for x in caught] == [CacheWarning], [str(x.message) for x in caught]
assert "cannot be written" in str(caught[0].message)
assert cache.get(key("a")) == {"block": 1}
"""


def test_a_read_only_directory_is_one_warning():
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folder is closed to other users
        path = Path(folder) / "scale.json"
        PersistentCache("scale", path).put(key("a"), {"block": 1})
        Path(folder).chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, str(path)],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(ejkernel.__file__).parents[1])},
        )
        Path(folder).chmod(0o755)
    assert done.returncode == 0, done.stderr
