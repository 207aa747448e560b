"""`ejkernel tune` finds the fastest candidate and keeps it where calls look for it."""

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import threading
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from cli.commands import WIDTHS, run, sentence, too_wide
from cli.dying_task import DIES, Dying
from rich.console import Console

from ejkernel import settings
from ejkernel.cli import subjects
from ejkernel.cli import tune as tuning
from ejkernel.cli.progress import TuningProgress
from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    PersistentCache,
    executor,
    measuring,
)
from ejkernel.ops.config import FwdParams
from ejkernel.ops.implementation import Choice, Pass
from ejkernel.ops.persistent import ShippedTable
from ejkernel.ops.platform import Device
from ejkernel.ops.tuner import Progress, describe

OPTIONS = ("--dtype", "float32", "--rounds", "1")
MASK = ("mean_pooling", "--workload", "mask", *OPTIONS)


def _workload(op, name):
    subject = subjects.one(op)
    (found,) = [call for call in subject.workloads if call.name == name]
    return subject, found


@pytest.fixture
def two_candidates(monkeypatch):
    def two(self, inputs, spec, device, deterministic):
        first = self.heuristic(inputs, spec, device)
        return [first, dataclasses.replace(first, q_blocksize=16)]

    monkeypatch.setattr(Pass, "choices", two)


def test_a_later_call_finds_the_result_in_the_users_cache():
    shown = run("tune", *MASK)
    assert shown.exit_code == 0
    path = settings.cache_dir() / "mean_pooling.json"
    assert str(path) in shown.output
    events = []
    chain = ConfigSelectorChain(
        ConfigCache(),
        persistent=PersistentCache,
        on_event=lambda name, **data: events.append((name, data.get("level"))),
    )
    subject, workload = _workload("mean_pooling", "mask")
    with executor.use(Executor(chain)):
        subject.function(**workload.build())
    assert events == [("cache_hit", "persistent")]


def test_maintainers_write_a_table_that_the_package_reads(tmp_path, two_candidates):
    name = "scaled_dot_product_attention"
    shown = run("tune", name, "--workload", "plain", *OPTIONS, "--ship", "--output", str(tmp_path))
    assert shown.exit_code == 0
    subject, workload = _workload(name, "plain")
    plain = subject.invocation(workload.build())
    table = ShippedTable(name, tmp_path)
    assert table.get(plain.key)["fwd_params"].keys() == {"q_blocksize", "kv_blocksize"}
    backward = dataclasses.replace(plain, direction="backward")
    assert table.get(backward.key)["bwd_params"].keys() == {"q_blocksize", "kv_blocksize"}
    assert not settings.cache_dir().exists()


def test_a_folder_of_tables_is_for_maintainers(tmp_path):
    shown = run("tune", "mean_pooling", "--output", str(tmp_path))
    assert shown.exit_code == 2
    assert "--output is a folder of shipped tables; use it with --ship." in sentence(shown)


def test_a_single_candidate_is_nothing_to_tune():
    shown = run("tune", "scaled_dot_product_attention", "--workload", "plain")
    assert (shown.exit_code, sentence(shown)) == (
        0,
        "Nothing to tune: scaled_dot_product_attention has a single candidate per call on cpu.",
    )
    assert not settings.cache_dir().exists()


@pytest.mark.slow
def test_several_processes_write_what_one_would():
    named = [x for name in ("plain", "mask") for x in ("--workload", name)]
    shown = run("tune", "mean_pooling", *named, *OPTIONS, "--workers", "2")
    assert shown.exit_code == 0
    assert "plain forward: candidate 3 of 3" in shown.output
    subject = subjects.one("mean_pooling")
    cache = PersistentCache("mean_pooling")
    for call in subject.workloads[:6]:
        known = cache.get(subject.invocation(call.build()).key) is not None
        assert known == (call.name in ("plain", "mask"))


@pytest.mark.slow
def test_a_process_that_dies_costs_no_other_pass():
    passes = [tuning.Pass(name, "forward") for name in ("plain", DIES, "mask")]
    found = dict(tuning._outcomes(Dying("mean_pooling", "float32", 1), passes, 2, print))
    assert [found[one].failed for one in passes] == [False, True, False]
    assert found[passes[1]].said.startswith(f"{DIES} forward: failed, BrokenProcessPool: ")


