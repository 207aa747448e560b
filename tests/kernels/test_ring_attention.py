"""A ring of devices computes what one device computes on the whole sequences."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ring_cases import CALLS, IDS, LENGTH, RING, SMALL, arrays, close, mesh_of, value_and_gradients
from tiers import quick

from ejkernel.modules import flash_attention, ring_attention
from ejkernel.types import MaskInfo


@pytest.mark.parametrize("name", quick(CALLS, "bias", "segments"))
def test_value_and_gradients_are_those_of_flash_attention(name):
    """The causal mask, in particular, holds under differentiation."""
    q, k, v = arrays()
    ring = lambda *a, **kw: ring_attention(*a, axis_name="sp", mesh=RING, cfg=SMALL, **kw)
    got = jax.jit(lambda q, k, v: value_and_gradients(ring, q, k, v, CALLS[name]))(q, k, v)
    expected = value_and_gradients(flash_attention, q, k, v, CALLS[name])
    jax.tree.map(close, got, expected)


def test_chunks_are_a_mask_and_not_a_tile():
    q, k, v = arrays()
    same_chunk = np.arange(LENGTH)[:, None] // 12 == np.arange(LENGTH)[None] // 12
    mask = {"causal": True, "attention_mask": same_chunk[None]}
    expected = value_and_gradients(flash_attention, q, k, v, mask)
    close(ring_attention(q, k, v, chunk_size=12), expected[0])
    ring = lambda *a: ring_attention(*a, chunk_size=12, axis_name="sp", mesh=RING)
    got = jax.jit(lambda *a: value_and_gradients(ring, *a, {}))(q, k, v)
    jax.tree.map(close, got, expected)


# With equal logits and the position as value, the output is the mean of the visible positions.
AT = np.arange(LENGTH)
BY_HAND = {
    "plain": ({}, np.full(LENGTH, 31.5)),
    "causal": ({"causal": True}, AT / 2),
    "causal_offset": (
        {"causal": True, "causal_offset": -10},
        np.where(AT < 10, 0, (AT - 10) / 2),  # the first ten see nothing
    ),
    "window": ({"sliding_window": (9, 0)}, (np.maximum(AT - 9, 0) + AT) / 2),
    "chunks": ({"chunk_size": 20}, (AT // 20 * 20 + AT) / 2),
    # A sink of logit log 2 weighs as much as two keys of value 0.
    "sinks": (
        {"causal": True, "softmax_aux": np.log(np.float32([2.0]))},
        AT / 2 * (AT + 1) / (AT + 3),
    ),
    # Odd keys weigh three times as much: 32 even ones of mean 31, 32 odd ones of mean 32.
    "bias": (
        {"bias": np.float32(np.log(np.where(AT % 2, 3.0, 1.0)))[None]},
        np.full(LENGTH, (31 + 3 * 32) / 4),
    ),
    "soft_cap": (
        {"bias": np.float32(np.where(AT % 2, 1e9, 0.0))[None], "logits_soft_cap": np.log(3.0)},
        np.full(LENGTH, (31 + 3 * 32) / 4),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_values_that_can_be_worked_out(name):
    arguments, expected = BY_HAND[name]
    zeros = jnp.zeros((1, LENGTH, 1, 2))
    value = jnp.arange(float(LENGTH)).reshape(1, LENGTH, 1, 1)
    out = ring_attention(zeros, zeros, value, axis_name="sp", mesh=RING, **arguments)
    np.testing.assert_allclose(out[0, :, 0, 0], expected, rtol=1e-5, atol=1e-5)


def test_keys_that_nobody_sees_are_not_read():
    """Two devices hold nothing but NaN, and so does a part of a third."""
    q, k, v = arrays()
    seen = jnp.arange(LENGTH) < 44
    info = MaskInfo.from_segments(jnp.zeros((2, LENGTH), jnp.int32)).apply_kv_lengths(
        jnp.array([44, 44])
    )
    ring = lambda *a: ring_attention(*a, axis_name="sp", mesh=RING, cfg=SMALL, mask_info=info)
    run = jax.jit(lambda *a: value_and_gradients(ring, *a, {}))
    poison = lambda x: jnp.where(seen[:, None, None], x, jnp.nan)
    out, (d_query, d_key, d_value, _) = run(q, poison(k), poison(v))
    jax.tree.map(close, (out, d_query), (lambda o, g: (o, g[0]))(*run(q, k, v)))
    for gradient in (d_key, d_value):
        assert (gradient[:, ~seen] == 0).all()
        assert np.isfinite(gradient).all()


def test_parts_are_merged_in_float32():
    """Eight merges in bfloat16 would round eight times; the result is rounded once."""
    narrow = [x.astype(jnp.bfloat16) for x in arrays()]
    got = ring_attention(*narrow, axis_name="sp", mesh=RING, causal=True)
    assert got.dtype == jnp.bfloat16
    exact = flash_attention(*(x.astype(jnp.float32) for x in narrow), causal=True)
    rounded = np.asarray(exact.astype(jnp.bfloat16), np.float32)
    # What lies between two numbers of bfloat16 may go either way.
    np.testing.assert_allclose(np.asarray(got, np.float32), rounded, rtol=2**-7, atol=1e-6)
    assert (np.asarray(got, np.float32) == rounded).mean() > 0.99


def test_batch_and_heads_may_be_split_as_well():
    mesh = mesh_of(2, 2, 2, names=("dp", "sp", "tp"))
    spec = P("dp", "sp", "tp", None)
    q, k, v = arrays(kv_heads=1)
    got = ring_attention(
        q, k, v, axis_name="sp", causal=True, softmax_aux=jnp.ones((4, 1)),
        mesh=mesh, in_specs=(spec,) * 3, out_specs=spec,
        mask_info=MaskInfo.from_segments(IDS),
    )  # fmt: skip
    expected = flash_attention(
        q, k, v, causal=True, softmax_aux=jnp.ones((4, 1)), mask_info=MaskInfo.from_segments(IDS)
    )
    close(got, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_mesh_around_the_call_is_found():
    q, k, v = arrays()
    expected = flash_attention(q, k, v, causal=True)
    with RING:
        close(ring_attention(q, k, v, axis_name="sp", causal=True), expected)
        close(jax.jit(lambda q: ring_attention(q, k, v, axis_name="sp", causal=True))(q), expected)


def test_set_mesh_is_found():
    q, k, v = arrays()
    with jax.set_mesh(RING):
        got = jax.jit(lambda q, k, v: ring_attention(q, k, v, axis_name="sp", causal=True))(q, k, v)
    close(got, flash_attention(q, k, v, causal=True))


def test_without_a_mesh_one_device_does_it_all():
    q, k, v = arrays()
    close(
        ring_attention(q, k, v, axis_name="sp", causal=True), flash_attention(q, k, v, causal=True)
    )
    close(ring_attention(q, k, v), flash_attention(q, k, v))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_inside_shard_map(whole, check_vma):
    """With a mask of the whole sequences, or with this device's segment ids."""
    q, k, v = arrays()
    sinks = jnp.ones((4, 1))

    def local(q, k, v, ids, sinks):
        info = MaskInfo.from_segments(IDS if whole else ids)
        return ring_attention(
            q, k, v, axis_name="sp", causal=True, mask_info=info, softmax_aux=sinks
        )

    spec = P(None, "sp")
    ring = jax.shard_map(
        local, mesh=RING, in_specs=(spec,) * 4 + (P(),), out_specs=spec, check_vma=check_vma
    )
    flash = lambda q, k, v, ids, sinks: flash_attention(
        q, k, v, causal=True, mask_info=MaskInfo.from_segments(ids), softmax_aux=sinks
    )
    loss = lambda f: lambda *a: (f(*a[:3], IDS, a[3]) ** 2).sum()
    got = jax.jit(jax.value_and_grad(loss(ring), argnums=(0, 1, 2, 3)))(q, k, v, sinks)
    jax.tree.map(close, got, jax.value_and_grad(loss(flash), argnums=(0, 1, 2, 3))(q, k, v, sinks))


