"""A ring whose hops are Triton kernels, interpreted, computes what one device does on the whole."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.cases import Case
from conformance.oracle import assert_as_good_as_rounding
from evidence import proves
from jax.sharding import Mesh
from kernels.triton_testing import marked, needs_triton
from tiers import quick

from ejkernel.cli.oracle import with_gradients
from ejkernel.kernels.ring_attention import OP
from ejkernel.kernels.ring_attention.config import RingAttentionConfig
from ejkernel.kernels.ring_attention.workloads import WORKLOADS
from ejkernel.modules import flash_attention, ring_attention
from ejkernel.ops import executor
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.executor import Request
from ejkernel.ops.platform import Platform
from ejkernel.parallel import permute_sequence, restore_sequence
from ejkernel.types import MaskInfo
from ejkernel.types.placement import PLACEMENTS

pytestmark = needs_triton

SOURCE = next(source for source in OP.sources if source.platform is Platform.TRITON)
SMALL = RingAttentionConfig(
    platform="triton",
    fwd_params=FwdParams(q_blocksize=16, kv_blocksize=32),
    bwd_params=BwdParams(q_blocksize=16, kv_blocksize=32, blocksize_m=32, blocksize_n=16),
)
LENGTH = 64
IDS = np.repeat(np.arange(4), (20, 7, 30, 7))[None]
CALLS = {
    "causal_sinks": {"causal": True, "softmax_aux": jnp.ones((2, 2))},
    "segments_cap": {"mask_info": MaskInfo.from_segments(IDS), "logits_soft_cap": 2.0},
    "dropout": {"causal": True, "dropout_prob": 0.3, "dropout_seed": 5},
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("workload", marked(WORKLOADS, "window"))
def test_one_device_matches_the_reference(interpreter, workload, dtype):
    case = Case(OP, SOURCE, workload)
    call = case.call(dtype)
    proves(OP.name, SOURCE, "forward", "backward")
    run = lambda inputs: executor.run(OP, inputs, call.spec, Request(cfg=SMALL))
    outputs, gradients = with_gradients(run)(call.inputs)
    assert_as_good_as_rounding(case, dtype, "values", outputs)
    assert_as_good_as_rounding(case, dtype, "gradients", gradients)


def both(function, arrays, dtype):
    """Output and gradients, along a direction that is the same for all."""

    def loss(arrays):
        out = function(*(x.astype(dtype) for x in arrays)).astype(jnp.float32)
        return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

    (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
    return [out, *gradients]


@pytest.mark.parametrize(
    "case",
    quick(
        itertools.product(CALLS, PLACEMENTS, ("float32", "float16")),
        ("causal_sinks", "contiguous", "float16"),
        ("segments_cap", "zigzag", "float32"),
        ("dropout", "striped", "float32"),
    ),
    ids="-".join,
)
def test_hops_are_added_in_float32(interpreter, case):
    """In float16, parts in float32 leave no more error than flash attention has in one piece."""
    name, placement, dtype = case
    mesh = Mesh(np.array(jax.devices()[:2]), ("sp",))
    order = {"shards": 2, "placement": placement}
    draw = lambda i, n: jax.random.normal(jax.random.key(i), (1, LENGTH, n, 16))
    arrays = (draw(0, 2), draw(1, 1), draw(2, 1))

    def ring(*x):
        placed = (permute_sequence(y, **order) for y in x)
        out = ring_attention(
            *placed, **CALLS[name], axis_name="sp", mesh=mesh, placement=placement,
            method="ring", cfg=SMALL,
        )  # fmt: skip
        return restore_sequence(out, **order)

    flash = lambda *x: flash_attention(*x, **CALLS[name], platform="xla")
    exact, rounded = (both(flash, arrays, x) for x in ("float32", dtype))
    actual = jax.jit(lambda x: both(ring, x, dtype))(arrays)
    for got, one_piece, truth in zip(actual, rounded, exact, strict=True):
        error, unavoidable = (float(jnp.abs(x - truth).max()) for x in (got, one_piece))
        assert error <= 2 * unavoidable + 2e-5 * float(jnp.abs(truth).max())