class Pool:
    """In place of worker processes: runs a pass when it is submitted, the second of two not."""

    def __init__(self):
        self.submitted = 0

    def submit(self, _, task, one):
        self.submitted += 1
        if self.submitted > 1:
            raise BrokenProcessPool("a process has died")
        future = concurrent.futures.Future()
        future.set_result(task(one, print))
        return future


@dataclasses.dataclass(frozen=True)
class Locked(tuning.Task):
    """A pass whose outcome names the folder of its lock."""

    def __call__(self, one, report):
        assert self.lock
        return tuning.Outcome(str(self.lock.parent), {})


@pytest.fixture
def pools(monkeypatch):
    """What each pool finds when it ends, once a folder was told: whether it is still there."""
    ended, folder = [], []

    @contextlib.contextmanager
    def pool(workers, report):
        try:
            yield Pool()
        finally:
            ended.append(all(map(os.path.isdir, folder)))

    monkeypatch.setattr(tuning, "_pool", pool)
    return folder, ended


@pytest.mark.usefixtures("pools")
def test_a_process_that_dies_while_passes_are_submitted_costs_none():
    passes = [tuning.Pass(name, "forward") for name in ("plain", "mask", "wide")]
    found = dict(tuning._outcomes(Locked("mean_pooling", "float32", 1), passes, 2, print))
    assert [found[one].failed for one in passes] == [False] * 3


def test_processes_end_before_the_folder_of_their_lock(pools):
    folder, ended = pools
    passes = [tuning.Pass(name, "forward") for name in ("plain", "mask")]
    outcomes = tuning._outcomes(Locked("mean_pooling", "float32", 1), passes[:1], 2, print)
    folder.append(next(outcomes)[1].said)
    outcomes.close()
    assert ended == [True]
    assert not os.path.isdir(folder[0])


def test_a_pass_that_fails_costs_no_other(monkeypatch, two_candidates):
    def few(self, one, report):
        if one.direction == "backward":
            raise MemoryError("no room left")
        return tuned(self, one, report)

    tuned = tuning.Task._tuned
    monkeypatch.setattr(tuning.Task, "_tuned", few)
    name = "scaled_dot_product_attention"
    shown = run("tune", name, "--workload", "plain", *OPTIONS)
    assert shown.exit_code == 1
    assert "plain backward: failed, MemoryError: no room left" in shown.output
    assert "Failed passes: 1" in shown.output
    subject, workload = _workload(name, "plain")
    assert PersistentCache(name).get(subject.invocation(workload.build()).key)


def test_a_cache_that_cannot_be_written_is_a_failure(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "file"))
    shown = run("tune", *MASK)
    assert shown.exit_code == 1
    assert "The configurations could not be written." in shown.output
    shown = run("tune", *MASK, "--ship", "--output", str(tmp_path / "file"))
    assert shown.exit_code == 1
    assert "ejkernel: cannot write the table of mean_pooling" in shown.output


STEP = """
import jax, jax.numpy as jnp
from ejkernel import mean_pooling

x = jax.ShapeDtypeStruct((2, 40, 8), jnp.float32)
{arguments}


@jax.grad
def step(x):
    return mean_pooling(x).sum()
"""


def test_the_calls_of_a_function_are_tuned(tmp_path):
    (tmp_path / "train.py").write_text(STEP.format(arguments="arguments = (x,)"))
    shown = run("tune", f"{tmp_path}/train.py:step", "--rounds", "1")
    assert shown.exit_code == 0, shown.output
    assert re.search(r"mean_pooling: \d+\.\d{3} ms, xla block_size=\d+", shown.output)
    assert "Calls tuned: 2." in shown.output
    assert len(PersistentCache("mean_pooling").items()) == 2


@pytest.mark.parametrize(
    ("place", "arguments", "said"),
    [
        ("absent.py:step", "arguments = (x,)", "there is no file"),
        ("train.py:other", "arguments = (x,)", "defines no function other"),
        ("train.py:step", "", "must define `arguments`"),
        ("train.py:step", "arguments = lambda: x", "must be a tuple, got ShapeDtypeStruct"),
    ],
)
def test_a_file_that_cannot_be_tuned_gets_a_sentence(tmp_path, place, arguments, said):
    (tmp_path / "train.py").write_text(STEP.format(arguments=arguments))
    shown = run("tune", f"{tmp_path}/{place}", columns=200)
    assert shown.exit_code == 2
    assert said in " ".join(shown.output.split())