def test_the_program_passes_keys_on_and_gathers_nothing():
    q, k, v = arrays()
    run = lambda q, k, v: ring_attention(q, k, v, axis_name="sp", causal=True, mesh=RING)
    grad = jax.jit(jax.grad(lambda *a: run(*a).sum(), argnums=(0, 1, 2)))
    text = grad.lower(q, k, v).compile().as_text()
    assert "collective-permute" in text
    assert not re.search("all-gather|all-to-all", text)


def test_the_backward_pass_is_a_ring_of_its_own():
    """Keys and values travel forward; backward they do so again, and their gradients behind them.

    Gradients do once more after the last hop, home. Differentiating the hops would turn the two
    permutes round and keep every hop's keys.
    """
    q, k, v = arrays()
    run = lambda q, k, v: ring_attention(q, k, v, axis_name="sp", causal=True, mesh=RING)
    grad = jax.grad(lambda *a: run(*a).sum(), argnums=(0, 1, 2))
    forward, both = (jax.jit(f).lower(q, k, v).as_text() for f in (run, grad))
    permutes = re.compile(r"stablehlo\.collective_permute.*?-> tensor<([\dx]+)xf32>", re.DOTALL)
    keys, values = "2x8x2x8", "2x8x2x12"  # of one device
    # Of the first hop and of the loop; backward with gradients in the loop, in the last hop, home.
    assert sorted(permutes.findall(forward)) == [values] * 2 + [keys] * 2
    assert sorted(permutes.findall(both)) == [values] * 7 + [keys] * 7
    assert not re.search(rf"tensor<8x({keys}|{values})xf32>", both)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gradients_inside_a_mesh_around_the_call():
    q, k, v = arrays()
    extra = {"causal": True, "softmax_aux": jnp.ones((4, 1))}
    with RING:
        ring = lambda *a, **kw: ring_attention(*a, axis_name="sp", **kw)
        got = value_and_gradients(ring, q, k, v, extra)
    jax.tree.map(close, got, value_and_gradients(flash_attention, q, k, v, extra))


