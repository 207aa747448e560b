"""Measuring counts whole computations, and works from inside a trace."""

import contextvars
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from ejkernel.ops import timing
from ejkernel.ops.platform import Device
from ejkernel.ops.timing import Measurement, measure, outside_trace


class Clock:
    """A clock that moves only when it is told to, and counts how often."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.moves = 0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def move(self, seconds):
        self.moves += 1
        self.now += seconds


class Pending:
    """A result that is not there before somebody waits for it."""

    def __init__(self, log):
        self.log = log
        log.append("started")

    def block_until_ready(self):
        self.log.append("done")


def test_a_slow_function_is_called_as_often_as_asked(monkeypatch):
    clock = Clock(monkeypatch)
    measured = measure(clock.move, 0.25, warmup=2, iters=3)
    assert clock.moves == 5
    assert measured == Measurement(best=0.25, median=0.25)


def test_one_sample_of_a_short_function_is_many_calls(monkeypatch):
    clock = Clock(monkeypatch)
    measured = measure(clock.move, 2.0**-14, warmup=1, iters=3)
    # One call to warm up, one to see how many make two milliseconds: 33.
    assert clock.moves == 2 + 3 * 33
    assert measured.best == pytest.approx(2.0**-14)


def test_best_and_median_are_over_the_samples(monkeypatch):
    clock = Clock(monkeypatch)
    seconds = iter([9.0, 0.5, 0.25, 8.0, 0.5, 1.0])
    measured = measure(lambda: clock.move(next(seconds)), warmup=1, iters=5)
    assert measured == Measurement(best=0.25, median=0.5)


@pytest.mark.parametrize(
    ("platform", "sample"),
    [
        ("cpu", ["started", "done", "started", "done", "done"]),
        ("gpu", [*20 * ["started"], "done"]),
    ],
)
def test_the_clock_stops_when_the_last_result_is_there(monkeypatch, platform, sample):
    device = Device(platform, platform, None, platform)
    monkeypatch.setattr(timing, "device_of", lambda leaves: device)
    clock = Clock(monkeypatch)
    log = []

    def launch():
        clock.move(1e-3)
        return Pending(log)

    measure(launch, warmup=1, iters=2)
    warmup = first = ["started", "done"]
    assert log == warmup + first + 2 * sample


def test_interleaved_functions_are_told_apart_with_few_samples(monkeypatch):
    clock = Clock(monkeypatch)
    taken = {"slow": 0, "fast": 0, "hopeless": 0}

    def takes(name, seconds):
        def run():
            taken[name] += 1
            clock.move(seconds)

        return run

    functions = [takes("slow", 1.1), takes("fast", 1.0), takes("hopeless", 9.0)]
    slow, fast, hopeless = timing.interleaved(functions, (), seconds=1e9)
    assert timing.is_faster(fast, slow)
    assert not timing.is_faster(slow, fast)
    assert (slow.median, fast.median, hopeless.median) == pytest.approx((1.1, 1.0, 9.0))
    assert taken == {"slow": 5, "fast": 5, "hopeless": 1}


def test_functions_that_cannot_be_told_apart_are_sampled_until_the_time_is_up(monkeypatch):
    clock = Clock(monkeypatch)
    same = lambda: clock.move(1.0)
    one, other = timing.interleaved([same, same], (), seconds=30.0)
    assert not timing.is_faster(one, other)
    assert not timing.is_faster(other, one)
    assert 30 < clock.now < 36


def test_slow_functions_run_once_when_that_takes_all_the_time(monkeypatch):
    clock = Clock(monkeypatch)
    functions = [lambda t=t: clock.move(t) for t in (1.0, 0.99, 0.9, 1.2)]
    first, same, faster, _ = timing.interleaved(functions, (), seconds=0.4)
    assert clock.moves == len(functions)
    assert not timing.is_faster(same, first)  # one sample of each says no more than this
    assert timing.is_faster(faster, first)


def test_short_functions_get_one_sample_each_when_the_time_is_up(monkeypatch):
    clock = Clock(monkeypatch)
    functions = [lambda t=t: clock.move(t) for t in (1e-3, 0.9e-3)]
    slow, fast = timing.interleaved(functions, (), seconds=1e-4)
    assert (slow.median, fast.median) == pytest.approx((1e-3, 0.9e-3))
    assert clock.moves == 2 + 2 + 3  # 2 ms on a CPU


def test_a_compiled_function_is_timed_to_its_end():
    def pause(x):
        time.sleep(0.01)
        return x

    paused = jax.jit(lambda x: jax.pure_callback(pause, x, x))
    assert measure(paused, jnp.ones(3)).best >= 0.01


@pytest.mark.parametrize(("warmup", "iters"), [(-1, 3), (1, 0)])
def test_impossible_counts_are_refused(warmup, iters):
    with pytest.raises(ValueError, match=r"^measure: warmup must be at least 0 and iters at least"):
        measure(lambda: None, warmup=warmup, iters=iters)


def timed_outside():
    """Compile, run, look at the value and time: all that a trace forbids."""
    triple = jax.jit(lambda x: 3 * x)
    assert measure(triple, jnp.ones(4)).best > 0
    return float(triple(jnp.ones(4)).sum())


def traced(x):
    return x * outside_trace(timed_outside)


spec = PartitionSpec("x")


@pytest.mark.parametrize(
    "transformed",
    [
        traced,
        jax.jit(traced),
        jax.vmap(traced),
        jax.jit(jax.vmap(traced)),
        jax.vmap(jax.grad(traced)),
        jax.jit(jax.vmap(jax.value_and_grad(traced))),
        jax.checkpoint(traced),
        lambda x: jax.lax.scan(lambda carry, y: (carry, traced(y)), 0.0, x)[1],
        lambda x: sharded(traced)(x),
        jax.jit(lambda x: sharded(traced)(x)),
        jax.jit(jax.grad(lambda x: sharded(traced)(x).sum())),
    ],
)
def test_outside_trace_works_while_a_trace_is_active(transformed):
    for leaf in jax.tree.leaves(transformed(jnp.ones(8))):
        assert leaf.tolist() == [12.0] * 8


def sharded(function):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)


def test_without_it_the_trace_gets_in_the_way():
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(lambda x: x * timed_outside())(1.0)


@pytest.mark.parametrize("seconds", [None, 60.0, 1e300, float("inf")])
def test_any_time_to_wait_is_taken(seconds):
    assert outside_trace(lambda: 3, seconds=seconds) == 3


def test_errors_come_back_as_they_are():
    def fail():
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost") as caught:
        jax.jit(lambda x: outside_trace(fail))(1.0)
    assert "fail" in [entry.name for entry in caught.traceback]


def test_the_callers_settings_hold_and_its_thread_does_not():
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set")

    def look():
        x = jnp.ones(3, float)
        precision = jax.config.jax_default_matmul_precision
        return variable.get(), str(x.dtype), x.devices(), precision, threading.get_ident()

    device = jax.devices()[3]
    with jax.default_device(device), jax.enable_x64(True), jax.default_matmul_precision("float32"):
        *settings, thread = outside_trace(look)
        assert thread != threading.get_ident()
    assert settings == ["set", "float64", {device}, "float32"]
    assert outside_trace(look)[1:4] == ("float32", {jax.devices()[0]}, None)
