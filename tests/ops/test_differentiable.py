"""Derivatives of every order and mode, of one call and of programs around it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from ejkernel import settings
from ejkernel.errors import UnsupportedError
from ejkernel.modules import (
    FlashAttentionConfig,
    flash_attention,
    gla_attention,
    grouped_matmul,
    mean_pooling,
)

STEP = 1e-5


def draw(*shapes, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return tuple(jax.random.normal(key, x) for key, x in zip(keys, shapes, strict=True))


def attention(query, key, value):
    return flash_attention(query, key, value, causal=True, sliding_window=(5, 0))


def linear(query, key, value):
    gate = -jnp.abs(key[..., 0])
    return gla_attention(query, key, value, gate, return_state=True)


def experts(x, weights):
    return grouped_matmul(x, weights, jnp.array([0, 2, 1, 1, 0, 2, 2, 0]))


HEADS = (2, 12, 4, 8), (2, 12, 2, 8), (2, 12, 2, 8)
CALLS = {
    "attention": (attention, HEADS),
    "linear": (linear, HEADS),
    "experts": (experts, ((8, 4), (3, 4, 6))),
    "pooling": (mean_pooling, ((2, 6, 4),)),
}
each_call = pytest.mark.parametrize("name", CALLS)


@pytest.fixture(autouse=True)
def _in_float64():
    with jax.enable_x64(True):
        yield


def drawn(name):
    run, shapes = CALLS[name]
    return run, draw(*shapes), draw(*shapes, seed=1)


def total(run, *arguments):
    """A scalar with second derivatives of its own."""
    return sum((x**2).sum() for x in jax.tree.leaves(run(*arguments)))


def difference(run, arguments, along):
    """The derivative along a direction, by central differences."""
    ahead, behind = (
        run(*(x + step * d for x, d in zip(arguments, along, strict=True)))
        for step in (STEP, -STEP)
    )
    return jax.tree.map(lambda a, b: (a - b) / (2 * STEP), ahead, behind)


def assert_close(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def inner(a, b):
    return sum((x * y).sum() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@each_call
def test_the_tangent_is_the_slope_and_the_adjoint_of_the_gradient(name):
    run, arguments, along = drawn(name)
    outputs, tangents = jax.jvp(run, arguments, along)
    assert_close(tangents, difference(run, arguments, along))
    cotangents = jax.tree.map(jnp.cos, outputs)
    gradients = jax.vjp(run, *arguments)[1](cotangents)
    np.testing.assert_allclose(inner(tangents, cotangents), inner(gradients, along), rtol=1e-10)


@each_call
def test_linearize_is_the_tangent(name):
    run, arguments, along = drawn(name)
    outputs, linear = jax.linearize(run, *arguments)
    assert_close((outputs, linear(*along)), jax.jvp(run, arguments, along))


@each_call
def test_second_derivatives_are_slopes_of_first_ones(name):
    run, arguments, along = drawn(name)
    every = tuple(range(len(arguments)))
    gradient = jax.grad(functools.partial(total, run), every)
    slope = difference(gradient, arguments, along)
    forward_over_reverse = jax.jvp(gradient, arguments, along)[1]
    reverse_over_reverse = jax.grad(lambda *x: inner(gradient(*x), along), every)(*arguments)
    assert_close(forward_over_reverse, slope)
    assert_close(reverse_over_reverse, slope)


@each_call
def test_the_gradient_of_a_tangent_is_its_slope(name):
    """As in flow matching, where a loss has a jvp in it."""
    run, arguments, along = drawn(name)
    loss = lambda *x: total(lambda *y: jax.jvp(run, y, along)[1], *x)
    gradients = jax.jit(jax.grad(loss, tuple(range(len(arguments)))))(*arguments)
    other = draw(*(x.shape for x in arguments), seed=2)
    assert_close(inner(gradients, other), difference(loss, arguments, other))


# Calls whose arrays have no batch axis; under vmap those that are mapped get one.
IDS = jnp.array([[0, 2, 1, 1, 0, 2], [2, 2, 0, 1, 0, 1]])
ENDS = jnp.array([[0, 1, 6], [0, 3, 5]])
WEIGHTS = jnp.array([[[0.5, -1.0]], [[2.0, 0.0]], [[1.5, 3.0]]])
SHARED = {
    "experts": (lambda x, ids: grouped_matmul(x, WEIGHTS.astype(x.dtype), ids), (6, 1), IDS),
    "pooling": (lambda x, ends: mean_pooling(x, cu_seqlens=ends), (6, 2), ENDS),
}


@pytest.mark.parametrize("name", SHARED)
def test_calls_of_a_vmap_share_an_array(name):
    """Its gradient is the sum of theirs."""
    run, shape, mapped = SHARED[name]
    (x,) = draw(shape)
    together = lambda x: total(jax.vmap(run, in_axes=(None, 0)), x, mapped)
    in_turn = lambda x: sum(total(run, x, one) for one in mapped)
    assert_close(jax.grad(together)(x), jax.grad(in_turn)(x))
    assert_close(jax.hessian(together)(x), jax.hessian(in_turn)(x))


@pytest.mark.parametrize("name", SHARED)
def test_jacobians_of_a_call_without_a_batch_axis(name):
    run, shape, (given, _) = SHARED[name]
    call = lambda x: jnp.sin(run(x, given))
    (x,) = draw(shape)
    columns = [difference(call, (x,), (d.reshape(shape),))[..., None] for d in jnp.eye(x.size)]
    wanted = jnp.concatenate(columns, -1).reshape(*call(x).shape, *shape)
    assert_close((jax.jacfwd(call)(x), jax.jacrev(call)(x)), (wanted, wanted))
    second = jax.jacfwd(jax.jacfwd(call))(x)
    for outer, inner in ((jax.jacfwd, jax.jacrev), (jax.jacrev, jax.jacfwd), (jax.jacrev,) * 2):
        assert_close(outer(inner(call))(x), second)


def test_the_tangent_of_a_tangent():
    run, arguments, along = drawn("attention")
    tangent = lambda *x: jax.jvp(run, x, along)[1]
    assert_close(jax.jvp(tangent, arguments, along)[1], difference(tangent, arguments, along))


def test_jacobians_and_a_hessian():
    query, key = draw((1, 3, 1, 2), (1, 4, 1, 2))
    run = lambda x: flash_attention(x, key, key).sum((0, 2))
    assert_close(jax.jacfwd(run)(query), jax.jacrev(run)(query))
    loss = lambda x: (run(x) ** 2).sum()
    hessian = jax.hessian(loss)(query).reshape(6, 6)
    assert_close(hessian, hessian.T)
    assert_close(hessian, jax.jacrev(jax.jacrev(loss))(query).reshape(6, 6))


def test_a_gradient_of_some_arguments_is_that_of_all():
    run, arguments, _ = drawn("attention")
    loss = functools.partial(total, run)
    every = jax.grad(loss, (0, 1, 2))(*arguments)
    assert_close(jax.grad(loss, 1)(*arguments), every[1])
    assert_close(jax.grad(loss, (0, 2))(*arguments), (every[0], every[2]))


def test_the_tangent_of_a_row_that_sees_nothing_is_zero():
    query, key = draw((1, 4, 1, 8), (1, 4, 1, 8))
    mask = jnp.array([[True, True, False, False]])[:, None, None, :] & jnp.array(
        [True, False, True, True]
    ).reshape(1, 1, 4, 1)
    run = lambda q, k: flash_attention(q, k, k, attention_mask=mask, return_lse=True)
    out, lse = jax.jvp(run, (query, key), (key, query))[1]
    assert np.isfinite(out).all()
    assert not out[0, 1].any()
    assert np.isfinite(np.delete(np.asarray(lse), 1, axis=2)).all()


def memory_of_the_tangent(length):
    shape = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
    run = lambda q, k, v, *d: jax.jvp(functools.partial(flash_attention, causal=True), (q, k, v), d)
    program = jax.jit(run).lower(*[shape] * 6).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_the_memory_of_a_tangent_is_linear_in_the_length():
    assert memory_of_the_tangent(8192) <= 2.2 * memory_of_the_tangent(4096)


def test_a_platform_without_forward_mode_says_which_have_it():
    x = jnp.ones((1, 8, 1, 8), jnp.float32)
    cfg = FlashAttentionConfig(platform="pallas")
    run = lambda x: flash_attention(x, x, x, cfg=cfg)
    words = "platform='pallas' has no forward-mode derivative .* platform='xla' have"
    refused = pytest.raises(UnsupportedError, match=words)
    with jax.enable_x64(False), settings.override(interpret=True), refused:
        jax.jvp(run, (x,), (x,))


LAYERS = 3


def layer(x, weight):
    heads = (x @ weight).reshape(*x.shape[:-1], 2, 8)
    return x + attention(heads, heads, heads).reshape(x.shape)


def equations(jaxpr, name):
    """How often a primitive runs in a program, loops counted once."""
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name == name
        for inner_jaxpr in core.jaxprs_in_params(equation.params):
            found += equations(inner_jaxpr, name)
    return found


def calls(policy):
    """How often a program of rematerialised layers calls attention, forward and backward."""
    x, weights = draw((1, 12, 16), (LAYERS, 16, 16))
    block = jax.checkpoint(layer, policy=policy)
    loss = lambda w: (jax.lax.scan(lambda x, w: (block(x, w), None), x, w)[0] ** 2).sum()
    program = jax.make_jaxpr(jax.grad(loss))(weights)
    assert_close(jax.grad(loss)(weights), jax.grad(plain_loss(x))(weights))
    return equations(program.jaxpr, "ejkernel_call")


def plain_loss(x):
    return lambda w: (jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2).sum()


def test_named_residuals_save_the_forward_of_a_rematerialised_layer():
    """Forward and backward, and nothing else; without the names the forward runs twice."""
    names = ("flash_attention_out", "flash_attention_lse")
    named = jax.checkpoint_policies.save_only_these_names(*names)
    nothing = jax.checkpoint_policies.nothing_saveable
    assert calls(named) == 2
    assert calls(nothing) == 3


@pytest.mark.parametrize(
    ("run", "names"),
    [
        (lambda x: gla_attention(x, x, x), {"gla_attention_out", "gla_attention_state"}),
        (lambda x: mean_pooling(x[:, :, 0]), {"mean_pooling_out"}),
    ],
)
def test_residuals_are_named_after_the_op(run, names):
    (x,) = draw((2, 12, 2, 8))
    text = str(jax.make_jaxpr(lambda x: jax.vjp(run, x))(x))
    assert all(f"name={name}" in text for name in names)


@pytest.mark.parametrize("name", ["attention", "linear", "experts"])
def test_a_precision_around_a_call_holds_for_its_derivatives(name):
    """As it does for JAX's own matmuls, whatever holds where the program is differentiated."""
    run, arguments, tangents = drawn(name)

    def loss(*arguments):
        with jax.default_matmul_precision("highest"):
            return sum(x.sum() for x in jax.tree.leaves(run(*arguments)))

    with jax.default_matmul_precision("bfloat16"):
        gradient = jax.jit(jax.grad(loss)).lower(*arguments).as_text()
        tangent = jax.jit(functools.partial(jax.jvp, loss)).lower(arguments, tangents).as_text()
    for text in (gradient, tangent):
        assert "HIGHEST" in text
        assert "precision = [DEFAULT" not in text
