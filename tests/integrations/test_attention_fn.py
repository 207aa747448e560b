"""`attention_fn` by itself: what Flax's layers ask of it."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from integrations.peers import same

from ejkernel.integrations.flax import attention_fn
from ejkernel.kernels.flash_attention import dropout

QUERY, KEY, VALUE = jax.random.normal(jax.random.key(0), (3, 2, 24, 4, 8))
MASK = jnp.tril(jnp.ones((2, 1, 24, 24)))


def test_batch_axes_and_bias():
    shapes = ((2, 3, 10, 4, 8), (2, 3, 12, 4, 8), (2, 3, 12, 4, 8))
    keys = jax.random.split(jax.random.key(3), 4)
    arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)]
    bias = jax.random.normal(keys[3], (2, 1, 4, 10, 12))
    weights = jnp.einsum("abqhd,abkhd->abhqk", arrays[0], arrays[1]) * 8**-0.5 + bias
    theirs = jnp.einsum("abhqk,abkhd->abqhd", jax.nn.softmax(weights), arrays[2])
    same(attention_fn(*arrays, bias=bias), theirs)


@pytest.mark.parametrize("mask", [MASK, MASK.astype(bool), MASK.astype(int), MASK[0]])
def test_masks_of_any_dtype(mask):
    expected = jax.nn.dot_product_attention(QUERY, KEY, VALUE, is_causal=True)
    same(attention_fn(QUERY, KEY, VALUE, mask=mask), expected)


def test_no_batch_axis():
    expected = jax.nn.dot_product_attention(QUERY[0], KEY[0], VALUE[0], is_causal=True)
    same(attention_fn(QUERY[0], KEY[0], VALUE[0], mask=MASK[0]), expected)
    same(attention_fn(QUERY[0], KEY[0], VALUE[0], is_causal=True), expected)


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_has_the_values_and_gradients_of_its_mask(broadcast):
    """As in Flax, whose bits are other ones: weights that are kept grow by 1 / (1 - rate)."""
    rng = jax.random.key(5)
    rows = 0 if broadcast else jnp.arange(2)[:, None, None, None]
    heads = 0 if broadcast else jnp.arange(4)[:, None, None]
    seed = jax.random.bits(rng, (), "uint32")
    kept = dropout.keep(0.3, seed, rows, heads, jnp.arange(24)[:, None], jnp.arange(24))

    def expected(query, key, value):
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key) * 8**-0.5)
        return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(kept, weights / 0.7, 0), value)

    options = {"dropout_rng": rng, "dropout_rate": 0.3, "broadcast_dropout": broadcast}
    ours = functools.partial(attention_fn, **options)
    square = lambda function, *arrays: (function(*arrays) ** 2).sum()
    of = lambda function: jax.value_and_grad(functools.partial(square, function), (0, 1, 2))
    same(*(of(function)(QUERY, KEY, VALUE) for function in (ours, expected)))


def test_what_a_fused_kernel_cannot_do_is_refused():
    with pytest.raises(NotImplementedError, match=r"module .*attention weights are never"):
        attention_fn(QUERY, KEY, VALUE, module=object())
    for name in ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"):
        with pytest.raises(NotImplementedError, match=name):
            attention_fn(QUERY, KEY, VALUE, **{name: jnp.einsum})


def test_bad_arguments_get_a_sentence():
    x = QUERY
    with pytest.raises(ValueError, match=r"^attention_fn: dropout_rate=0.1 needs dropout_rng="):
        attention_fn(x, x, x, dropout_rate=0.1)
    with pytest.raises(ValueError, match=r"^attention_fn: mask must be broadcastable to"):
        attention_fn(x, x, x, mask=jnp.ones((3, 1, 24, 24)))
    with pytest.raises(ValueError, match=r"^attention_fn: .* must have the same batch axes, got"):
        attention_fn(x[None], x[:, None], x[:, None])
    with pytest.raises(ValueError, match=r"^attention_fn: .* number of axes, at least 3, got"):
        attention_fn(x, x[0], x[0])
    with pytest.raises(NotImplementedError, match=r"^attention_fn: precision must be the same"):
        attention_fn(x, x, x, precision=("high", "highest"))
    with pytest.raises(TypeError, match=r"^attention_fn: unknown argument 'window'; it has query"):
        attention_fn(x, x, x, window=3)


@pytest.mark.parametrize(
    ("precision", "word"),
    [
        (None, "HIGHEST"),
        ("default", "DEFAULT"),
        (jax.lax.Precision.HIGH, "HIGH"),
        (("high", "high"), "HIGH"),
        (jax.lax.DotAlgorithmPreset.BF16_BF16_F32, "bf16"),
    ],
)
def test_precision_is_that_of_every_product_also_of_the_gradient(precision, word):
    x = QUERY
    of = lambda x: attention_fn(x, x, x, precision=precision).sum()
    text = jax.jit(jax.grad(of)).lower(x).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) > 4
    assert [line for line in products if not re.search(rf"\b{word}\b", line)] == []


@pytest.mark.parametrize("precision", ["highest", "default"])
def test_precision_changes_no_meaning(precision):
    of = lambda function, *arrays: (function(*arrays) ** 2).sum()
    ours = functools.partial(attention_fn, mask=MASK, precision=precision)
    theirs = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    gradients = (jax.grad(functools.partial(of, f), (0, 1, 2)) for f in (ours, theirs))
    same(*(gradient(QUERY, KEY, VALUE) for gradient in gradients))


def test_integers_become_floats():
    x = jnp.arange(2 * 6 * 4 * 8).reshape(2, 6, 4, 8) % 5
    same(attention_fn(x, x, x), jax.nn.dot_product_attention(*(x.astype(jnp.float32),) * 3))
