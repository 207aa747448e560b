"""`attention_fn` in the layers of Flax NNX gives what their default gives."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from integrations.peers import need, same

from ejkernel.integrations.flax import attention_fn

nnx = need("flax.nnx")

X = jax.random.normal(jax.random.key(0), (2, 24, 32))
Y = jax.random.normal(jax.random.key(1), (2, 24, 32))
MASK = nnx.make_causal_mask(jnp.ones((2, 24)))


def make(**options):
    return nnx.MultiHeadAttention(
        num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0), **options
    )


@pytest.mark.parametrize("mask", [None, MASK, MASK.astype(bool), MASK[:1]])
def test_values_and_gradients(mask):
    def of(layer, x):
        out = layer(x, mask=mask)
        return (out * jnp.cos(out)).sum()

    layers = make(attention_fn=attention_fn), make()
    same(*(nnx.value_and_grad(of, argnums=(0, 1))(layer, X) for layer in layers))


@pytest.mark.parametrize("mask", [None, MASK.astype(bool)])
def test_causal(mask):
    if "is_causal" not in inspect.signature(nnx.MultiHeadAttention.__call__).parameters:
        pytest.skip("this Flax has no is_causal")
    layers = make(attention_fn=attention_fn), make()
    same(*(layer(X, mask=mask, is_causal=True) for layer in layers))


def test_with_masks_of_padding_and_normalised_heads():
    is_token = jnp.arange(24) < jnp.array([24, 13])[:, None]
    mask = nnx.combine_masks(nnx.make_attention_mask(is_token, is_token), MASK)
    layers = (make(normalize_qk=True, **x) for x in ({"attention_fn": attention_fn}, {}))
    ours, theirs = (layer(X, Y, mask=mask) for layer in layers)
    same(ours[0], theirs[0])
    same(ours[1, :13], theirs[1, :13])  # a row that sees nothing has another meaning


def test_grouped_heads():
    if "num_kv_heads" not in inspect.signature(nnx.MultiHeadAttention.__init__).parameters:
        pytest.skip("this Flax has no grouped heads")
    layers = (make(num_kv_heads=2, **x) for x in ({"attention_fn": attention_fn}, {}))
    same(*(layer(X, mask=MASK) for layer in layers))


def test_bfloat16():
    layers = (make(dtype=jnp.bfloat16, **x) for x in ({"attention_fn": attention_fn}, {}))
    ours, theirs = (layer(X, mask=MASK) for layer in layers)
    assert ours.dtype == jnp.bfloat16
    same(ours, theirs, tolerance=3e-2)


def test_decodes_with_its_cache():
    def decoded(**options):
        layer = make(**options)
        layer.init_cache((2, 5, 32))
        return jnp.concatenate([layer(X[:, i : i + 1], decode=True) for i in range(5)], axis=1)

    ours, theirs = decoded(attention_fn=attention_fn), decoded()
    same(ours, theirs)
    same(ours, make()(X[:, :5], mask=MASK[:, :, :5, :5]))


def test_every_argument_is_known():
    theirs = inspect.signature(nnx.dot_product_attention).parameters
    assert not set(theirs) - set(inspect.signature(attention_fn).parameters)


@pytest.mark.parametrize("options", [{}, {"broadcast_dropout": False}])
def test_dropout(options):
    layer = make(attention_fn=attention_fn, dropout_rate=0.5, **options)
    same(layer(X, deterministic=True), make()(X))
    first, second = (layer(X, deterministic=False) for _ in range(2))
    assert (first != second).any()


def test_precision_of_a_layer():
    layers = (make(precision="highest", **x) for x in ({"attention_fn": attention_fn}, {}))
    same(*(layer(X, mask=MASK) for layer in layers))


def test_weights_cannot_be_sown():
    with pytest.raises(NotImplementedError, match=r"module .*attention weights are never"):
        make(attention_fn=attention_fn)(X, sow_weights=True)
