"""`attention_fn` in the layers of Flax Linen gives what their default gives."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
from integrations.peers import need, same

from ejkernel.integrations.flax import attention_fn

linen = need("flax.linen")

X = jax.random.normal(jax.random.key(0), (2, 24, 32))
Y = jax.random.normal(jax.random.key(1), (2, 24, 32))
MASK = linen.make_causal_mask(jnp.ones((2, 24)))
layer = functools.partial(linen.MultiHeadDotProductAttention, num_heads=4)


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("force", [False, True])
def test_values_and_gradients(mask, force):
    theirs, ours = (
        layer(force_fp32_for_softmax=force, **x) for x in ({}, {"attention_fn": attention_fn})
    )
    params = theirs.init(jax.random.key(0), X, Y, mask=mask)
    of = lambda module, params: jnp.square(module.apply(params, X, Y, mask=mask)).sum()
    same(*(jax.value_and_grad(functools.partial(of, x))(params) for x in (ours, theirs)))


def test_it_decodes_with_its_cache():
    def decoded(**options):
        module = layer(decode=True, **options)
        variables = module.init(jax.random.key(0), X[:, :5])
        params, cache, out = variables["params"], variables["cache"], []
        for i in range(5):
            step, state = module.apply(
                {"params": params, "cache": cache}, X[:, i : i + 1], mutable=["cache"]
            )
            cache = state["cache"]
            out.append(step)
        return jnp.concatenate(out, axis=1)

    same(decoded(attention_fn=attention_fn), decoded())


def test_every_argument_is_known():
    """Linen drops what a signature does not have, without a word."""
    theirs = inspect.signature(linen.dot_product_attention).parameters
    assert not set(theirs) - set(inspect.signature(attention_fn).parameters)


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_drops_the_same_in_all_rows_and_heads_only_if_it_is_broadcast(broadcast):
    """In Flax's own function and in ours."""
    query = jnp.ones((3, 64, 4, 8))
    options = {"dropout_rate": 0.5, "broadcast_dropout": broadcast}
    for function in (attention_fn, linen.dot_product_attention):
        out = function(query, query, query, dropout_rng=jax.random.key(0), **options)
        assert jnp.allclose(out, out[:1, :, :1], rtol=1e-5) == broadcast, function
        assert abs(out.mean() - 1) < 0.05
        assert 0.05 < out[0, :, 0, 0].std() < 0.3


@pytest.mark.parametrize("options", [{}, {"broadcast_dropout": False}])
def test_dropout(options):
    module = layer(attention_fn=attention_fn, dropout_rate=0.5, **options)
    params = module.init(jax.random.key(0), X, deterministic=True)
    same(module.apply(params, X, deterministic=True), layer().apply(params, X))
    call = functools.partial(module.apply, params, X, deterministic=False)
    first, again, second = (call(rngs={"dropout": jax.random.key(i)}) for i in (1, 1, 2))
    assert (first == again).all()
    assert (first != second).any()


def test_weights_cannot_be_sown():
    module = layer(attention_fn=attention_fn)
    params = module.init(jax.random.key(0), X)
    with pytest.raises(NotImplementedError, match=r"module .*attention weights are never"):
        module.apply(params, X, sow_weights=True, mutable=["intermediates"])


def test_other_products_are_refused():
    einsum = lambda: jnp.einsum
    module = layer(
        attention_fn=attention_fn,
        qk_attn_weights_einsum_cls=einsum,
        attn_weights_value_einsum_cls=einsum,
    )
    with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum is not supported"):
        module.init(jax.random.key(0), X)
