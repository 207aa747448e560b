"""Calls from many threads, from children, at the end of the interpreter and after an interrupt."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from ops.kernels import Scale, ScaleConfig

import ejkernel
from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    PersistentCache,
    Tuner,
)

THREADS = 8


def tuning_executor(path, events):
    """An executor that measures unknown calls, and notes its decisions."""
    return Executor(
        ConfigSelectorChain(
            ConfigCache(),
            policy=AutotunePolicy(),
            tuner=Tuner(warmup=0, iters=1, report=lambda progress: None),
            persistent=PersistentCache("scale", path),
            on_event=lambda name, **data: events.append((name, data.get("key"))),
        )
    )


def in_threads(work):
    """The results of `work(number)` in eight threads that begin at the same moment."""
    start = threading.Barrier(THREADS)

    def after_start(number):
        start.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(after_start, range(THREADS)))


def test_threads_may_call_an_operation_at_once():
    arrays = [np.full((1, 1 + number % 4, 2), number, np.float32) for number in range(THREADS)]

    def call(number):
        x = jax.numpy.asarray(arrays[number])
        return [ejkernel.mean_pooling(x) for _ in range(3)]

    for number, results in enumerate(in_threads(call)):
        for result in results:
            np.testing.assert_array_equal(result, np.full((1, 2), number))


def test_threads_that_make_the_same_unknown_call_measure_it_once(tmp_path):
    events, kernel = [], Scale()
    executor = tuning_executor(tmp_path / "scale.json", events)
    x = np.ones(4, np.float32)
    for result in in_threads(lambda number: executor(kernel, x)):
        np.testing.assert_array_equal(result, 2 * x)
    assert [name for name, _ in events].count("autotune_start") == 1


def test_threads_that_measure_several_calls_lose_none(tmp_path):
    events, kernel = [], Scale()
    executor = tuning_executor(tmp_path / "scale.json", events)
    arrays = [np.full(1 + number // 2, number, np.float32) for number in range(THREADS)]
    for number, result in enumerate(in_threads(lambda number: executor(kernel, arrays[number]))):
        np.testing.assert_array_equal(result, 2 * arrays[number])
    keys = {executor.invocation(kernel, x).key for x in arrays}
    stored = dict(PersistentCache("scale", tmp_path / "scale.json", ScaleConfig).items())
    assert set(stored) == keys
    assert set(stored.values()) <= {ScaleConfig(64), ScaleConfig(128)}


class Interrupted(Scale):
    """Its first run is interrupted by Ctrl-C, whatever thread it is in."""

    interrupts = 1

    def run(self, x, *, factor=2.0, cfg):
        if self.interrupts:
            self.interrupts -= 1
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        return x * factor


def test_a_call_after_an_interrupted_one_works():
    kernel, x = Interrupted("interrupted_call"), np.ones(5, np.float32)
    executor = Executor(ConfigSelectorChain(ConfigCache()))
    with pytest.raises(KeyboardInterrupt):
        executor(kernel, x)
    np.testing.assert_array_equal(executor(kernel, x), 2 * x)


def test_a_call_after_an_interrupted_measurement_measures_again(tmp_path):
    events, kernel, x = [], Interrupted("interrupted_measurement"), np.ones(6, np.float32)
    executor = tuning_executor(tmp_path / "scale.json", events)
    with pytest.raises(KeyboardInterrupt):
        executor(kernel, x)
    np.testing.assert_array_equal(executor(kernel, x), 2 * x)
    assert [name for name, _ in events].count("autotune_start") == 2
    assert PersistentCache("scale", tmp_path / "scale.json").items()


def test_a_call_after_an_interrupted_compilation_works(monkeypatch):
    from jax._src import compiler

    x = jax.numpy.ones((1, 7, 3))
    expected = np.ones((1, 3))

    compiled = compiler.compile_or_get_cached

    def interrupted(*args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            return compiled(*args, **kwargs)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler, "compile_or_get_cached", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ejkernel.mean_pooling(x)
    np.testing.assert_allclose(ejkernel.mean_pooling(x), expected, rtol=1e-6)


CALL = """
import sys, threading, time
import jax.numpy as jnp
import ejkernel

def call(size):
    return float(ejkernel.mean_pooling(jnp.ones((1, size, 2))).sum())
"""

CHILDREN = """
import multiprocessing

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print(pool.map_async(call, [3, 4]).get(timeout=120))
    print(call(5))
"""

# Not a daemon thread: the interpreter ends daemon threads inside of JAX, which aborts.
LATE_THREAD = """
ending = threading.Event()

def work():
    ending.wait()
    time.sleep(0.5)
    print(call(3))

threading.Thread(target=work).start()
print(call(2))
ending.set()
"""


def run_script(tmp_path, script, *arguments):
    """What a script of its own prints, and its errors; it must end well."""
    (tmp_path / "script.py").write_text(CALL + script)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        env=os.environ
        | {"PYTHONPATH": str(Path(ejkernel.__file__).parents[1]), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.split("\n")[:-1]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_may_call_an_operation(tmp_path, method):
    """A fork comes before the first computation: JAX itself does not work in a later one."""
    assert run_script(tmp_path, CHILDREN, method) == ["[2.0, 2.0]", "2.0"]


@pytest.mark.slow
def test_the_interpreter_may_end_while_a_thread_calls(tmp_path):
    assert run_script(tmp_path, LATE_THREAD) == ["2.0", "2.0"]
