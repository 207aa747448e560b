"""Masks inside JAX's transformations, and what they leave behind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.types import MaskInfo
from ejkernel.types.rules import Everything

IDS = jnp.array([[0, 0, 1, 1, -1], [2, 2, 2, 3, 3]])


@jax.jit
def process(mask_info, x):
    return x * mask_info.q_attention_mask[..., None]


def test_jit_and_vmap_of_a_model_step():
    mask, x = MaskInfo.from_segments(IDS), jnp.ones((2, 5, 3))
    expected = x * (IDS >= 0)[..., None]
    np.testing.assert_array_equal(process(mask, x), expected)
    np.testing.assert_array_equal(jax.vmap(process)(mask, x), expected)
    assert mask.cu_seqlens_q.tolist() == [0, 4, 0, 5]
    np.testing.assert_array_equal(jax.vmap(process)(mask, x), expected)


def test_every_array_leaf_begins_with_the_batch():
    types = jnp.array([[1, 1, 0, 2, 2]])
    mask = (
        MaskInfo.from_segments(IDS)
        .apply_causal(jnp.array(1))
        .apply_chunked(jnp.array([2, 3]), offset=jnp.array([1]))
        .apply_token_type_ids(types)
        .apply_kv_lengths(jnp.array(4), q_len=2, end_index=jnp.array([3, 4]), sliding_window=3)
    )
    leaves = jax.tree.leaves(mask)
    assert leaves
    assert {leaf.shape[0] for leaf in leaves} == {2}
    mapped = jax.vmap(lambda mask: mask.attention_mask)(mask)
    np.testing.assert_array_equal(mapped, mask.attention_mask)


@pytest.mark.parametrize("window", [1, (2, 0), jnp.array([2, 0])], ids=["number", "pair", "array"])
def test_a_traced_window(window):
    masked = lambda window: MaskInfo.from_segments(IDS).apply_sliding_window(window, offset=1)
    found = jax.jit(masked)(window)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(found)} == {2}
    expected = masked(tuple(window.tolist()) if isinstance(window, jax.Array) else window)
    np.testing.assert_array_equal(found.attention_mask, expected.attention_mask)
    assert expected.attention_mask.sum() != MaskInfo.from_segments(IDS).attention_mask.sum()


def test_traced_windows_of_a_vmap():
    whole = MaskInfo.from_segments(IDS)
    one = lambda mask, window: mask.apply_sliding_window((window, 1)).attention_mask
    found = jax.vmap(one)(whole, jnp.array([0, 2]))
    for row, window in enumerate((0, 2)):
        alone = whole.apply_sliding_window((window, 1)).attention_mask[row]
        np.testing.assert_array_equal(found[row], alone)


def test_a_mask_of_one_row_takes_the_batch_of_the_numbers():
    mask = MaskInfo.from_segments(IDS[:1]).apply_causal(jnp.array([0, 1, 2]))
    assert mask.batch_size == 3
    assert {leaf.shape[0] for leaf in jax.tree.leaves(mask)} == {3}
    assert mask.q_lens.tolist() == [4, 4, 4]
    mask = MaskInfo.from_segments(IDS[:1]).apply_chunked(jnp.array([2]), jnp.array([0, 1, 2]))
    assert {leaf.shape[0] for leaf in jax.tree.leaves(mask)} == {3}


def test_closing_over_a_mask_leaks_no_tracer():
    mask = MaskInfo.from_segments(IDS).apply_causal()
    with jax.checking_leaks():
        inside = jax.jit(lambda x: x + mask.attention_mask.sum() + mask.bias.shape[0])(0)
    assert int(inside) == int(mask.attention_mask.sum()) + 2
    jax.vmap(lambda x: x * mask.q_attention_mask)(jnp.ones((2, 2, 5)))
    assert mask.q_attention_mask.tolist() == (IDS >= 0).astype(int).tolist()


def test_concrete_results_are_computed_once():
    mask = MaskInfo.from_segments(IDS)
    assert mask.attention_mask is mask.attention_mask
    assert mask.block_map(2, 2) is mask.block_map(2, 2)
    assert len(jax.tree.leaves(mask)) == 2


def test_reading_does_not_change_the_structure():
    mask = MaskInfo.from_segments(IDS)
    before = jax.tree.structure(mask)
    mask.attention_mask, mask.cu_seqlens_q, mask.q_position_ids  # noqa: B018
    assert jax.tree.structure(mask) == before


def test_a_mask_of_other_numbers_is_not_compiled_again():
    compiled = jax.jit(lambda mask: mask.attention_mask.sum())
    for ids in (IDS, IDS + 1):
        compiled(MaskInfo.from_segments(ids).apply_causal())
    assert compiled._cache_size() == 1
    compiled(MaskInfo.from_segments(IDS).apply_causal(1))
    assert compiled._cache_size() == 2


def test_gradients_flow_past_a_mask():
    mask = MaskInfo.from_segments(IDS).apply_causal()

    def loss(x, mask):
        scores = jnp.where(mask.attention_mask[:, 0], x[:, :, None] * x[:, None, :], 0)
        return scores.sum()

    x = jnp.arange(10.0).reshape(2, 5)
    weights = mask.attention_mask[:, 0].astype(jnp.float32)
    expected = jnp.einsum("bqk,bk->bq", weights + weights.swapaxes(1, 2), x)
    np.testing.assert_allclose(jax.grad(loss)(x, mask), expected)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x, mask), expected)
    remat = jax.grad(lambda x: jax.checkpoint(loss)(x, mask))(x)
    np.testing.assert_allclose(remat, expected)


def test_scan_carries_a_mask():
    mask = MaskInfo.from_segments(IDS)
    carried, total = jax.lax.scan(
        lambda mask, _: (mask, mask.attention_mask.sum()), mask, jnp.arange(2)
    )
    assert total.tolist() == [int(mask.attention_mask.sum())] * 2
    assert carried.shape == mask.shape


def test_shard_map_gives_each_device_its_rows():
    mesh = Mesh(np.array(jax.devices()[:2]), ("dp",))
    mask = MaskInfo.from_segments(IDS).apply_causal(jnp.array([0, 1])).apply_chunked(3)
    local = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    found = local(lambda mask: (mask.attention_mask, mask.q_lens))(mask)
    np.testing.assert_array_equal(found[0], mask.attention_mask)
    np.testing.assert_array_equal(found[1], mask.q_lens)


def test_eval_shape_and_placeholders():
    mask = MaskInfo.from_segments(IDS).apply_causal()
    shapes = jax.eval_shape(lambda mask: mask.apply_sliding_window(2), mask)
    assert shapes.shape == (2, 5, 5)
    assert jax.eval_shape(lambda mask: mask.attention_mask, mask).shape == (2, 1, 5, 5)
    axes = jax.tree.map(lambda leaf: 0, mask)
    mapped = jax.vmap(lambda mask: mask.q_lens, in_axes=(axes,))(mask)
    assert mapped.tolist() == [4, 5]
    assert "MaskInfo" in repr(jax.tree.map(lambda leaf: None, mask))


def test_leaves_are_named():
    mask = MaskInfo.from_segments(IDS)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(mask)]
    assert paths == [".rule.q_ids", ".rule.kv_ids"]


def test_inputs_that_are_all_tokens_forbid_nothing():
    mask = MaskInfo.dynamic_init(input_ids=jnp.zeros((2, 5), int))
    assert isinstance(mask.rule, Everything)
    assert mask.attention_mask.all()
    assert mask.attention_mask.shape == (2, 1, 5, 5)
    assert jax.vmap(lambda mask: mask.q_lens)(mask).tolist() == [5, 5]


def test_a_long_mask_costs_no_more_than_its_ids():
    length = 1 << 16
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def build(ids):
        mask = MaskInfo.from_segments(ids).apply_causal().apply_sliding_window((512, 0))
        mask = mask.apply_chunked(1024).apply_kv_lengths(length // 2, q_len=8, end_index=100)
        return mask.apply_token_type_ids((mask.q_segment_ids, mask.kv_segment_ids))

    memory = jax.jit(build).lower(ids).compile().memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 64 * length


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_sharded_mask_is_the_same_mask(sequence_parallel):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "sp"))
    mask = MaskInfo.from_segments(IDS[:, :4]).apply_causal()
    ids = jax.device_put(IDS[:, :4], NamedSharding(mesh, P("dp", "sp")))
    shardings = mask.get_shardings(sequence_parallel, mesh=mesh)
    sharded = MaskInfo.from_segments(jax.device_put(ids, shardings.q_segment_ids)).apply_causal()
    np.testing.assert_array_equal(sharded.attention_mask, mask.attention_mask)


def chained():
    ids = jnp.array([[0, 0, 1, 1, 1, -1]])
    mask = MaskInfo.from_segments(ids).apply_causal().apply_sliding_window((2, 0))
    return mask.apply_chunked(4).apply_kv_lengths(jnp.array([5])).apply_token_type_ids(ids)


PROPERTIES = [name for name, x in vars(MaskInfo).items() if isinstance(x, property)]


@pytest.mark.parametrize("name", PROPERTIES)
def test_promotions_that_a_program_forbids_itself_are_not_forbidden_to_us(name):
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        got = getattr(chained(), name)
    jax.tree.map(np.testing.assert_array_equal, got, getattr(chained(), name))
