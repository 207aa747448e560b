"""Linear attention over a sequence that is split over devices: what one device computes of it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import quick

from ejkernel.modules import (
    GLAttentionConfig,
    LightningAttentionConfig,
    RecurrentAttentionConfig,
    gla_attention,
    lightning_attention,
    recurrent_attention,
)

if len(jax.devices()) < 8:
    pytest.skip("eight devices are needed", allow_module_level=True)

BATCH, LENGTH, HEADS, KV_HEADS, ROWS, COLUMNS = 2, 32, 4, 2, 4, 6
SPLIT = P(None, "sp")
COLLECTIVE = re.compile(
    r"= (\S+) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def mesh_of(*shape, names=("sp",)):
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


def arrays(dtype=jnp.float32, length=LENGTH, batch=BATCH):
    sizes = {
        "query": (batch, length, HEADS, ROWS),
        "key": (batch, length, KV_HEADS, ROWS),
        "value": (batch, length, KV_HEADS, COLUMNS),
        "gate": (batch, length, KV_HEADS, ROWS),
        "head_gate": (batch, length, KV_HEADS),
        "g_gamma": (KV_HEADS,),
        "gv": (batch, length, KV_HEADS, COLUMNS),
        "state": (batch, KV_HEADS, ROWS, COLUMNS),
        "states": (len(ENDS) - 1, KV_HEADS, ROWS, COLUMNS),
    }
    rng = np.random.default_rng(0)
    drawn = {name: rng.standard_normal(size) for name, size in sizes.items()}
    decays = ("gate", "head_gate", "g_gamma", "gv")
    return {n: jnp.asarray(-0.3 * abs(x) if n in decays else x, dtype) for n, x in drawn.items()}


# Empty ones at both ends and inside, some that begin or end where a shard does, one that crosses
# three shards of eight, tokens after the last.
ENDS = (0, 0, 3, 8, 8, 27, 28, 30, 30)
gla = functools.partial(gla_attention, return_state=True, cfg=GLAttentionConfig(block_q=4))
recurrent = functools.partial(recurrent_attention, cfg=RecurrentAttentionConfig(block_q=4))
lightning = functools.partial(
    lightning_attention, return_state=True, cfg=LightningAttentionConfig(block_q=4)
)
# Function, arrays that have gradients, other arguments.
CALLS = {
    "plain": (gla, (), {}),
    "gates": (gla, ("gate",), {}),
    "gates_of_heads": (gla, ("head_gate", "g_gamma", "state"), {}),
    "everything": (recurrent, ("gate", "g_gamma", "gv", "state"), {}),
    "reverse": (recurrent, ("gate", "g_gamma", "gv", "state"), {"reverse": True}),
    "decay": (lightning, ("decay",), {}),
    "packed": (recurrent, ("gate", "gv", "states"), {"cu_seqlens": ENDS}),
    "packed_reverse": (
        recurrent,
        ("g_gamma", "states"),
        {"cu_seqlens": ENDS, "reverse": True},
    ),
    "packed_plain": (gla, (), {"cu_seqlens": (0, 17, 32)}),
}


def call_of(name, dtype=jnp.float32, length=LENGTH):
    """The call as a function of its arrays and of options, and the arrays."""
    function, given, rest = CALLS[name]
    rest, packed = dict(rest), "cu_seqlens" in rest
    if packed:
        rest["cu_seqlens"] = np.array(rest["cu_seqlens"])
    drawn = arrays(dtype, length, 1 if packed else BATCH)
    used = {name: drawn[name] for name in ("query", "key", "value", *given) if name in drawn}
    if "decay" in given:
        used["decay"] = jnp.asarray([0.9, 0.6], dtype)

    def run(used, **options):
        names = {"head_gate": "gate", "states": "state"}
        if function is gla:
            names |= {"state": "initial_state", "states": "initial_state"}
        renamed = {names.get(name, name): x for name, x in used.items()}
        return function(**renamed, **rest, **options)

    return run, used


def with_gradients(run):
    """Results, and the gradients of a sum of them in which every entry has a weight of its own."""

    def total(used):
        results = run(used)
        weigh = lambda x: (x * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)).sum()
        return sum(map(weigh, jax.tree.leaves(results))), results

    def both(used):
        gradients, results = jax.grad(total, has_aux=True)(used)
        return results, gradients

    return both


def assert_close(got, wanted, tolerance=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def check(name, dtype=jnp.float32, tolerance=2e-5, **options):
    run, used = call_of(name, dtype)
    got = jax.jit(with_gradients(functools.partial(run, **options)))(used)
    wanted = jax.jit(with_gradients(functools.partial(run)))(used)
    assert_close(got, wanted, tolerance)


@pytest.mark.parametrize("name", quick(CALLS, "gates_of_heads", "packed"))
def test_values_and_gradients_are_those_of_one_device(name):
    check(name, axis_name="sp", mesh=mesh_of(8))


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("name", CALLS)
def test_over_other_numbers_of_devices(name, shards):
    check(name, axis_name="sp", mesh=mesh_of(shards))


@pytest.mark.parametrize("name", quick(CALLS, "plain"))
def test_in_float64(name):
    with jax.enable_x64(True):
        check(name, jnp.float64, 1e-12, axis_name="sp", mesh=mesh_of(4))


@pytest.mark.parametrize(
    "case",
    quick([(n, v) for n in ("gates_of_heads", "packed") for v in (True, False)], ("packed", True)),
    ids=str,
)
def test_inside_shard_map(case):
    """Tokens are this device's share; states and the ends of sequences are those of the whole."""
    name, check_vma = case
    run, used = call_of(name)
    specs = {x: P() if x in ("states", "state", "g_gamma") else SPLIT for x in used}
    local = jax.shard_map(
        functools.partial(run, axis_name="sp"),
        mesh=mesh_of(4),
        in_specs=(specs,),
        out_specs=(SPLIT, P()),
        check_vma=check_vma,
    )
    assert_close(jax.jit(with_gradients(local))(used), jax.jit(with_gradients(run))(used))


