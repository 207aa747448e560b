"""Shardings of the representations of a mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from ejkernel.types import MaskInfo
from ejkernel.types.mask import MaskSharding


def mesh(*names):
    shape = {1: (8,), 2: (2, 4), 3: (2, 2, 2)}[len(names)]
    return Mesh(np.array(jax.devices()).reshape(shape), names)


def specs(shardings):
    return {
        name: tuple(sharding.spec)
        for name, sharding in shardings._asdict().items()
        if sharding is not None
    }


def test_axes_that_the_mesh_lacks_are_dropped():
    mask = MaskInfo.from_segments(jnp.zeros((4, 16), int))
    assert specs(mask.get_shardings(mesh=mesh("dp", "tp"))) == {
        "attention_mask": ("dp", None, None, None),
        "q_segment_ids": ("dp", None),
        "kv_segment_ids": ("dp", None),
    }
    parallel = mask.get_shardings(mesh=mesh("dp", "tp"), sequence_parallel=True)
    assert specs(parallel) == specs(mask.get_shardings(mesh=mesh("dp", "tp")))


def test_sequence_parallel_shards_queries_of_the_mask_and_all_tokens():
    positions = jnp.zeros((4, 16), int)
    mask = MaskInfo.from_segments(positions, q_positions=positions)
    found = specs(mask.get_shardings(True, mesh=mesh("dp", "fsdp", "sp")))
    assert found == {
        "attention_mask": (("dp", "fsdp"), None, "sp", None),
        "q_segment_ids": (("dp", "fsdp"), "sp"),
        "kv_segment_ids": (("dp", "fsdp"), "sp"),
        "q_positions": (("dp", "fsdp"), "sp"),
    }


def test_heads_are_sharded_where_there_are_heads():
    mask = MaskInfo.from_attention_mask(jnp.ones((2, 8, 4, 4), bool))
    spec = mask.get_shardings(mesh=mesh("dp", "tp")).attention_mask.spec
    assert tuple(spec) == ("dp", "tp", None, None)


def test_axes_that_do_not_divide_are_left_out():
    mask = MaskInfo.from_segments(jnp.zeros((3, 16), int), sequence_axis_name="tp")
    found = specs(mask.get_shardings(True, mesh=mesh("dp", "tp")))
    assert found["q_segment_ids"] == (None, "tp")


@pytest.mark.parametrize("name", ["rows", ("rows",)])
def test_axis_names_are_the_users(name):
    mask = MaskInfo.from_segments(jnp.zeros((8, 4), int), batch_axis_name=name)
    assert specs(mask.get_shardings(mesh=mesh("rows")))["kv_segment_ids"] == ("rows", None)
    kept = mask.apply_causal().apply_sliding_window(2, mode="prefill")
    assert kept.batch_axis_name == name


def test_shardings_can_be_used():
    mask = MaskInfo.from_segments(jnp.zeros((2, 4), int))
    shardings = mask.get_shardings(mesh=mesh("dp", "tp"))
    placed = jax.device_put(mask.attention_mask, shardings.attention_mask)
    np.testing.assert_array_equal(placed, mask.attention_mask)


def test_the_empty_sharding():
    assert MaskInfo.get_empty_sharding() == MaskSharding(*[None] * 7)
