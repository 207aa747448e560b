"""The disk cache loses nothing to other processes, killed writers, broken files or full disks."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import filelock
import pytest

import ejkernel
from ejkernel import settings
from ejkernel.errors import CacheWarning
from ejkernel.ops import shared_file, table_file
from ejkernel.ops.config import Config, FwdParams
from ejkernel.ops.persistent import PersistentCache, ShippedTable, write_tuned


@dataclasses.dataclass(frozen=True)
class TiledConfig(Config):
    fwd_params: FwdParams | dict = dataclasses.field(default_factory=FwdParams)


@dataclasses.dataclass(frozen=True)
class PlainConfig:
    block: int = 128
    tiles: tuple[tuple[int, int], ...] = ()


def key(call, op="scale@v1", device="cpu|cpu"):
    return (device, op, str(call))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "scale.json"


@pytest.fixture(autouse=True)
def _nothing_is_written_at_exit():
    yield
    shared_file._PENDING.clear()


def on_disk(path):
    """The calls that the file itself holds."""
    table = json.loads(path.read_text())
    return {call for ops in table["devices"].values() for calls in ops.values() for call in calls}


@contextlib.contextmanager
def one_warning(match):
    """Exactly one warning, whatever happens in the block."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
    [warning] = told
    assert warning.category is CacheWarning
    assert re.search(match, str(warning.message))


def corrupt_files(path):
    return sorted(file.name for file in path.parent.glob("*.corrupt-*"))


# Values.


@pytest.mark.parametrize(
    ("value", "cfg_type"),
    [
        (TiledConfig(FwdParams(q_blocksize=64), platform="triton", backend="gpu"), TiledConfig),
        (PlainConfig(64, ((1, 2), (3, 4))), PlainConfig),
        ({"block": 64, "tiles": (1, 2)}, None),
        (64, None),
    ],
)
def test_another_process_gets_back_what_was_put(path, value, cfg_type):
    PersistentCache("scale", path, cfg_type).put(key("a"), value)
    again = PersistentCache("scale", path, cfg_type)
    assert again.get(key("a")) == value
    assert again.items() == [(key("a"), value)]
    assert again.get(key("b")) is None
    if cfg_type:
        hash(again.get(key("a")))


def test_device_op_version_and_call_tell_entries_apart(path):
    cache = PersistentCache("scale", path)
    distinct = [
        key("a"),
        key("b"),
        key("a", op="scale@v2"),
        key("a", op="scale.backward@v1"),
        key("a", device="NVIDIA H200|cuda 13000"),
    ]
    cache.update({one: {"block": number} for number, one in enumerate(distinct)})
    assert [cache.get(one)["block"] for one in distinct] == [0, 1, 2, 3, 4]
    assert json.loads(path.read_text())["devices"]["cpu|cpu"]["scale@v1"]["a"] == {"block": 0}


def test_a_stored_configuration_that_no_longer_fits_is_a_miss_and_stays(path):
    PersistentCache("scale", path).update({key("a"): {"gone": 1}, key("b"): {"block": 2}})
    cache = PersistentCache("scale", path, PlainConfig)
    with pytest.warns(CacheWarning, match=r"scale@v1 is not a PlainConfig any more: .*gone"):
        assert cache.get(key("a")) is None
    with pytest.warns(CacheWarning):
        assert cache.items() == [(key("b"), PlainConfig(2))]
    assert on_disk(path) == {"a", "b"}


def test_a_configuration_that_json_cannot_hold_is_not_kept(path):
    cache = PersistentCache("scale", path)
    with pytest.warns(CacheWarning, match=r"scale@v1 cannot be kept as JSON: .*complex"):
        cache.update({key("a"): {"block": 1j}, key("b"): {"block": 2}})
    assert on_disk(path) == {"b"}


# Where the file is.


def test_nothing_is_created_before_a_write(tmp_path):
    with settings.override(cache_dir=tmp_path / "new"):
        cache = PersistentCache("scale")
        assert cache.get(key("a")) is None
        assert cache.items() == []
        cache.clear()
        assert list(tmp_path.iterdir()) == []
        cache.put(key("a"), {"block": 1})
        assert (tmp_path / "new" / "scale.json").exists()


def test_the_cache_directory_is_asked_for_at_every_use(tmp_path):
    cache = PersistentCache("scale")
    for name in ("one", "two"):
        with settings.override(cache_dir=tmp_path / name):
            assert cache.get(key("a")) is None
            cache.put(key("a"), {"block": name})
            assert cache.path.parent == tmp_path / name
    with settings.override(cache_dir=tmp_path / "one"):
        assert cache.get(key("a")) == {"block": "one"}


