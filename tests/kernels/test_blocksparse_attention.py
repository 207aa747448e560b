"""What block-sparse attention promises beyond the numbers of the conformance suite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.kernels._pallas.tpu.blocksparse_attention import (
    CausalMask,
    FullMask,
    LocalMask,
    MultiHeadMask,
    NumpyMask,
)
from ejkernel.modules import BlockSparseAttention, blocksparse_attention, flash_attention
from ejkernel.types import MaskInfo


def arrays(batch=2, length=40, heads=4, kv_heads=2):
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
    return (
        draw(1, batch, length, heads, 8),
        draw(2, batch, length, kv_heads, 8),
        draw(3, batch, length, kv_heads, 8),
    )


Q, K, V = arrays()


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def pairs(block_mask, block_q, block_k, length=40):
    return np.repeat(np.repeat(block_mask, block_q, -2), block_k, -1)[..., :length, :length]


@pytest.mark.parametrize("shape", [(5, 4), (4, 5, 4), (2, 1, 5, 4), (1, 4, 5, 4), (2, 4, 5, 4)])
def test_a_block_mask_is_the_mask_of_its_pairs(shape):
    mask = np.random.default_rng(0).random(shape) < 0.5
    whole = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    expected = flash_attention(Q, K, V, attention_mask=pairs(whole, 8, 10))
    close(blocksparse_attention(Q, K, V, block_mask=mask, block_size=(8, 10)), expected)
    traced = jax.jit(lambda m: blocksparse_attention(Q, K, V, block_mask=m, block_size=(8, 10)))
    close(traced(jnp.asarray(mask, jnp.int32)), expected)


def test_the_layout_is_said_and_never_guessed():
    mask = np.random.default_rng(0).random((5, 5)) < 0.5
    first = lambda x: jnp.swapaxes(x, 1, 2)
    expected = blocksparse_attention(Q, K, V, block_mask=mask, block_size=8)
    got = blocksparse_attention(
        first(Q), first(K), first(V), block_mask=mask, block_size=8, layout="bhsd"
    )
    close(first(got), expected)
    close(BlockSparseAttention()(Q, K, V, block_mask=mask, block_size=8), expected)


def test_specs_follow_the_layout():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))
    spec = P("dp", "tp", None, None)
    first = lambda x: jnp.swapaxes(x, 1, 2)
    mask = np.random.default_rng(0).random((4, 5, 5)) < 0.6
    got = blocksparse_attention(
        first(Q), first(K), first(V), block_mask=mask, block_size=8, layout="bhsd",
        mesh=mesh, in_specs=(spec,) * 3, out_specs=spec,
    )  # fmt: skip
    close(first(got), blocksparse_attention(Q, K, V, block_mask=mask, block_size=8))


def test_builders_say_what_masks_say():
    shape = (40, 40)
    numpy = np.random.default_rng(1).random(shape) < 0.5
    masks = {
        "causal": CausalMask(shape, 2),
        "local": LocalMask(shape, (5, None), 1),
        "full": FullMask(shape),
        "numpy": NumpyMask(numpy),
        "joined": (CausalMask(shape) & LocalMask(shape, (9, 3))) | NumpyMask(numpy),
    }
    for mask in masks.values():
        expected = flash_attention(Q, K, V, attention_mask=mask[:, :][None])
        close(blocksparse_attention(Q, K, V, mask_builder=lambda *_, mask=mask: mask), expected)
    several = list(masks.values())[:4]
    expected = flash_attention(Q, K, V, attention_mask=np.stack([m[:, :] for m in several])[None])
    close(blocksparse_attention(Q, K, V, mask_builder=lambda *a: several[a[3]]), expected)
    close(blocksparse_attention(Q, K, V, mask_builder=lambda *_: MultiHeadMask(several)), expected)


def test_a_builder_is_told_sizes_head_and_group():
    seen = []

    def build(*sizes):
        seen.append(sizes)
        return FullMask((40, 40))

    blocksparse_attention(Q, K, V, mask_builder=build)
    assert seen == [(40, 40, 4, head, 2) for head in range(4)]


def test_every_mask_is_joined():
    block_mask = np.tri(5, dtype=bool)
    info = MaskInfo.from_segments(jnp.repeat(jnp.arange(2), 20)[None])
    got = blocksparse_attention(
        Q, K, V, block_mask=block_mask, block_size=8, mask_info=info, causal=True,
        sliding_window=(9, 0), chunk_size=16,
    )  # fmt: skip
    q, k = np.arange(40)[:, None], np.arange(40)[None]
    mask = pairs(block_mask, 8, 8) & (q // 20 == k // 20) & (k <= q) & (q - k <= 9)
    mask &= q // 16 == k // 16
    close(got, flash_attention(Q, K, V, attention_mask=mask[None]))


def test_a_row_of_empty_blocks_gives_zeros_and_finite_gradients():
    mask = jnp.ones((5, 5), bool).at[2].set(False)
    run = lambda q: blocksparse_attention(q, K, V, block_mask=mask, block_size=8)
    out, pull_back = jax.vjp(run, Q)
    assert (out[:, 16:24] == 0).all()
    (d_query,) = pull_back(jnp.ones_like(out))
    assert (d_query[:, 16:24] == 0).all()
    assert jnp.isfinite(d_query).all()


@pytest.mark.usefixtures("as_a_user_calls")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_mask": np.ones((4, 5))}, r"block_mask must have shape \[1, 1\]"),
        ({"block_mask": np.ones((3, 5, 5)), "block_size": 8}, r"got \[3, 5, 5\]"),
        ({"block_mask": np.ones((5, 5)), "block_size": 0}, "block_size must be positive"),
        ({"block_mask": np.ones((5, 5)), "block_size": "8"}, "block_size must be an int or a pair"),
        ({"layout": "bsd"}, "layout must be 'bshd' or 'bhsd'"),
        ({"mask_builder": 3}, "mask_builder must be a function"),
        ({"mask_builder": lambda *_: 3}, "must return a Mask, got int"),
        ({"mask_builder": lambda *_: FullMask((8, 8))}, r"a mask of \(8, 8\) for \(40, 40\)"),
        ({"chunk_size": -1}, "chunk_size must be a positive int"),
    ],
)
def test_a_mistake_is_named(arguments, message):
    with pytest.raises(ValueError, match=f"blocksparse_attention: .*{message}"):
        blocksparse_attention(Q, K, V, **arguments)
