"""Arguments that several operations share mean the same in each, and mistakes get one sentence."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import (
    blocksparse_attention,
    flash_attention,
    gla_attention,
    grouped_matmul,
    lightning_attention,
    mean_pooling,
    native_sparse_attention,
    page_attention,
    ragged_page_attention_v2,
    ragged_page_attention_v3,
    ragged_page_attention_v3_update,
    recurrent_attention,
    ring_attention,
    scaled_dot_product_attention,
)
from ejkernel.types import MaskInfo


def draw(i, *shape):
    return jax.random.normal(jax.random.key(i), shape)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


Q = draw(1, 2, 12, 4, 8)
K, V = draw(2, 2, 12, 2, 8), draw(3, 2, 12, 2, 8)
SOFTMAX_OPS = [
    flash_attention,
    scaled_dot_product_attention,
    ring_attention,
    blocksparse_attention,
]
every_softmax_op = pytest.mark.parametrize("op", SOFTMAX_OPS, ids=lambda op: op.__name__)


def refused(op, text):
    """The call is refused with this text, which begins with the name of the op."""
    return pytest.raises(ValueError, match=f"^{op.__name__}: {re.escape(text)}")


# Masks


@every_softmax_op
@pytest.mark.parametrize("shape", [(2, 12), (2, 12, 12), (2, 1, 12, 12)], ids=len)
def test_a_float_mask_is_refused(op, shape):
    text = (
        "attention_mask must be boolean, or integers 0 and 1, got float32; .astype(bool) makes a "
        "mask of 0 and 1 boolean, and what is added to the logits is the argument bias=."
    )
    for mask in (jnp.zeros(shape), np.zeros(shape, np.float32)):
        with refused(op, text):
            op(Q, K, V, attention_mask=mask)


@every_softmax_op
def test_a_mask_of_integers_is_that_of_booleans(op):
    mask = jnp.arange(12) < jnp.array([[5], [12]])
    expected = op(Q, K, V, attention_mask=mask)
    for dtype in (jnp.int32, jnp.uint8):
        close(op(Q, K, V, attention_mask=mask.astype(dtype)), expected)


def test_a_float_block_mask_is_refused():
    with refused(blocksparse_attention, "block_mask must be boolean, or integers 0 and 1, got fl"):
        blocksparse_attention(Q, K, V, block_mask=jnp.ones((3, 3)), block_size=4)


# Dropout

with_dropout = pytest.mark.parametrize(
    "op", [flash_attention, scaled_dot_product_attention], ids=lambda op: op.__name__
)


@with_dropout
def test_dropout_needs_a_seed(op):
    with refused(op, "dropout_prob=0.25 needs dropout_seed=, an integer or a jax.random.key"):
        op(Q, K, V, dropout_prob=0.25)
    close(op(Q, K, V, dropout_prob=0.0), op(Q, K, V))


@with_dropout
@pytest.mark.parametrize(
    "seed",
    [jax.random.split(jax.random.key(0)), jnp.zeros(3, jnp.uint32), jnp.zeros(2, jnp.int32), 1.5],
    ids=["keys", "three", "not_a_key", "float"],
)
def test_one_seed_is_one_integer_or_one_key(op, seed):
    with refused(op, "dropout_seed must be one integer or one jax.random.key, got "):
        op(Q, K, V, dropout_prob=0.25, dropout_seed=seed)


@with_dropout
def test_a_key_is_a_seed(op):
    run = lambda seed: op(Q, K, V, dropout_prob=0.5, dropout_seed=seed)
    keys = [jax.random.key(3), jax.random.PRNGKey(3), np.asarray(jax.random.PRNGKey(3))]
    first, *same = map(run, keys)
    for one in same:
        np.testing.assert_array_equal(one, first)
    assert not np.allclose(run(jax.random.key(4)), first)
    bits = jax.random.bits(jax.random.key(3), (), jnp.uint32)
    np.testing.assert_array_equal(run(bits), first)
    np.testing.assert_array_equal(run(int(bits)), first)


def test_a_key_under_transformations():
    loss = lambda q, key: (flash_attention(q, K, V, dropout_prob=0.5, dropout_seed=key) ** 2).sum()
    keys = jax.random.split(jax.random.key(5), 3)
    alone = [jax.value_and_grad(loss)(Q, key) for key in keys]
    assert not np.allclose(alone[0][1], alone[1][1])
    mapped = jax.jit(jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0)))(Q, keys)
    for i, (value, gradient) in enumerate(alone):
        np.testing.assert_allclose(mapped[0][i], value, rtol=1e-5)
        close(mapped[1][i], gradient)


def test_the_gradient_of_dropout_is_that_of_the_weights_that_are_kept():
    """The output is linear in the values, so the gradient can be read off the outputs."""
    key = jax.random.key(6)
    run = lambda v: flash_attention(Q, K, v, dropout_prob=0.5, dropout_seed=key)
    _, tangent = run(V), run(draw(8, *V.shape))
    weights = draw(9, *tangent.shape)
    gradient = jax.grad(lambda v: (run(v) * weights).sum())(V)
    np.testing.assert_allclose(
        (gradient * draw(8, *V.shape)).sum(), (tangent * weights).sum(), rtol=1e-4
    )


# Arrays without a batch axis

COIN = jax.random.bernoulli(jax.random.key(10), 0.6, (4, 12, 12))
BARE_SOFTMAX = {
    "plain": {},
    "bias": {"bias": draw(11, 4, 12, 12), "causal": True},
    "mask_of_keys": {"attention_mask": COIN[0, 0]},
    "mask_of_pairs": {"attention_mask": COIN[0]},
    "mask_of_heads": {"attention_mask": COIN},
    "mask_info": {"mask_info": MaskInfo.from_segments(jnp.arange(12)[None] // 5)},
    "dropout": {"dropout_prob": 0.3, "dropout_seed": 7, "softmax_aux": jnp.ones((4, 1))},
}
# What a batch of one row is called with where a call without a batch has no such axis.
BATCHED = {
    "attention_mask": lambda x: x.reshape((1,) * (4 - x.ndim) + x.shape),
    "gate": lambda x: x[None],
    "gv": lambda x: x[None],
    "initial_state": lambda x: x[None],
    "state": lambda x: x[None],
}


def batched(options):
    return {name: BATCHED.get(name, lambda x: x)(x) for name, x in options.items()}


def assert_the_batch_is_all_that_is_missing(function, arrays, options):
    """Results and gradients of the call without a batch are those of a batch of one row."""

    def run(arrays, options):
        results = function(*arrays, **options)
        weighted = lambda x: (x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)).sum()
        return sum(map(weighted, jax.tree.leaves(results))), results

    differentiate = jax.value_and_grad(run, has_aux=True)
    (_, results), gradients = differentiate(arrays, options)
    (_, expected), d_expected = differentiate([x[None] for x in arrays], batched(options))
    for got, known in zip(
        jax.tree.leaves((results, gradients)), jax.tree.leaves((expected, d_expected)), strict=True
    ):
        assert got.shape == known.shape[1:]
        close(got, known[0])


@with_dropout
@pytest.mark.parametrize("name", BARE_SOFTMAX)
def test_softmax_attention_without_a_batch(op, name):
    attend = lambda q, k, v, **options: op(q, k, v, return_lse=True, **options)
    assert_the_batch_is_all_that_is_missing(attend, [Q[0], K[0], V[0]], BARE_SOFTMAX[name])


STATE, GATE = draw(12, 2, 8, 8), -jnp.abs(draw(13, 12, 2, 8))
BARE_LINEAR = {
    "gla": (gla_attention, {"return_state": True}),
    "gla_gate": (gla_attention, {"return_state": True, "gate": GATE, "initial_state": STATE}),
    "gla_gate_of_heads": (gla_attention, {"return_state": True, "gate": GATE[..., 0]}),
    "lightning": (lightning_attention, {"return_state": True, "initial_state": STATE}),
    "lightning_decay": (lightning_attention, {"decay": 0.5}),
    "recurrent": (recurrent_attention, {"gate": GATE, "gv": GATE, "state": STATE}),
    "recurrent_reverse": (recurrent_attention, {"reverse": True}),
}


@pytest.mark.parametrize("name", BARE_LINEAR)
def test_linear_attention_without_a_batch(name):
    op, options = BARE_LINEAR[name]
    assert_the_batch_is_all_that_is_missing(
        lambda q, k, v, **more: op(q, k, v, **more), [Q[0], K[0], V[0]], options
    )


def test_a_vmap_over_calls_without_a_batch_is_a_batch():
    attend = lambda q, k, v: flash_attention(q, k, v, causal=True, return_lse=True)
    for got, expected in zip(jax.vmap(attend)(Q, K, V), attend(Q, K, V), strict=True):
        close(got, expected)
    recur = lambda q, k, v: gla_attention(q, k, v, return_state=True)
    for got, expected in zip(jax.vmap(recur)(Q, K, V), recur(Q, K, V), strict=True):
        close(got, expected)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_specs_of_arrays_without_a_batch_have_no_batch_either():
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("tp",))
    heads = jax.P(None, "tp", None)
    arrays = Q[0], K[0], V[0]
    split = {"mesh": mesh, "in_specs": (heads,) * 3}
    out, lse = flash_attention(*arrays, return_lse=True, **split, out_specs=(heads, jax.P("tp")))
    for got, expected in zip((out, lse), flash_attention(*arrays, return_lse=True), strict=True):
        close(got, expected)
    states = (heads, jax.P("tp"))
    out, state = recurrent_attention(*arrays, **split, out_specs=states)
    for got, expected in zip((out, state), recurrent_attention(*arrays), strict=True):
        close(got, expected)


BARE_OPS = [
    flash_attention,
    scaled_dot_product_attention,
    gla_attention,
    lightning_attention,
    recurrent_attention,
]


@pytest.mark.parametrize("op", BARE_OPS, ids=lambda op: op.__name__)
def test_a_batch_of_only_some_arrays_is_refused(op):
    with refused(op, "query, key and value must all have a batch axis or all have none, got (12"):
        op(Q[0], K, V)
    with refused(op, "query, key and value must all have a batch axis or all have none, got (2, "):
        op(Q, K, V[0])
    with refused(op, "key must have shape [batch, length, heads, head_dim] or, without a batch, ["):
        op(Q[0], K[0, 0], V[0])


@pytest.mark.parametrize(
    ("op", "options", "text"),
    [
        (
            flash_attention,
            {"attention_mask": COIN[0, :5]},
            "attention_mask must have shape [keys], [queries, keys] or [heads, queries, keys], "
            "here (4, 12, 12), got (5, 12).",
        ),
        (
            gla_attention,
            {"gate": GATE[None]},
            "gate must be [length, kv_heads] or [length, kv_heads, head_dim] = [12, 2, 8], "
            "got [1, 12, 2, 8].",
        ),
        (
            recurrent_attention,
            {"gv": GATE[:3]},
            "gv must be [length, kv_heads, value_dim] = [12, 2, 8], got [3, 2, 8].",
        ),
        (
            recurrent_attention,
            {"state": STATE[None]},
            "state must be [kv_heads, head_dim, value_dim] = [2, 8, 8], got [1, 2, 8, 8].",
        ),
    ],
    ids=["mask", "gate", "gv", "state"],
)
def test_what_does_not_fit_arrays_without_a_batch(op, options, text):
    with refused(op, text):
        op(Q[0], K[0], V[0], **options)


# Soft cap


def pages(*shape):
    return draw(20, *shape)


TABLE, CU_Q, CU_K = np.array([[0, 1], [2, 3]]), np.array([0, 1, 2]), np.array([0, 5, 12])
# Decoding over pages of 16 slots and 2 key heads; each with the arguments that follow its pages.
PAGED = {
    page_attention: (2, (np.array([5, 7]), TABLE)),
    ragged_page_attention_v2: (1, (np.array([5, 7]), TABLE, CU_Q, np.array([2]))),
    ragged_page_attention_v3: (2, (CU_Q, CU_K, TABLE)),
}


def over_pages(op, cache, query=None, **options):
    count, rest = PAGED[op]
    query = draw(21, 2, 4, 8) if query is None else query
    return op(query, *[cache] * count, *rest, **options)


def over_combined(op):
    """The axis of heads of a cache of 2 key heads."""
    return 4 if op is ragged_page_attention_v2 else 2


CAPPED = {
    **{op.__name__: (op, lambda op=op, **kw: op(Q, K, V, **kw)) for op in SOFTMAX_OPS},
    **{
        op.__name__: (
            op,
            lambda op=op, **kw: over_pages(op, pages(4, 16, over_combined(op), 8), **kw),
        )
        for op in PAGED
    },
}


@pytest.mark.parametrize("name", CAPPED)
def test_an_infinite_soft_cap_is_none(name):
    _, run = CAPPED[name]
    np.testing.assert_array_equal(run(logits_soft_cap=float("inf")), run())
    assert not np.allclose(run(logits_soft_cap=0.1), run(), atol=1e-4)


@pytest.mark.parametrize("name", CAPPED)
@pytest.mark.parametrize("cap", [0.0, -2.0, float("nan"), float("-inf")])
def test_a_soft_cap_that_is_not_positive_is_refused(name, cap):
    op, run = CAPPED[name]
    with refused(op, f"logits_soft_cap must be positive, got {cap}; None is no soft cap."):
        run(logits_soft_cap=cap)


# Eight-bit floats


def eight(x):
    return x.astype(jnp.float8_e4m3fn)


NARROW = [
    *((op, "query", lambda op=op: op(eight(Q), eight(K), eight(V))) for op in SOFTMAX_OPS),
    *((op, "key", lambda op=op: op(Q, eight(K), eight(V))) for op in SOFTMAX_OPS),
    *(
        (op, "query", lambda op=op: op(eight(Q), eight(K), eight(V)))
        for op in (gla_attention, lightning_attention, recurrent_attention)
    ),
    (
        native_sparse_attention,
        "query",
        lambda: native_sparse_attention(eight(Q), eight(K), eight(V), block_size=4),
    ),
    (flash_attention, "bias", lambda: flash_attention(Q, K, V, eight(jnp.ones((12, 12))))),
    (gla_attention, "gate", lambda: gla_attention(Q, K, V, eight(K))),
    (mean_pooling, "x", lambda: mean_pooling(eight(Q[..., 0]))),
    (
        grouped_matmul,
        "inputs",
        lambda: grouped_matmul(eight(Q[0, 0]), eight(draw(23, 1, 8, 3)), group_sizes=CU_Q[1:2]),
    ),
    *(
        (
            op,
            "query",
            lambda op=op: over_pages(
                op, pages(4, 16, over_combined(op), 8), query=eight(draw(21, 2, 4, 8))
            ),
        )
        for op in PAGED
    ),
]


@pytest.mark.parametrize(
    ("op", "name", "call"), NARROW, ids=[f"{op.__name__}-{name}" for op, name, _ in NARROW]
)
def test_eight_bit_floats_get_a_sentence_that_names_the_dtypes(op, name, call):
    with refused(
        op,
        f"{name} must be floating point, float32, bfloat16, float16 or float64, got float8_e4m3fn.",
    ):
        call()


@pytest.mark.parametrize("op", PAGED, ids=lambda op: op.__name__)
def test_a_cache_may_have_eight_bits(op):
    cache = pages(4, 16, over_combined(op), 8)
    out = over_pages(op, (cache * 8).astype(jnp.float8_e4m3fn), k_scale=0.125, v_scale=0.125)
    np.testing.assert_allclose(out, over_pages(op, cache), atol=0.2)


# A cache in another layout


@pytest.mark.parametrize("op", PAGED, ids=lambda op: op.__name__)
def test_a_cache_in_another_layout_is_recognised(op):
    heads = over_combined(op)
    head_first, last = (6, heads, 16, 8), (6, 16, heads, 8)
    read = 16 // (heads // 2)  # key heads, where slots are read as heads
    with refused(
        op,
        f'query heads must be a multiple of key heads, got 4 and {read} under kv_layout="NHD"; '
        f'the shape [6, {heads}, 16, 8] fits kv_layout="HND".',
    ):
        over_pages(op, pages(*head_first))
    with refused(
        op,
        f'query heads must be a multiple of key heads, got 4 and {read} under kv_layout="HND"; '
        f'the shape [6, 16, {heads}, 8] fits kv_layout="NHD".',
    ):
        over_pages(op, pages(*last), kv_layout="HND")
    assert over_pages(op, pages(*head_first), kv_layout="HND").shape == (2, 4, 8)


def test_a_cache_that_fits_no_layout_is_told_so_without_advice():
    text = "query heads must be a multiple of key heads, got 4 and 16."
    with refused(page_attention, text):
        over_pages(page_attention, pages(6, 16, 16, 8))


def test_a_cache_with_an_odd_number_of_combined_heads():
    with refused(
        ragged_page_attention_v2,
        "kv_pages holds key heads and value heads alternately and must have an even number of "
        'heads, got 5 under kv_layout="NHD"; the shape [6, 4, 5, 8] fits kv_layout="HND".',
    ):
        over_pages(ragged_page_attention_v2, pages(6, 4, 5, 8))


def test_a_cache_that_is_written_in_another_layout():
    new = draw(22, 2, 2, 8)
    cache = pages(6, 2, 16, 8)
    run = lambda **kw: ragged_page_attention_v3_update(
        draw(21, 2, 4, 8), new, new, cache, cache, CU_Q, CU_K, TABLE, **kw
    )
    with refused(ragged_page_attention_v3_update, "query heads must be a multiple of key heads, "):
        run()
    assert run(kv_layout="HND")[1].shape == cache.shape


@pytest.mark.parametrize("name", ["softmax_scale", "logits_soft_cap", "dropout_prob"])
def test_a_string_is_no_number(as_a_user_calls, name):
    x = draw(30, 1, 8, 2, 8)
    with refused(flash_attention, f"{name} must be a number known at trace time, got '0.5'"):
        flash_attention(x, x, x, **{name: "0.5"})
