"""What the public call promises beyond the numbers that the conformance suite checks."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tiers import examples

from ejkernel.modules import MeanPooling, MeanPoolingConfig, mean_pooling

X = jax.random.normal(jax.random.key(0), (4, 9, 8))
MASK = jnp.arange(9) < jnp.array([9, 4, 0, 1])[:, None]
TOKENS = jax.random.normal(jax.random.key(1), (20, 8))
CU_SEQLENS = jnp.array([0, 5, 5, 17])


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# Closed forms


ROWS = jnp.array([[[1.0, 2.0], [3.0, 4.0], [8.0, 9.0]], [[5.0, 5.0], [0.0, 0.0], [0.0, 0.0]]])


def test_the_mean_of_the_valid_tokens():
    assert mean_pooling(ROWS, jnp.array([[1, 1, 0], [1, 0, 0]])).tolist() == [[2, 3], [5, 5]]


def test_every_token_is_valid_unless_a_mask_says_otherwise():
    close(mean_pooling(ROWS), [[4, 5], [5 / 3, 5 / 3]])


def test_a_row_of_no_valid_token_is_zero_and_has_no_gradient():
    mask = jnp.array([[0, 0, 0], [1, 0, 0]])
    assert mean_pooling(ROWS, mask).tolist() == [[0, 0], [5, 5]]
    gradient = jax.grad(lambda x: mean_pooling(x, mask).sum())(ROWS)
    assert gradient.tolist() == [[[0, 0]] * 3, [[1, 1], [0, 0], [0, 0]]]


def test_packed_sequences_with_an_empty_one_and_tokens_past_the_last():
    x, cu_seqlens = jnp.array([[1.0], [3.0], [8.0], [7.0]]), jnp.array([0, 2, 2, 3])
    assert mean_pooling(x, cu_seqlens=cu_seqlens).tolist() == [[2], [0], [8]]
    assert mean_pooling(x[None], cu_seqlens=cu_seqlens).tolist() == [[2], [0], [8]]
    gradient = jax.grad(lambda x: (mean_pooling(x, cu_seqlens=cu_seqlens)).sum())(x)
    assert gradient.tolist() == [[0.5], [0.5], [1], [0]]


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int32, jnp.uint8])
def test_a_mask_is_true_where_it_is_not_zero(dtype):
    close(mean_pooling(X, MASK.astype(dtype)), mean_pooling(X, MASK))


def test_a_mask_does_not_weigh():
    close(mean_pooling(X, jnp.where(MASK, 4, 0)), mean_pooling(X, MASK))


# Properties


@functools.cache
def compiled(size):
    cfg = MeanPoolingConfig(block_size=size)
    pool = lambda x, ends: mean_pooling(x, cu_seqlens=ends, cfg=cfg)
    return jax.jit(jax.value_and_grad(lambda x, ends, along: (pool(x, ends) * along).sum()))


@examples(25)
@hypothesis.given(cuts=st.lists(st.integers(0, 20), min_size=5, max_size=5))
def test_packed_is_a_loop_over_the_sequences(cuts):
    cuts = [0, *sorted(cuts)]
    along = jax.random.normal(jax.random.key(2), (5, 8))
    value, gradient = compiled(4)(TOKENS, jnp.array(cuts), along)
    means, expected = np.zeros((5, 8)), np.zeros((20, 8))
    for i, (start, end) in enumerate(itertools.pairwise(cuts)):
        if end > start:
            means[i] = np.asarray(TOKENS)[start:end].mean(0)
            expected[start:end] = along[i] / (end - start)
    close(value, (means * along).sum())
    close(gradient, expected)


def test_padded_and_packed_agree():
    packed = jnp.concatenate([X[i, : int(MASK[i].sum())] for i in range(4)])
    ends = jnp.cumsum(jnp.concatenate([jnp.zeros(1, jnp.int32), MASK.sum(1)]))
    close(mean_pooling(packed, cu_seqlens=ends), mean_pooling(X, MASK))


def test_boundaries_may_be_traced_and_differentiated_around():
    run = jax.jit(jax.grad(lambda x, ends: mean_pooling(x, cu_seqlens=ends).sum()))
    close(run(TOKENS, CU_SEQLENS)[:, 0], [1 / 5] * 5 + [1 / 12] * 12 + [0] * 3)


def test_impossible_boundaries_under_a_trace_stay_inside():
    run = jax.jit(lambda x, ends: mean_pooling(x, cu_seqlens=ends))
    out = run(jnp.ones((20, 8)), jnp.array([0, 12, 900]))
    assert out.tolist() == [[1] * 8] * 2


def test_nan_in_invalid_tokens_never_leaks():
    x = jnp.where(MASK[..., None], X, jnp.nan)
    out, pull_back = jax.vjp(lambda x: mean_pooling(x, MASK), x)
    close(out, mean_pooling(X, MASK))
    assert np.isfinite(pull_back(out)[0]).all()
    tokens = TOKENS.at[17:].set(jnp.nan)
    packed = mean_pooling(tokens, cu_seqlens=CU_SEQLENS)
    close(packed, mean_pooling(TOKENS, cu_seqlens=CU_SEQLENS))
    spoiled = mean_pooling(TOKENS.at[0].set(jnp.nan), cu_seqlens=CU_SEQLENS)
    assert np.isnan(spoiled[0]).all()
    close(spoiled[1:], packed[1:])


@pytest.mark.parametrize("hidden", [jnp.nan, jnp.inf, -jnp.inf])
def test_nothing_leaks_into_whole_blocks(hidden):
    x = jax.random.normal(jax.random.key(2), (3, 256, 8))
    mask = jnp.arange(256) < jnp.array([256, 130, 0])[:, None]
    expected = np.where(mask[..., None], x, 0).sum(1) / np.array([[256], [130], [1]])
    close(mean_pooling(x, mask), expected)
    hiding = jnp.where(mask[..., None], x, hidden)
    run = lambda x: mean_pooling(x, mask)
    out, tangent = jax.jvp(run, (hiding,), (jnp.ones_like(x),))
    close(out, expected)
    close(tangent, jnp.array([[1.0], [1.0], [0.0]]) * jnp.ones((1, 8)))
    both = jax.vmap(run)(jnp.stack([x, hiding]))
    close(both, np.stack([expected, expected]))
    seen = mean_pooling(x.at[0, 3, 0].set(hidden), mask)
    np.testing.assert_array_equal(seen[0, 0], hidden)
    close(seen[1:], expected[1:])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_narrow_call_gives_a_narrow_mean_of_a_wide_sum(dtype):
    """A sum of 4096 ones in bfloat16 would stop at 256."""
    x = jnp.ones((1, 4096, 2), dtype)
    for out in (mean_pooling(x), mean_pooling(x, cu_seqlens=jnp.array([0, 4096]))):
        assert out.dtype == dtype
        assert out.tolist() == [[1, 1]]


@pytest.mark.parametrize("form", ["padded", "packed", "whole blocks", "masked"])
def test_a_long_sum_is_added_up_in_blocks(form):
    """At most 128 and then 1563 roundings go into it; one by one they would be 200 000."""
    tokens = 200_000 if form in ("padded", "packed") else 1563 * 128
    x = jnp.full((1, tokens, 1), 1.1)
    cu_seqlens = jnp.array([0, tokens]) if form == "packed" else None
    mask = jnp.ones((1, tokens), bool) if form == "masked" else None
    out = mean_pooling(x, mask, cu_seqlens=cu_seqlens)
    np.testing.assert_allclose(out, np.float32(1.1), rtol=(128 + 1563) * np.finfo("f4").eps / 2)


def test_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(X, jnp.float64)
        out = mean_pooling(x, MASK)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out[1], np.asarray(x[1, :4]).mean(0), rtol=1e-14)


# Transformations


def test_mapped_calls_are_one_call():
    batch = 11
    x = jax.random.normal(jax.random.key(3), (batch, 20, 8))
    ends = jnp.sort(jax.random.randint(jax.random.key(4), (batch, 4), 0, 20)).at[:, 0].set(0)
    call = lambda x, ends: mean_pooling(x, cu_seqlens=ends)
    gradient = jax.grad(lambda x, ends: (call(x, ends) ** 2).sum())
    for axes in ((0, 0), (0, None), (None, 0)):
        arguments = [v if axis == 0 else v[0] for v, axis in zip((x, ends), axes, strict=True)]
        for function in (call, gradient):
            mapped = jax.vmap(function, axes)
            assert f"length={batch}" not in str(jax.make_jaxpr(mapped)(*arguments))
        one = [v[3] if axis == 0 else v for v, axis in zip(arguments, axes, strict=True)]
        close(mapped(*arguments)[3], gradient(*one))
        close(jax.vmap(call, axes)(*arguments)[3], call(*one))


@pytest.mark.parametrize("form", ["padded", "packed", "packed_row"])
def test_a_mesh_changes_nothing(form):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))
    x, specs, arguments = {
        "padded": (X, (P("dp", None, "tp"), P("dp")), {"attention_mask": MASK}),
        "packed": (TOKENS, (P(None, "tp"),), {"cu_seqlens": CU_SEQLENS}),
        "packed_row": (TOKENS[None], (P(None, None, "tp"),), {"cu_seqlens": CU_SEQLENS}),
    }[form]
    out_specs = P("dp", "tp") if form == "padded" else P(None, "tp")
    request = {"mesh": mesh, "in_specs": specs, "out_specs": out_specs}
    loss = lambda x, **request: (mean_pooling(x, **arguments, **request) ** 2).sum()
    split = jax.value_and_grad(functools.partial(loss, **request))(x)
    jax.tree.map(close, split, jax.value_and_grad(loss)(x))


def test_inside_shard_map():
    mesh = Mesh(jax.devices()[:4], ("dp",))
    split = jax.shard_map(mean_pooling, mesh=mesh, in_specs=(P("dp"), P("dp")), out_specs=P("dp"))
    close(split(X, MASK), mean_pooling(X, MASK))


def test_the_module_is_the_function():
    close(MeanPooling()(X, MASK), mean_pooling(X, MASK))


@pytest.mark.parametrize("shape", [(0, 9, 8), (4, 0, 8), (4, 9, 0)])
def test_nothing_has_the_mean_zero(shape):
    x = jnp.ones(shape)
    assert mean_pooling(x, jnp.ones(shape[:2], bool)).shape == (shape[0], shape[2])
    assert not mean_pooling(x).any()
    assert mean_pooling(jnp.ones((0, 3)), cu_seqlens=jnp.array([0, 0])).tolist() == [[0, 0, 0]]


def test_numpy_arrays_are_arrays():
    close(mean_pooling(np.asarray(X), np.asarray(MASK)), mean_pooling(X, MASK))


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": TOKENS}, r"x must be \[batch, length, hidden\], got \(20, 8\); .* cu_seqlens="),
        ({"x": X.astype(jnp.int32)}, "x must be floating point, float32, bfl.* got int32"),
        ({"x": "tokens"}, "x must be an array, got str"),
        ({"attention_mask": MASK[:, :3]}, r"\[batch, length\] = \[4, 9\], got \[4, 3\]\."),
        ({"attention_mask": CU_SEQLENS}, r"got \[4\]; for cumulative lengths use cu_seqlens="),
        ({"attention_mask": MASK, "cu_seqlens": CU_SEQLENS}, "not both"),
        (
            {"attention_mask": MASK.astype(jnp.float32)},
            r"attention_mask must be boolean, or integers 0 and 1, got float32; \.astype\(bool\)",
        ),
        ({"cu_seqlens": CU_SEQLENS}, r"or \[1, tokens, hidden\], got \(4, 9, 8\)"),
        ({"x": TOKENS, "cu_seqlens": [0, 21]}, "cu_seqlens ends at 21, past the 20 tokens"),
        ({"x": TOKENS, "cu_seqlens": [0, 9, 5]}, "must start at 0 and never decrease"),
        ({"x": TOKENS, "cu_seqlens": [[0, 9]]}, "cu_seqlens must be integers"),
        ({"cfg": 64}, "cfg must be a MeanPoolingConfig, got int"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("as_a_user_calls")
def test_a_mistake_is_named(arguments, message):
    with pytest.raises(ValueError, match=f"mean_pooling: .*{message}"):
        mean_pooling(**({"x": X} | arguments))


@pytest.mark.usefixtures("as_a_user_calls")
def test_the_tokens_of_a_sequence_stay_together():
    mesh = Mesh(jax.devices()[:4], ("dp",))
    with pytest.raises(ValueError, match="x cannot be split along 's' over mesh axis dp"):
        mean_pooling(X, mesh=mesh, in_specs=(P(None, "dp"),))


@pytest.mark.parametrize("field", ["block_size", "num_warps", "num_stages", "block_dim"])
def test_a_config_holds_positive_numbers(field):
    with pytest.raises(ValueError, match=f"MeanPoolingConfig: {field} must be a positive int"):
        MeanPoolingConfig(**{field: 0})
