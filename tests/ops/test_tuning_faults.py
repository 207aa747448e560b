"""Tuning survives candidates that hang, fail or lie, and processes that die or do the same."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.kernels import Scale, ScaleConfig

import ejkernel
from ejkernel import settings
from ejkernel.errors import TuningWarning
from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    PersistentCache,
    Tuner,
    tuner,
)

ALWAYS = AutotunePolicy(allow_autotune=True)
X = np.arange(6.0, dtype=np.float32).reshape(2, 3)
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes."


class Faulty(Scale):
    """With small blocks it does what it is given."""

    version = "faulty"

    def __init__(self, fault):
        super().__init__("faulty")
        self.fault = fault

    def run(self, x, *, factor=2.0, cfg):
        return self.fault(x * factor) if cfg.block == 64 else x * factor


def chosen_with(fault, timeout=300.0):
    """The result and the configuration of a call that measures a faulty candidate."""
    chain = ConfigSelectorChain(ConfigCache(), ALWAYS, tuner=Tuner(timeout=timeout))
    kernel, executor = Faulty(fault), Executor(chain)
    result = executor(kernel, X)
    return result, executor.choose_config(kernel, X).params


def raise_(error):
    raise error


FAULTS = {
    "out of memory": (
        lambda y: raise_(jax.errors.JaxRuntimeError(OUT_OF_MEMORY)),
        "RESOURCE_EXHAUSTED",
    ),
    "one element is wrong": (lambda y: y.at[1, 1].add(0.01), "is off by"),
    "one element is NaN": (lambda y: y.at[1, 1].set(jnp.nan), "is off by nan|is off by inf"),
    "another shape": (lambda y: y[:1], "gives shape"),
    "another exception": (lambda y: raise_(KeyError("block")), "KeyError"),
}


@pytest.mark.parametrize(("fault", "said"), FAULTS.values(), ids=FAULTS.keys())
def test_a_faulty_candidate_is_dropped_and_named(fault, said):
    with pytest.warns(TuningWarning, match=f"dropped 1 of 2.*({said})"):
        result, params = chosen_with(fault)
    assert params == ScaleConfig(128)
    np.testing.assert_array_equal(result, 2 * X)


@pytest.mark.parametrize("step", ["while compiled", "while run"])
def test_a_candidate_that_hangs_is_dropped_after_its_time(step):
    until = threading.Event()

    def wait(y):
        until.wait(120)
        return y

    def hang(y):
        if step == "while compiled":
            return wait(y)
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    # The other candidate is measured first, with all the time that it needs.
    shorten = lambda progress: setattr(tuner, "timeout", 1.0)
    tuner = Tuner(timeout=60.0, report=shorten)
    chain = ConfigSelectorChain(ConfigCache(), ALWAYS, tuner=tuner)
    try:
        with pytest.warns(TuningWarning, match="dropped 1 of 2.*TimeoutError: it did not end"):
            choice = chain.choose(Executor(chain).invocation(Faulty(hang), X))
        assert choice.params == ScaleConfig(128)
    finally:
        until.set()
        for thread in threading.enumerate():  # leave nothing that runs during another test
            if thread.name == "ejkernel-outside-trace":
                thread.join(60)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_a_time_that_is_none_is_refused(timeout):
    with pytest.raises(ValueError, match=r"^Tuner: timeout must be positive"):
        Tuner(timeout=timeout)


def test_a_time_without_limit_drops_nothing():
    _, params = chosen_with(lambda y: y, timeout=float("inf"))
    assert params in (ScaleConfig(64), ScaleConfig(128))


def test_without_memory_for_its_data_nothing_is_measured_and_the_call_runs(monkeypatch):
    fail = lambda *_: raise_(jax.errors.JaxRuntimeError(OUT_OF_MEMORY))
    monkeypatch.setattr(tuner, "random_arguments", fail)
    events = []
    chain = ConfigSelectorChain(
        ConfigCache(), ALWAYS, on_event=lambda name, **_: events.append(name)
    )
    with pytest.warns(TuningWarning, match=r"cannot be measured \(JaxRuntimeError: RESOURCE_EXH"):
        result = Executor(chain)(Scale(), X)
    np.testing.assert_array_equal(result, 2 * X)
    assert events == ["autotune_start", "autotune_finish", "heuristics"]


ENDLESS = """
import time
from types import SimpleNamespace
from ejkernel.ops import measuring
from ejkernel.ops.platform import Device

endless = SimpleNamespace(lower=lambda: SimpleNamespace(compile=lambda: time.sleep(3600)))
with measuring.compiled_together([endless], (), Device("gpu", "x", None, "x")):
    print("done")
"""


def test_a_compilation_that_never_ends_does_not_keep_the_process_from_exiting():
    environment = os.environ | {"PYTHONPATH": str(Path(ejkernel.__file__).parents[1])}
    command = [sys.executable, "-c", ENDLESS]
    done = subprocess.run(
        command, env=environment, timeout=60, check=True, capture_output=True, text=True
    )
    assert done.stdout == "done\n"


# Prints when it starts to measure; its first candidate takes until the given file exists.
PROGRAM = """
import sys, time
from pathlib import Path
import numpy as np
from ops.kernels import Scale
from ejkernel.ops import *

class Slow(Scale):
    def run(self, x, *, factor=2.0, cfg):
        if cfg.block == 64:
            print("measuring", flush=True)
            while not Path(sys.argv[1]).exists():
                time.sleep(0.05)
        return x * factor

chain = ConfigSelectorChain(
    ConfigCache(), AutotunePolicy(allow_autotune=True), persistent=PersistentCache
)
assert (Executor(chain)(Slow(), np.ones(4, np.float32)) == 2).all()
print("done", flush=True)
"""


def start(directory, until):
    """Another process that measures the same call, with the cache in this directory."""
    paths = [str(Path(ejkernel.__file__).parents[1]), str(Path(__file__).parents[1])]
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(until)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(paths), "EJKERNEL_CACHE_DIR": str(directory)},
    )
    assert process.stdout
    assert process.stdout.readline() == "measuring\n"
    return process


@pytest.mark.slow
def test_two_processes_may_measure_the_same_call_and_one_of_them_may_die(tmp_path):
    cache, until = tmp_path / "cache", tmp_path / "until"
    killed, *others = [start(cache, until) for _ in range(3)]
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    until.touch()
    for process in others:
        said, _ = process.communicate(timeout=120)
        assert (process.returncode, said.split()[-1]) == (0, "done")
    with settings.override(cache_dir=cache):
        ((_, config),) = PersistentCache("scale").items()
    assert config["block"] in (64, 128)
    assert {x.name for x in cache.iterdir()} <= {"scale.json", "scale.json.lock"}