def test_every_op_name_is_a_file_name_of_its_own(tmp_path):
    awkward = ["a/b", "a:b", "a b", "../a", "module.Class", "ä"]
    with settings.override(cache_dir=tmp_path):
        paths = {PersistentCache(name).path for name in awkward}
        assert len(paths) == len(awkward)
        assert {path.parent for path in paths} == {tmp_path}
        for name in awkward:
            PersistentCache(name).put(key("a"), {"block": 1})


# Several writers.


def test_what_another_writes_is_seen_without_reopening(path):
    one, other = PersistentCache("scale", path), PersistentCache("scale", path)
    assert one.get(key("a")) is None
    other.put(key("a"), {"block": 1})
    assert one.get(key("a")) == {"block": 1}
    one.put(key("b"), {"block": 2})
    other.put(key("c"), {"block": 3})
    assert on_disk(path) == {"a", "b", "c"}
    other.put(key("a"), {"block": 4})
    assert one.get(key("a")) == {"block": 4}
    path.unlink()
    assert one.items() == []


def test_clear_forgets_for_everybody(path):
    one, other = PersistentCache("scale", path), PersistentCache("scale", path)
    one.put(key("a"), {"block": 1})
    assert other.get(key("a"))
    one.clear()
    assert (one.get(key("a")), other.get(key("a"))) == (None, None)
    other.put(key("b"), {"block": 2})
    assert on_disk(path) == {"b"}


def test_threads_that_share_a_cache_lose_nothing(path):
    cache = PersistentCache("scale", path)

    def write(name):
        for number in range(20):
            cache.put(key(f"{name}{number}"), {"block": number})
            cache.get(key("a0"))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(on_disk(path)) == 60


WRITER = """
import itertools, os, sys, time
from ejkernel.ops.persistent import PersistentCache
path, name, count, stuck = sys.argv[1:]
cache = PersistentCache("scale", path)
if stuck == "stuck":
    def never(source, target):
        print("stuck", flush=True)
        time.sleep(600)
    os.replace = never
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(count)):
    cache.put(("cpu|cpu", "scale@v1", f"{name}{number}"), {"block": number})
    print(f"{name}{number}", flush=True)
"""


def start_writer(path, name, count, stuck=""):
    root = str(Path(ejkernel.__file__).parent.parent)
    writer = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", WRITER, str(path), name, str(count), stuck],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    )
    assert writer.stdout
    assert writer.stdout.readline() == "ready\n"
    return writer


def let_go(writer):
    writer.stdin.write("go\n")
    writer.stdin.flush()


def kill(writer):
    """Kill the writer and return what it had said it had done."""
    os.kill(writer.pid, signal.SIGKILL)
    said = writer.stdout.read().split()
    writer.stdout.close()
    writer.stdin.close()
    writer.wait()
    return said


def test_two_processes_writing_at_once_lose_nothing(path):
    writers = [start_writer(path, name, 100) for name in "ab"]
    for writer in writers:
        let_go(writer)
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    assert on_disk(path) == {f"{name}{number}" for name in "ab" for number in range(100)}


def test_a_writer_killed_at_any_moment_loses_nothing_it_had_written(path):
    acknowledged = set()
    for name, lines in (("a", 1), ("b", 17)):
        writer = start_writer(path, name, 100_000)
        let_go(writer)
        acknowledged |= {writer.stdout.readline().strip() for _ in range(lines)}
        acknowledged |= set(kill(writer))
        cache = PersistentCache("scale", path)
        cache.put(key(f"after {name}"), {"block": 1})
        acknowledged.add(f"after {name}")
        assert acknowledged <= on_disk(path)
    assert corrupt_files(path) == []


def test_a_writer_killed_between_writing_and_replacing_harms_nobody(path):
    PersistentCache("scale", path).put(key("before"), {"block": 1})
    writer = start_writer(path, "a", 1, "stuck")
    let_go(writer)
    assert writer.stdout.readline() == "stuck\n"
    cache = PersistentCache("scale", path)
    assert cache.get(key("before")) == {"block": 1}
    kill(writer)
    cache.put(key("after"), {"block": 2})
    assert on_disk(path) == {"before", "after"}
    assert sorted(file.name for file in path.parent.iterdir()) == ["scale.json", "scale.json.lock"]


# Files that are not ours, or not any more.

