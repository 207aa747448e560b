"""The TPU kernels of grouped matmul: tiles of every state, their schedule, blocks that fit."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import examples

from ejkernel import settings
from ejkernel.cli.oracle import Truth, with_dtype, with_gradients
from ejkernel.kernels.common.mosaic_tpu.memory import core_of
from ejkernel.kernels.grouped_matmul import pallas_tpu
from ejkernel.kernels.grouped_matmul.inputs import Inputs, Spec
from ejkernel.kernels.grouped_matmul.layout import GroupLayout
from ejkernel.kernels.grouped_matmul.pallas_tpu import configs, schedule
from ejkernel.modules import GroupedMatmulConfig, grouped_matmul
from ejkernel.ops import default_executor, executor
from ejkernel.ops.executor import Request
from ejkernel.ops.platform import Device
from ejkernel.ops.workload import Workload, normal, value
from ejkernel.types.block_map import EMPTY, FULL, PARTIAL

SMALL = GroupedMatmulConfig(block_m=128, block_n=128, block_k=128)
WHOLE = GroupedMatmulConfig(block_m=128, block_n=256, block_k=4096)


def matmul(rows, k, n, *sizes, weights=None, **static):
    matrix = (n, k) if static.get("transpose_rhs") else (k, n)
    return static | {
        "inputs": normal(rows, k),
        "weights": normal(weights or len(sizes), *matrix, scale=k**-0.5),
        "group_sizes": value(lambda: jnp.array(sizes, jnp.int32)),
    }


CALLS = (
    ("whole_tiles", matmul(384, 256, 256, 256, 0, 128), SMALL),
    ("ragged", matmul(390, 300, 270, 130, 0, 200, 1, 20), SMALL),
    ("transposed", matmul(390, 270, 300, 130, 1, 128, transpose_rhs=True), SMALL),
    ("wider", matmul(300, 140, 200, 256, 30, preferred_element_type=jnp.float32), SMALL),
    ("deep", matmul(300, 1100, 130, 140, 100), WHOLE),
    (
        "others_before_and_behind",
        matmul(700, 130, 130, 200, 150, 40, 250, weights=2, group_offset=1),
        SMALL,
    ),
)


@pytest.mark.tpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("arguments", "cfg"), [x[1:] for x in CALLS], ids=[x[0] for x in CALLS])
def test_many_tiles_give_what_the_reference_defines(arguments, cfg, dtype):
    workload = Workload("call", arguments)
    call = lambda seed: default_executor().invocation(grouped_matmul, **workload.build(seed))
    mine = call(0)
    run = lambda x: executor.run(mine.op, x, mine.spec, Request(platform="pallas", cfg=cfg))
    with settings.override(interpret=jax.default_backend() != "tpu"):
        outputs, gradients = jax.jit(with_gradients(run))(with_dtype(mine.inputs, dtype))
    truth = Truth(call)
    for deviation in (*truth.of_values(outputs, dtype), *truth.of_gradients(gradients, dtype)):
        assert deviation.fine, deviation


@pytest.mark.tpu
def test_nan_where_no_group_looks_never_leaks():
    """In rows past the last group, in weights without rows, and past the end of a sum over k."""
    sizes = jnp.array([140, 0, 20])
    x = jnp.ones((300, 200)).at[160:].set(jnp.nan)
    w = jnp.ones((3, 200, 130)).at[1].set(jnp.nan)
    call = lambda x, w: grouped_matmul(x, w, group_sizes=sizes, platform="pallas", cfg=SMALL)
    with settings.override(interpret=jax.default_backend() != "tpu"):
        out, pull_back = jax.vjp(call, x, w)
        d_x, d_w = pull_back(jnp.ones_like(out))
    assert (out[:160] == 200).all()
    assert not out[160:].any()
    assert (d_x[:160] == 130).all()
    assert not d_x[160:].any()
    assert d_w[:, 0, 0].tolist() == [140, 0, 20]


def steps(starts, ends, rows, block, **options):
    layout = GroupLayout(jnp.array(starts), jnp.array(ends), None, None)
    listed = schedule.schedule_rows(layout, rows, block, **options)
    count = int(listed.count)
    assert count <= listed.tile.shape[0]
    index = jnp.arange(count)
    read = (schedule.weight_of, schedule.state_of, schedule.is_first, schedule.is_last)
    flags = [np.asarray(of(listed.packed, index)) for of in read]
    return np.asarray(listed.tile[:count]), *flags, np.asarray(listed.source[:count])


def states(starts, ends, block):
    """Every pair of a tile and a weight that meet."""
    return {
        (tile, weight): FULL if start <= tile * block and (tile + 1) * block <= end else PARTIAL
        for weight, (start, end) in enumerate(zip(starts, ends, strict=True))
        for tile in range(start // block, -(-end // block))
        if start < end
    }


@examples(40)
@hypothesis.given(
    cuts=st.lists(st.integers(0, 40), min_size=5, max_size=5), by_weight=st.booleans()
)
def test_the_list_holds_every_pair_once_and_nothing_else(cuts, by_weight):
    cuts = sorted(cuts)
    starts, ends = cuts[:-1], cuts[1:]
    tile, weight, state, first, last, source = steps(starts, ends, 40, 8, by_weight=by_weight)
    some = state != EMPTY
    listed = {(t, w): s for t, w, s in np.stack([tile, weight, state], 1)[some].tolist()}
    assert listed == states(starts, ends, 8)
    assert len(listed) == some.sum()
    mine, others = (weight, range(4)) if by_weight else (tile, range(5))
    assert (np.diff(mine) >= 0).all()
    assert set(mine.tolist()) == set(others)
    assert mine[first].tolist() == mine[last].tolist() == list(others)
    assert (source[some] == tile[some]).all()
    assert not source[~some].any()


def test_ranges_that_contradict_each_other_still_follow_each_other():
    tile, weight, *_ = steps([0, -5, 5, 30], [20, 5, 90, 7], 40, 8)
    listed = list(zip(tile.tolist(), weight.tolist(), strict=True))
    assert len(set(listed)) == len(listed)
    assert set(tile.tolist()) == set(range(5))


KINDS = ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("rows", "k", "n", "groups"),
    [(8192, 4096, 14336, 8), (8192, 14336, 4096, 8), (32768, 7168, 2048, 256), (5, 9999, 777, 3)],
)
def test_default_blocks_fit(kind, dtype, rows, k, n, groups):
    device, spec = Device("tpu", kind, None, kind), Spec()
    shape = lambda *x: jax.ShapeDtypeStruct(x, dtype)
    inputs = Inputs(shape(rows, k), shape(groups, k, n))
    forward = pallas_tpu.heuristic_forward(inputs, spec, device)
    tiles = configs.forward_tiles(forward, inputs, spec)
    assert tiles[:3] == (forward.block_m, forward.block_n, forward.block_k)
    assert tiles.vmem_bytes < core_of(device).vmem
    backward = pallas_tpu.heuristic_backward(inputs, spec, device)
    _, weight_tiles = configs.backward_tiles(backward, inputs, spec, device)
    assert weight_tiles.vmem_bytes < core_of(device).vmem


def test_a_weight_is_read_once_where_all_of_its_depth_fits():
    shape = lambda *x: jax.ShapeDtypeStruct(x, jnp.bfloat16)
    inputs = Inputs(shape(32768, 7168), shape(256, 7168, 2048))
    device = Device("tpu", "TPU v5 lite", None, "")
    assert pallas_tpu.heuristic_forward(inputs, Spec(), device).block_k == 7168


def test_lists_that_scalar_memory_cannot_hold_are_refused():
    shape = lambda *x: jax.ShapeDtypeStruct(x, jnp.bfloat16)
    device = Device("tpu", "TPU v5 lite", None, "")
    many = Inputs(shape(512, 128), shape(65536, 128, 128))
    assert "scalar memory" in (pallas_tpu.why_not(many, Spec(), device) or "")
    few = Inputs(shape(1 << 20, 128), shape(1024, 128, 128))
    assert pallas_tpu.why_not(few, Spec(), device) is None


def test_other_dtypes_are_refused():
    shape = lambda *x: jax.ShapeDtypeStruct(x, jnp.float16)
    device = Device("tpu", "TPU v5 lite", None, "")
    refusal = pallas_tpu.why_not(Inputs(shape(8, 128), shape(2, 128, 128)), Spec(), device)
    assert refusal == "needs float32 or bfloat16 alone, got float16"
