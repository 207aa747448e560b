"""The memory cache counts its changes; overlays nest and stay in their context."""

import concurrent.futures
import contextvars
import threading

import pytest

from ejkernel.ops.cache import ConfigCache, current_overlay, overlay_cache, overlay_state

KEY = ("cpu|cpu", "scale@v1", "0123456789abcdef")
OTHER = ("cpu|cpu", "scale@v1", "fedcba9876543210")


def test_what_was_put_is_there_until_cleared():
    cache = ConfigCache()
    assert cache.get(KEY) is None
    assert cache.get(KEY, 7) == 7
    assert KEY not in cache
    cache.put(KEY, 64)
    assert KEY in cache
    assert (cache.get(KEY), len(cache), cache.size(), cache.keys()) == (64, 1, 1, [KEY])
    cache.clear()
    assert (cache.get(KEY), len(cache), cache.keys()) == (None, 0, [])


def test_the_version_grows_with_every_change_and_only_then():
    cache = ConfigCache()
    versions = [cache.version]
    for change in (
        lambda: cache.put(KEY, 64),
        lambda: cache.put(KEY, 128),
        lambda: cache.put(OTHER, 128),
        cache.clear,
    ):
        change()
        versions.append(cache.version)
    assert versions == sorted(set(versions))
    cache.clear()
    assert cache.version == versions[-1]
    cache.put(KEY, 64)
    version = cache.version
    cache.put(KEY, 64)
    cache.get(KEY)
    cache.record(KEY, 128)
    cache.record(OTHER, 128)
    assert cache.version == version
    assert (cache.get(KEY), cache.get(OTHER)) == (128, 128)


def test_threads_lose_no_entry_and_no_version():
    cache = ConfigCache()
    start = threading.Barrier(4)

    def fill(thread):
        start.wait()
        for number in range(500):
            cache.put((thread, number), number)
            assert cache.keys()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(fill, range(4)))
    assert (len(cache), cache.version) == (2000, 2000)


def test_the_innermost_overlay_wins_and_the_outer_ones_show_through():
    with overlay_cache({KEY: 1, OTHER: 2}):
        with overlay_cache({KEY: 3}):
            assert (current_overlay(KEY), current_overlay(OTHER)) == (3, 2)
        assert (current_overlay(KEY), current_overlay(OTHER)) == (1, 2)
    assert current_overlay(KEY) is None


def test_an_overlay_ends_with_an_exception():
    with pytest.raises(KeyError), overlay_cache({KEY: 1}):
        raise KeyError
    assert current_overlay(KEY) is None


def test_an_overlay_is_taken_as_it_is_on_entry():
    mapping = {KEY: 1}
    with overlay_cache(mapping):
        mapping[KEY] = 2
        assert current_overlay(KEY) == 1


def test_the_state_is_equal_exactly_for_equal_overlays():
    bare = overlay_state()
    states = []
    for value in (1, 1, 2):
        with overlay_cache({KEY: value}):
            states.append(overlay_state())
    with overlay_cache({KEY: 9}), overlay_cache({KEY: 1}):
        states.append(overlay_state())
    assert overlay_state() == bare
    assert states[0] == states[1] == states[3]
    assert len({bare, *states}) == 3


def test_an_overlay_reaches_only_threads_that_copy_the_context():
    with overlay_cache({KEY: 1}), concurrent.futures.ThreadPoolExecutor(1) as pool:
        context = contextvars.copy_context()
        assert pool.submit(context.run, current_overlay, KEY).result() == 1
        assert pool.submit(current_overlay, KEY).result() is None


def test_an_overlay_wants_hashable_configurations():
    with (
        pytest.raises(ValueError, match=r"^overlay_cache: configurations must be hashable"),
        overlay_cache({KEY: {"block": 64}}),
    ):
        pass
