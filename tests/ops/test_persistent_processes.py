"""Processes that are killed, and disks that really fill up, lose no entry that was written."""

import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ejkernel
from ejkernel.errors import CacheWarning
from ejkernel.ops.persistent import PersistentCache

# Writes entries for ever, and says which have been written.
WRITER = """
import itertools, sys
from ejkernel.ops.persistent import PersistentCache
cache = PersistentCache("scale", sys.argv[1])
for number in itertools.count():
    cache.put(("cpu|cpu", "scale@v1", f"{sys.argv[2]}{number}"), {"block": number})
    print(f"{sys.argv[2]}{number}", flush=True)
"""


def key(call):
    return ("cpu|cpu", "scale@v1", call)


def writer(path, name):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", WRITER, str(path), name],
        stdout=subprocess.PIPE,
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
            written.add(one.stdout.readline().strip())
        for one in writers:
            time.sleep(chance.uniform(0, 0.3))
            one.send_signal(signal.SIGKILL)
            written |= set(one.communicate()[0].split())
        assert written <= on_disk(path)
    cache = PersistentCache("scale", path)
    cache.put(key("last"), {"block": 1})
    assert written | {"last"} <= on_disk(path)
    assert {x.name for x in tmp_path.iterdir()} == {"scale.json", "scale.json.lock"}


@pytest.fixture
def small_disk():
    """A function that lets this process write files of so many bytes, and no more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an OSError in its place
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("more", [0, 1, 100])
def test_a_disk_that_fills_up_leaves_the_file_whole(tmp_path, small_disk, more):
    path = tmp_path / "scale.json"
    cache = PersistentCache("scale", path)
    cache.put(key("a"), {"block": 1})
    before = path.read_bytes()
    small_disk(len(before) + more)
    with pytest.warns(CacheWarning, match=r"cannot be written .*; going on in memory"):
        cache.put(key("b" * 200), {"block": 2})
    assert path.read_bytes() == before
    assert not path.with_name("scale.json.tmp").exists()
    small_disk(2**20)
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


def test_a_read_only_directory_is_one_warning(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    path = tmp_path / "scale.json"
    PersistentCache("scale", path).put(key("a"), {"block": 1})
    tmp_path.chmod(0o555)
    try:
        cache = PersistentCache("scale", path)
        with pytest.warns(CacheWarning, match="cannot be written"):
            cache.put(key("b"), {"block": 2})
        assert cache.get(key("a")) == {"block": 1}
    finally:
        tmp_path.chmod(0o755)