@pytest.mark.usefixtures("as_a_user_calls")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axis_name": "pp", "mesh": RING}, "'pp' is not an axis of the mesh, which has sp"),
        ({"mesh": RING}, "mesh= and in_specs= need axis_name="),
        ({"axis_name": 3}, "axis_name must be a string"),
        ({"axis_name": "sp", "in_specs": (P(),) * 3}, "in_specs= needs mesh="),
        ({"axis_name": "sp", "mesh": RING, "in_specs": (P(),) * 3}, "must be split over 'sp'"),
        ({"chunk_size": 0}, "chunk_size must be a positive int, got 0"),
        ({"sliding_window": -2}, "sliding_window must not be negative"),
        ({"platform": "triton"}, "platform='triton' does not support"),
    ],
)
def test_a_mistake_is_named(arguments, message):
    q, k, v = arrays()
    with pytest.raises((ValueError, NotImplementedError), match=f"ring_attention: .*{message}"):
        ring_attention(q, k, v, **arguments)


def test_a_ring_in_float64():
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(x[:, :32], jnp.float64) for x in arrays())
        got = ring_attention(q, k, v, causal=True, axis_name="sp", mesh=RING)
        wanted = flash_attention(q, k, v, causal=True)
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


def test_the_axis_of_a_vmap_is_refused():
    q, k, v = (x.reshape(8, 1, -1, *x.shape[2:]) for x in (x[:1] for x in arrays()))
    run = jax.vmap(lambda *a: ring_attention(*a, axis_name="sp"), axis_name="sp")
    with pytest.raises(ValueError, match=r"'sp' is the axis of a jax\.vmap"):
        run(q, k, v)


def test_a_length_that_does_not_divide_is_refused():
    q, k, v = (x[:, :60] for x in arrays())
    with pytest.raises(ValueError, match="60 queries and 60 keys do not divide over the 8 devices"):
        ring_attention(q, k, v, axis_name="sp", mesh=RING)
