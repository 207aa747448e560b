"""What the linear attentions promise beyond the numbers that the conformance suite checks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.modules import (
    GLAttention,
    GLAttentionConfig,
    LightningAttention,
    RecurrentAttention,
    gla_attention,
    lightning_attention,
    recurrent_attention,
)

QUERY = jax.random.normal(jax.random.key(0), (2, 24, 4, 8))
KEY = jax.random.normal(jax.random.key(1), (2, 24, 2, 8))
VALUE = jax.random.normal(jax.random.key(2), (2, 24, 2, 12))
GATE = -jnp.abs(jax.random.normal(jax.random.key(3), (2, 24, 2, 8)))
STATE = jax.random.normal(jax.random.key(4), (2, 2, 8, 12))
ONES = jnp.ones((1, 4, 1, 1))
SMALL = GLAttentionConfig(block_q=4, block_k=1)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


# Closed forms


def test_without_decay_the_output_counts_the_tokens():
    assert gla_attention(ONES, ONES, ONES).ravel().tolist() == [1, 2, 3, 4]


def test_a_gate_is_the_logarithm_of_a_decay():
    gate = jnp.full(ONES.shape, jnp.log(0.5))
    close(gla_attention(ONES, ONES, ONES, gate=gate).ravel(), [1, 1.5, 1.75, 1.875])


def test_decay_is_a_factor_and_g_gamma_its_logarithm():
    close(lightning_attention(ONES, ONES, ONES, 0.5).ravel(), [1, 1.5, 1.75, 1.875])
    gamma = lightning_attention(ONES, ONES, ONES, g_gamma=float(np.log(0.5)))
    close(gamma.ravel(), [1, 1.5, 1.75, 1.875])


def test_gate_and_g_gamma_multiply():
    gate = jnp.full(ONES.shape, jnp.log(0.5))
    out = gla_attention(ONES, ONES, ONES, gate, float(np.log(0.5)))
    close(out.ravel(), [1, 1.25, 1.3125, 1.328125])


def test_the_first_token_fades_the_state_it_finds():
    state = jnp.full((1, 1, 1, 1), 8.0)
    gate = jnp.full(ONES.shape, jnp.log(0.5))
    out, after = gla_attention(ONES, ONES, ONES, gate, initial_state=state, return_state=True)
    close(out.ravel(), [5, 3.5, 2.75, 2.375])
    close(after.ravel(), [2.375])


def test_gate_fades_rows_and_gv_columns_of_the_state():
    query, key = jnp.array([1.0, 1.0]), jnp.array([0.0, 0.0])
    state = jnp.array([[1.0, 10.0], [100.0, 1000.0]])
    expand = lambda x: x.reshape(1, 1, 1, 2)
    out, after = recurrent_attention(
        *map(expand, (query, key, key)),
        gate=expand(jnp.log(jnp.array([1.0, 0.5]))),
        gv=expand(jnp.log(jnp.array([1.0, 0.1]))),
        state=state.reshape(1, 1, 2, 2),
        softmax_scale=1.0,
    )
    close(after[0, 0], [[1, 1], [50, 50]])
    close(out.ravel(), [51, 51])


def test_layers_forget_at_their_own_pace():
    """Key head i of k in layer l of n fades by exp(-8 / k * (1 - l / n) * i)."""
    x = jnp.ones((1, 2, 4, 1))
    out = lightning_attention(x, x, x, layer_idx=1, num_layers=4)
    close(out[0, 1, :, 0], 1 + np.exp(-8 / 4 * 0.75 * np.arange(4)))
    close(lightning_attention(x, x, x)[0, 1, :, 0], 1 + np.exp(-2.0 * np.arange(4)))


def test_reverse_runs_from_the_last_token():
    decay = functools.partial(lightning_attention, decay=0.5)
    close(decay(ONES, ONES, ONES, reverse=True).ravel(), [1.875, 1.75, 1.5, 1])


def test_packed_sequences_have_states_of_their_own_and_what_follows_them_is_zero():
    x = jnp.ones((1, 7, 1, 1))
    out, state = gla_attention(x, x, x, cu_seqlens=jnp.array([0, 3, 3, 5]), return_state=True)
    assert out.ravel().tolist() == [1, 2, 3, 1, 2, 0, 0]
    assert state.ravel().tolist() == [3, 0, 2]


# Properties


@pytest.mark.parametrize("cut", [1, 9, 23])
def test_splitting_a_sequence_and_carrying_the_state_equals_one_pass(cut):
    arrays = (QUERY, KEY, VALUE, GATE)
    whole, end = gla_attention(*arrays, initial_state=STATE, return_state=True)
    first, state = recurrent_attention(*(x[:, :cut] for x in arrays), state=STATE)
    second, state = recurrent_attention(*(x[:, cut:] for x in arrays), state=state)
    close(jnp.concatenate([first, second], 1), whole)
    close(state, end)


def test_a_stream_of_single_tokens_equals_one_pass():
    whole = gla_attention(QUERY, KEY, VALUE, GATE)
    state, parts = None, []
    for t in range(QUERY.shape[1]):
        arrays = (x[:, t : t + 1] for x in (QUERY, KEY, VALUE, GATE))
        part, state = recurrent_attention(*arrays, state=state)
        parts.append(part)
    close(jnp.concatenate(parts, 1), whole)


def test_packed_sequences_equal_separate_ones_with_traced_ends():
    packed = jax.jit(lambda q, k, v, g, ends: gla_attention(q, k, v, g, cu_seqlens=ends))
    arrays = tuple(x[:1] for x in (QUERY, KEY, VALUE, GATE))
    out = packed(*arrays, jnp.array([0, 5, 18, 24]))
    for start, end in ((0, 5), (5, 18), (18, 24)):
        close(out[:, start:end], gla_attention(*(x[:, start:end] for x in arrays)))


def test_what_lies_past_the_last_sequence_never_leaks():
    arrays = tuple(x[:1].at[:, 20:].set(jnp.nan) for x in (QUERY, KEY, VALUE, GATE))
    ends = jnp.array([0, 7, 20])

    def total(*arrays):
        out, state = gla_attention(*arrays, cu_seqlens=ends, return_state=True, cfg=SMALL)
        return out.sum() + state.sum()

    total, gradients = jax.value_and_grad(total, (0, 1, 2, 3))(*arrays)
    assert jnp.isfinite(total)
    for gradient in gradients:
        assert jnp.isfinite(gradient).all()
        assert not gradient[:, 20:].any()


@pytest.mark.parametrize("strength", [-50.0, -1e4, -np.inf])
def test_a_gate_that_forgets_everything_keeps_values_and_gradients_finite(strength):
    """With everything before forgotten, the output is each token's own."""
    gate = jnp.full_like(GATE, strength)
    own = jnp.einsum("bthd,bthd->bth", QUERY, jnp.repeat(KEY, 2, 2)) * 8**-0.5
    out = gla_attention(QUERY, KEY, VALUE, gate, cfg=SMALL)
    close(out, own[..., None] * jnp.repeat(VALUE, 2, 2))
    gradients = jax.grad(lambda *x: gla_attention(*x, cfg=SMALL).sum(), (0, 1, 2, 3))(
        QUERY, KEY, VALUE, gate
    )
    assert all(jnp.isfinite(x).all() for x in gradients)
    assert jnp.abs(gradients[3]).max() < 1e-18


