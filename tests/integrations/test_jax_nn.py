"""Every argument of `jax.nn.dot_product_attention` means the same here."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from integrations.peers import same

from ejkernel import dot_product_attention
from ejkernel.errors import UnsupportedError
from ejkernel.ops import target_device


def arrays(*shapes, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


QUERY, KEY, VALUE = arrays((2, 24, 4, 16), (2, 40, 2, 16), (2, 40, 2, 16))
(BIAS,) = arrays((2, 4, 24, 40), seed=1)
# The first key is seen by all: JAX has another meaning for rows that see nothing.
MASK = jax.random.bernoulli(jax.random.key(2), 0.5, (2, 1, 24, 40)).at[..., 0].set(True)
LENGTHS = np.array([24, 17], np.int32), np.array([40, 9], np.int32)

CALLS = {
    "plain": {},
    "bias": {"bias": BIAS},
    "bias_broadcast": {"bias": BIAS[:1, :, :1]},
    "bias_rank_three": {"bias": BIAS[0]},
    "mask": {"mask": MASK},
    "mask_of_heads": {"mask": jnp.broadcast_to(MASK, (2, 4, 24, 40))},
    "mask_rank_two": {"mask": MASK[0, 0]},
    "scale": {"scale": 0.3},
    "scale_array": {"scale": np.float32(0.3)},
    "causal": {"is_causal": True},
    "query_lengths": {"query_seq_lengths": LENGTHS[0]},
    "key_lengths": {"key_value_seq_lengths": LENGTHS[1]},
    "both_lengths": {
        "query_seq_lengths": LENGTHS[0],
        "key_value_seq_lengths": LENGTHS[1],
        "is_causal": True,
    },
    "window": {"local_window_size": 40},
    "window_pair": {"local_window_size": (7, 3)},
    "window_causal": {"local_window_size": (7, 3), "is_causal": True},
    "window_lengths": {"local_window_size": (9, 0), "query_seq_lengths": LENGTHS[0]},
    "implementation": {"implementation": "xla"},
    "everything": {
        "bias": BIAS,
        "mask": MASK,
        "scale": 0.2,
        "is_causal": True,
        "key_value_seq_lengths": LENGTHS[1],
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_those_of_jax(name):
    arguments = CALLS[name]

    def of(function, *arrays):
        out = function(*arrays, **arguments)
        return (out * jnp.cos(out)).sum(), out

    results = [
        jax.jit(jax.value_and_grad(functools.partial(of, function), (0, 1, 2), has_aux=True))(
            QUERY, KEY, VALUE
        )
        for function in (dot_product_attention, jax.nn.dot_product_attention)
    ]
    same(*results)


def test_a_traced_scale_has_the_gradient_of_jax():
    of = lambda function, scale: (function(QUERY, KEY, VALUE, scale=scale) ** 2).sum()
    functions = (dot_product_attention, jax.nn.dot_product_attention)
    same(*(jax.jit(jax.value_and_grad(functools.partial(of, f)))(0.3) for f in functions))


def test_bfloat16_has_the_dtypes_of_jax():
    given = [x.astype(jnp.bfloat16) for x in (QUERY, KEY, VALUE)]
    ours, theirs = (
        function(*given, is_causal=True, return_residual=True)
        for function in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert ours[0].dtype == ours[1].dtype == jnp.bfloat16
    same(ours, theirs, tolerance=2e-2)


def test_under_jit_and_vmap():
    mapped = lambda function: jax.jit(jax.vmap(functools.partial(function, is_causal=True)))
    functions = (dot_product_attention, jax.nn.dot_product_attention)
    same(*(mapped(function)(QUERY, KEY, VALUE) for function in functions))


def test_gradients_of_the_bias_are_those_of_jax():
    of = lambda function, bias: (function(QUERY, KEY, VALUE, bias) ** 2).sum()
    functions = (dot_product_attention, jax.nn.dot_product_attention)
    same(*(jax.grad(functools.partial(of, function))(BIAS) for function in functions))


@pytest.mark.parametrize("batched", [True, False])
def test_the_residual_is_that_of_jax(batched):
    given = [x if batched else x[0] for x in (QUERY, KEY, VALUE)]
    functions = (dot_product_attention, jax.nn.dot_product_attention)
    same(*(function(*given, return_residual=True, is_causal=True) for function in functions))


def test_the_residual_has_no_gradient():
    lse = lambda query: dot_product_attention(query, KEY, VALUE, return_residual=True)[1].sum()
    assert not jax.grad(lse)(QUERY).any()


def test_rank_three():
    given = [x[0] for x in (QUERY, KEY, VALUE)]
    functions = (dot_product_attention, jax.nn.dot_product_attention)
    same(*(function(*given, BIAS[0], MASK[0]) for function in functions))


def test_a_row_that_sees_nothing_is_zero():
    out, lse = dot_product_attention(
        QUERY, KEY, VALUE, mask=jnp.zeros((1, 1, 24, 40), bool), return_residual=True
    )
    assert not out.any()
    assert (lse == -jnp.inf).all()


def test_the_signature_is_that_of_jax():
    ours = inspect.signature(dot_product_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert [*ours] == [*theirs, "platform"]
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)


def test_the_implementations_are_those_of_jax():
    parameter = inspect.signature(jax.nn.dot_product_attention).parameters["implementation"]
    assert set(re.findall(r"[\"'](\w+)[\"']", str(parameter.annotation))) == {"xla", "cudnn"}


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
def test_lengths_of_any_integer_dtype(as_a_user_calls, dtype):
    """Also lengths past the end."""
    lengths = {"query_seq_lengths": [24, 3], "key_value_seq_lengths": [100, 7]}
    given = {name: np.array(x, dtype) for name, x in lengths.items()}
    known = {name: np.array(x, np.int32) for name, x in lengths.items()}
    known["key_value_seq_lengths"][0] = 40
    expected = dot_product_attention(QUERY, KEY, VALUE, **known)
    for call in (dot_product_attention, jax.jit(dot_product_attention)):
        np.testing.assert_array_equal(call(QUERY, KEY, VALUE, **given), expected)


@pytest.mark.parametrize("name", ["query_lengths", "key_lengths", "both_lengths"])
def test_cudnn_supports_lengths(name):
    """As it does in JAX: a program for an H200 holds its operation."""
    call = functools.partial(dot_product_attention, **CALLS[name], implementation="cudnn")
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with target_device("NVIDIA H200"):
        traced = jax.jit(call).trace(array(2, 24, 4, 16), *[array(2, 40, 2, 16)] * 2)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmha" in text


def test_a_window_may_be_a_list(as_a_user_calls):
    of = lambda window: dot_product_attention(QUERY, KEY, VALUE, local_window_size=window)
    assert (of([7, 3]) == of((7, 3))).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask": jnp.ones((1, 1, 24, 40))}, r"mask must be boolean, got float32; .*bias="),
        ({"implementation": "flash"}, r"implementation must be None, 'xla', 'cudnn', got 'flash'"),
        ({"implementation": "xla", "platform": "xla"}, r"implementation= or platform=, not both"),
        ({"key_value_seq_lengths": np.ones(3, np.int32)}, r"must be integers of shape \(2,\)"),
        ({"bias": jnp.ones((1, 1, 1, 1, 1))}, r"bias must have at most 4 axes"),
        ({"query": QUERY[0]}, r"must all have 3 or all have 4 axes"),
        ({"scale": np.ones(3)}, r"scale must be one number, got an array of shape \(3,\)"),
        ({"scale": "0.1"}, r"scale must be a number, got '0.1'"),
        ({"local_window_size": (1, 2, 3)}, r"local_window_size must be one number or \(left"),
    ],
)
def test_bad_arguments_get_a_sentence(as_a_user_calls, arguments, message):
    given = {"query": QUERY, "key": KEY, "value": VALUE} | arguments
    with pytest.raises(ValueError, match=f"^dot_product_attention: .*{message}"):
        dot_product_attention(**given)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is cuDNN")
def test_cudnn_is_not_replaced():
    with pytest.raises(UnsupportedError, match="platform='cuda' does not support this call"):
        dot_product_attention(QUERY, KEY, VALUE, implementation="cudnn")
