"""Kept programs are found again, and never take more memory maps than a process may have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.kernels import Scale

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, kept
from ejkernel.ops.eager import EagerPrograms
from ejkernel.ops.kept import KeptPrograms, memory_maps


def test_programs_used_least_recently_are_dropped_first(monkeypatch):
    monkeypatch.setattr(kept, "_MOST", 4)
    store = KeptPrograms()
    for number in range(4):
        store.put(number, lambda number=number: number)
    assert store.get(0)() == 0
    store.put(4, lambda: 4)
    assert [store.get(number) is not None for number in range(5)] == [1, 0, 0, 1, 1]
    store.clear()
    assert len(store) == 0
    assert store.get(4) is None


@pytest.fixture
def forty_maps_more(monkeypatch):
    """This process may have forty memory maps more than it has."""
    if not memory_maps():
        pytest.skip("the system does not say how many memory maps there are")
    limit = memory_maps() + 40
    monkeypatch.setattr(kept, "_most_maps", lambda: limit)
    monkeypatch.setattr(kept, "_CHECKED_EVERY", 2)


def test_eager_programs_stay_within_the_maps(forty_maps_more):
    eager = EagerPrograms(lambda x: jnp.sort(x * 2, axis=1))
    arrays = [np.ones((1, size, 2), np.float32) for size in range(1, 17)]
    before = memory_maps()
    for x in arrays:
        np.testing.assert_array_equal(eager((jnp.asarray(x),), {}), 2 * x)
    assert len(eager._programs) < 16
    assert memory_maps() < before + 80
    for x in arrays[::10]:
        np.testing.assert_array_equal(eager((jnp.asarray(x),), {}), 2 * x)


def test_an_executor_drops_programs_where_maps_are_few(monkeypatch):
    monkeypatch.setattr(kept, "memory_maps", lambda: 2)
    monkeypatch.setattr(kept, "_most_maps", lambda: 1)
    monkeypatch.setattr(kept, "_CHECKED_EVERY", 2)
    executor, kernel = Executor(ConfigSelectorChain(ConfigCache())), Scale()
    gradient = jax.grad(lambda x: executor(kernel, x).sum())
    for size in (*range(1, 6), 1):
        np.testing.assert_array_equal(gradient(np.ones(size, np.float32)), 2 * np.ones(size))
    assert len(executor._compiled) < 4


def test_a_system_without_a_listing_has_no_bound_but_the_number(monkeypatch):
    with monkeypatch.context() as patched:  # not while the fixtures of the test end
        patched.setattr(kept.Path, "read_bytes", lambda path: open("/no/such/file"))  # noqa: SIM115
        assert memory_maps() == 0