def test_a_file_without_a_function_is_wrong_usage():
    shown = run("tune", "train.py", columns=200)
    assert shown.exit_code == 2
    assert "train.py names no function: train.py:FUNCTION." in shown.output


def test_an_option_for_named_calls_is_refused_for_a_function():
    shown = run("tune", "train.py:step", "--dtype", "float32", columns=200)
    assert shown.exit_code == 2
    assert "takes no option but --rounds." in shown.output


def test_an_unknown_named_call_is_wrong_usage():
    shown = run("tune", "flash_attention", "--workload", "nonsense")
    assert shown.exit_code == 2
    assert "causal_offset" in shown.output


@pytest.mark.parametrize("columns", WIDTHS)
def test_results_fit_the_terminal(columns, monkeypatch):
    said = "pretraining_64k backward: 1.234 ms, pallas " + "q_blocksize=128 " * 8
    outcome = tuning.Outcome(said, {})
    monkeypatch.setattr(tuning.Task, "__call__", lambda self, one, report: outcome)
    shown = run("tune", *MASK, columns=columns)
    assert too_wide(shown, columns) == []
    assert "pretraining_64k backward" in shown.output


def test_progress_names_candidate_best_and_time_left_but_no_unset_field():
    shown = run("tune", *MASK)
    line = r"mask forward: candidate 3 of 3, best \d+\.\d{3} ms, \d+:\d\d left; xla block_size=\d+"
    assert re.search(line, shown.stderr)
    assert "None" not in shown.output


def test_a_candidate_is_described_by_what_is_set():
    source = subjects.one("flash_attention").op.sources[-1]
    params = FwdParams(q_blocksize=64, num_warps=4)
    choice = Choice(source, Pass(run=print, features=frozenset()), params)
    assert describe(choice) == "xla q_blocksize=64 num_warps=4"
    assert describe(choice._replace(params=None)) == "xla"


def test_candidates_for_an_accelerator_are_compiled_at_once_until_one_gives_up(as_a_user_calls):
    """The compiler is that of the host; the pool is the one that a GPU gets."""
    gpu = Device("gpu", "NVIDIA H200", (9, 0), "NVIDIA H200|absent")
    runs = [jax.jit(lambda x, i=i: x + i) for i in range(3)]
    x = jnp.ones(4)
    with measuring.compiled_together(runs, (x,), gpu) as compiled:
        assert [float(run()(x)[0]) for run in compiled] == [1, 2, 3]
    until = threading.Event()
    waiting = SimpleNamespace(lower=lambda x: SimpleNamespace(compile=lambda: until.wait(60)))
    many = measuring.compiled_together([waiting] * 99, (x,), gpu)
    with pytest.raises(KeyboardInterrupt), many as compiled:
        raise KeyboardInterrupt
    until.set()
    with pytest.raises(concurrent.futures.CancelledError):
        compiled[-1]()


class TestTimeLeft:
    @pytest.fixture
    def clock(self, monkeypatch):
        now = [100.0]
        monkeypatch.setattr("ejkernel.cli.progress.time.monotonic", lambda: now[0])
        return now

    def test_is_as_long_as_what_is_left_of_all_passes(self, clock):
        progress = TuningProgress(passes=4, console=Console(force_terminal=True))
        assert progress.seconds_left() is None
        clock[0] += 30
        progress.finish("plain forward")
        progress.update("plain backward", Progress("op", 5, 10, "xla", "1 ms", 1e-3, 0.0))
        assert progress.seconds_left() == pytest.approx(30 / 1.5 * 2.5)

    def test_is_shown_on_one_line_of_the_terminal(self, clock):
        console = Console(force_terminal=True, width=80)
        progress = TuningProgress(passes=2, console=console)
        clock[0] += 45
        progress.update("plain forward", Progress("op", 3, 12, "xla", "9 ms", 1.25e-3, 0.0))
        with console.capture() as captured:
            console.print(progress._lines())
        line = "plain forward: candidate 3 of 12, best 1.250 ms, 5:15 left\n"
        assert captured.get() == line