def test_a_strong_gate_between_mild_ones_does_not_blur_what_follows():
    """The fade from token 13 to 14 is exp(-0.1) whatever was forgotten at token 12."""
    gate = jnp.full_like(GATE, -0.1).at[:, 12].set(-1e4)
    tail = gla_attention(*(x[:, 12:] for x in (QUERY, KEY, VALUE, gate)))
    close(gla_attention(QUERY, KEY, VALUE, gate)[:, 12:], tail)


def test_positive_gates_grow_and_do_not_crash():
    gate = jnp.abs(GATE)
    expected = recurrent_attention(QUERY, KEY, VALUE, gate)[0]
    assert jnp.isfinite(expected).all()
    out = gla_attention(QUERY, KEY, VALUE, gate, cfg=SMALL)
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-4 * jnp.abs(expected).max())


# What was wrong elsewhere


def test_gradients_exist_under_jit_for_every_array():
    def total(arrays):
        out, after = recurrent_attention(*arrays)
        return (out**2).sum() + (after**2).sum()

    arrays = (QUERY, KEY, VALUE, GATE, jnp.array([-0.1, -0.7]), -0.1 * jnp.abs(VALUE), STATE)
    gradients = jax.jit(jax.grad(total))(arrays)
    for x, gradient in zip(arrays, gradients, strict=True):
        assert gradient.shape == x.shape
        assert jnp.isfinite(gradient).all()
        assert jnp.abs(gradient).max() > 1e-3


def test_the_gradient_of_the_key_is_that_of_finite_differences():
    with jax.enable_x64(True):
        query, key, value, along = (
            jnp.asarray(np.asarray(x, np.float64)) for x in (QUERY, KEY, VALUE, KEY[::-1])
        )
        total = lambda key: (lightning_attention(query, key, value, 0.9) ** 2).sum()
        step = 1e-5
        difference = (total(key + step * along) - total(key - step * along)) / (2 * step)
        slope = (jax.grad(total)(key) * along).sum()
        np.testing.assert_allclose(slope, difference, rtol=1e-7)


