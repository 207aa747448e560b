"""Sparse attention over sequences that are split over devices is that of the whole sequences."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import quick

from ejkernel import settings
from ejkernel.errors import UnsupportedError
from ejkernel.kernels._pallas.tpu.blocksparse_attention import CausalMask, LocalMask
from ejkernel.modules import blocksparse_attention, native_sparse_attention
from ejkernel.types import MaskInfo

if len(jax.devices()) < 8:
    pytest.skip("eight devices are needed", allow_module_level=True)

LENGTH, HEADS, KV_HEADS = 64, 4, 2
FLOATS = ("bias", "softmax_aux", "g_cmp", "g_slc", "g_swa")
AXIS = "sequence"


def mesh_of(*shape, names=(AXIS,), kind=AxisType.Auto):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(kind,) * len(names))


MESH = mesh_of(8)


def draw(number, *shape):
    return jax.random.normal(jax.random.key(number), shape)


def arrays(kv_heads=KV_HEADS, batch=2):
    return (
        draw(1, batch, LENGTH, HEADS, 8),
        draw(2, batch, LENGTH, kv_heads, 8),
        draw(3, batch, LENGTH, kv_heads, 12),
    )


def value_and_gradients(function, arrays, extra):
    """Of all arrays of floats, those of `extra` included."""
    floats = {n: x for n, x in extra.items() if n in FLOATS}
    rest = {n: x for n, x in extra.items() if n not in floats}

    def loss(arrays, floats):
        out = function(*arrays, **floats, **rest)
        return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(arrays, floats)
    return out, gradients


def assert_close(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=3e-5, atol=3e-5)


def builder(queries, keys, heads, head, group):
    shape = (queries, keys)
    return CausalMask(shape) if head % 2 else LocalMask(shape, (9, 0), 0)


IDS = jnp.stack([jnp.repeat(jnp.arange(4), 16), jnp.where(jnp.arange(64) < 50, 0, -1)])
RANDOM = np.random.default_rng(0)
# A device has eight queries: blocks of 5 and of 12 lie across devices.
CALLS = {
    "causal": {"causal": True},
    "blocks": {"block_mask": RANDOM.random((2, HEADS, 13, 6)) < 0.5, "block_size": (5, 12)},
    "causal_blocks": {
        "block_mask": RANDOM.random((8, 8)) < 0.5,
        "block_size": 8,
        "causal": True,
        "softmax_aux": jnp.ones((HEADS, 2)),
        "logits_soft_cap": 2.0,
    },
    "window": {"sliding_window": (9, 3), "softmax_aux": jnp.ones((1,))},
    "chunks": {"chunk_size": 12},
    "bias": {"bias": draw(7, HEADS, LENGTH, LENGTH), "causal": True},
    "bias_row": {"bias": draw(7, 2, 1, LENGTH, 1)},
    "mask": {"attention_mask": RANDOM.random((2, HEADS, LENGTH, LENGTH)) < 0.6},
    "segments": {"mask_info": MaskInfo.from_segments(IDS), "causal": True},
    "builder": {"mask_builder": builder, "block_size": 16},
}


@pytest.mark.parametrize("name", quick(CALLS, "causal_blocks", "segments"))
def test_values_and_gradients_are_those_of_one_device(name):
    split = lambda *x, **more: blocksparse_attention(*x, axis_name=AXIS, mesh=MESH, **more)
    got = value_and_gradients(split, arrays(), CALLS[name])
    assert_close(got, value_and_gradients(blocksparse_attention, arrays(), CALLS[name]))


@pytest.mark.parametrize("check_vma", quick([True, False], True))
def test_a_shard_map_gives_each_device_its_share(check_vma):
    """With masks of the whole, and the rows of a bias."""
    given = CALLS["causal_blocks"] | {"bias": draw(7, HEADS, LENGTH, LENGTH)}

    def split(query, key, value, bias, softmax_aux, **masks):
        share = P(None, AXIS)
        return jax.shard_map(
            lambda *x: blocksparse_attention(
                *x[:3], bias=x[3], softmax_aux=x[4], axis_name=AXIS, **masks
            ),
            mesh=MESH,
            in_specs=(share, share, share, share, P()),
            out_specs=share,
            check_vma=check_vma,
        )(query, key, value, bias, softmax_aux)

    got = value_and_gradients(split, arrays(), given)
    assert_close(got, value_and_gradients(blocksparse_attention, arrays(), given))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_the_mesh_of_the_context(kind):
    wanted = blocksparse_attention(*arrays(), **CALLS["causal_blocks"])
    mesh = mesh_of(8, kind=kind)
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, NamedSharding(mesh, P(None, AXIS))) for x in arrays()]
        run = lambda *x: blocksparse_attention(*x, axis_name=AXIS, **CALLS["causal_blocks"])
        assert_close(jax.jit(run)(*split), wanted)


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_batch_and_heads_are_split_together_with_the_sequence(kv_heads):
    """One key head, whose query heads are split, is on every device; heads may come first."""
    mesh = mesh_of(2, 2, 2, names=("batch", AXIS, "heads"))
    first = lambda x: jnp.swapaxes(x, 1, 2)
    keys = "heads" if kv_heads > 1 else None
    specs = (P("batch", "heads", AXIS), P("batch", keys, AXIS), P("batch", keys, AXIS))

    def split(*x, **more):
        more |= {"axis_name": AXIS, "mesh": mesh, "in_specs": specs, "layout": "bhsd"}
        return first(blocksparse_attention(*map(first, x), **more))

    given = CALLS["causal_blocks"]
    got = value_and_gradients(split, arrays(kv_heads), given)
    assert_close(got, value_and_gradients(blocksparse_attention, arrays(kv_heads), given))


def test_keys_and_values_are_gathered_once_and_their_gradients_scattered_once():
    split = lambda *x: blocksparse_attention(*x, causal=True, axis_name=AXIS, mesh=MESH)
    gradients = jax.grad(lambda x: (split(*x) ** 2).sum())
    given = [x.astype(jnp.bfloat16) for x in arrays()]
    moved = r"stablehlo\.(all_\w+|collective_\w+|reduce_scatter)"
    text = lambda run: jax.jit(run).lower(given).as_text()
    assert re.findall(moved, text(lambda x: split(*x))) == ["all_gather"] * 2
    program = text(gradients)
    assert sorted(re.findall(moved, program)) == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    sums = r"reduce_scatter(?:.|\n)*?\}\) : \(tensor<[\dx]*(\w+)>\)"
    assert re.findall(sums, program) == ["f32"] * 2


def test_forward_mode_and_vmap():
    x, along = arrays(), arrays(batch=2)
    more = {"causal": True, "platform": "xla"}
    split = lambda *x: blocksparse_attention(*x, axis_name=AXIS, mesh=MESH, **more)
    whole = lambda *x: blocksparse_attention(*x, **more)
    assert_close(jax.jvp(split, x, along), jax.jvp(whole, x, along))
    examples = [jnp.stack([x, -x]) for x in arrays()]
    assert_close(jax.vmap(split)(*examples), jax.vmap(whole)(*examples))


def test_without_devices_to_split_over_the_axis_means_nothing():
    got = blocksparse_attention(*arrays(), axis_name=AXIS, **CALLS["blocks"])
    assert jnp.array_equal(got, blocksparse_attention(*arrays(), **CALLS["blocks"]))


def test_what_cannot_be_split_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"^blocksparse_attention: 64 queries and 64 keys do not"):
        blocksparse_attention(*arrays(), axis_name=AXIS, mesh=mesh_of(3))
    heads_first = [jnp.swapaxes(x, 1, 2) for x in arrays()]
    over = {"mesh": MESH, "in_specs": (P(None, AXIS),) * 3}
    with pytest.raises(ValueError, match="axis 2 of query must be split over 'sequence'"):
        blocksparse_attention(*heads_first, layout="bhsd", axis_name=AXIS, **over)
    with pytest.raises(ValueError, match="over mesh axis sequence; axis_name= splits the sequence"):
        blocksparse_attention(*arrays(), **over)
    with pytest.raises(ValueError, match=r"block_mask must have shape \[8, 8\], \[heads, ...\]"):
        blocksparse_attention(
            *arrays(), block_mask=np.ones((1, 8)), block_size=8, axis_name=AXIS, mesh=MESH
        )


GATES = dict(zip(FLOATS[2:], jax.nn.sigmoid(draw(8, 3, 2, LENGTH, HEADS)), strict=True))
WITHOUT_WINDOW = {name: GATES[name] for name in ("g_cmp", "g_slc")}
# Of blocks of 5, the last of which is shorter; -1 and 13 are none.
LISTS = RANDOM.integers(-1, 14, (2, LENGTH, KV_HEADS, 3))
# Packed sequences that lie across devices, one of them empty, and a rest of no sequence.
PACKED = {"cu_seqlens": np.array([0, 19, 19, 50])}
SPARSE_CALLS = {
    "selected": {"block_indices": LISTS},
    "all_branches": {"block_indices": LISTS, "sliding_window": 7, **GATES},
    "traced_window": {"block_indices": LISTS, "sliding_window": jnp.int32(11)},
    "chosen": {"block_counts": 3, **WITHOUT_WINDOW},
    "lists_of_blocks": {"block_indices": LISTS[:, :13], "block_counts": 2},
    "packed": {"block_indices": LISTS, "sliding_window": 7, **GATES, **PACKED},
    "packed_chosen": {"block_counts": 3, **WITHOUT_WINDOW, **PACKED},
}


def sparse(name):
    """The arrays and arguments of a call of native sparse attention."""
    given = {"block_size": 5, **SPARSE_CALLS[name]}
    if "cu_seqlens" not in given:
        return arrays(), given
    first = lambda x: x[:1] if getattr(x, "ndim", 0) > 2 else x
    return arrays(batch=1), {name: first(x) for name, x in given.items()}


@pytest.mark.parametrize("name", quick(SPARSE_CALLS, "packed"))
def test_native_sparse_attention_is_that_of_one_device(name):
    given, extra = sparse(name)
    split = lambda *x, **more: native_sparse_attention(*x, axis_name=AXIS, mesh=MESH, **more)
    got = value_and_gradients(split, given, extra)
    assert_close(got, value_and_gradients(native_sparse_attention, given, extra))


def test_the_blocks_that_are_chosen_count_the_whole_sequence():
    run = lambda **more: native_sparse_attention(
        *arrays(), block_counts=3, block_size=5, return_block_indices=True, **more
    )
    (got, blocks), (wanted, chosen) = run(axis_name=AXIS, mesh=MESH), run()
    assert_close(got, wanted)
    assert jnp.array_equal(blocks, chosen)
    assert (blocks[:, -1, :, 0] == 63 // 5).all()


@pytest.mark.parametrize("check_vma", quick([True, False], True))
@pytest.mark.parametrize("name", quick(["all_branches", "chosen", "packed"], "chosen"))
def test_a_shard_map_gives_each_device_its_tokens(name, check_vma):
    given, extra = sparse(name)
    share = P(None, AXIS)
    split_arrays = {n: x for n, x in extra.items() if n in (*FLOATS, "block_indices")}
    rest = {n: x for n, x in extra.items() if n not in split_arrays}
    got = jax.shard_map(
        lambda x, more: native_sparse_attention(*x, **more, **rest, axis_name=AXIS),
        mesh=MESH,
        in_specs=share,
        out_specs=share,
        check_vma=check_vma,
    )(given, split_arrays)
    assert_close(got, native_sparse_attention(*given, **extra))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_native_sparse_attention_over_the_mesh_of_the_context(kind):
    given = {"block_counts": 3, "block_size": 5}
    wanted = native_sparse_attention(*arrays(), **given)
    mesh = mesh_of(8, kind=kind)
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, NamedSharding(mesh, P(None, AXIS))) for x in arrays()]
        run = lambda *x: native_sparse_attention(*x, axis_name=AXIS, **given)
        assert_close(jax.jit(run)(*split), wanted)


@pytest.mark.parametrize("kv_heads", quick([2, 1], 1))
@pytest.mark.parametrize("name", ["chosen", pytest.param("all_branches", marks=pytest.mark.slow)])
def test_native_sparse_attention_splits_batch_and_heads_as_well(name, kv_heads):
    mesh = mesh_of(2, 2, 2, names=("batch", AXIS, "heads"))
    keys = P("batch", AXIS, "heads" if kv_heads > 1 else None)
    _, extra = sparse(name)
    if "block_indices" in extra:
        extra["block_indices"] = extra["block_indices"][:, :, :kv_heads]
    more = {"axis_name": AXIS, "mesh": mesh, "in_specs": (P("batch", AXIS, "heads"), keys, keys)}
    split = lambda *x, **given: native_sparse_attention(*x, **given, **more)
    got = value_and_gradients(split, arrays(kv_heads), extra)
    assert_close(got, value_and_gradients(native_sparse_attention, arrays(kv_heads), extra))


def test_native_sparse_attention_gathers_keys_and_values_and_nothing_else():
    """Also where it selects the blocks: XLA merges the two gathers of the keys."""
    split = lambda *x: native_sparse_attention(
        *x, block_counts=3, block_size=5, sliding_window=7, axis_name=AXIS, mesh=MESH
    )
    text = jax.jit(split).lower(*arrays()).compile().as_text()
    moved = r" (all-\w+?|collective-permute|reduce-scatter)(?:-start)?\("
    assert re.findall(moved, text) == ["all-gather"] * 2


def test_what_native_sparse_attention_cannot_split_is_refused_in_one_sentence():
    run = lambda **more: native_sparse_attention(*arrays(), block_size=5, axis_name=AXIS, **more)
    with pytest.raises(ValueError, match=r"^native_sparse_attention: 64 tokens do not divide over"):
        run(mesh=mesh_of(3))
    with (
        settings.override(interpret=True),
        pytest.raises(UnsupportedError, match=r"does not support query_start.*support it: xla"),
    ):
        run(mesh=MESH, platform="triton", block_indices=LISTS)
    with pytest.raises(ValueError, match="give one list for each token"):
        jax.shard_map(
            lambda *x: native_sparse_attention(
                *x[:3], block_indices=x[3], block_size=5, axis_name=AXIS
            ),
            mesh=MESH,
            in_specs=(*(P(None, AXIS),) * 3, P()),
            out_specs=P(None, AXIS),
        )(*arrays(), LISTS[:, :2])
