"""A layer of ours has the parameters and the call of Equinox's."""

import functools
import inspect
import io

import jax
import jax.numpy as jnp
import pytest
from integrations.peers import need, same

from ejkernel.kernels.flash_attention import dropout

eqx = need("equinox")
from ejkernel.integrations.equinox import MultiheadAttention  # noqa: E402

SIZES = {
    "num_heads": 4,
    "query_size": 32,
    "key_size": 24,
    "value_size": 20,
    "output_size": 12,
    "qk_size": 8,
    "vo_size": 6,
    "use_query_bias": True,
    "use_output_bias": True,
}
QUERY, KEY, VALUE = (
    jax.random.normal(jax.random.key(i), shape)
    for i, shape in enumerate([(16, 32), (24, 24), (24, 20)])
)
MASK = jax.random.bernoulli(jax.random.key(9), 0.6, (16, 24)).at[:, 0].set(True)


def layers(**options):
    make = lambda kind: kind(**SIZES, **options, key=jax.random.key(0))
    return make(MultiheadAttention), make(eqx.nn.MultiheadAttention)


def rotated(query, key, value):
    return query[::-1], key * 2, value


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": MASK},
        {"mask": MASK.astype(int)},
        {"mask": jnp.stack([MASK, ~MASK.at[:, 0].set(False), MASK, MASK])},
        {"process_heads": rotated},
        {"inference": True},
    ],
)
def test_values_and_gradients(options):
    def of(layer):
        out = layer(QUERY, KEY, VALUE, **options)
        return (out * jnp.cos(out)).sum()

    same(*(eqx.filter_value_and_grad(of)(layer) for layer in layers()))


def test_the_pytree_is_the_same():
    ours, theirs = layers()
    assert jax.tree.leaves(jax.tree.map(jnp.shape, ours)) == jax.tree.leaves(
        jax.tree.map(jnp.shape, theirs)
    )
    paths = [jax.tree_util.tree_flatten_with_path(x)[0] for x in (ours, theirs)]
    assert [path for path, _ in paths[0]] == [path for path, _ in paths[1]]
    assert isinstance(ours, eqx.nn.MultiheadAttention)


def test_the_call_has_the_arguments_of_equinox():
    for name in ("__init__", "__call__"):
        ours, theirs = (
            inspect.signature(getattr(kind, name)).parameters
            for kind in (MultiheadAttention, eqx.nn.MultiheadAttention)
        )
        extra = ["platform"] if name == "__call__" else []
        assert [*ours] == [*theirs, *extra]
        for parameter in theirs.values():
            own = ours[parameter.name]
            assert (own.kind, own.default) == (parameter.kind, parameter.default)


def test_parameters_are_those_of_equinox_and_can_be_loaded():
    ours, theirs = layers()
    same(ours, theirs)
    trained = jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, theirs)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, trained)
    file.seek(0)
    same(eqx.tree_deserialise_leaves(file, ours), trained)


def test_a_rotary_embedding():
    rotary = eqx.nn.RotaryPositionalEmbedding(8)

    def embedded(query, key, value):
        return jax.vmap(rotary, 1, 1)(query), jax.vmap(rotary, 1, 1)(key), value

    same(*(layer(QUERY, KEY, VALUE, process_heads=embedded) for layer in layers()))


def test_dtypes_are_promoted_as_in_equinox():
    given = QUERY.astype(jnp.bfloat16), KEY, VALUE
    ours, theirs = (layer(*given) for layer in layers(dtype=jnp.bfloat16))
    same(ours, theirs, tolerance=3e-2)


def test_over_a_batch():
    ours, theirs = layers()
    batch = [jnp.stack([x, x + 1]) for x in (QUERY, KEY, VALUE)]
    same(*(jax.vmap(functools.partial(layer, mask=MASK))(*batch) for layer in (ours, theirs)))


def test_dropout():
    ours, theirs = layers(dropout_p=0.5)
    same(*(layer(QUERY, KEY, VALUE, inference=True) for layer in (ours, theirs)))
    same(*(eqx.nn.inference_mode(layer)(QUERY, KEY, VALUE) for layer in (ours, theirs)))
    call = lambda i: ours(QUERY, KEY, VALUE, key=jax.random.key(i))
    assert (call(0) == call(0)).all()
    assert (call(0) != call(1)).any()
    for layer in (ours, theirs):
        with pytest.raises(RuntimeError):
            layer(QUERY, KEY, VALUE)
    with pytest.raises(RuntimeError, match=r"^MultiheadAttention: dropout needs key="):
        ours(QUERY, KEY, VALUE)


def test_a_layer_without_dropout_needs_no_key():
    same(*(layer(QUERY, KEY, VALUE, inference=False) for layer in layers()))
    same(*(layer(QUERY, KEY, VALUE, key=jax.random.key(0)) for layer in layers()))


def test_dropout_has_the_values_and_gradients_of_its_mask():
    key = jax.random.key(3)
    ours, theirs = layers(dropout_p=0.4)
    seed = jax.random.bits(key, (), "uint32")
    rows, columns = jnp.arange(16)[:, None], jnp.arange(24)
    kept = dropout.keep(0.4, seed, 0, jnp.arange(4)[:, None, None], rows, columns)

    def expected(layer):
        query, keys, value = (
            jax.vmap(projection)(x).reshape(len(x), 4, -1)
            for projection, x in (
                (layer.query_proj, QUERY),
                (layer.key_proj, KEY),
                (layer.value_proj, VALUE),
            )
        )
        weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", query, keys) * 8**-0.5)
        out = jnp.einsum("hqk,khd->qhd", jnp.where(kept, weights / 0.6, 0), value)
        return (jax.vmap(layer.output_proj)(out.reshape(16, -1)) ** 2).sum()

    got = lambda layer: (layer(QUERY, KEY, VALUE, key=key) ** 2).sum()
    same(eqx.filter_value_and_grad(got)(ours), eqx.filter_value_and_grad(expected)(theirs))


def test_dropout_differs_between_the_rows_of_a_batch():
    ours, _ = layers(dropout_p=0.5)
    batch = [jnp.stack([x, x]) for x in (QUERY, KEY, VALUE)]
    call = eqx.filter_jit(jax.vmap(lambda q, k, v, key: ours(q, k, v, key=key)))
    out = call(*batch, jax.random.split(jax.random.key(0), 2))
    assert (out[0] != out[1]).any()


def test_the_old_name_of_inference_warns():
    ours, theirs = layers(dropout_p=0.5)
    with pytest.warns(DeprecationWarning, match="in favour of inference="):
        out = ours(QUERY, KEY, VALUE, deterministic=True)
    same(out, theirs(QUERY, KEY, VALUE, inference=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"value": VALUE[:-1]}, "key_ and value must have the same length, got 24 and 23"),
        ({"query": QUERY[None]}, r"query, key_ and value must be \[length, size\], got \(1, 16"),
        ({"mask": MASK[0]}, r"mask must be \[queries, keys\] = \(16, 24\) or \[heads, queries"),
        ({"mask": MASK[:1]}, r"mask must be .* got \(1, 24\)"),
        ({"mask": MASK.astype(float)}, "mask must be boolean, got float32; .astype"),
        ({"process_heads": lambda q, k, v: (q[1:], k, v)}, "process_heads must not change"),
    ],
)
def test_bad_arguments_get_a_sentence(arguments, message):
    ours, _ = layers()
    with pytest.raises(ValueError, match=f"^MultiheadAttention: {message}"):
        ours(**({"query": QUERY, "key_": KEY, "value": VALUE} | arguments))
