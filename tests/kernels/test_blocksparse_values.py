"""Block-sparse attention where the result can be written down, and what it must not touch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import quick

from ejkernel.kernels._pallas.tpu.blocksparse_attention import CausalMask, LocalMask, NumpyMask
from ejkernel.kernels.blocksparse_attention.mask_rules import rule_of_builder
from ejkernel.kernels.common.masking import Extent
from ejkernel.modules import (
    BlockSparseAttentionConfig,
    blocksparse_attention,
    flash_attention,
)
from ejkernel.ops import BwdParams, FwdParams
from ejkernel.types import MaskInfo

# Four keys with the values 0, 1, 2, 3, in two blocks; equal logits give the mean of what is seen.
ZEROS = jnp.zeros((1, 4, 1, 2))
VALUE = jnp.arange(4.0).reshape(1, 4, 1, 1)
OWN, LOWER, NONE_FIRST = np.eye(2, dtype=bool), np.tri(2, dtype=bool), np.array([[0, 0], [1, 0]])


@pytest.mark.parametrize(
    ("block_mask", "arguments", "expected"),
    [
        (OWN, {}, [1 / 2, 1 / 2, 5 / 2, 5 / 2]),
        (LOWER, {}, [1 / 2, 1 / 2, 6 / 4, 6 / 4]),
        (NONE_FIRST, {}, [0, 0, 1 / 2, 1 / 2]),
        (LOWER, {"causal": True}, [0, 1 / 2, 3 / 3, 6 / 4]),
        (LOWER, {"sliding_window": (1, 0)}, [0, 1 / 2, 3 / 2, 5 / 2]),
        (LOWER, {"chunk_size": 3}, [0, 1 / 2, 3 / 3, 3]),
        # A sink of logit log 2 weighs as much as two keys of value 0.
        (LOWER, {"softmax_aux": np.log([2.0])}, [1 / 4, 1 / 4, 6 / 6, 6 / 6]),
        (NONE_FIRST, {"softmax_aux": np.log([2.0])}, [0, 0, 1 / 4, 1 / 4]),
        # The bias makes the second key of each block three times as heavy as the first.
        (LOWER, {"bias": np.log([[1.0, 3, 1, 3]])}, [3 / 4, 3 / 4, 14 / 8, 14 / 8]),
        # However large the bias, the cap leaves it log 3.
        (
            LOWER,
            {"bias": [[0.0, 1e9, 0.0, 1e9]], "logits_soft_cap": float(np.log(3))},
            [3 / 4, 3 / 4, 14 / 8, 14 / 8],
        ),
    ],
)
def test_values_that_can_be_worked_out(block_mask, arguments, expected):
    arguments = {
        name: np.asarray(x, np.float32) if name in ("bias", "softmax_aux") else x
        for name, x in arguments.items()
    }
    out = blocksparse_attention(
        ZEROS, ZEROS, VALUE, block_mask=block_mask, block_size=2, **arguments
    )
    np.testing.assert_allclose(out[0, :, 0, 0], expected, rtol=1e-6, atol=1e-6)


def test_every_head_has_its_own_blocks():
    twice = lambda x: jnp.repeat(x, 2, axis=2)
    mask = np.stack([OWN, LOWER])
    out = blocksparse_attention(
        twice(ZEROS), twice(ZEROS), twice(VALUE), block_mask=mask, block_size=2
    )
    np.testing.assert_allclose(out[0, :, 0, 0], [0.5, 0.5, 2.5, 2.5], rtol=1e-6)
    np.testing.assert_allclose(out[0, :, 1, 0], [0.5, 0.5, 1.5, 1.5], rtol=1e-6)


def test_the_gradient_that_can_be_worked_out():
    """Of the sum of outputs, each value has the weights of its column: 1/2 twice, 1/4 twice."""
    run = lambda value: blocksparse_attention(
        ZEROS, ZEROS, value, block_mask=LOWER, block_size=2
    ).sum()
    np.testing.assert_allclose(
        jax.grad(run)(VALUE)[0, :, 0, 0], [3 / 2, 3 / 2, 1 / 2, 1 / 2], rtol=1e-6
    )


BLOCK, BLOCKS = 16, 24
LENGTH = BLOCK * BLOCKS


@functools.cache
def arrays(length=LENGTH, heads=2, kv_heads=1):
    draw = lambda i, n: jax.random.normal(jax.random.key(i), (1, length, n, 8))
    return draw(0, heads), draw(1, kv_heads), draw(2, kv_heads)


def value_and_gradients(function, *operands):
    out, pull_back = jax.vjp(function, *operands)
    return out, *pull_back(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("per_head", quick([False, True], True))
def test_blocks_that_nobody_sees_are_not_read(per_head):
    """With the blocks that are chosen by default: a NaN that is computed would show, as 0 * NaN."""
    mask = np.random.default_rng(0).random((2 if per_head else 1, BLOCKS, BLOCKS)) < 0.6
    unseen = [0, 3, 4, 11, 23]
    mask[:, :, unseen] = False
    poisoned = np.isin(np.arange(LENGTH) // BLOCK, unseen)
    query, key, value = arrays()
    run = lambda q, k, v: blocksparse_attention(
        q, k, v, block_mask=jnp.asarray(mask), block_size=BLOCK
    )
    clean = value_and_gradients(run, query, key, value)
    poison = lambda x: jnp.where(poisoned[:, None, None], jnp.nan, x)
    got = jax.jit(lambda *a: value_and_gradients(run, *a))(query, poison(key), poison(value))
    for one, other in zip(got, clean, strict=True):
        close(one, other)
    assert (got[2][:, poisoned] == 0).all()
    assert (got[3][:, poisoned] == 0).all()


def test_queries_that_see_nothing_are_not_read():
    mask = np.ones((BLOCKS, BLOCKS), bool)
    mask[5] = mask[17] = False
    blind = np.isin(np.arange(LENGTH) // BLOCK, [5, 17])
    query, key, value = arrays()
    run = lambda *a: blocksparse_attention(*a, block_mask=mask, block_size=BLOCK)
    query = jnp.where(blind[:, None, None], jnp.nan, query)
    out, *gradients = value_and_gradients(run, query, key, value)
    assert (out[:, blind] == 0).all()
    assert (gradients[0][:, blind] == 0).all()
    assert all(np.isfinite(x).all() for x in (out, *gradients))


@pytest.mark.slow
def test_the_blocks_of_the_kernel_do_not_matter():
    """Sinks, in particular, are counted once a row, however many blocks a row has."""
    mask = np.random.default_rng(1).random((2, BLOCKS, BLOCKS)) < 0.3
    sinks, bias = jnp.ones((2, 2)), jax.random.normal(jax.random.key(5), (LENGTH, LENGTH))

    def run(cfg, *operands):
        *qkv, sinks, bias = operands
        return blocksparse_attention(
            *qkv, sinks, bias, block_mask=mask, block_size=BLOCK, logits_soft_cap=3.0, cfg=cfg
        )

    results = []
    for q_block, k_block in ((None, None), (64, 32), (LENGTH, LENGTH)):
        cfg = BlockSparseAttentionConfig(
            fwd_params=FwdParams(q_blocksize=q_block, kv_blocksize=k_block),
            bwd_params=BwdParams(q_blocksize=q_block, kv_blocksize=k_block),
        )
        call = jax.jit(lambda *a, cfg=cfg: value_and_gradients(functools.partial(run, cfg), *a))
        results.append(call(*arrays(), sinks, bias))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            close(a, b)
    assert all(np.abs(x).max() > 1e-3 for x in results[0])  # sinks and bias have gradients


def test_any_mask_of_a_mask_info_counts_and_reading_it_changes_nothing():
    """Segments, causal and a window at once: more than segment ids can say."""
    ids = jnp.repeat(jnp.arange(3), LENGTH // 3)[None]
    info = MaskInfo.from_segments(ids).apply_causal().apply_sliding_window((40, 0))
    block_mask = np.random.default_rng(2).random((BLOCKS, BLOCKS)) < 0.7
    run = lambda **mask: blocksparse_attention(
        *arrays(), block_mask=block_mask, block_size=BLOCK, **mask
    )
    before = run(mask_info=info)
    close(before, run(attention_mask=info.attention_mask))
    assert info.q_segment_ids is not None
    assert info.q_position_ids is not None
    np.testing.assert_array_equal(run(mask_info=info), before)


def test_memory_follows_the_length_and_not_its_square():
    def temporary(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32)
        mask = jax.ShapeDtypeStruct((length // BLOCK, length // BLOCK), bool)
        run = lambda q, k, v, m: value_and_gradients(
            lambda *a: blocksparse_attention(*a, block_mask=m, block_size=BLOCK), q, k, v
        )
        return jax.jit(run).lower(x, x, x, mask).compile().memory_analysis().temp_size_in_bytes

    small, large = temporary(2048), temporary(4096)
    # Besides what is linear there is the map: a few numbers for each block.
    assert large <= 2.2 * small + 32 * (4096 // BLOCK) ** 2


def test_formulas_that_differ_between_heads_are_never_written_out():
    length = 1 << 16
    masks = [CausalMask((length, length)), LocalMask((length, length), (128, 0))] * 2
    rule = rule_of_builder(lambda *a: masks[a[3]], 100, Extent(1, 4, length, length), 1)
    assert max(x.size for x in jax.tree.leaves(rule)) == 4
    assert rule.heads == 4


def test_a_builder_of_pairs_is_visited_by_its_blocks():
    pairs = np.kron(np.eye(BLOCKS, dtype=bool), np.tri(BLOCK, dtype=bool))
    build = lambda *_: NumpyMask(pairs)
    query, key, value = arrays()
    run = lambda q, k, v: blocksparse_attention(q, k, v, mask_builder=build, block_size=BLOCK)
    rule = rule_of_builder(build, BLOCK, Extent(1, 2, LENGTH, LENGTH), 2)
    assert "blocks" in rule.features()
    expected = value_and_gradients(
        lambda *a: flash_attention(*a, attention_mask=pairs[None]), query, key, value
    )
    for a, b in zip(value_and_gradients(run, query, key, value), expected, strict=True):
        close(a, b)