BROKEN = {
    "empty": b"",
    "cut short": b'{"format": "ejkernel tuned conf',
    "not text": b"\xff\xfe\x00",
    "no table": b"[1, 2]",
    "foreign": b'{"flash_attention": {"block": 64}}',
    "another schema": b'{"format": "ejkernel tuned configurations", "schema": 0, "devices": {}}',
    "no devices": b'{"format": "ejkernel tuned configurations", "schema": 1}',
    "flat": b'{"format": "ejkernel tuned configurations", "schema": 1, "devices": {"cpu": 1}}',
    "too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("first", ["get", "put"])
def test_a_broken_file_is_set_aside_with_one_warning(path, content, first):
    path.parent.mkdir()
    path.write_bytes(content)
    cache = PersistentCache("scale", path)
    with one_warning(r"cannot be understood .*; it is now .*corrupt-1"):
        if first == "get":
            assert cache.get(key("a")) is None
        cache.put(key("a"), {"block": 1})
        assert cache.get(key("a")) == {"block": 1}
    assert path.with_name("scale.json.corrupt-1").read_bytes() == content
    assert on_disk(path) == {"a"}


def test_a_file_of_a_later_version_is_left_alone(path):
    path.parent.mkdir()
    later = b'{"format": "ejkernel tuned configurations", "schema": 2, "devices": {}, "more": 1}'
    path.write_bytes(later)
    cache = PersistentCache("scale", path)
    with one_warning(r"cannot be read .*schema 2 of a later version.* going on in memory"):
        assert cache.get(key("a")) is None
        cache.put(key("a"), {"block": 1})
        assert cache.get(key("a")) == {"block": 1}
    assert path.read_bytes() == later
    assert corrupt_files(path) == []


def test_what_was_known_before_the_file_broke_is_written_again(path):
    cache = PersistentCache("scale", path)
    cache.put(key("a"), {"block": 1})
    path.write_text("{")
    with pytest.warns(CacheWarning):
        assert cache.get(key("a")) == {"block": 1}
    cache.put(key("b"), {"block": 2})
    path.write_text("{{")
    with pytest.warns(CacheWarning, match=r"corrupt-2"):
        cache.put(key("c"), {"block": 3})
    assert on_disk(path) == {"a", "b", "c"}
    assert corrupt_files(path) == ["scale.json.corrupt-1", "scale.json.corrupt-2"]


def test_a_file_repaired_while_waiting_for_the_lock_is_not_set_aside(path, monkeypatch):
    path.parent.mkdir()
    path.write_text("{")
    locked = shared_file.SharedFile._locked

    def after_another_process(file):
        monkeypatch.undo()
        path.unlink()
        PersistentCache("scale", path).put(key("a"), {"block": 1})
        return locked(file)

    monkeypatch.setattr(shared_file.SharedFile, "_locked", after_another_process)
    assert PersistentCache("scale", path).get(key("a")) == {"block": 1}
    assert corrupt_files(path) == []


# Disks that fail.


def fail_with(code):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return fail


def block_lock(path, monkeypatch):
    path.parent.mkdir(exist_ok=True)
    monkeypatch.setattr(shared_file, "_LOCK_SECONDS", 0.05)
    file = open(path.with_name("scale.json.lock"), "w")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    return file.close


def block_home(path, monkeypatch):
    path.parent.write_text("a file where the directory should be")
    return path.parent.unlink


def block_call(module, name, code):
    def block(path, monkeypatch):
        monkeypatch.setattr(module, name, fail_with(code), raising=False)
        return monkeypatch.undo

    return block


FAILURES = {
    "home is a file": block_home,
    "directory cannot be made": block_call(Path, "mkdir", errno.EROFS),
    "file cannot be opened": block_call(table_file, "open", errno.EACCES),
    "disk full": block_call(os, "fsync", errno.ENOSPC),
    "cannot replace": block_call(os, "replace", errno.EACCES),
    "lock never free": block_lock,
}


@pytest.mark.parametrize("block", FAILURES.values(), ids=FAILURES.keys())
def test_a_failing_disk_is_one_warning_and_entries_stay_in_memory(path, monkeypatch, block):
    unblock = block(path, monkeypatch)
    cache = PersistentCache("scale", path)
    with one_warning(r"scale.json cannot be written .*; going on in memory"):
        for call in "abc":
            cache.put(key(call), {"block": call})
            assert cache.get(key(call)) == {"block": call}
    assert not path.exists()
    assert not path.with_name("scale.json.tmp").exists()
    assert len(cache.items()) == 3
    # Once the disk works again, nothing has been lost.
    unblock()
    cache.put(key("d"), {"block": "d"})
    assert on_disk(path) == set("abcd")


def test_nobody_waits_twice_for_a_lock_that_does_not_come(path, monkeypatch):
    patience = []
    lock = filelock.FileLock

    def spy(*args, timeout, **kwargs):
        patience.append(timeout)
        return lock(*args, timeout=timeout, **kwargs)

    monkeypatch.setattr(filelock, "FileLock", spy)
    cache = PersistentCache("scale", path)
    release = block_lock(path, monkeypatch)
    with one_warning("cannot be written"):
        cache.put(key("a"), {"block": 1})
        cache.put(key("b"), {"block": 2})
    release()
    cache.put(key("c"), {"block": 3})
    cache.put(key("d"), {"block": 4})
    wait = shared_file._LOCK_SECONDS
    assert patience == [wait, 0, 0, wait]


def test_a_full_disk_leaves_the_file_as_it_was(path, monkeypatch):
    cache = PersistentCache("scale", path)
    cache.put(key("a"), {"block": 1})
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", fail_with(errno.ENOSPC))
    with pytest.warns(CacheWarning, match=os.strerror(errno.ENOSPC)):
        cache.put(key("b"), {"block": 2})
    assert path.read_bytes() == before
    assert cache.get(key("a")) == {"block": 1}


def test_a_file_that_cannot_be_read_is_one_warning_and_is_not_overwritten(path, monkeypatch):
    PersistentCache("scale", path).put(key("a"), {"block": 1})
    monkeypatch.setattr(Path, "read_text", fail_with(errno.EACCES))
    cache = PersistentCache("scale", path)
    with one_warning(r"scale.json cannot be read"):
        assert cache.get(key("a")) is None
        cache.put(key("b"), {"block": 2})
        assert cache.get(key("b")) == {"block": 2}
    monkeypatch.undo()
    assert on_disk(path) == {"a"}


def test_a_broken_file_that_cannot_be_moved_is_one_warning(path, monkeypatch):
    path.parent.mkdir()
    path.write_text("{")
    monkeypatch.setattr(os, "rename", fail_with(errno.EROFS))
    cache = PersistentCache("scale", path)
    with one_warning(r"cannot be read"):
        for _ in range(3):
            assert cache.get(key("a")) is None
        cache.put(key("b"), {"block": 2})
    assert cache.get(key("b")) == {"block": 2}
    assert path.read_text() == "{"


# Export, import, shipped tables.


def test_an_export_can_be_imported_elsewhere(path, tmp_path):
    cache = PersistentCache("scale", path)
    cache.update({key("a"): {"block": 1}, key("b"): {"block": 2}})
    assert cache.export_to(tmp_path / "export.json") == 2
    other = PersistentCache("scale", tmp_path / "other.json")
    other.update({key("b"): {"block": 3}, key("c"): {"block": 4}})
    assert other.import_from(tmp_path / "export.json") == 2
    assert dict(other.items()) == {
        key("a"): {"block": 1},
        key("b"): {"block": 2},
        key("c"): {"block": 4},
    }


def test_importing_a_broken_file_is_an_error_and_leaves_it_alone(path, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(ValueError, match=r"^PersistentCache: cannot import .*broken.json: its"):
        PersistentCache("scale", path).import_from(broken)
    assert broken.read_text() == "{}"
    assert not path.exists()


H200 = "NVIDIA H200|PJRT C API cuda 13000"


def test_a_written_table_is_found_whatever_the_driver(tmp_path):
    config = TiledConfig(FwdParams(q_blocksize=128), platform="pallas")
    entries = {key("a", device=H200): config, key("a", device="TPU v5 lite|x"): {"block": 1}}
    assert write_tuned(tmp_path, "scale", entries) == [
        tmp_path / "nvidia-h200" / "scale.json",
        tmp_path / "tpu-v5-lite" / "scale.json",
    ]
    write_tuned(tmp_path, "scale", {key("b", device=H200): {"block": 2}})
    table = ShippedTable("scale", tmp_path)
    for driver in ("PJRT C API cuda 12090", "absent"):
        assert TiledConfig.from_dict(table.get(key("a", device=f"NVIDIA H200|{driver}"))) == config
    assert table.get(key("b", device=H200)) == {"block": 2}
    assert table.get(key("b", device="TPU v5 lite|y")) is None
    assert table.get(key("a", device="NVIDIA A100|y")) is None


def test_a_shipped_table_is_read_once_and_a_broken_one_is_one_warning(tmp_path):
    [file] = write_tuned(tmp_path, "scale", {key("a", device=H200): {"block": 1}})
    table = ShippedTable("scale", tmp_path)
    assert table.get(key("a", device=H200)) == {"block": 1}
    file.write_text("{")
    assert table.get(key("a", device=H200)) == {"block": 1}
    broken = ShippedTable("scale", tmp_path)
    with one_warning(r"shipped table .* cannot be read"):
        assert broken.get(key("a", device=H200)) is None
        assert broken.get(key("b", device=H200)) is None
    assert file.read_text() == "{"


def test_the_package_can_be_asked_for_any_op_and_device():
    assert ShippedTable.for_op("scale") is ShippedTable.for_op("scale")
    assert ShippedTable.for_op("scale").get(key("a", device="no such device|1")) is None


def test_importing_the_framework_loads_no_locks_and_no_directories():
    script = (
        "import sys, jax; before = set(sys.modules); import ejkernel.ops; "
        "print({'filelock', 'platformdirs'} & (set(sys.modules) - before))"
    )
    root = str(Path(ejkernel.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": root},
    )
    assert done.stdout.strip() == "set()"


def test_warnings_as_errors_leave_a_cache_that_works(path):
    path.parent.mkdir()
    path.write_text("{")
    cache = PersistentCache("scale", path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CacheWarning):
            cache.put(key("a"), {"block": 1})
        cache.put(key("b"), {"block": 2})
    assert on_disk(path) == {"a", "b"}


# Entries that could not be written when they were put.

HOLDER = """
import sys
import filelock
with filelock.FileLock(sys.argv[1] + ".lock"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def held_by_another_process(path):
    """Another process holds the lock of the file in the block."""
    path.parent.mkdir(exist_ok=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout
    assert holder.stdout.readline() == "held\n"
    try:
        yield
    finally:
        holder.communicate("\n")


@pytest.mark.parametrize("then", ["get", "items", "put", "get of another object"])
def test_an_entry_put_under_a_held_lock_is_written_by_the_next_use(path, monkeypatch, then):
    monkeypatch.setattr(shared_file, "_LOCK_SECONDS", 0.05)
    cache = PersistentCache("scale", path)
    with held_by_another_process(path):
        with pytest.warns(CacheWarning, match="cannot be written"):
            cache.put(key("a"), {"block": 1})
        assert cache.get(key("a")) == {"block": 1}
        assert not path.exists()
    if then == "get":
        assert cache.get(key("a")) == {"block": 1}
    elif then == "items":
        assert len(cache.items()) == 1
    elif then == "put":
        cache.put(key("b"), {"block": 2})
    else:
        del cache
        assert PersistentCache("scale", path).get(key("a")) == {"block": 1}
    assert "a" in on_disk(path)


LAST_TRY = """
import sys
from ejkernel.ops import shared_file
from ejkernel.ops.persistent import PersistentCache
shared_file._LOCK_SECONDS, shared_file._EXIT_SECONDS = 0.01, float(sys.argv[2])
PersistentCache("scale", sys.argv[1]).put(("cpu|cpu", "scale@v1", "a"), {"block": 1})
print("put", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("released", [True, False])
def test_the_exit_of_a_process_is_the_last_try_to_write(path, released):
    root = str(Path(ejkernel.__file__).parent.parent)
    with contextlib.ExitStack() as lock:
        lock.enter_context(held_by_another_process(path))
        process = subprocess.Popen(
            [sys.executable, "-c", LAST_TRY, str(path), "20" if released else "0.1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": root},
        )
        assert process.stdout
        assert process.stdout.readline() == "put\n"
        if released:
            lock.close()
        _, told = process.communicate("\n")
    assert process.returncode == 0
    assert ("1 could not be written to" in told) is not released
    assert "Traceback" not in told
    assert path.exists() is released


def in_a_fork(work):
    """The exit status of a forked child that works for at most five seconds."""
    with warnings.catch_warnings(category=RuntimeWarning, action="ignore"):  # JAX has threads
        child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_a_child_forked_while_a_thread_writes_can_read_and_write(path):
    cache = PersistentCache("scale", path)
    cache.put(key("a"), {"block": 1})
    held, done = threading.Event(), threading.Event()

    def write():
        with cache._file._guard:
            held.set()
            done.wait()

    def work():
        assert cache.get(key("a")) == {"block": 1}
        cache.put(key("b"), {"block": 2})

    thread = threading.Thread(target=write)
    thread.start()
    held.wait()
    try:
        assert in_a_fork(work) == 0
    finally:
        done.set()
        thread.join()
    assert on_disk(path) == {"a", "b"}