def test_batch_and_heads_may_be_split_as_well():
    """Three axes; the four query heads of a device share the one key head there is."""
    mesh = mesh_of(2, 2, 2, names=("dp", "sp", "tp"))
    spec = P("dp", "sp", "tp")
    drawn = arrays()
    used = {n: x[:, :, :1] for n, x in drawn.items() if n in ("key", "value", "head_gate")}
    used |= {"query": drawn["query"], "state": drawn["state"][:, :1]}
    run, _ = call_of("gates_of_heads")
    split = functools.partial(run, axis_name="sp", mesh=mesh, in_specs=(spec,) * 3)
    assert_close(jax.jit(with_gradients(split))(used), jax.jit(with_gradients(run))(used))


def test_the_mesh_of_the_context():
    run, used = call_of("decay")
    with jax.set_mesh(mesh_of(8)):
        got = jax.jit(functools.partial(run, axis_name="sp"))(used)
    assert_close(got, run(used))
    assert_close(run(used, axis_name="sp"), run(used))  # without a mesh one device has everything


def test_explicit_axes_say_where_the_sequence_is_split():
    run, used = call_of("plain")
    mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=(AxisType.Explicit,) * 2)
    split = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P("dp", "sp"))), used)
    got = run(split, axis_name="sp")
    assert jax.typeof(got[0]).sharding.spec[:2] == ("dp", "sp")
    assert jax.typeof(got[1]).sharding.spec[:1] == ("dp",)
    assert_close(got, run(used))


def test_arrays_without_a_batch():
    run, used = call_of("plain")
    used = {name: x[0] for name, x in used.items()}
    got = run(used, axis_name="sp", mesh=mesh_of(4), in_specs=(P("sp"),) * 3)
    assert_close(got, run(used))


@pytest.mark.parametrize("strength", quick([-50.0, -1e4, -np.inf], -np.inf))
def test_what_a_gate_forgets_reaches_no_other_shard(strength):
    """Mild gates around a strong one are exact, and so is all that is forgotten everywhere."""
    used = {name: arrays()[name] for name in ("query", "key", "value", "state")}
    mild = jnp.full((BATCH, LENGTH, KV_HEADS, ROWS), -0.1).at[:, 13].set(strength)
    gates = jnp.concatenate([mild[:1], jnp.full_like(mild[:1], strength)])
    run = lambda used, **options: gla(
        *(used[name] for name in ("query", "key", "value", "gate")),
        initial_state=used["state"], **options,
    )  # fmt: skip
    used["gate"] = gates
    split = functools.partial(run, axis_name="sp", mesh=mesh_of(8))
    got = jax.jit(with_gradients(split))(used)
    assert_close(got, jax.jit(with_gradients(run))(used))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(got))


def test_what_lies_past_the_last_sequence_never_leaks():
    run, used = call_of("packed")
    poisoned = {
        n: x if n == "states" else x.at[:, ENDS[-1] :].set(jnp.nan) for n, x in used.items()
    }
    split = functools.partial(run, axis_name="sp", mesh=mesh_of(8))
    both = jax.jit(with_gradients(split))
    assert_close(both(poisoned), both(used))


