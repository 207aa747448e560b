"""Arrays that are split over devices: automatic, explicit, manual and mixed axes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ejkernel.errors import UnsupportedError
from ejkernel.modules import (
    flash_attention,
    gla_attention,
    grouped_matmul,
    native_sparse_attention,
    page_attention,
    ring_attention,
)
from ejkernel.ops import partitioned
from ejkernel.types import MaskInfo

P = PartitionSpec
HEADS = P("dp", None, "tp")
BATCH = P("dp")

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")


def make_mesh(kind=AxisType.Auto, other=None):
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind, other or kind))


def draw(*shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(jax.random.normal(key, x) for key, x in zip(keys, shapes, strict=True))


def placed(mesh, arrays, specs):
    return [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]


def spec_of(x, typed=False):
    """How an array is split, without the axes at the end that are not."""
    entries = list((jax.typeof(x) if typed else x).sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def collectives(run, *arguments):
    text = jax.jit(run).lower(*arguments).compile().as_text()
    names = r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    return set(re.findall(names, text))


def with_gradients(run):
    def both(*arguments):
        floats = [i for i, x in enumerate(arguments) if jnp.issubdtype(x.dtype, jnp.floating)]
        loss = lambda *x: (run(*x) ** 2).sum()
        return run(*arguments), jax.grad(loss, tuple(floats))(*arguments)

    return both


def assert_close(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-4)


def check(run, arrays, specs, mesh, allowed_forward=(), allowed=("all-reduce",)):
    """Values and gradients of split arrays are those of whole ones, with these collectives."""
    both = with_gradients(run)
    wanted = both(*arrays)
    with jax.set_mesh(mesh):
        arguments = placed(mesh, arrays, specs)
        got = jax.jit(both)(*arguments)
        assert collectives(run, *arguments) <= set(allowed_forward)
        assert collectives(both, *arguments) <= set(allowed)
    assert_close(got, wanted)
    return got


attention = functools.partial(flash_attention, causal=True)
each_kind = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)


@each_kind
@pytest.mark.parametrize(
    ("key_heads", "spec"), [(8, HEADS), (4, HEADS), (2, BATCH), (1, BATCH), (4, BATCH)]
)
def test_heads_stay_split_with_fewer_key_heads_too(kind, key_heads, spec):
    arrays = draw((4, 16, 8, 8), (4, 16, key_heads, 8), (4, 16, key_heads, 8))
    # Gradients of whole keys are split where the heads divide, and gathered if they must be whole.
    allowed = {"all-reduce", "all-gather"} if spec == BATCH and key_heads == 4 else {"all-reduce"}
    mesh = make_mesh(kind)
    out, gradients = check(attention, arrays, (HEADS, spec, spec), mesh, allowed=allowed)
    assert spec_of(out) == spec_of(gradients[0]) == HEADS


@pytest.mark.parametrize(
    ("kind", "query", "key", "key_heads"),
    [
        (kind, *split)
        for kind in (AxisType.Auto, AxisType.Explicit)
        for split in [(HEADS, HEADS, 4), (HEADS, BATCH, 4), (BATCH, HEADS, 8), (P(), BATCH, 1)]
    ]
    + [(AxisType.Explicit, HEADS, BATCH, 2)],
)
def test_blocks_are_chosen_for_split_arrays(kind, query, key, key_heads):
    arrays = draw((4, 16, 8, 8), (4, 16, key_heads, 8), (4, 16, key_heads, 8))
    run = functools.partial(native_sparse_attention, block_size=4, block_counts=2)
    anything = {"all-gather", "all-reduce", "all-to-all", "collective-permute"}
    check(run, arrays, (query, key, key), make_mesh(kind), anything, anything)


def test_query_heads_over_all_devices_share_key_heads():
    arrays = draw((1, 16, 16, 8), (1, 16, 2, 8), (1, 16, 2, 8))
    both_axes = P(None, None, ("dp", "tp"))
    out, _ = check(attention, arrays, (both_axes, P(), P()), make_mesh())
    assert spec_of(out) == both_axes


def test_a_split_sequence_is_gathered_and_right():
    arrays = draw((4, 16, 8, 8), (4, 16, 4, 8), (4, 16, 4, 8))
    spec = P("dp", "tp")
    check(attention, arrays, (spec,) * 3, make_mesh(), {"all-gather"}, {"all-gather", "all-reduce"})


def test_a_precision_around_a_call_holds_on_every_device():
    """XLA splits the call over devices when the program is compiled, outside of the block."""

    def run(x):
        with jax.default_matmul_precision("bfloat16"):
            return attention(x, x, x)

    (x,) = placed(make_mesh(), draw((4, 16, 8, 8)), (HEADS,))
    text = jax.jit(run).lower(x).compile().as_text()
    assert "dot(" in text
    assert "highest" not in text


@pytest.mark.parametrize("function", [flash_attention, gla_attention])
@pytest.mark.parametrize("spec", [HEADS, P("dp", "tp"), P(None, None, "tp")])
def test_a_compiler_without_partitioning_rules_splits_the_operations_of_xla(
    function, spec, monkeypatch
):
    """Such as libtpu; what a TPU does is in tests/tpu/test_meshes.py."""
    monkeypatch.setattr(partitioned, "WITHOUT_RULES", {"cpu"})
    arrays = draw((4, 16, 8, 8), (4, 16, 4, 8), (4, 16, 4, 8))
    anything = {"all-gather", "all-reduce", "all-to-all", "collective-permute"}
    check(lambda *x: function(*x), arrays, (spec,) * 3, make_mesh(), anything, anything)


def test_a_split_head_dimension_is_gathered_and_right():
    arrays = draw((4, 16, 8, 8), (4, 16, 2, 8), (4, 16, 2, 8))
    spec = P("dp", None, None, "tp")
    anything = {"all-gather", "all-reduce", "all-to-all", "collective-permute"}
    check(attention, arrays, (HEADS, spec, spec), make_mesh(), anything, anything)


@each_kind
def test_masks_biases_and_sinks_travel_by_their_letters(kind):
    q, k, bias, sinks = draw((4, 16, 8, 8), (4, 16, 4, 8), (4, 8, 16, 16), (8, 2))
    segments = jnp.asarray(np.repeat(np.arange(4), 4)[None].repeat(4, 0))

    def run(q, k, bias, sinks, segments):
        mask = MaskInfo.from_segments(segments).apply_causal()
        return flash_attention(q, k, k, bias=bias, softmax_aux=sinks, mask_info=mask)

    specs = (HEADS, HEADS, P("dp", "tp"), P(), BATCH)
    check(run, (q, k, bias, sinks, segments), specs, make_mesh(kind))


@pytest.mark.parametrize("scan", [False, True])
def test_inside_scan_and_vmap(scan):
    """A loop over layers, each with a split batch; examples that are split, one by one."""
    one = lambda q, k: attention(q, k, k)
    if scan:
        arrays, spec = draw((3, 4, 16, 8, 8), (3, 4, 16, 4, 8)), P(None, "dp", None, "tp")
        run = lambda q, k: jax.lax.map(lambda x: one(*x), (q, k))
    else:
        arrays, spec = draw((4, 1, 16, 8, 8), (4, 1, 16, 4, 8)), P("dp", None, None, "tp")
        run = jax.vmap(one)

    check(run, arrays, (spec, spec), make_mesh())


def test_a_tangent_is_split_as_its_output():
    mesh = make_mesh()
    arrays = draw((4, 16, 8, 8), (4, 16, 4, 8), (4, 16, 8, 8), (4, 16, 4, 8))
    run = lambda q, k, dq, dk: jax.jvp(lambda q, k: attention(q, k, k), (q, k), (dq, dk))[1]
    arguments = placed(mesh, arrays, (HEADS,) * 4)
    tangent = jax.jit(run)(*arguments)
    assert_close(tangent, run(*arrays))
    assert not collectives(run, *arguments)
    assert spec_of(tangent) == HEADS


def test_manual_axes_around_automatic_ones():
    """A `shard_map` over the batch alone: heads stay with XLA."""
    mesh = make_mesh()
    arrays = draw((4, 16, 8, 8), (4, 16, 4, 8))
    local = lambda q, k: attention(q, k, k)
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(BATCH, BATCH), out_specs=BATCH, axis_names={"dp"}
    )
    arguments = placed(mesh, arrays, (HEADS, HEADS))
    assert_close(jax.jit(run)(*arguments), local(*arrays))
    assert not collectives(run, *arguments)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("key_heads", [4, 1])
def test_a_ring_over_a_manual_axis_among_automatic_ones(method, key_heads):
    """A `shard_map` over the sequence alone: XLA does not say in a rule that the axis is mapped."""
    arrays = draw((4, 16, 8, 8), (4, 16, key_heads, 8), (4, 16, key_heads, 8))
    mesh, spec = make_mesh(), P(None, "dp")
    local = functools.partial(ring_attention, axis_name="dp", causal=True, method=method)
    run = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, axis_names={"dp"})
    of_keys = P(None, "dp", "tp") if key_heads > 1 else spec
    arguments = placed(mesh, arrays, (P(None, "dp", "tp"), of_keys, of_keys))
    assert_close(jax.jit(with_gradients(run))(*arguments), with_gradients(attention)(*arrays))


def test_explicit_axes_around_automatic_ones():
    arrays = draw((4, 16, 8, 8), (4, 16, 4, 8))
    mesh = make_mesh(AxisType.Explicit, AxisType.Auto)
    out, _ = check(lambda q, k: attention(q, k, k), arrays, (HEADS, HEADS), mesh)
    assert jax.typeof(out).sharding.spec[0] == "dp"


def test_explicit_axes_eagerly_and_under_grad():
    q, k = arrays = draw((4, 16, 8, 8), (4, 16, 4, 8))
    mesh = make_mesh(AxisType.Explicit)
    loss = lambda q, k: (attention(q, k, k) ** 2).sum()
    with jax.set_mesh(mesh):
        split = placed(mesh, arrays, (HEADS, HEADS))
        out, gradient = attention(split[0], split[1], split[1]), jax.grad(loss)(*split)
    assert spec_of(out, typed=True) == spec_of(gradient, typed=True) == HEADS
    assert_close((out, gradient), (attention(q, k, k), jax.grad(loss)(q, k)))


def test_whole_arrays_under_explicit_axes():
    arrays = draw((4, 16, 8, 8), (4, 16, 4, 8))
    check(lambda q, k: attention(q, k, k), arrays, (P(), P()), make_mesh(AxisType.Explicit))


def test_whole_arrays_keep_their_explicit_mesh_outside_of_it():
    """JAX refuses to mix them with arrays of no mesh, such as those that a call makes."""
    arrays = draw((2, 16, 8, 8), (2, 16, 4, 8))
    run = lambda q, k: attention(q, k, k)
    split = placed(make_mesh(AxisType.Explicit), arrays, (P(), P()))
    for function in (run, jax.jit(run), jax.jit(jax.grad(lambda *x: run(*x).sum()))):
        got = function(*split)
        assert jax.typeof(got).sharding.mesh.axis_names == ("dp", "tp")
        assert_close(got, function(*arrays))


def test_an_explicit_axis_that_cannot_be_split_is_refused():
    mesh = make_mesh(AxisType.Explicit)
    (x,) = placed(mesh, draw((4, 16, 8, 8)), (P("dp", "tp"),))
    with pytest.raises(ValueError, match="query cannot be split along 't' over mesh axis tp"):
        attention(x, x, x)


@pytest.mark.parametrize("axis_name", [None, "tp"])
def test_ring_attention_without_a_mesh_gathers_a_split_sequence(axis_name):
    """Arrays of a `NamedSharding` name no mesh to the call, so that its ring has one device."""
    arrays = draw((4, 16, 8, 8), (4, 16, 4, 8), (4, 16, 4, 8))
    run = functools.partial(ring_attention, causal=True, axis_name=axis_name)
    both = with_gradients(run)
    arguments = placed(make_mesh(), arrays, (P("dp", "tp"),) * 3)
    assert_close(jax.jit(both)(*arguments), with_gradients(attention)(*arrays))
    out = jax.jit(run)(*placed(make_mesh(), arrays, (HEADS,) * 3))
    assert spec_of(out) == HEADS


def test_ring_attention_over_explicit_axes_needs_axis_name():
    arrays = draw((4, 16, 8, 8), (4, 16, 4, 8), (4, 16, 4, 8))
    split = placed(make_mesh(AxisType.Explicit), arrays, (P("dp", "tp"),) * 3)
    message = "query cannot be split along 't' over mesh axis tp; axis_name= splits the sequences"
    with pytest.raises(ValueError, match=message):
        ring_attention(*split, causal=True)
    out = ring_attention(*split, causal=True, axis_name="tp")
    assert spec_of(out, typed=True) == P("dp", "tp")
    assert_close(out, attention(*arrays))


def test_a_map_over_a_split_explicit_axis_is_refused():
    mesh = make_mesh(AxisType.Explicit)
    (x,) = placed(mesh, draw((4, 2, 16, 8, 8)), (BATCH,))
    run = jax.vmap(lambda x: attention(x, x, x))
    message = "flash_attention: jax.vmap cannot map over an axis that is split over explicit mesh"
    with jax.set_mesh(mesh), pytest.raises(UnsupportedError, match=message):
        jax.jit(run)(x)


def test_explicit_axes_that_differ_are_refused():
    mesh = make_mesh(AxisType.Explicit)
    x, y = placed(mesh, draw((8, 16, 8, 8), (8, 16, 8, 8)), (P("dp"), P("tp")))
    with pytest.raises(ValueError, match="query and key are split along 'b' differently"):
        attention(x, y, y)


def test_specs_use_the_mesh_of_the_context():
    arrays = draw((4, 16, 8, 8), (4, 16, 4, 8), (4, 16, 4, 8))
    run = functools.partial(attention, in_specs=(HEADS, HEADS, HEADS))
    with jax.set_mesh(make_mesh()):
        out = run(*arrays)
    assert spec_of(out) == HEADS
    assert_close(out, attention(*arrays))


@pytest.mark.parametrize("argument", ["in_specs", "out_specs"])
def test_specs_without_a_mesh_are_refused(argument):
    arrays = draw((4, 16, 8, 8), (4, 16, 4, 8), (4, 16, 4, 8))
    with pytest.raises(ValueError, match=r"need a mesh: mesh=, or jax\.set_mesh around the call"):
        attention(*arrays, **{argument: (HEADS, HEADS, HEADS)})


@pytest.mark.parametrize(
    ("specs", "forward"),
    [
        ((P(), P(None, None, "tp"), P()), set()),  # columns
        ((P("dp"), P(), P("dp")), set()),  # rows
        ((P("dp"), P(None, None, "tp"), P("dp")), set()),
        ((P(None, "tp"), P(None, "tp"), P()), {"all-reduce"}),  # the inner dimension
        ((P(), P("tp"), P()), {"all-reduce"}),  # experts
    ],
    ids=["columns", "rows", "both", "inner", "experts"],
)
@each_kind
def test_grouped_matmul(kind, specs, forward):
    x, weights = draw((16, 8), (4, 8, 16))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 4, 16), jnp.int32)
    check(grouped_matmul, (x, weights, ids), specs, make_mesh(kind), forward)


@each_kind
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_grouped_matmul_adds_partial_sums_in_float32(kind, transpose_rhs):
    """Eight parts of the inner dimension that are rounded once, after they are added."""
    x, weights = (jnp.asarray(a, jnp.bfloat16) for a in draw((16, 512), (4, 512, 16)))
    ids = jnp.asarray(np.arange(16) % 4, jnp.int32)
    inner = ("dp", "tp")
    specs = P(None, inner), P(None, inner), P()
    if transpose_rhs:
        weights, specs = weights.mT, (specs[0], P(None, None, inner), P())
    run = functools.partial(grouped_matmul, transpose_rhs=transpose_rhs)
    exact = run(x.astype(jnp.float32), weights.astype(jnp.float32), ids)
    along = lambda x, weights, ids: jax.jvp(lambda x: run(x, weights, ids), (x,), (x,))[1]
    arguments = placed(make_mesh(kind), (x, weights, ids), specs)
    for function in (run, along):
        got = jax.jit(function)(*arguments)
        assert got.dtype == jnp.bfloat16
        # Half of the last place, and what the order of a float32 sum may change.
        got = np.asarray(got, np.float32)
        np.testing.assert_allclose(got, np.asarray(exact), rtol=2**-8, atol=1e-4)


def test_grouped_matmul_with_sizes_uses_the_mesh_of_the_context():
    """Rows that are split, of which each device has a part of a group."""
    x, weights = draw((16, 8), (4, 8, 16))
    sizes = jnp.array([5, 0, 8, 3], jnp.int32)
    run = functools.partial(grouped_matmul, group_sizes=sizes)
    with jax.set_mesh(make_mesh()):
        got = run(x, weights, in_specs=(P("dp"), P()))
    assert_close(got, run(x, weights))


def test_explicit_rows_need_ids():
    mesh = make_mesh(AxisType.Explicit)
    x, weights = placed(mesh, draw((16, 8), (4, 8, 16)), (P("dp"), P()))
    with pytest.raises(ValueError, match="along 'r' over mesh axis dp; rows are split with group_"):
        grouped_matmul(x, weights, group_sizes=jnp.array([5, 0, 8, 3], jnp.int32))


@pytest.mark.parametrize("pages", [P(), P(None, None, "tp")], ids=["whole", "by_head"])
@each_kind
def test_paged_decoding(kind, pages):
    query, cache = draw((4, 8, 8), (16, 4, 4, 8))
    lengths = jnp.array([3, 8, 1, 16])
    tables = jnp.arange(16).reshape(4, 4)
    run = lambda query, cache, lengths, tables: page_attention(query, cache, cache, lengths, tables)
    arrays = (query, cache, lengths, tables)
    wanted = run(*arrays)
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        arguments = placed(mesh, arrays, (P("dp", "tp"), pages, BATCH, BATCH))
        got = jax.jit(run)(*arguments)
        assert not collectives(run, *arguments)
    assert_close(got, wanted)
    assert spec_of(got) == P("dp", "tp")


@each_kind
@pytest.mark.parametrize("query", [P("dp", "tp"), P(None, "tp")], ids=["both", "heads"])
def test_gradients_of_a_cache_with_fewer_key_heads_than_devices(kind, query):
    """The cache and its scales have no batch: their gradients are sums over "dp", too."""
    queries, cache = draw((4, 8, 8), (16, 4, 2, 8))
    scale = jnp.array([1.5, 0.5])
    lengths, tables = jnp.array([3, 8, 1, 16]), jnp.arange(16).reshape(4, 4)

    def run(query, cache, scale, lengths, tables):
        return page_attention(query, cache, cache, lengths, tables, k_scale=scale, v_scale=scale)

    batch = P(*query[:1])
    specs = (query, P(), P(), batch, batch)
    check(run, (queries, cache, scale, lengths, tables), specs, make_mesh(kind))


@each_kind
@pytest.mark.parametrize("key_heads", [2, 1])
def test_the_state_of_shared_key_heads_is_whole_on_every_device(kind, key_heads):
    """Its gradient is that of one device, although all of them have it."""
    q, k = draw((4, 16, 8, 8), (4, 16, key_heads, 8))

    def run(q, k):
        out, state = gla_attention(q, k, k, -jnp.abs(k[..., 0]), return_state=True)
        return out + state.sum()

    check(run, (q, k), (HEADS, BATCH), make_mesh(kind), {"all-reduce"})
