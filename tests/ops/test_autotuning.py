"""`ejkernel.autotune` measures the operations that a function calls."""

import concurrent.futures
import threading

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel.ops import (
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    default_executor,
    record_invocations,
)
from ejkernel.ops.cache import current_overlay

X = jax.ShapeDtypeStruct((3, 24, 8), jnp.float32)


def test_it_measures_what_a_call_and_its_gradient_use():
    tuned = ejkernel.autotune(jax.grad(lambda x: ejkernel.mean_pooling(x).sum()), X)
    assert [op.partition("@")[0] for _, op, _ in tuned.entries] == [
        "mean_pooling",
        "mean_pooling.backward",
    ]


def test_later_calls_find_the_result():
    tuned = ejkernel.autotune(ejkernel.mean_pooling, X)
    with record_invocations() as calls:
        ejkernel.mean_pooling(jnp.ones(X.shape))
    assert [*calls] == [*tuned.entries]
    (key,) = calls
    assert default_executor().chooser.cache.get(key) == tuned.entries[key]


def test_calls_that_were_compiled_before_are_recorded_with_their_gradients():
    step = jax.grad(lambda x: ejkernel.mean_pooling(x).sum())
    step(jnp.ones(X.shape))
    for _ in range(2):
        with record_invocations() as calls:
            step(jnp.ones(X.shape))
            step(jnp.ones(X.shape))
        assert [call.direction for call in calls.values()] == ["forward", "backward"]


def test_calls_that_were_made_before_find_the_result_too():
    chooser = default_executor().chooser
    chooser.cache.clear()
    ejkernel.mean_pooling(jnp.ones(X.shape))
    before = chooser.state()
    ejkernel.autotune(ejkernel.mean_pooling, X)
    assert chooser.state() != before


def test_a_result_is_entered_twice_and_in_several_threads():
    key = ("cpu|cpu", "scale@v1", "0123456789abcdef")
    tuned = AutotuningResult({key: 64})
    assert tuned == AutotuningResult({key: 64})
    with tuned:
        with tuned:
            assert current_overlay(key) == 64
        assert current_overlay(key) == 64
    both = threading.Barrier(2, timeout=60)

    def inside():
        with tuned:
            both.wait()
            found = current_overlay(key)
            both.wait()
        return found, current_overlay(key)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        threads = [pool.submit(inside) for _ in range(2)]
        assert [x.result() for x in threads] == [(64, None)] * 2


def test_arguments_that_are_no_arrays_are_given_on():
    def step(x, *, times):
        return ejkernel.mean_pooling(x * times if isinstance(times, int) else x)

    assert len(ejkernel.autotune(step, jnp.ones(X.shape), times=2).entries) == 1


def test_a_function_without_operations_gets_a_sentence():
    with pytest.raises(
        ValueError, match=r"^autotune: the function called no operation of ejkernel"
    ):
        ejkernel.autotune(jnp.sin, X)


@pytest.mark.parametrize("function", ["mean_pooling", 3, None])
def test_what_is_no_function_gets_a_sentence(as_a_user_calls, function):
    with pytest.raises(ValueError, match=r"^autotune: the first argument must be a function"):
        ejkernel.autotune(function, X)


def test_a_result_is_saved_and_loaded(tmp_path):
    tuned = ejkernel.autotune(ejkernel.mean_pooling, X)
    tuned.save(tmp_path / "tuned.json")
    loaded = AutotuningResult.load(tmp_path / "tuned.json")
    assert [*loaded.entries] == [*tuned.entries]
    events = []
    chain = ConfigSelectorChain(ConfigCache(), on_event=lambda name, **_: events.append(name))
    with loaded:
        Executor(chain)(ejkernel.mean_pooling, jnp.ones(X.shape))
    assert events == ["overlay_hit"]


def test_another_file_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"^AutotuningResult: cannot load .*other.json: its format"
    ):
        AutotuningResult.load(tmp_path / "other.json")