def test_memory_does_not_hold_a_state_for_every_token():
    shape = jax.ShapeDtypeStruct((1, 2048, 2, 32), jnp.float32)
    gradient = jax.grad(lambda *x: gla_attention(*x).sum(), (0, 1, 2, 3))
    compiled = jax.jit(gradient).lower(*[shape] * 4).compile()
    states = 2048 * 2 * 32 * 32 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < states / 2


# Calls


def test_modules_are_the_functions():
    close(GLAttention()(QUERY, KEY, VALUE, GATE), gla_attention(QUERY, KEY, VALUE, GATE))
    decay = jnp.array([0.9, 0.5])
    close(
        LightningAttention()(QUERY, KEY, VALUE, decay=decay),
        lightning_attention(QUERY, KEY, VALUE, decay),
    )
    out, state = RecurrentAttention()(QUERY, KEY, VALUE, state=STATE)
    expected = recurrent_attention(QUERY, KEY, VALUE, state=STATE)
    close(out, expected[0])
    close(state, expected[1])


def test_the_state_over_a_mesh_has_each_key_head_once():
    """Four devices share two key heads: each head's state comes back once, with its gradient."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    specs = {"mesh": mesh, "in_specs": (P(None, None, "tp"),) * 3}

    def total(key, **options):
        out, state = recurrent_attention(QUERY, key, VALUE, state=STATE, **options)
        return (out**2).sum() + (state**3).sum()

    close(*(recurrent_attention(QUERY, KEY, VALUE, **x)[1] for x in (specs, {})))
    mine, whole = (jax.grad(functools.partial(total, **x))(KEY) for x in (specs, {}))
    np.testing.assert_allclose(mine, whole, rtol=1e-4, atol=1e-4 * jnp.abs(whole).max())


def test_no_tokens_leave_the_state_as_it_was():
    out, state = recurrent_attention(QUERY[:, :0], KEY[:, :0], VALUE[:, :0], state=STATE)
    assert out.shape == (2, 0, 4, 12)
    close(state, STATE)


# Bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gla_attention(QUERY, KEY, VALUE, GATE[0, 0]), "gate must be"),
        (lambda: gla_attention(QUERY, KEY, VALUE, GATE[..., :5]), "gate must be"),
        (lambda: gla_attention(QUERY, KEY, VALUE, GATE.astype(int)), "must be floating point"),
        (lambda: gla_attention(QUERY, KEY, VALUE, initial_state=STATE[..., :8]), "initial_state"),
        (lambda: gla_attention(QUERY, KEY, VALUE, g_gamma=jnp.zeros(3)), "g_gamma must be"),
        (lambda: gla_attention(QUERY, KEY[:, :9], VALUE[:, :9]), "one length"),
        (
            lambda: gla_attention(QUERY, KEY, VALUE, cu_seqlens=jnp.array([0, 24])),
            "one packed row",
        ),
        (
            lambda: gla_attention(QUERY[:1], KEY[:1], VALUE[:1], cu_seqlens=jnp.array([0, 25])),
            "cu_seqlens",
        ),
        (lambda: recurrent_attention(QUERY, KEY, VALUE, state=STATE[0]), "state must be"),
        (lambda: recurrent_attention(QUERY, KEY, VALUE, gv=GATE), "gv must be"),
        (lambda: lightning_attention(QUERY, KEY, VALUE, 1.5), r"\(0, 1\]"),
        (lambda: lightning_attention(QUERY, KEY, VALUE, 0.0), "g_gamma"),
        (lambda: lightning_attention(QUERY, KEY, VALUE, 0.5, g_gamma=-1.0), "give one of"),
        (lambda: lightning_attention(QUERY, KEY, VALUE, 0.5, layer_idx=1), "give one of"),
        (lambda: lightning_attention(QUERY, KEY, VALUE, layer_idx=1), "needs num_layers"),
        (lambda: lightning_attention(QUERY, KEY, VALUE, num_layers=4), "needs layer_idx"),
        (lambda: lightning_attention(QUERY, KEY, VALUE, layer_idx=4, num_layers=4), "within"),
        (lambda: GLAttentionConfig(block_q=48), "power of two"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call, message, as_a_user_calls):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_values_of_no_columns_leave_states_of_none():
    out, state = gla_attention(QUERY, KEY, VALUE[..., :0], return_state=True)
    assert (out.shape, state.shape) == ((2, 24, 4, 0), (2, 2, 8, 0))
    _, state = recurrent_attention(
        QUERY[:1], KEY[:1], VALUE[:1, ..., :0], cu_seqlens=jnp.array([0, 5, 9, 24])
    )
    assert state.shape == (3, 2, 8, 0)
