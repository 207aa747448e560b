"""What the public call promises beyond the numbers that the conformance suite checks."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tiers import examples, quick

from ejkernel.errors import UnsupportedError
from ejkernel.modules import (
    NativeSparseAttention,
    NativeSparseAttentionConfig,
    flash_attention,
    native_sparse_attention,
)

SIZE = 4  # keys in a block


def arrays(batch=2, length=24, heads=4, kv_heads=2, dim=8, seed=0):
    draw = lambda i, *shape: jax.random.normal(jax.random.key(seed + i), shape)
    return (
        draw(1, batch, length, heads, dim),
        draw(2, batch, length, kv_heads, dim),
        draw(3, batch, length, kv_heads, dim),
    )


Q, K, V = arrays()
LISTS = jax.random.randint(jax.random.key(7), (2, 24, 2, 3), 0, 6)
GATE = jax.nn.sigmoid(jax.random.normal(jax.random.key(8), (2, 24, 4)))


def attend(q=Q, k=K, v=V, **arguments):
    return native_sparse_attention(q, k, v, **({"block_size": SIZE} | arguments))


def close(a, b):
    """Equal up to some float32 roundings of the largest number, as in the conformance suite."""
    np.testing.assert_allclose(a, b, rtol=0, atol=32 * np.finfo(np.float32).eps * np.abs(b).max())


def all_blocks(length, kv_heads=2, batch=2):
    return jnp.broadcast_to(
        jnp.arange(-(-length // SIZE)), (batch, length, kv_heads, -(-length // SIZE))
    )


# Cases that can be checked by hand


def test_equal_logits_give_the_mean_of_the_values_seen():
    """Token 6 of blocks of 4 sees keys 4, 5, 6 of its own block and 0 to 3 of block 0."""
    values = jnp.arange(12.0).reshape(1, 12, 1, 1)
    zeros = jnp.zeros((1, 12, 1, 1))
    lists = jnp.full((1, 12, 1, 2), -1).at[0, 6, 0].set(jnp.array([1, 0]))
    lists = lists.at[0, 11, 0, 0].set(1).at[0, 5, 0, 0].set(2)
    out = attend(zeros, zeros, values, block_indices=lists)[0, :, 0, 0]
    np.testing.assert_allclose(out[6], np.mean([0, 1, 2, 3, 4, 5, 6]), rtol=1e-6)
    np.testing.assert_allclose(out[11], np.mean([4, 5, 6, 7]), rtol=1e-6)
    assert out[5] == 0  # a block that lies ahead
    assert out[0] == 0  # no block


def test_the_compressed_branch_sees_the_means_of_complete_blocks():
    values = jnp.arange(12.0).reshape(1, 12, 1, 1)
    zeros, ones = jnp.zeros((1, 12, 1, 1)), jnp.ones((1, 12, 1))
    out = attend(zeros, zeros, values, g_cmp=ones, g_slc=0 * ones)[0, :, 0, 0]
    means = [1.5, 5.5, 9.5]  # complete with tokens 3, 7 and 11
    expected = [0.0] * 3 + [means[0]] * 4 + [np.mean(means[:2])] * 4 + [np.mean(means)]
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_the_window_keeps_the_newest_keys_and_the_own_one_among_them():
    values = jnp.arange(6.0).reshape(1, 6, 1, 1)
    zeros = jnp.zeros((1, 6, 1, 1))
    out = attend(zeros, zeros, values, block_counts=0, sliding_window=3)[0, :, 0, 0]
    np.testing.assert_allclose(out, [0.0, 0.5, 1.0, 2.0, 3.0, 4.0], rtol=1e-6)


def test_the_blocks_with_most_weight_are_chosen_after_the_own_one():
    """The mean keys of blocks 0 to 4 have these logits; token 21 lies in block 5."""
    logits = jnp.repeat(jnp.array([0.5, 3.0, -1.0, 2.0, 2.0, 9.0]), SIZE)
    key = logits.reshape(1, 24, 1, 1)
    query = jnp.ones((1, 24, 1, 1))
    _, blocks = attend(
        query, key, key, block_counts=4, softmax_scale=1.0, return_block_indices=True
    )
    assert blocks.shape == (1, 24, 1, 4)
    assert blocks[0, 21, 0].tolist() == [5, 1, 3, 4]  # of equal ones the earlier first
    assert blocks[0, 23, 0].tolist() == [5, 1, 3, 4]  # complete by now, and still there once
    assert blocks[0, 9, 0].tolist() == [2, 1, 0, -1]
    assert blocks[0, 2, 0].tolist() == [0, -1, -1, -1]


def test_the_heads_of_a_group_choose_together():
    """One head puts weight 1 on block 0, the other two 0.9 on block 1 each: block 1 wins."""
    key = jnp.repeat(jnp.eye(2), SIZE, axis=0)  # the mean of block i is unit vector i
    key = jnp.concatenate([key, jnp.zeros((SIZE, 2))])[None, :, None]
    query = jnp.array([[20.0, 0.0], [0.0, np.log(9.0)], [0.0, np.log(9.0)]])
    query = jnp.broadcast_to(query, (1, 12, 3, 2))
    choose = lambda query: attend(
        query, key, key, block_counts=2, softmax_scale=1.0, return_block_indices=True
    )[1]
    assert choose(query)[0, 10, 0].tolist() == [2, 1]
    assert choose(query[:, :, :2])[0, 10, 0].tolist() == [2, 0]


# The same meaning, said in different ways


def test_all_blocks_are_causal_attention():
    expected = flash_attention(Q, K, V, causal=True)
    close(attend(block_indices=all_blocks(24)), expected)
    close(NativeSparseAttention()(Q, K, V, block_size=SIZE, block_counts=100), expected)
    close(attend(block_counts=0, sliding_window=24), expected)


def test_branches_add_up_with_their_gates():
    lists = {"block_indices": LISTS}
    selected = attend(**lists)
    window = attend(block_counts=0, sliding_window=5)
    compressed = attend(**lists, g_cmp=jnp.ones_like(GATE)) - selected
    close(window, flash_attention(Q, K, V, causal=True, sliding_window=(4, 0)))
    got = attend(**lists, g_cmp=GATE, g_slc=GATE**2, g_swa=-GATE, sliding_window=5)
    gate = GATE[..., None]
    close(got, gate * compressed + gate**2 * selected - gate * window)


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_list_for_a_block_of_tokens_is_a_list_for_each_of_them(heads_first):
    q, k, v = arrays(length=22)  # the last list serves two tokens
    lists = jax.random.randint(jax.random.key(1), (2, 6, 2, 3), 0, 6)
    counts = jax.random.randint(jax.random.key(2), (2, 6, 2), 0, 4)
    spread = lambda x: jnp.repeat(x, SIZE, axis=1)[:, :22]
    expected = attend(q, k, v, block_indices=spread(lists), block_counts=spread(counts))
    if heads_first:
        lists, counts = lists.swapaxes(1, 2), counts.swapaxes(1, 2)
    close(attend(q, k, v, block_indices=lists, block_counts=counts), expected)


def test_lists_may_be_shared_by_all_heads():
    expected = attend(block_indices=jnp.broadcast_to(LISTS[:, :, :1], LISTS.shape))
    close(attend(block_indices=LISTS[:, :, 0]), expected)
    counts = jnp.full((2, 24), 2)
    fewer = attend(block_indices=LISTS[:, :, 0], block_counts=2)
    close(attend(block_indices=LISTS[:, :, 0], block_counts=counts), fewer)


def test_a_shape_that_fits_both_ways_has_a_list_for_each_head_last():
    """Six lists and six key heads."""
    q, k, v = arrays(heads=6, kv_heads=6)
    lists = jax.random.randint(jax.random.key(1), (2, 6, 6, 3), 0, 6)
    expected = attend(q, k, v, block_indices=jnp.repeat(lists, SIZE, axis=1))
    close(attend(q, k, v, block_indices=lists), expected)


def test_counts_cut_lists_and_are_clipped():
    expected = attend(block_indices=LISTS[..., :2])
    close(attend(block_indices=LISTS, block_counts=2), expected)
    close(attend(block_indices=LISTS, block_counts=np.int64(2)), expected)
    close(attend(block_indices=LISTS, block_counts=np.full((2, 24, 2), 2)), expected)
    close(jax.jit(lambda n: attend(block_indices=LISTS, block_counts=n))(2), expected)
    close(attend(block_indices=LISTS, block_counts=99), attend(block_indices=LISTS))


def test_blocks_named_twice_count_once_and_others_not_at_all():
    lists = jnp.full((2, 24, 2, 8), -1).at[..., 1:4].set(LISTS).at[..., 5:8].set(LISTS)
    close(attend(block_indices=lists), attend(block_indices=LISTS))
    wild = jnp.array([6, 2**30, -7])
    wild = jnp.concatenate([LISTS, jnp.broadcast_to(wild, LISTS.shape)], axis=-1)
    close(attend(block_indices=wild), attend(block_indices=LISTS))
    close(attend(block_indices=np.asarray(LISTS, np.uint8)), attend(block_indices=LISTS))


def test_blocks_returned_can_be_used_again():
    out, blocks = attend(block_counts=3, g_cmp=GATE, return_block_indices=True)
    again, same = attend(block_indices=blocks, g_cmp=GATE, return_block_indices=True)
    np.testing.assert_array_equal(blocks, same)
    close(again, out)


def test_the_result_depends_on_no_tile():
    expected = attend(block_indices=LISTS)
    for block_q in (3, 1000):
        cfg = NativeSparseAttentionConfig(block_q=block_q, block_size=SIZE)
        close(attend(block_indices=LISTS, cfg=cfg), expected)


@given(data=st.data())
@examples(15, derandomize=True)
def test_any_lists_give_what_a_dense_mask_gives(data):
    """Lists of a fixed shape with any entries, among them repeated, unused and impossible ones."""
    lists = data.draw(
        st.lists(st.lists(st.integers(-2, 8), min_size=4, max_size=4), min_size=24, max_size=24)
    )
    lists = np.array(lists)[None, :, None]
    token, block = np.arange(24), np.arange(24) // SIZE
    mask = (lists[0, :, 0, :, None] == block).any(1) & (token <= token[:, None])
    q, k, v = arrays(batch=1, kv_heads=1)
    close(attend(q, k, v, block_indices=lists), flash_attention(q, k, v, attention_mask=mask[None]))


# Packed sequences


@pytest.mark.parametrize(("rank", "lists"), [(3, "given"), (4, "chosen")])
def test_packed_sequences_equal_a_loop_over_them(rank, lists):
    cum = [0, 11, 11, 22]
    q, k, v = arrays(batch=1, length=30)
    gate = jax.random.normal(jax.random.key(3), (1, 30, 4))
    indices = None
    if lists == "given":
        indices = jax.random.randint(jax.random.key(4), (1, 30, 2, 3), 0, 4)
    drop = (lambda x: x[0]) if rank == 3 else (lambda x: x)

    def run(part, **arguments):
        rest = {} if indices is None else {"block_indices": drop(indices[:, part])}
        return attend(
            *(drop(x[:, part]) for x in (q, k, v)), g_cmp=drop(gate[:, part]),
            sliding_window=3, block_counts=3, return_block_indices=True, **rest, **arguments,
        )  # fmt: skip

    out, blocks = run(np.s_[:], cu_seqlens=jnp.array(cum))
    assert out.ndim == rank
    out, blocks = out.reshape(1, 30, 4, 8), blocks.reshape(1, 30, 2, -1)
    for start, end in itertools.pairwise(cum):
        if start != end:
            alone, chosen = run(np.s_[start:end], cu_seqlens=jnp.array([0, end - start]))
            close(out[:, start:end], alone.reshape(1, end - start, 4, 8))
            if indices is None:
                chosen = chosen.reshape(1, end - start, 2, -1)
                assert (blocks[:, start:end, :, : chosen.shape[-1]] == chosen).all()
    assert (out[:, 22:] == 0).all()
    if indices is None:
        assert (blocks[:, 22:] == -1).all()


def test_sequence_bounds_may_be_traced():
    q, k, v = arrays(batch=1)
    run = jax.jit(lambda cum: attend(q, k, v, cu_seqlens=cum, block_counts=2))
    close(run(jnp.array([0, 24, 24])), attend(q, k, v, block_counts=2))
    assert (run(jnp.array([0, 9, 20]))[:, 20:] == 0).all()


def test_garbage_past_the_last_sequence_reaches_nothing():
    q, k, v = arrays(batch=1)
    gates = dict.fromkeys(("g_cmp", "g_slc", "g_swa"), GATE[:1])

    def run(spoil):
        spoiled = lambda x: x.at[:, 18:].set(spoil)
        lists = LISTS[:1].at[:, 18:].set(2**30 if np.isnan(spoil) else 0)

        def loss(q, k, v, gates):
            packing = {"cu_seqlens": np.array([0, 10, 18]), "block_indices": lists}
            out = attend(q, k, v, **gates, **packing, sliding_window=5)
            return out, out

        arguments = jax.tree.map(spoiled, (q, k, v, gates))
        out, pull_back, _ = jax.vjp(loss, *arguments, has_aux=True)
        return out, pull_back(jnp.ones_like(out).at[:, 18:].set(spoil))

    (out, gradients), (clean, clean_gradients) = run(np.nan), run(0.0)
    np.testing.assert_array_equal(out, clean)
    assert (out[:, 18:] == 0).all()
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(clean_gradients), strict=True):
        np.testing.assert_array_equal(a, b)


# What is not chosen is not touched


def test_keys_that_nobody_chose_are_not_read():
    lists = jnp.where(LISTS == 2, 3, LISTS)
    spoiled = [x.at[:, 2 * SIZE : 3 * SIZE].set(jnp.nan) for x in (K, V)]
    run = lambda q, k, v: attend(q, k, v, block_indices=lists)
    out, pull_back = jax.vjp(run, Q, *spoiled)
    np.testing.assert_array_equal(out, run(Q, K, V))
    d_q, d_k, d_v = pull_back(jnp.ones_like(out))
    assert jnp.isfinite(d_q).all()
    assert (d_k[:, 2 * SIZE : 3 * SIZE] == 0).all()
    assert (d_v[:, 2 * SIZE : 3 * SIZE] == 0).all()
    assert jnp.isfinite(d_k).all()


def test_a_spoiled_row_of_the_batch_stays_alone():
    out = attend(Q.at[0].set(jnp.nan), K.at[0].set(jnp.nan), V.at[0].set(jnp.nan), block_counts=3)
    close(out[1], attend(block_counts=3)[1])


def test_blind_tokens_are_exactly_zero_in_value_and_gradient():
    lists = LISTS.at[:, 5:9].set(-1)
    out, pull_back = jax.vjp(lambda *a: attend(*a, block_indices=lists), Q, K, V)
    assert (out[:, 5:9] == 0).all()
    gradients = pull_back(jnp.ones_like(out))
    assert (gradients[0][:, 5:9] == 0).all()
    assert all(jnp.isfinite(g).all() for g in gradients)
    assert (attend(block_indices=jnp.full_like(LISTS, -1)) == 0).all()


def test_no_gradient_flows_through_the_choice():
    """Moving a query without changing what it chose moves the result as if the lists were given."""
    _, blocks = attend(block_counts=3, return_block_indices=True)
    loss = lambda q, **kw: (attend(q, **kw) ** 2).sum()
    close(jax.grad(loss)(Q, block_counts=3), jax.grad(loss)(Q, block_indices=blocks))


def test_large_logits_do_not_overflow():
    out = attend(100 * Q, 100 * K, V, block_indices=all_blocks(24))
    close(out, flash_attention(100 * Q, 100 * K, V, causal=True))


def test_memory_grows_with_the_length_alone():
    def temporary(length):
        q = jax.ShapeDtypeStruct((1, length, 8, 16), jnp.float32)
        k = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
        lists = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.int32)
        run = lambda q, k, lists: native_sparse_attention(q, k, k, block_indices=lists).sum()
        compiled = jax.jit(jax.grad(run, argnums=(0, 1))).lower(q, k, lists).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary(8192), temporary(32768)
    assert long <= 4.2 * short
    assert long < 32768 * 16 * 64 * 16 * 4 / 8  # far from all blocks of all tokens at once


# Meshes, platforms, configurations


@pytest.mark.parametrize("kv_heads", quick([8, 2], 2))
def test_three_specs_are_enough(kv_heads):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))
    q, k, v = arrays(heads=8, kv_heads=kv_heads)
    gate = jnp.concatenate([GATE, GATE], axis=-1)
    spec = P("dp", None, "tp", None)

    def loss(q, k, v, gate, **kw):
        out = attend(q, k, v, g_cmp=gate, g_swa=gate, sliding_window=3, block_counts=3, **kw)
        return (out**2).sum()

    sharding = {"mesh": mesh, "in_specs": (spec,) * 3, "out_specs": spec}
    of_all = lambda function: jax.value_and_grad(function, argnums=(0, 1, 2, 3))
    split = jax.jit(of_all(lambda *a: loss(*a, **sharding)))
    jax.tree.map(close, split(q, k, v, gate), of_all(loss)(q, k, v, gate))


def test_lists_given_need_no_collective_on_a_mesh():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))
    spec = P("dp", None, "tp", None)
    on = jax.NamedSharding(mesh, spec)
    x = jax.ShapeDtypeStruct((2, 24, 8, 8), jnp.float32, sharding=on)
    lists = jax.ShapeDtypeStruct((2, 24, 8, 3), jnp.int32, sharding=on)
    run = lambda q, k, v, i: attend(q, k, v, block_indices=i, mesh=mesh, in_specs=(spec,) * 3)
    text = jax.jit(run).lower(x, x, x, lists).compile().as_text()
    assert not re.search("all-gather|all-reduce|collective-permute|all-to-all", text)


def test_a_forced_platform_is_never_swapped():
    with pytest.raises(UnsupportedError, match=r"native_sparse_attention: platform='triton'.*xla"):
        attend(platform="triton")


def test_a_configuration_can_be_made_for_other_hardware():
    config = NativeSparseAttentionConfig(128, num_warps=8, platform="triton", backend="gpu")
    assert (config.block_q, config.block_size, config.num_stages) == (128, 64, 1)
    with pytest.raises(ValueError, match="block_q must be a positive int, got 0"):
        NativeSparseAttentionConfig(block_q=0)


# Mistakes


@pytest.mark.usefixtures("as_a_user_calls")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": Q[0]}, r"native_sparse_attention: query must have shape \[batch, length, heads"),
        ({"q": Q[:, :20]}, "query and key must have one length, got 20 and 24"),
        ({"q": Q[:, :, :3]}, "query heads must be a multiple of key heads, got 3 and 2"),
        ({"g_cmp": GATE[..., :2]}, r"g_cmp must be .*= \[2, 24, 4\], got \[2, 24, 2\]"),
        ({"g_slc": GATE > 0}, "g_slc must be floating point"),
        ({"g_swa": GATE}, "g_swa needs sliding_window"),
        ({"sliding_window": 0}, "sliding_window must be positive, got 0"),
        ({"sliding_window": (3, 0)}, "sliding_window must be an int"),
        ({"block_size": 0}, "block_size must be positive, got 0"),
        ({"block_size": 2.5}, "block_size must be an int, got 2.5"),
        ({"block_counts": -1}, "block_counts must not be negative, got -1"),
        ({"block_counts": jnp.ones((2, 24, 2), int)}, "with block_indices, an array"),
        ({"block_indices": LISTS, "block_counts": LISTS[..., 0] - 9}, "must not be negative"),
        ({"block_indices": LISTS, "block_counts": jnp.ones((2, 5, 2), int)},
         r"block_counts must be integers of shape \[2, 24, 2\], .*got int32\[2, 5, 2\]"),
        ({"block_indices": LISTS, "block_counts": jnp.ones((2, 24, 2))}, "counts must be int"),
        ({"block_indices": LISTS[:, :7]},
         r"indices must .*\[2, 24, 2, n\], \[2, 24, n\], \[2, 6, 2, n\], \[2, 2, 6, n\], got"),
        ({"block_indices": LISTS.astype(float)}, "block_indices must be integers"),
        ({"block_indices": LISTS[0, 0]}, "block_indices must be integers"),
        ({"cu_seqlens": jnp.array([0, 24])}, "one packed row, got a batch of 2"),
        ({"cfg": NativeSparseAttentionConfig()}, "block_size=4 and cfg.block_size=64 differ"),
        ({"cfg": 64}, "cfg must be a NativeSparseAttentionConfig, got int"),
        ({"softmax_scale": "large"}, "softmax_scale must be a number"),
        ({"platform": "numpy"}, "platform must be one of auto, triton, pallas, cuda, xla"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        attend(**arguments)


@pytest.mark.parametrize(
    ("cum", "message"),
    [
        (np.array([0, 9, 5]), "cu_seqlens must start at 0 and never decrease"),
        (np.array([0, 25]), "cu_seqlens ends at 25, past the 24 tokens"),
        (jnp.ones(3), "cu_seqlens must be integers"),
    ],
)
def test_a_wrong_packing_is_named(cum, message):
    with pytest.raises(ValueError, match=message):
        attend(Q[:1], K[:1], V[:1], cu_seqlens=cum)


def test_no_tokens_give_no_output():
    out, blocks = attend(Q[:, :0], K[:, :0], V[:, :0], return_block_indices=True)
    assert out.shape == (2, 0, 4, 8)
    assert blocks.shape == (2, 0, 2, 0)


def test_numpy_arrays_are_arrays():
    got = attend(*map(np.asarray, (Q, K, V)), block_indices=np.asarray(LISTS))
    close(got, attend(block_indices=LISTS))
