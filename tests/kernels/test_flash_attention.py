"""What the public call promises beyond the numbers that the conformance suite checks."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tiers import quick

from ejkernel.cli import oracle
from ejkernel.errors import UnsupportedError
from ejkernel.modules import (
    FlashAttention,
    FlashAttentionConfig,
    flash_attention,
    scaled_dot_product_attention,
)
from ejkernel.ops import BwdParams, FwdParams
from ejkernel.types import MaskInfo


def arrays(batch=2, queries=24, keys=None, heads=4, kv_heads=2, dim=8, seed=0):
    draw = lambda i, *shape: jax.random.normal(jax.random.key(seed + i), shape)
    keys = queries if keys is None else keys
    return (
        draw(1, batch, queries, heads, dim),
        draw(2, batch, keys, kv_heads, dim),
        draw(3, batch, keys, kv_heads, dim),
    )


Q, K, V = arrays()


def close(a, b):
    """Equal up to what the conformance suite allows of float32, relative to the largest number."""
    largest = oracle.largest(np.asarray(b))
    np.testing.assert_allclose(a, b, rtol=0, atol=oracle.GRADIENT_FLOOR * largest)


# The same meaning, said in different ways


def test_agrees_with_jax():
    expected = jax.nn.dot_product_attention(Q, K, V, is_causal=True)
    close(flash_attention(Q, K, V, causal=True), expected)
    close(scaled_dot_product_attention(Q, K, V, causal=True), expected)
    close(FlashAttention()(Q, K, V, causal=True), expected)


def test_a_causal_mask_can_be_said_in_five_ways():
    expected = flash_attention(Q, K, V, causal=True)
    lower = jnp.tril(jnp.ones((24, 24), bool))
    close(flash_attention(Q, K, V, attention_mask=lower[None]), expected)
    close(
        flash_attention(Q, K, V, attention_mask=np.asarray(lower[None, None], np.int32)), expected
    )
    close(flash_attention(Q, K, V, sliding_window=(24, 0)), expected)
    close(flash_attention(Q, K, V, bias=jnp.where(lower, 0.0, -jnp.inf)), expected)
    whole = MaskInfo.from_segments(jnp.zeros((2, 24), jnp.int32))
    close(flash_attention(Q, K, V, mask_info=whole.apply_causal()), expected)


def test_constraints_are_joined():
    ids = jnp.repeat(jnp.arange(3), 8)[None]
    got = flash_attention(
        Q, K, V, mask_info=MaskInfo.from_segments(ids), causal=True, sliding_window=4
    )
    q, k = np.arange(24)[:, None], np.arange(24)[None]
    mask = (q // 8 == k // 8) & (k <= q) & (abs(k - q) <= 4)
    close(got, flash_attention(Q, K, V, attention_mask=mask[None]))


def test_reading_a_mask_changes_no_result():
    info = MaskInfo.from_attention_mask(jax.random.bernoulli(jax.random.key(9), 0.5, (2, 24, 24)))
    before = flash_attention(Q, K, V, mask_info=info)
    _ = info.q_segment_ids, info.kv_segment_ids, info.get_or_compute_positions(), info.bias
    np.testing.assert_array_equal(flash_attention(Q, K, V, mask_info=info), before)


@pytest.mark.parametrize("rank", [3, 4])
def test_packed_sequences_equal_a_loop_over_them(rank):
    q, k, v = arrays(batch=1, queries=30)
    cum = [0, 7, 7, 22]
    drop = (lambda x: x[0]) if rank == 3 else (lambda x: x)
    out, lse = flash_attention(
        drop(q), drop(k), drop(v), cum_seqlens_q=jnp.array(cum), causal=True, return_lse=True
    )
    assert out.ndim == rank
    assert lse.ndim == rank - 1
    out = out.reshape(1, 30, 4, 8)
    for start, end in itertools.pairwise(cum):
        if start != end:
            part = [x[:, start:end] for x in (q, k, v)]
            close(out[:, start:end], flash_attention(*part, causal=True))
    assert (out[:, 22:] == 0).all()


def test_packed_sequences_of_different_lengths_align_at_their_starts():
    q, k, v = arrays(batch=1, queries=10, keys=25)
    cum_q, cum_k = [0, 4, 10], [0, 9, 25]
    got = jax.jit(
        lambda cq, ck: flash_attention(q, k, v, None, cq, ck, causal=True, sliding_window=(3, 0))
    )(jnp.array(cum_q), jnp.array(cum_k))
    for i in range(2):
        rows, columns = slice(*cum_q[i : i + 2]), slice(*cum_k[i : i + 2])
        alone = flash_attention(
            q[:, rows], k[:, columns], v[:, columns], causal=True, sliding_window=(3, 0)
        )
        close(got[:, rows], alone)


@pytest.mark.usefixtures("as_a_user_calls")
def test_an_offset_per_packed_sequence():
    q, k, v = arrays(batch=1, queries=10, keys=25)
    got = flash_attention(
        q, k, v, cum_seqlens_q=[0, 4, 10], cum_seqlens_k=[0, 9, 25],
        causal=True, causal_offset=jnp.array([5, 10]),
    )  # fmt: skip
    close(got[:, :4], flash_attention(q[:, :4], k[:, :9], v[:, :9], causal=True, causal_offset=5))
    close(got[:, 4:], flash_attention(q[:, 4:], k[:, 9:], v[:, 9:], causal=True, causal_offset=10))


def test_a_batch_of_one_mask_serves_every_row():
    info = MaskInfo.from_segments(jnp.repeat(jnp.arange(2), 12)[None])
    twice = MaskInfo.from_segments(jnp.tile(jnp.repeat(jnp.arange(2), 12)[None], (2, 1)))
    close(flash_attention(Q, K, V, mask_info=info), flash_attention(Q, K, V, mask_info=twice))


# Rows that see nothing, sinks, log-sum-exp


def test_blind_rows_are_exactly_zero_in_value_and_gradient():
    def run(q, k, v, sinks):
        return flash_attention(
            q, k, v, softmax_aux=sinks, causal=True, causal_offset=-5, return_lse=True
        )

    sinks = jnp.ones((4, 2))
    (out, lse), pull_back = jax.vjp(run, Q, K, V, sinks)
    assert (out[:, :5] == 0).all()
    assert (lse[:, :, :5] == -jnp.inf).all()
    assert jnp.isfinite(lse[:, :, 5:]).all()
    d_q, d_k, d_v, d_sinks = pull_back((jnp.ones_like(out), jnp.zeros_like(lse)))
    assert (d_q[:, :5] == 0).all()
    assert all(jnp.isfinite(d).all() for d in (d_q, d_k, d_v, d_sinks))


def test_a_sink_takes_its_share_once_per_row():
    """With equal logits, s sinks of the same logit leave keys / (keys + s) of the weight."""
    ones = jnp.ones((1, 100, 2, 8))
    got = flash_attention(
        0 * ones, ones, ones, softmax_aux=jnp.zeros(3),
        cfg=FlashAttentionConfig(fwd_params=FwdParams(q_blocksize=16, kv_blocksize=16)),
    )  # fmt: skip
    np.testing.assert_allclose(got, 100 / 103, rtol=1e-6)


def test_the_gradient_of_a_small_sink_keeps_its_digits():
    """One minus the share of the keys has few digits left where a sink takes 1e-5 of a row."""
    ones = jnp.ones((1, 100, 2, 8))
    total = lambda sink: flash_attention(0 * ones, ones, ones, softmax_aux=sink[None]).sum()
    weight = np.exp(-7.0)
    exact = -ones.size * 100 * weight / (100 + weight) ** 2
    np.testing.assert_allclose(jax.grad(total)(jnp.float32(-7.0)), exact, rtol=1e-5)


def test_parts_can_be_merged_by_their_lse():
    whole, whole_lse = flash_attention(Q, K, V, return_lse=True)
    parts = [flash_attention(Q, K[:, s], V[:, s], return_lse=True) for s in (np.s_[:9], np.s_[9:])]
    weights = [jnp.exp(lse - whole_lse).swapaxes(1, 2)[..., None] for _, lse in parts]
    close(sum(w * out for w, (out, _) in zip(weights, parts, strict=True)), whole)


def test_no_keys_at_all_give_zeros():
    out, lse = flash_attention(Q, K[:, :0], V[:, :0], return_lse=True)
    assert out.shape == Q.shape
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()


@pytest.mark.parametrize("keys", [0, 3])
def test_the_log_sum_exp_of_float64_is_float64(keys):
    with jax.enable_x64(True):
        q, k, v = (x.astype(jnp.float64) for x in (Q, K[:, :keys], V[:, :keys]))
        out, lse = flash_attention(q, k, v, return_lse=True)
    assert (out.dtype, lse.dtype) == (jnp.float64, jnp.float64)


# Dropout


def test_dropout_depends_on_the_seed_and_on_nothing_else():
    run = lambda **kw: flash_attention(Q, K, V, dropout_prob=0.4, **kw)
    np.testing.assert_array_equal(run(dropout_seed=1), run(dropout_seed=jnp.int32(1)))
    assert not np.allclose(run(dropout_seed=1), run(dropout_seed=2))
    small = FlashAttentionConfig(fwd_params=FwdParams(q_blocksize=8, kv_blocksize=4))
    close(run(dropout_seed=1, cfg=small), run(dropout_seed=1))


def test_dropout_is_right_on_average():
    q, k, v = arrays(batch=8, queries=64, heads=8, kv_heads=8)
    plain = flash_attention(q, k, jnp.ones_like(v))
    dropped = flash_attention(q, k, jnp.ones_like(v), dropout_prob=0.25, dropout_seed=5)
    np.testing.assert_allclose(plain, 1.0, rtol=1e-5)
    # 4096 rows of 64 weights each: the mean of their kept weight is within some standard errors.
    assert abs(float(dropped.mean()) - 1.0) < 5 * float(dropped[..., 0].std()) / 64


def test_a_seed_may_be_traced_and_compiles_once():
    traces = []

    @jax.jit
    def run(seed):
        traces.append(seed)
        return flash_attention(Q, K, V, dropout_prob=0.5, dropout_seed=seed)

    assert not np.allclose(run(1), run(2))
    assert len(traces) == 1


# Platforms, configurations, meshes


def test_a_forced_platform_is_never_swapped():
    for platform in ("triton", "pallas", "cuda"):
        with pytest.raises(
            UnsupportedError,
            match=rf"platform='{platform}' does not support this call: .*support it: xla",
        ):
            flash_attention(Q, K, V, platform=platform)


def test_a_configuration_for_other_hardware_can_be_made_but_not_run():
    config = FlashAttentionConfig(
        fwd_params=FwdParams(q_blocksize=128, kv_blocksize=256, num_warps=4, num_stages=2),
        bwd_params=BwdParams(q_blocksize=64, kv_blocksize=128),
        platform="triton",
        backend="gpu",
    )
    with pytest.raises(
        UnsupportedError, match=r"cfg asks for the backend 'gpu'.*support the call here.*xla"
    ):
        flash_attention(Q, K, V, cfg=config)


@pytest.mark.parametrize("heads", quick([(8, 8), (8, 2), (8, 1)], (8, 2)))
def test_three_specs_are_enough(heads):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))
    q, k, v = arrays(heads=heads[0], kv_heads=heads[1])
    spec = P("dp", None, "tp", None)
    extra = {
        "bias": jax.random.normal(jax.random.key(8), (8, 24, 24)),
        "softmax_aux": jnp.ones((8, 1)),
        "mask_info": MaskInfo.from_segments(jnp.repeat(jnp.arange(2), 12)[None]),
        "dropout_prob": 0.3,
        "dropout_seed": 11,
        "causal": True,
    }

    def loss(q, k, v, bias, **kw):
        return (flash_attention(q, k, v, **(extra | {"bias": bias} | kw)) ** 2).sum()

    sharding = {"mesh": mesh, "in_specs": (spec,) * 3, "out_specs": spec}
    plain = jax.value_and_grad(lambda *a: loss(*a), argnums=(0, 1, 2, 3))
    split = jax.jit(jax.value_and_grad(lambda *a: loss(*a, **sharding), argnums=(0, 1, 2, 3)))
    jax.tree.map(close, split(q, k, v, extra["bias"]), plain(q, k, v, extra["bias"]))


def test_the_program_for_a_mesh_needs_no_collective():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))
    spec = P("dp", None, "tp", None)
    x = jax.ShapeDtypeStruct((2, 24, 8, 8), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
    run = lambda q, k, v: flash_attention(q, k, v, mesh=mesh, in_specs=(spec,) * 3)
    text = jax.jit(run).lower(x, x, x).compile().as_text()
    assert not re.search("all-gather|all-reduce|collective-permute|all-to-all", text)


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": Q[0, 0]}, r"flash_attention: query must have shape \[batch, length, heads"),
        ({"query": "text"}, "query must be an array, got str"),
        ({"query": Q[:, :, :3]}, "query heads must be a multiple of key heads, got 3 and 2"),
        ({"key": K[:1]}, "one batch size, got 2, 1 and 2"),
        ({"value": V[:, :5]}, "key and value must agree in length and heads"),
        ({"key": K[..., :4]}, "one head dim, got 8 and 4"),
        ({"query": Q.astype(jnp.bfloat16)}, "must have one dtype, got bfloat16, float32"),
        ({"query": jnp.ones((2, 24, 4, 8), jnp.int32)}, "query must be floating point.* int32"),
        ({"bias": jnp.ones((2, 3, 24, 24))}, r"bias must broadcast .*\(2, 4, 24, 24\), got \[2, 3"),
        ({"bias": jnp.ones(24)}, "bias must"),
        ({"softmax_aux": jnp.ones((3, 1))}, r"softmax_aux must be .* \[4, sinks\], got \[3, 1\]"),
        ({"attention_mask": jnp.ones((2, 23), bool)}, r"attention_mask .* got \(2, 23\)"),
        ({"mask_info": MaskInfo.from_segments(jnp.zeros((1, 6), jnp.int32))},
         r"mask_info has shape \(1, 6, 6\).*the arrays have \(2, 24, 24\)"),
        ({"mask_info": jnp.ones((2, 24))}, "mask_info must be a MaskInfo"),
        ({"sliding_window": -1}, "sliding_window must not be negative, got -1"),
        ({"sliding_window": (1, 2, 3)}, "sliding_window must be an int or a pair"),
        ({"sliding_window": 2.5}, "sliding_window must be an int or a pair"),
        ({"causal_offset": 3}, "causal_offset needs causal=True"),
        ({"causal": True, "causal_offset": jnp.ones(3, jnp.int32)}, "2 ints, one per batch row"),
        ({"dropout_prob": 1.0}, r"dropout_prob must be in \[0, 1\), got 1.0"),
        ({"dropout_prob": 0.1, "dropout_seed": jnp.ones(2, jnp.int32)}, "must be one integer"),
        ({"dropout_prob": 0.1}, "dropout_prob=0.1 needs dropout_seed=, an integer or a"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap must be positive, got 0.0"),
        ({"cum_seqlens_q": jnp.array([0, 24])}, "a batch of 2; for padded rows use MaskInfo"),
        ({"cum_seqlens_k": jnp.array([0, 24])}, "cum_seqlens_k needs cum_seqlens_q"),
        ({"platform": "numpy"}, "platform must be one of auto, triton, pallas, cuda, xla"),
        ({"cfg": 128}, "cfg must be a FlashAttentionConfig, got int"),
        ({"platform": "xla", "cfg": FlashAttentionConfig(platform="triton")}, "differ"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("as_a_user_calls")
def test_a_mistake_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        flash_attention(**({"query": Q, "key": K, "value": V} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cum_seqlens_q": [0, 9, 5]}, "must start at 0 and never decrease"),
        ({"cum_seqlens_q": [1, 9]}, "must start at 0"),
        ({"cum_seqlens_q": [0, 25]}, "ends at 25, past the 24 tokens"),
        ({"cum_seqlens_q": [0, 9], "cum_seqlens_k": [0, 3, 9]}, "as many sequences, got 1 and 2"),
        ({"cum_seqlens_q": jnp.ones(3)}, "must be integers"),
    ],
)
@pytest.mark.usefixtures("as_a_user_calls")
def test_a_wrong_packing_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        flash_attention(Q[:1], K[:1], V[:1], **arguments)


@pytest.mark.parametrize(
    ("in_specs", "out_specs", "message"),
    [
        (None, None, "mesh= needs in_specs="),
        (P("dp"), None, "in_specs must be a tuple"),
        ((P("dp"),) * 2, None, "in_specs needs 3 to 7 entries"),
        ((P("pp"),) * 3, None, "names the mesh axis 'pp'; the mesh has dp, tp"),
        ((P("dp"), P(), P()), None, "query and key split the axis 'b' differently"),
        ((P(None, "dp"),) * 3, None, "along 't' .* there is ring_attention"),
        ((P(None, None, None, "dp"),) * 3, None, "cannot be split along 'h'"),
        ((P(None, None, "tp", None, None),) * 3, None, "has more than 4 axes"),
        ((P("dp"),) * 3, P("tp"), "does not follow from in_specs"),
        ((P("tp"),) * 3, None, "'b' of 2 does not divide over mesh axis tp of size 4"),
    ],
)
@pytest.mark.usefixtures("as_a_user_calls")
def test_a_wrong_spec_is_named(in_specs, out_specs, message):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))
    with pytest.raises(ValueError, match=message):
        flash_attention(Q, K, V, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def test_numpy_arrays_are_arrays():
    got = flash_attention(
        np.asarray(Q), np.asarray(K), np.asarray(V), bias=np.zeros((24, 24), "f4")
    )
    close(got, flash_attention(Q, K, V))


def test_a_configuration_is_no_dictionary(as_a_user_calls):
    with pytest.raises(ValueError, match=r"^flash_attention: cfg must be a FlashAttentionConfig"):
        flash_attention(Q, K, V, cfg={})
