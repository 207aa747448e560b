"""The TPU kernels of flash attention: several tiles of every state, and ragged ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import settings
from ejkernel.cli.oracle import Truth, with_dtype, with_gradients
from ejkernel.kernels.common.mosaic_tpu.memory import core_of
from ejkernel.kernels.flash_attention import pallas_tpu
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.kernels.flash_attention.pallas_tpu import configs
from ejkernel.kernels.flash_attention.pallas_tpu.launch import FlashTileSize
from ejkernel.kernels.flash_attention.pallas_tpu.schedule import tile_schedule
from ejkernel.modules import FlashAttentionConfig, flash_attention
from ejkernel.ops import BwdParams, FwdParams, default_executor, executor
from ejkernel.ops.executor import Request
from ejkernel.ops.platform import Device
from ejkernel.ops.workload import Workload, boolean, normal, value
from ejkernel.types import MaskInfo
from ejkernel.types.rules import Band, KeyLength, Segments

SMALL = FlashAttentionConfig(
    fwd_params=FwdParams(q_blocksize=128, kv_blocksize=128, blocksize_heads=2),
    bwd_params=BwdParams(
        q_blocksize=128, kv_blocksize=128, resident_queries=256, blocksize_heads=1
    ),
)


def attention(batch=1, q_len=300, kv_len=400, heads=4, kv_heads=2, head_dim=16, value_dim=8):
    return {
        "query": normal(batch, q_len, heads, head_dim),
        "key": normal(batch, kv_len, kv_heads, head_dim),
        "value": normal(batch, kv_len, kv_heads, value_dim),
    }


def documents(*lengths):
    ids = np.repeat(np.arange(len(lengths)), lengths)[None]
    return value(lambda: MaskInfo.from_segments(jnp.asarray(ids)).apply_causal())


CALLS = (
    Workload("plain", attention()),
    Workload("causal", attention(q_len=400) | {"causal": True}),
    Workload("window", attention(q_len=400) | {"causal": True, "sliding_window": (150, 0)}),
    Workload("packed", attention(q_len=400) | {"mask_info": documents(100, 30, 200, 70)}),
    Workload(
        "per_row",
        attention(batch=2, q_len=140)
        | {"causal": True, "causal_offset": value(lambda: jnp.array([0, 260]))},
    ),
    Workload("per_head", attention(q_len=140) | {"attention_mask": boolean(1, 4, 140, 400)}),
    Workload("bias", attention(q_len=140, kv_len=200) | {"bias": normal(1, 4, 140, 200)}),
    Workload(
        "bias_of_all_rows",
        attention(batch=2, q_len=140, kv_len=200) | {"bias": normal(1, 4, 140, 200)},
    ),
    Workload(
        "bias_of_all_heads",
        attention(batch=2, q_len=300, kv_len=200)
        | {"bias": normal(2, 1, 300, 200), "causal": True, "logits_soft_cap": 3.0},
    ),
    Workload("bias_of_keys", attention(batch=2) | {"bias": normal(2, 1, 1, 400), "causal": True}),
    Workload("bias_of_queries", attention(batch=2) | {"bias": normal(1, 4, 300, 1)}),
    Workload("bias_of_all", attention(q_len=140) | {"bias": normal(1, 1, 1, 1)}),
    Workload(
        "sinks_and_cap",
        attention(q_len=400)
        | {"causal": True, "softmax_aux": normal(4, 2), "logits_soft_cap": 5.0},
    ),
    Workload(
        "dropout",
        attention(q_len=280) | {"dropout_prob": 0.3, "dropout_seed": 7},
    ),
)


@pytest.mark.tpu
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16],
    ids=["exact", "half"],
)
@pytest.mark.parametrize("workload", CALLS, ids=lambda workload: workload.name)
def test_many_tiles_give_what_the_reference_defines(workload, dtype):
    call = lambda seed: default_executor().invocation(flash_attention, **workload.build(seed))
    mine = call(0)
    run = lambda x: executor.run(mine.op, x, mine.spec, Request(platform="pallas", cfg=SMALL))
    with settings.override(interpret=jax.default_backend() != "tpu"):
        outputs, gradients = jax.jit(with_gradients(run))(with_dtype(mine.inputs, dtype))
    truth = Truth(call)
    for deviation in (*truth.of_values(outputs, dtype), *truth.of_gradients(gradients, dtype)):
        assert deviation.fine, deviation


@pytest.mark.tpu
@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize(
    "options",
    [{"causal": True, "bias": normal(1, 1, 500, 650)}, {"dropout_prob": 0.3, "dropout_seed": 7}],
    ids=["bias", "dropout"],
)
def test_squares_of_a_tile_give_what_the_reference_defines(options, width):
    """Several strips of queries, the last a short one, and more keys than go together."""
    shapes = attention(q_len=500, kv_len=650, heads=1, kv_heads=1, value_dim=16)
    workload = Workload("squares", shapes | options)
    call = lambda seed: default_executor().invocation(flash_attention, **workload.build(seed))
    sizes = {"q_blocksize": 384, "kv_blocksize": 640}
    config = FlashAttentionConfig(
        fwd_params=FwdParams(**sizes, mxu_width=width),
        bwd_params=BwdParams(**sizes, mxu_width=width, resident_queries=768),
    )
    mine = call(0)
    run = lambda x: executor.run(mine.op, x, mine.spec, Request(platform="pallas", cfg=config))
    with settings.override(interpret=jax.default_backend() != "tpu"):
        run = jax.jit(with_gradients(run))
        outputs, gradients = run(with_dtype(mine.inputs, jnp.bfloat16))
    truth, half = Truth(call), jnp.bfloat16
    for deviation in (*truth.of_values(outputs, half), *truth.of_gradients(gradients, half)):
        assert deviation.fine, deviation


@pytest.mark.parametrize(("kind", "width"), [("TPU v5 lite", 128), ("TPU v6 lite", 256)])
def test_squares_are_as_wide_as_the_matrix_unit(kind, width):
    array = jax.ShapeDtypeStruct((1, 8192, 8, 128), jnp.bfloat16)
    inputs, device = Inputs(array, array, array), Device("tpu", kind, None, kind)
    chosen = pallas_tpu.heuristic_forward(inputs, Spec(softmax_scale=1.0), device)
    assert chosen.mxu_width == width
    assert (chosen.q_blocksize, chosen.kv_blocksize) == (1024, 1024)
    window = inputs._replace(mask=Band(-100, 0))
    assert pallas_tpu.heuristic_forward(window, Spec(softmax_scale=1.0), device).q_blocksize == 512


def visited(rule, **options):
    tiles = tile_schedule(rule, 512, 512, 128, 128, **options)
    count = int(tiles.count)
    return list(
        zip(tiles.result[:count].tolist(), (tiles.packed[:count] // 4).tolist(), strict=True)
    )


def test_the_list_holds_the_tiles_with_an_allowed_pair_in_order():
    assert visited(Band(None, 0)) == [(i, j) for i in range(4) for j in range(i + 1)]
    assert visited(Band(None, 0), by_keys=True) == [(j, i) for j in range(4) for i in range(j, 4)]


def test_the_list_of_a_traced_mask_is_that_of_the_static_one():
    ids = jnp.repeat(jnp.arange(4), 128)[None]
    rule = Segments(ids, ids) & Band(None, 0)
    assert visited(rule) == [(i, i) for i in range(4)]


def test_a_block_that_sees_nothing_has_one_tile_all_the_same():
    tiles = tile_schedule(KeyLength(jnp.array([0, 200])), 256, 512, 128, 128)
    assert tiles.result[: int(tiles.count)].tolist() == [0, 1, 2, 2, 3, 3]
    assert (tiles.packed[:2] % 4).tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"])
def test_default_tiles_shrink_until_they_fit(kind):
    device = Device("tpu", kind, None, kind)
    shape = lambda *x: jax.ShapeDtypeStruct(x, jnp.float32)
    inputs = Inputs(shape(1, 65536, 32, 256), shape(1, 65536, 1, 256), shape(1, 65536, 1, 256))
    spec = Spec(softmax_scale=1.0)
    forward = pallas_tpu.heuristic_forward(inputs, spec, device)
    backward = pallas_tpu.heuristic_backward(inputs, spec, device)
    size = FlashTileSize(backward.q_blocksize, backward.kv_blocksize, backward.blocksize_heads)
    needed = configs.backward_bytes(inputs, size)
    needed += configs.resident_bytes(inputs, size, backward.resident_queries)
    assert forward.q_blocksize % 128 == backward.resident_queries % 128 == 0
    assert needed <= core_of(device).vmem


def test_a_list_that_scalar_memory_cannot_hold_is_refused():
    shape = lambda *x: jax.ShapeDtypeStruct(x, jnp.bfloat16)
    ids = jnp.zeros((64, 65536), jnp.int32)
    array = shape(64, 65536, 8, 128)
    device = Device("tpu", "TPU v5 lite", None, "")
    many = Inputs(array, array, array, mask=Segments(ids, ids))
    assert "scalar memory" in (pallas_tpu.why_not(many, Spec(softmax_scale=1.0), device) or "")
    few = many._replace(mask=Band(None, 0))
    assert pallas_tpu.why_not(few, Spec(softmax_scale=1.0), device) is None
