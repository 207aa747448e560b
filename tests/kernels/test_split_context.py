"""A KV cache whose pages are split over devices is attended to as if one device held it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import quick

from ejkernel.kernels.ragged_page_attention_v3 import split_context as context
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Spec
from ejkernel.modules import page_attention, ragged_page_attention_v3

if len(jax.devices()) < 8:
    pytest.skip("eight devices are needed", allow_module_level=True)

PAGES, SLOTS, ENTRIES, HEADS, KV_HEADS, DIM, VALUE_DIM = 64, 4, 10, 4, 2, 8, 12
# In the middle of a page, short, empty, a whole number of pages, a single token.
LENGTHS = np.array([38, 7, 0, 32, 1])
QUERIES = np.array([1, 7, 0, 9, 1])  # decoding, prefilling, empty, a second part, decoding
AXIS = "context"


def mesh_of(*shape, names=(AXIS,), kind=AxisType.Auto):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(kind,) * len(names))


MESH = mesh_of(8)


def tables(anywhere=True):
    """Pages in no order with a hole; or the long sequence on device 3, others on one each."""
    table = np.random.default_rng(0).permutation(PAGES)[: len(LENGTHS) * ENTRIES]
    table = table.reshape(len(LENGTHS), ENTRIES).astype(np.int32)
    if anywhere:
        table[3, 2] = -1
        return table
    alone = -np.ones_like(table)
    alone[0, :8], alone[1, :2], alone[3, :8] = np.arange(24, 32), [0, 1], np.arange(56, 64)
    alone[4, 0] = 2
    return alone


def cache(layout="NHD", eight_bits=False, seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    order = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3), "HNPD": (2, 0, 1, 3)}[layout]
    shapes = [(PAGES, SLOTS, KV_HEADS, width) for width in (DIM, VALUE_DIM)]
    if eight_bits:
        drawn = [
            jax.random.randint(*x, -128, 128, jnp.int8) for x in zip(keys, shapes, strict=True)
        ]
    else:
        drawn = [jax.random.normal(*x) for x in zip(keys, shapes, strict=True)]
    return [x.transpose(order) for x in drawn]


def query(*lengths):
    return jax.random.normal(jax.random.key(9), (*lengths, HEADS, DIM))


def decode(queries=1, anywhere=True, **options):
    """A call of page attention as a function of its arrays of floats, and these."""
    eight_bits = options.pop("eight_bits", False)
    caches = cache(options.get("kv_layout", "NHD"), eight_bits)
    table = tables(anywhere)

    def run(query, keys, values, **more):
        lengths = jnp.minimum(LENGTHS, 32) if not anywhere else LENGTHS
        return page_attention(query, keys, values, lengths, table, **options, **more)

    return run, (query(len(LENGTHS), queries), *caches)


def ragged(anywhere=True, **options):
    """The same of ragged page attention, with two rows of no sequence."""
    cumulative = lambda x: np.concatenate([[0], np.cumsum(x)])
    lengths = np.minimum(LENGTHS, 32) if not anywhere else LENGTHS

    def run(query, keys, values, **more):
        return ragged_page_attention_v3(
            query,
            keys,
            values,
            cumulative(QUERIES),
            cumulative(lengths),
            tables(anywhere),
            **options,
            **more,
        )

    return run, (query(int(QUERIES.sum()) + 2), *cache(options.get("kv_layout", "NHD")))


def assert_close(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)


SINKS = jnp.arange(HEADS * 2.0).reshape(HEADS, 2) - 3
CALLS = {
    "decode": decode(),
    "several_queries": decode(queries=3),
    "window": decode(queries=2, sliding_window=9),
    "traced_window": decode(sliding_window=jnp.int32(9)),
    "soft_cap_and_sinks": decode(queries=2, logits_soft_cap=2.0, softmax_aux=SINKS),
    "eight_bits": decode(
        queries=2, eight_bits=True, k_scale=jnp.array([0.02, 0.01]), v_scale=0.02, kv_layout="HND"
    ),
    "heads_first": decode(queries=6, kv_layout="HNPD"),
    "on_one_device": decode(queries=2, anywhere=False),
    "ragged": ragged(),
    "ragged_window": ragged(sliding_window=6, softmax_aux=SINKS, logits_soft_cap=2.0),
    "ragged_heads_first": ragged(kv_layout="HNPD"),
    "ragged_on_one_device": ragged(anywhere=False),
}
FEW = ("decode", "window", "soft_cap_and_sinks", "ragged")


@pytest.mark.parametrize("name", quick(CALLS, *FEW, "eight_bits", "on_one_device"))
def test_output_and_log_sum_exp_are_those_of_one_device(name):
    run, arrays = CALLS[name]
    got = run(*arrays, return_lse=True, axis_name=AXIS, mesh=MESH)
    assert_close(got, run(*arrays, return_lse=True))


@pytest.mark.parametrize("name", quick([x for x in CALLS if x != "eight_bits"], *FEW[2:]))
def test_gradients_are_those_of_one_device(name):
    """Of the query and the cache, through the output and the log-sum-exp."""
    run, arrays = CALLS[name]

    def gradients(**more):
        def loss(arrays):
            out, lse = run(*arrays, return_lse=True, **more)
            lse = jnp.where(lse > -jnp.inf, lse, 0.0)
            return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum() + jnp.sin(
                lse
            ).sum()

        return jax.jit(jax.grad(loss))(arrays)

    assert_close(gradients(axis_name=AXIS, mesh=MESH), gradients())


@pytest.mark.parametrize("sink", quick([0.0, -30.0, -jnp.inf], -30.0))
def test_gradients_of_sinks_and_scales(sink):
    """Also of sinks that take next to nothing."""
    run, arrays = decode(queries=2, logits_soft_cap=2.0)
    given = {
        "softmax_aux": SINKS + sink,
        "k_scale": jnp.array([0.5, 1.5]),
        "v_scale": jnp.float32(0.7),
    }

    def gradients(**more):
        loss = lambda given: (run(*arrays, **given, **more) ** 2).sum()
        return jax.jit(jax.grad(loss))(given)

    got, wanted = gradients(axis_name=AXIS, mesh=MESH), gradients()
    assert_close(got, wanted)
    np.testing.assert_allclose(got["softmax_aux"], wanted["softmax_aux"], rtol=1e-4)


@pytest.mark.parametrize("check_vma", quick([True, False], True))
def test_a_shard_map_gives_each_device_its_pages(check_vma):
    """Page ids count the pages of all devices, and are checked so."""
    run, arrays = CALLS["soft_cap_and_sinks"]
    got = jax.shard_map(
        lambda *x: run(*x, axis_name=AXIS),
        mesh=MESH,
        in_specs=(P(), P(AXIS), P(AXIS)),
        out_specs=P(),
        check_vma=check_vma,
    )(*arrays)
    assert_close(got, run(*arrays))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_the_mesh_of_the_context(kind):
    run, arrays = CALLS["ragged"]
    wanted = run(*arrays)
    mesh = mesh_of(8, kind=kind)
    with jax.set_mesh(mesh):
        split = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(arrays, (P(), P(AXIS), P(AXIS)), strict=True)
        ]
        assert_close(jax.jit(lambda *x: run(*x, axis_name=AXIS))(*split), wanted)


def test_batch_and_heads_are_split_together_with_the_context():
    mesh = mesh_of(2, 2, 2, names=("batch", AXIS, "heads"))
    _, arrays = decode(queries=2)
    even = lambda x: jnp.concatenate([x, x[:1]])  # six sequences
    pages = P(AXIS, None, "heads")
    lengths, table = even(LENGTHS), even(tables())
    call = lambda *x, **more: page_attention(*x, lengths, table, softmax_aux=SINKS, **more)
    arrays = (even(arrays[0]), *arrays[1:])
    split = lambda *x: call(
        *x, axis_name=AXIS, mesh=mesh, in_specs=(P("batch", None, "heads"), pages, pages)
    )
    assert_close(split(*arrays), call(*arrays))
    # One key head, whose query heads are split: every device has it.
    arrays = (arrays[0], arrays[1][:, :, :1], arrays[2][:, :, :1])
    pages = P(AXIS)
    assert_close(split(*arrays), call(*arrays))


def test_without_devices_to_split_over_the_axis_means_nothing():
    run, arrays = CALLS["ragged"]
    assert jnp.array_equal(run(*arrays, axis_name=AXIS), run(*arrays))


@pytest.mark.parametrize("name", quick(["soft_cap_and_sinks", "ragged_window"], "ragged_window"))
def test_two_collectives_merge_the_results_in_float32(name):
    """The largest log-sum-exp, then the sums of outputs and weights; no page is moved."""
    run, arrays = CALLS[name]
    arrays = [x.astype(jnp.bfloat16) for x in arrays]
    split = lambda *x: run(*x, return_lse=True, axis_name=AXIS, mesh=MESH)
    text = jax.jit(split).lower(*arrays).as_text()
    moved = r"stablehlo\.(all_\w+|collective_\w+|reduce_scatter)"
    assert re.findall(moved, text) == ["all_reduce", "all_reduce"]
    sums = re.findall(r"\}\) : \(tensor<[\dx]*(\w+)>\) -> tensor<[\dx]*\w+>", text)
    assert sums.count("f32") >= 2
    assert "bf16" not in sums
    out, _ = split(*arrays)
    assert out.dtype == jnp.bfloat16


def own_pages(lengths, queries, table, window=None):
    """Lengths and tables of all devices, [8, ...]."""
    spec = Spec(softmax_scale=1.0, sliding_window=window)
    count = len(lengths)
    inputs = Inputs(
        query=jnp.zeros((count, max(queries), 1, 1)),
        key_pages=jnp.zeros((PAGES, SLOTS, 1, 1)),
        value_pages=None,
        query_starts=jnp.zeros((count, 1), jnp.int32),
        query_lens=jnp.array(queries)[:, None],
        kv_lens=jnp.array(lengths)[:, None],
        page_indices=jnp.array(table)[:, None],
    )

    def of_device(pages):
        own = context.own_pages(inputs._replace(key_pages=pages), spec, AXIS)
        return own.kv_lens[None, :, 0], own.page_indices[None, :, 0]

    return jax.shard_map(of_device, mesh=MESH, in_specs=P(AXIS), out_specs=P(AXIS))(
        inputs.key_pages
    )


def test_the_work_of_a_device_follows_the_pages_that_it_holds():
    table = np.arange(5 * 8).reshape(5, 8) % 8 * 8 + np.arange(5)[:, None]  # one on each device
    lengths, _ = own_pages([32] * 5, [1] * 5, table)
    assert (np.asarray(lengths) == SLOTS).all()
    # A page that is not full yet, and those with queries, keep their place on every device.
    lengths, _ = own_pages([31, 30, 29, 32, 32], [1, 1, 1, 4, 5], table)
    assert (np.asarray(lengths)[:7] == [7, 6, 5, 8, 8]).all()
    assert (np.asarray(lengths)[7] == [3, 2, 1, 4, 4]).all()  # the device that holds that page
    # Under a window distances matter, and nothing moves.
    lengths, own = own_pages([32] * 5, [1] * 5, table, window=7)
    assert (np.asarray(lengths) == 32).all()
    assert ((np.asarray(own) >= 0).sum(-1) == 1).all()


def test_what_cannot_be_split_is_refused_in_one_sentence():
    run, arrays = CALLS["decode"]
    with pytest.raises(ValueError, match=r"^page_attention: 64 pages do not divide over the 3 dev"):
        run(*arrays, axis_name=AXIS, mesh=mesh_of(3))
    with pytest.raises(ValueError, match="axis_name 'sp' is not an axis of the mesh"):
        run(*arrays, axis_name="sp", mesh=MESH)
    with pytest.raises(ValueError, match="axis 0 of key_cache must be split over 'context'"):
        run(*arrays, axis_name=AXIS, mesh=MESH, in_specs=(P(), P(), P()))
    with pytest.raises(ValueError, match="mesh axis 'context' cannot split both 'n' and 'p'"):
        run(*arrays, axis_name=AXIS, mesh=MESH, in_specs=(P(None, None, AXIS), P(AXIS), P(AXIS)))
    with pytest.raises(ValueError, match="along 'p' over mesh axis context; axis_name= splits the"):
        run(*arrays, mesh=MESH, in_specs=(P(), P(AXIS), P(AXIS)))
    with pytest.raises(ValueError, match=r"must hold page ids below 64, or -1 for no page"):
        page_attention(*arrays, LENGTHS, tables() + 10, axis_name=AXIS, mesh=MESH)