@pytest.mark.slow
def test_forward_mode_and_second_derivatives():
    run, used = call_of("decay")
    along = jax.tree.map(lambda x: jnp.cos(3 * x), used)

    def derivatives(**options):
        loss = lambda used: sum((x**2).sum() for x in run(used, **options))
        return jax.jit(lambda: jax.jvp(jax.grad(loss), (used,), (along,)))()

    assert_close(derivatives(axis_name="sp", mesh=mesh_of(2)), derivatives(), 1e-4)


def test_vmap():
    run, used = call_of("plain")
    several = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), used)
    split = functools.partial(run, axis_name="sp", mesh=mesh_of(4))
    assert_close(jax.jit(jax.vmap(split))(several), jax.vmap(run)(several))


def exchanged(run, used):
    """The collectives of a compiled program, and the elements of their results."""
    text = jax.jit(run).lower(used).compile().as_text()
    count = lambda shape: int(np.prod([int(n) for n in re.findall(r"\d+", shape)] or [1]))
    return sorted(
        (kind, sum(count(dims) for dims in re.findall(r"\[([\d,]*)\]", shape)))
        for shape, kind in COLLECTIVE.findall(text.replace(", ", ","))
    )


def test_the_collectives_do_not_grow_with_the_sequence():
    """One each way, of a state and its decay; gradients of what all devices share are one more."""
    forward, backward = [], []
    for length in (32, 128):
        run, used = call_of("gates_of_heads", length=length)
        split = functools.partial(run, axis_name="sp", mesh=mesh_of(8))
        forward.append(exchanged(split, used))
        loss = lambda used, split=split: sum((x**2).sum() for x in split(used))
        backward.append(exchanged(jax.grad(loss), used))
    of_a_shard = BATCH * KV_HEADS * (ROWS * COLUMNS + 1)
    assert forward[0] == forward[1] == [("all-gather", 8 * of_a_shard)]
    state = BATCH * KV_HEADS * ROWS * COLUMNS
    assert backward[0] == backward[1]
    assert backward[0] == [
        ("all-gather", 8 * of_a_shard),  # of the forward pass
        ("all-reduce", state + BATCH * KV_HEADS),  # of initial_state and g_gamma, together
        ("reduce-scatter", of_a_shard),
    ]


def test_the_collectives_of_packed_sequences():
    """One more each way than without: the final state of each sequence and its gradient."""
    states = (len(ENDS) - 1) * KV_HEADS * ROWS * COLUMNS
    of_a_shard = KV_HEADS * (ROWS * COLUMNS + ROWS + COLUMNS)  # `gate` and `gv`
    for length in (32, 128):
        run, used = call_of("packed", length=length)
        split = functools.partial(run, axis_name="sp", mesh=mesh_of(8))
        forward = [("all-gather", 8 * of_a_shard), ("all-reduce", states)]
        assert exchanged(split, used) == forward
        loss = lambda used, split=split: sum((x**2).sum() for x in split(used))
        assert exchanged(jax.grad(loss), used) == [
            *forward,
            ("all-reduce", states),  # the gradient of the final states
            ("all-reduce", states),  # the gradient of the initial states, which all devices have
            ("reduce-scatter", of_a_shard),
        ]


@pytest.mark.usefixtures("as_a_user_calls")
@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (gla_attention, {"axis_name": "pp", "mesh": mesh_of(4)}, "'pp' is not an axis of the mesh"),
        (
            lightning_attention,
            {"axis_name": "sp", "mesh": mesh_of(8)},
            "36 tokens do not divide over the 8 devices of 'sp'",
        ),
        (
            recurrent_attention,
            {"axis_name": "sp", "mesh": mesh_of(4), "in_specs": (P(),) * 3},
            "axis 1 of query must be split over 'sp'",
        ),
        (gla_attention, {"axis_name": "sp", "in_specs": (SPLIT,) * 3}, "in_specs= needs mesh="),
        (
            gla_attention,
            {"mesh": mesh_of(4), "in_specs": (SPLIT,) * 3},
            "query cannot be split along 's' over mesh axis sp; axis_name= splits the sequence",
        ),
        (
            recurrent_attention,
            {"axis_name": "sp", "mesh": mesh_of(4), "platform": "triton"},
            "platform='triton' does not support",
        ),
    ],
)
def test_a_mistake_is_named(function, options, message):
    x = jnp.ones((1, 36, 2, 4))
    with pytest.raises((ValueError, NotImplementedError), match=message) as error:
        function(x, x, x, **options)
    assert str(error.value).startswith(f"{function.__name__}: ")
