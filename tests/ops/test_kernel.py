"""A user's own kernel is configured, measured, cached, differentiated and mapped like ours."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from ops.kernels import Cube, Hopeless, Scale, ScaleConfig, Wrong

from ejkernel import kernel_registry, settings
from ejkernel.errors import TuningWarning
from ejkernel.modules import mean_pooling
from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Kernel,
    PersistentCache,
    Tuner,
    autotune_recorded,
    device_fingerprint,
    overlay_cache,
    policy_override,
    record_invocations,
)

HEURISTICS = AutotunePolicy(allow_autotune=False, cache_miss_fallback="heuristics")


@pytest.fixture
def watched():
    """An executor that tunes, and the list of its decisions."""
    events = []
    chain = ConfigSelectorChain(
        cache=ConfigCache(),
        policy=AutotunePolicy(),
        tuner=Tuner(warmup=1, iters=2),
        on_event=lambda name, **data: events.append((name, data)),
    )
    return Executor(chain), events


def names(events):
    return [name for name, _ in events]


X = np.arange(6.0, dtype=np.float32).reshape(2, 3)


def test_the_first_call_tunes_and_the_second_hits_the_cache(watched):
    executor, events = watched
    np.testing.assert_array_equal(executor(Scale(), X, factor=3.0), 3 * X)
    np.testing.assert_array_equal(executor(Scale(), X, factor=3.0), 3 * X)
    assert names(events) == ["autotune_start", "autotune_finish", "cache_hit"]
    assert events[1][1]["cfg"] in (ScaleConfig(64), ScaleConfig(128))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: ((x[:1],), {}),
        lambda x: ((x.astype(np.float16),), {}),
        lambda x: ((x,), {"factor": 5.0}),
    ],
    ids=["shape", "dtype", "static argument"],
)
def test_a_changed_call_misses(watched, change):
    executor, events = watched
    executor(Scale(), X)
    events.clear()
    args, kwargs = change(X)
    executor(Scale(), *args, **kwargs)
    assert names(events) == ["autotune_start", "autotune_finish"]


def test_a_new_version_invalidates(watched):
    class Newer(Scale):
        version = "2"

    executor, events = watched
    executor(Scale(), X)
    events.clear()
    executor(Newer(), X)
    assert names(events)[0] == "autotune_start"


def test_candidates_that_raise_or_lie_are_dropped_and_reported(watched):
    executor, events = watched
    with pytest.warns(TuningWarning, match=r"dropped 2 of 3.*does not compile.*off by"):
        np.testing.assert_array_equal(executor(Wrong(), X), 2 * X)
    assert events[-1][1]["cfg"] == ScaleConfig(128)


def test_when_every_candidate_fails_the_heuristic_is_used(watched):
    executor, events = watched
    with (
        pytest.warns(TuningWarning, match="dropped 3 of 3"),
        pytest.raises(RuntimeError, match="does not compile"),
    ):
        executor(Hopeless(), X[0])
    assert names(events) == ["autotune_start", "autotune_finish", "heuristics"]


def test_the_heuristics_policy_times_nothing():
    events = []
    chain = ConfigSelectorChain(
        ConfigCache(), HEURISTICS, on_event=lambda name, **data: events.append(name)
    )
    Executor(chain)(Scale(), X)
    assert events == ["heuristics"]
    assert len(chain.cache) == 0


def test_a_policy_that_allows_nothing_is_an_error():
    policy = AutotunePolicy(allow_autotune=False, allow_heuristics=False)
    executor = Executor(ConfigSelectorChain(ConfigCache(), policy))
    with pytest.raises(RuntimeError, match="scale: no configuration is known"):
        executor(Scale(), X)


def test_policy_override_holds_for_its_block(watched):
    executor, events = watched
    with policy_override(executor.chooser, allow_autotune=False):
        executor(Scale(), X)
    executor(Scale(), X)
    assert names(events) == ["heuristics", "autotune_start", "autotune_finish"]


def test_an_explicit_configuration_wins_and_is_never_stored(watched, tmp_path):
    executor, events = watched
    executor.chooser.persistent = PersistentCache("scale", tmp_path / "scale.json")
    for policy in (None, HEURISTICS):
        executor.chooser.policy = policy
        Scale.ran.clear()
        executor(Scale(), X, cfg=ScaleConfig(7))
        assert Scale.ran == [7]
    assert names(events) == ["override", "override"]
    assert len(executor.chooser.cache) == 0
    assert not (tmp_path / "scale.json").exists()


def test_an_overlay_wins_over_the_caches(watched):
    executor, events = watched
    executor(Scale(), X)
    key = executor.invocation(Scale(), X).key
    assert key[:2] == (device_fingerprint(), "scale@v1")
    with overlay_cache({key: ScaleConfig(16)}):
        Scale.ran.clear()
        executor(Scale(), X)
        assert Scale.ran == [16]
    assert names(events)[-1] == "overlay_hit"
    executor(Scale(), X)
    assert names(events)[-1] == "cache_hit"


def test_what_was_measured_is_found_on_disk_by_the_next_process(watched, tmp_path):
    executor, events = watched
    executor.chooser.persistent = PersistentCache("scale", tmp_path / "scale.json")
    executor(Scale(), X)
    tuned = events[-1][1]["cfg"]
    later = Executor(
        ConfigSelectorChain(
            ConfigCache(),
            AutotunePolicy(),
            persistent=PersistentCache("scale", tmp_path / "scale.json"),
            on_event=lambda name, **data: events.append((name, data)),
        )
    )
    events.clear()
    later(Scale(), X)
    assert names(events) == ["cache_hit"]
    assert events[0][1]["level"] == "persistent"
    assert later.choose_config(Scale(), X).params == tuned


@pytest.mark.parametrize("known", [False, True], ids=["measured", "known"])
def test_a_kernel_is_measured_that_runs_another_one(watched, tmp_path, known):
    executor, _ = watched
    disk = executor.chooser.persistent = PersistentCache("scale", tmp_path / "scale.json")
    if known:
        disk.put(executor.invocation(Scale(), jnp.asarray(X)).key, ScaleConfig(64))

    class Twice(Scale):
        def run(self, x, *, factor=2.0, cfg):
            return executor(Scale(), x, factor=factor)

    thread = threading.Thread(target=lambda: executor(Twice("twice"), X), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_what_is_tuned_after_a_call_is_used_by_the_next():
    executor = Executor(ConfigSelectorChain(ConfigCache(), HEURISTICS))
    executor(Scale(), X)
    inv = executor.invocation(Scale(), X)
    candidates = executor.chooser.candidates(inv)
    executor.chooser.tune(inv, [x for x in candidates if x.params == ScaleConfig(64)])
    Scale.ran.clear()
    executor(Scale(), X)
    assert Scale.ran == [64]


def test_one_candidate_is_not_worth_tuning(watched):
    executor, events = watched
    executor(Cube(), X, X)
    assert names(events) == ["heuristics"]


def test_several_processes_never_tune(watched, monkeypatch):
    executor, events = watched
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    executor(Scale(), X)
    assert names(events) == ["heuristics"]


def test_several_processes_choose_alike_whatever_their_machines_remember(
    watched, monkeypatch, tmp_path
):
    """What one of them has on its disk the others need not have."""
    executor, events = watched
    executor.chooser.persistent = PersistentCache("scale", tmp_path / "scale.json")
    executor(Scale(), X)
    tuned = executor.chooser.cache
    keys = tuned.keys()
    executor.chooser.cache = ConfigCache()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    events.clear()
    executor(Scale(), X)
    assert names(events) == ["heuristics"]
    with overlay_cache({key: tuned.get(key) for key in keys}):
        executor(Scale(), X)
    assert names(events)[-1] == "overlay_hit"


def test_several_processes_are_not_tuned_each_for_itself(watched, monkeypatch):
    executor, _ = watched
    with record_invocations() as calls:
        executor(Scale(), X)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(RuntimeError, match=r"2 processes would each .*; tune in one process, save"):
        autotune_recorded(executor.chooser, calls.values())


def test_tuning_works_while_a_trace_is_under_way(watched):
    executor, events = watched
    result = jax.jit(jax.vmap(lambda x: executor(Scale(), x, factor=4.0)))(jnp.asarray(X))
    np.testing.assert_array_equal(result, 4 * X)
    assert names(events) == ["autotune_start", "autotune_finish"]


def test_numbers_of_another_type_are_another_call(watched):
    executor, _ = watched
    whole = jnp.arange(4)
    assert executor(Scale(), whole, factor=2).dtype == jnp.int32
    assert executor(Scale(), whole, factor=2.0).dtype == jnp.float32
    zeros = [executor(Scale(), X + 1, factor=factor) for factor in (0.0, -0.0)]
    assert [bool(np.signbit(zero).any()) for zero in zeros] == [False, True]


class Stateful(Scale):
    def __init__(self, **state):
        super().__init__("stateful")
        vars(self).update(state)

    def run(self, x, *, cfg):
        return x * self.factor


@pytest.mark.parametrize("other", [{}, {"table": [1, 2]}], ids=["hashable", "a list"])
def test_attributes_that_are_set_later_count(watched, other):
    executor, _ = watched
    kernel = Stateful(factor=2.0, **other)
    np.testing.assert_array_equal(executor(kernel, X), 2 * X)
    kernel.factor = 3.0
    np.testing.assert_array_equal(executor(kernel, X), 3 * X)
    np.testing.assert_array_equal(executor(Stateful(factor=2.0, **other), X[:1]), 2 * X[:1])


def test_instances_with_numbers_of_other_types_are_others(watched):
    executor, _ = watched
    whole = jnp.arange(4)
    dtypes = [executor(Stateful(factor=factor), whole).dtype for factor in (2, 2.0)]
    assert dtypes == [jnp.int32, jnp.float32]


def test_keys_hold_no_addresses(watched):
    executor, _ = watched
    functions = [lambda x: x, lambda x: x]
    keys = [executor.invocation(Scale(), X, factor=function).key for function in functions]
    assert keys[0] == keys[1]


def test_specs_take_the_mesh_around_the_call(watched):
    executor, _ = watched
    spec = PartitionSpec("dp")
    call = lambda x: executor(Scale(), x, in_specs=(spec,), out_specs=spec)
    with pytest.raises(ValueError, match=r"scale: in_specs= and out_specs= need a mesh"):
        call(X)
    with jax.set_mesh(jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2])):
        assert call(jax.device_put(X, spec)).sharding.spec[0] == "dp"


def test_a_configuration_is_that_of_one_device(watched):
    executor, _ = watched
    mesh, spec = Mesh(np.array(jax.devices()[:2]), ("dp",)), PartitionSpec("dp")
    over = {"mesh": mesh, "in_specs": (spec,), "out_specs": spec}
    with pytest.raises(ValueError, match=r"^scale: .* arrays of one device.* without mesh="):
        executor.invocation(Scale(), X, **over)
    x = jnp.ones((2, 16, 2, 8))
    with pytest.raises(ValueError, match=r"^mean_pooling: .* arrays of one device"):
        executor.invocation(mean_pooling, x[..., 0], mesh=mesh, in_specs=(spec,))
    run = executor.compile(Scale(), jnp.asarray(X), **over)
    np.testing.assert_array_equal(run(jnp.asarray(X), **over), 2 * X)


def test_a_dict_is_a_configuration(watched):
    class Plain(Scale):
        def run(self, x, *, cfg):
            return x * cfg["block"]

        def heuristic_cfg(self, inv):
            return {"block": 64}

        def candidate_cfgs(self, inv):
            return [self.heuristic_cfg(inv)]

    executor, _ = watched
    np.testing.assert_array_equal(executor(Plain("plain"), X, cfg={"block": 3}), 3 * X)
    np.testing.assert_array_equal(executor.compile(Plain("plain"), X)(X), 64 * X)
    with pytest.raises(ValueError, match="plain: cfg must be hashable"):
        executor(Plain("plain"), X, cfg=[3])


def test_policies_of_inner_blocks_change_only_what_they_name(watched):
    executor, events = watched
    chain = executor.chooser
    inner = policy_override(chain, allow_heuristics=True)
    with policy_override(chain, allow_autotune=False), inner:
        executor(Scale(), X)
    assert names(events) == ["heuristics"]
    chain.policy = None  # on a CPU nothing is measured
    with policy_override(chain, allow_heuristics=True):
        executor(Scale(), X[:1])
    assert names(events) == ["heuristics"] * 2
    with policy_override(chain, allow_autotune=True):
        executor(Scale(), X[:1])
    assert names(events)[2:] == ["autotune_start", "autotune_finish"]


def test_what_may_only_be_measured_is_measured(watched):
    executor, events = watched
    executor.chooser.policy = AutotunePolicy(
        allow_heuristics=False, cache_miss_fallback="heuristics"
    )
    executor(Scale(), X)
    assert names(events) == ["autotune_start", "autotune_finish"]


def test_run_is_differentiated_where_there_is_no_vjp(watched):
    executor, _ = watched
    gradient = jax.grad(lambda x: executor(Scale(), x, factor=3.0).sum())(jnp.asarray(X))
    np.testing.assert_array_equal(gradient, np.full_like(X, 3.0))
    _, tangent = jax.jvp(lambda x: executor(Scale(), x), (jnp.asarray(X),), (jnp.asarray(X),))
    np.testing.assert_array_equal(tangent, 2 * X)


def test_vjp_receives_residuals_result_and_cotangent(watched):
    executor, _ = watched
    weight, x = jnp.float32(2.0), jnp.asarray(X)
    value, pull_back = jax.vjp(lambda w, x: executor(Cube(), w, x), weight, x)
    np.testing.assert_allclose(value, 2 * X**3)
    d_weight, d_x = pull_back(jnp.ones_like(value))
    assert d_weight == 0
    np.testing.assert_allclose(d_x, 10 * 3 * 2 * X**2)


@pytest.mark.parametrize(("call", "pull_back"), [(True, False), (False, True), (False, False)])
def test_the_backward_pass_is_deterministic_where_either_is_asked_to_be(watched, call, pull_back):
    """The call, or what differentiates it: the pass is traced after the block of the call."""
    seen = []

    class Watched(Cube):
        def vjp(self, residuals, y, dy, weight, x, *, cfg):
            seen.append(settings.deterministic())
            return super().vjp(residuals, y, dy, weight, x, cfg=cfg)

    executor, _ = watched

    def loss(x):
        with settings.override(deterministic=call):
            return executor(Watched(), x, x).sum()

    with settings.override(deterministic=pull_back):
        jax.jit(jax.grad(loss)).lower(jnp.asarray(X))
    assert set(seen) == {call or pull_back}


def test_a_gradient_for_each_positional_argument_is_asked_for(watched):
    class Short(Cube):
        def vjp(self, residuals, y, dy, weight, x, *, cfg):
            return (dy,)

    executor, _ = watched
    with pytest.raises(ValueError, match="vjp must return 2 gradients"):
        jax.grad(lambda x: executor(Short(), x, x).sum())(jnp.asarray(X))


class Picked(Cube):
    """`x[index]` of a pair or a dict of both, with a gradient in that structure."""

    def run(self, pair, *, cfg):
        x, index = pair.values() if isinstance(pair, dict) else pair
        return x[index]

    def fwd_with_residuals(self, pair, *, cfg):
        return self.run(pair, cfg=cfg), ()

    def vjp(self, residuals, y, dy, pair, *, cfg):
        if isinstance(pair, dict):
            return ({"x": jnp.zeros_like(pair["x"]).at[pair["y"]].add(dy)},)
        return ((jnp.zeros_like(pair[0]).at[pair[1]].add(dy), None),)


@pytest.mark.parametrize("structure", [tuple, lambda pair: dict(zip("xy", pair, strict=True))])
def test_a_part_of_an_argument_may_have_no_gradient(watched, structure):
    executor, _ = watched
    index = jnp.array([2, 0, 2])
    gradient = jax.grad(lambda x: executor(Picked(), structure((x, index))).sum())(jnp.ones(4))
    np.testing.assert_array_equal(gradient, [1, 0, 2, 0])


def test_a_gradient_of_another_structure_is_refused(watched):
    class Other(Picked):
        def vjp(self, residuals, y, dy, pair, *, cfg):
            return ({"z": dy},)

    executor, _ = watched
    pair = lambda x: (x, jnp.array([2, 0, 2]))
    with pytest.raises(ValueError, match="cube: vjp must return gradients of the structure of"):
        jax.grad(lambda x: executor(Other(), pair(x)).sum())(jnp.ones(4))


def test_a_kernel_maps_and_shards(watched):
    executor, _ = watched
    np.testing.assert_array_equal(jax.vmap(lambda x: executor(Cube(), x, x))(X), X**4)
    mesh = Mesh(np.array(jax.devices()[:2]), ("dp",))
    spec = PartitionSpec("dp")
    sharded = executor(Scale(), jnp.asarray(X), mesh=mesh, in_specs=(spec,), out_specs=spec)
    np.testing.assert_array_equal(sharded, 2 * X)
    with pytest.raises(ValueError, match="needs in_specs= and out_specs="):
        executor(Scale(), X, mesh=mesh)


def test_compile_gives_a_function_of_the_arrays(watched):
    executor, _ = watched
    run = executor.compile(Scale(), X, factor=3.0)
    np.testing.assert_array_equal(run(X + 1, factor=3.0), 3 * (X + 1))
    with pytest.raises(ValueError, match="differs in structure"):
        run(X, X, factor=3.0)
    with pytest.raises(ValueError, match=r"the example had 3\.0, got 4\.0"):
        run(X, factor=4.0)
    with pytest.raises(ValueError, match=r"the example had 3\.0, got array\(\[3"):
        run(X, factor=np.full(2, 3.0))
    with pytest.raises(ValueError, match=r"the example had 3\.0, got 3\."):
        run(X, factor=3)  # of another type, which gives a result of another dtype


def test_compile_takes_a_nan_for_the_nan_of_the_example(watched):
    executor, _ = watched
    run = executor.compile(Scale(), X, factor=float("nan"), cfg=ScaleConfig())
    assert np.isnan(run(X, factor=float("nan"))).all()
    with pytest.raises(ValueError, match="non-array arguments are fixed at compile time"):
        run(X, factor=1.0)


def test_the_platform_variant_runs_on_its_platform(watched):
    class Variant(Scale):
        def run_tpu(self, x, *, factor=2.0, cfg):
            raise AssertionError("not here")

        def run_cpu(self, x, *, factor=2.0, cfg):
            return -x

    executor, _ = watched
    np.testing.assert_array_equal(executor(Variant("variant"), X), -X)
    backends = [s.backend.value for s in kernel_registry.list_implementations("variant")]
    assert backends == ["tpu", "cpu", "any"]


def test_a_kernel_is_an_op_of_the_table_but_cannot_take_our_names(watched):
    executor, _ = watched
    executor(Scale("mine"), X)
    assert "mine" in kernel_registry.list_algorithms()
    with pytest.raises(ValueError, match="is an operation of the package"):
        executor(Scale("flash_attention"), X)


def test_unhashable_static_arguments_are_refused_in_words(watched):
    executor, _ = watched
    with pytest.raises(ValueError, match="scale: static arguments must be hashable"):
        executor(Scale(), X, factor={1, 2})


def test_threads_tune_a_call_once(watched):
    executor, events = watched
    threads = [threading.Thread(target=executor, args=(Scale(), X)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(events).count("autotune_start") == 1


def test_a_kernel_must_say_what_it_runs():
    executor = Executor(ConfigSelectorChain(ConfigCache()))
    with pytest.raises(NotImplementedError, match="Kernel must define"):
        executor(Kernel("nothing"), X)
