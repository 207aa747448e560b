"""Flash attention in Triton: right in the interpreter, without register spills when compiled."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.cases import Case
from conformance.oracle import assert_as_good_as_rounding
from evidence import proves
from kernels import static_mask_traces
from kernels.triton_testing import H200, SHARED, compiled, lowered, marked, needs_triton

from ejkernel.cli.oracle import with_gradients
from ejkernel.errors import UnsupportedError
from ejkernel.kernels.common.triton import bridge
from ejkernel.kernels.flash_attention import OP
from ejkernel.kernels.flash_attention import triton as flash_triton
from ejkernel.kernels.flash_attention.config import FlashAttentionConfig
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.triton.operands import (
    FlashKernelArguments,
    kernel_arguments,
)
from ejkernel.kernels.flash_attention.workloads import WORKLOADS
from ejkernel.modules import flash_attention
from ejkernel.ops import executor
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.executor import Request
from ejkernel.ops.platform import Backend, Platform
from ejkernel.types.rules import (
    And,
    Band,
    Blocks,
    Chunks,
    Dense,
    Everything,
    KeyLength,
    Or,
    QueryLength,
    Rule,
    Segments,
    TokenTypes,
)

SOURCE = next(source for source in OP.sources if source.platform is Platform.TRITON)

# Blocks small enough that every workload has several, different for each of the three kernels.
SMALL = FlashAttentionConfig(
    platform="triton",
    fwd_params=FwdParams(q_blocksize=16, kv_blocksize=32),
    bwd_params=BwdParams(q_blocksize=16, kv_blocksize=32, blocksize_m=32, blocksize_n=16),
)


def check(workload, dtype, cfg):
    case = Case(OP, SOURCE, workload)
    call = case.call(dtype)
    proves(OP.name, SOURCE, "forward", "backward")
    run = lambda inputs: executor.run(OP, inputs, call.spec, Request(cfg=cfg))
    outputs, gradients = with_gradients(run)(call.inputs)
    assert outputs.out.dtype == dtype
    assert outputs.lse.dtype == jnp.float32
    assert_as_good_as_rounding(case, dtype, "values", outputs)
    assert_as_good_as_rounding(case, dtype, "gradients", gradients)


@needs_triton
@pytest.mark.parametrize("workload", marked(WORKLOADS, "window_pair", "blind_rows"))
def test_interpreted_it_matches_the_reference(interpreter, workload):
    """Values and gradients; elements that a kernel does not write are NaN."""
    check(workload, jnp.float32, SMALL)


@needs_triton
@pytest.mark.parametrize("workload", marked(WORKLOADS))
def test_half_precision_is_as_good_as_rounding(interpreter, workload):
    check(workload, jnp.float16, SMALL)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", ["all_at_once", "odd_lengths", "one_token", "decode"])
def test_default_tile_shapes(interpreter, name):
    workload = next(w for w in WORKLOADS if w.name == name)
    check(workload, jnp.float32, FlashAttentionConfig(platform="triton"))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("dim", "value_dim"), [(40, 60), (80, 80), (96, 24), (192, 128)])
def test_any_head_dim(interpreter, dim, value_dim):
    inputs = draw(queries=20, keys=40, dim=dim, value_dim=value_dim, mask=Band(None, 20))
    compare(inputs, Spec(softmax_scale=dim**-0.5))


def draw(queries=40, keys=40, dim=16, value_dim=16, heads=2, **fields):
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return Inputs(
        array(2, queries, heads, dim),
        array(2, keys, 1, dim),
        array(2, keys, 1, value_dim),
        **fields,
    )


def run(platform, inputs, spec):
    def both(inputs):
        implementation = {"triton": flash_triton.IMPLEMENTATION}.get(platform) or xla()
        outputs, residuals = implementation.forward(inputs, spec, SMALL.fwd_params, device=H200)
        ones = Outputs(jnp.ones_like(outputs.out), jnp.ones_like(outputs.lse))
        return outputs, implementation.backward(
            inputs, residuals, ones, spec, SMALL.bwd_params, device=H200
        )

    return jax.jit(both)(inputs)


def xla():
    return next(s for s in OP.sources if s.platform is Platform.XLA).load()


def compare(inputs, spec, tolerance=1e-5):
    """Compare with XLA, which the conformance suite compares with the reference."""
    for got, known in zip(
        jax.tree.leaves(run("triton", inputs, spec)),
        jax.tree.leaves(run("xla", inputs, spec)),
        strict=True,
    ):
        np.testing.assert_allclose(got, known, rtol=tolerance, atol=tolerance)


@dataclasses.dataclass(frozen=True, eq=False)
class Contradiction(Rule):
    """A rule whose blocks are all full and whose pairs are all hidden."""

    def sliced(self, q_start, q_len, k_start, k_len):
        return self

    def allowed(self, q_len, kv_len):
        return jnp.zeros((1, 1, 1), bool)

    def block_bounds(self, grid):
        return jnp.ones((1, 1, 1), bool), jnp.ones((1, 1, 1), bool)


@needs_triton
@pytest.mark.slow
def test_full_blocks_run_unmasked(interpreter):
    inputs, spec = draw(queries=64, keys=64), Spec(softmax_scale=0.3)
    plain = run("triton", inputs, spec)
    full = run("triton", inputs._replace(mask=Contradiction()), spec)
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(full), strict=True):
        np.testing.assert_array_equal(one, other)


@needs_triton
@pytest.mark.slow
def test_fully_masked_blocks_are_not_read(interpreter):
    """A NaN in a block that is computed and masked would still reach the output, as 0 * NaN."""
    inputs = draw(queries=64, keys=64, mask=Band(None, -32))
    poisoned = inputs._replace(
        key=inputs.key.at[:, 32:].set(np.nan), value=inputs.value.at[:, 32:].set(np.nan)
    )
    (out, lse), gradients = run("triton", poisoned, Spec(softmax_scale=0.3))
    assert (lse[..., :32] == -np.inf).all()
    assert (out[:, :32] == 0).all()
    assert not any(np.isnan(x).any() for x in jax.tree.leaves((out, lse, gradients)))
    assert (gradients.key[:, 32:] == 0).all()


@needs_triton
@pytest.mark.slow
def test_the_gradient_of_a_shared_bias_is_a_sum(interpreter):
    spec = Spec(softmax_scale=0.3)
    for shape in ((1, 1, 1, 1), (2, 1, 1, 40), (1, 2, 40, 1), (1, 1, 40, 40)):
        bias = jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)
        compare(draw(bias=bias, mask=Band(None, 0)), spec)


RNG = np.random.default_rng(0)
IDS = jnp.asarray(RNG.integers(-1, 3, (2, 50)), jnp.int32)
TYPES = jnp.asarray(RNG.integers(0, 3, (1, 50)), jnp.int32)
COIN = jnp.asarray(RNG.random((2, 3, 50, 50)) < 0.5)
LENGTHS = jnp.array([7, 41], jnp.int32)
RULES = {
    "everything": Everything(),
    "causal": Band(None, 0),
    "window": Band(-9, 3),
    "traced_band": Band(None, LENGTHS) & Band(-LENGTHS, None),
    "traced_window": Band(jnp.array([-9]), jnp.array(3)),
    "positions": Band(-5, 5, IDS[:1] * 7),
    "chunks": Chunks(16, 3, LENGTHS) & Band(None, 0),
    "lengths": KeyLength(LENGTHS) & QueryLength(30),
    "segments": Segments(IDS, IDS) & Band(None, 0),
    "two_matches": Segments(IDS, IDS) & TokenTypes(TYPES, TYPES),
    "union": (Band(None, 0) | TokenTypes(TYPES, TYPES)) & Segments(IDS, IDS) & Band(-20, 20),
    "union_of_unions": (Chunks(5) | Band(0, 1)) & (Chunks(16) | Segments(IDS, IDS)),
    "nothing": Or(()),
    "dense": Dense(COIN) & Band(None, 0),
    "dense_keys": Dense(COIN[:, :1, :1]),
    "dense_twice": Dense(COIN[:1]) & Dense(COIN[:, :1]),
    "dense_or_band": Dense(COIN[:, :1]) | Band(None, 0),
    "blocks": Blocks(COIN[:, :, :7, :6], 8, 10, 3, LENGTHS % 5) & Band(-30, 9),
    "too_many": And(tuple(Chunks(n) | Band(-n, 0) for n in (3, 4, 5))),
}


def arguments_of(rule, by_key_block=False):
    """Kernel arguments of a call of 50 queries and keys under a rule, in blocks of 16 and 8."""
    shape = jax.ShapeDtypeStruct((2, 50, 3, 16), jnp.float32)
    static = []

    def operands(rule):
        inputs = Inputs(shape, shape, shape, mask=rule)
        arguments = kernel_arguments(inputs, Spec(softmax_scale=1.0), 16, 8, by_key_block)
        static.append(arguments.static)
        return arguments.operands

    arrays = jax.jit(operands)(rule)
    return FlashKernelArguments(static[0], arrays)


def evaluated_mask(arguments):
    """The mask of kernel arguments, [b, n, t, s], by the formulas of the kernels in NumPy."""
    static, arrays = arguments
    q_mask, k_mask, dense_mask = (np.asarray(x) for x in arrays[:3])
    batch, heads, t, s = 2, 3, static.q_len, static.kv_len
    visible = np.ones((batch, heads, t, s), bool)
    for b in range(batch):
        q_rows = q_mask[b if static.mask_batched else 0]
        k_rows = k_mask[b if static.mask_batched else 0]
        any_allowed = np.zeros((t, s), bool)
        for conjunction in range(static.conjunctions):
            first = conjunction * (static.has_low + static.has_high + static.id_pairs)
            allowed = np.ones((t, s), bool)
            if static.has_low:
                allowed &= np.arange(s) >= q_rows[first][:, None]
            if static.has_high:
                allowed &= np.arange(s) <= q_rows[first + static.has_low][:, None]
            for pair in range(static.id_pairs):
                q_id = q_rows[first + static.has_low + static.has_high + pair]
                allowed &= q_id[:, None] == k_rows[conjunction * static.id_pairs + pair]
            any_allowed |= allowed
        if static.conjunctions:
            visible[b] &= any_allowed
        for n in range(heads):
            if not static.dense_mask:
                continue
            dense = dense_mask[
                b if static.dense_mask_batched else 0, n if static.dense_mask_heads > 1 else 0
            ]
            if static.dense_mask_blocks:
                dense = dense[q_rows[-1][:, None], k_rows[-1][None, :]]
            visible[b, n] &= np.broadcast_to(dense != 0, (t, s))
    return visible


@pytest.mark.parametrize("name", RULES)
def test_mask_operands_give_the_mask(name):
    rule = RULES[name]
    arguments = arguments_of(rule)
    truth = np.broadcast_to(rule.dense(50, 50), (2, 3, 50, 50))
    np.testing.assert_array_equal(evaluated_mask(arguments), truth)


def visited(arguments, b, n, block):
    """The full and the partial blocks that are visited, by the formulas of the kernels."""
    static, arrays = arguments
    b, n = b if static.block_map_batched else 0, n if static.block_map_heads else 0
    first, full_first, full_end, end = np.asarray(arrays.block_bounds)[b, n, block]
    if static.block_lists:
        index = list(np.asarray(arrays.block_index)[b, n, block])
        return index[:full_end], index[full_end:end]
    return list(range(full_first, full_end)), [*range(first, full_first), *range(full_end, end)]


@pytest.mark.parametrize("by_key_block", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_visible_blocks_are_visited_and_partially_visible_ones_masked(name, by_key_block):
    rule = RULES[name]
    arguments = arguments_of(rule, by_key_block)
    truth = np.broadcast_to(rule.dense(50, 50), (2, 3, 50, 50))
    blocks, others = arguments.static.q_blocks, arguments.static.k_blocks
    if by_key_block:
        truth, blocks, others = truth.swapaxes(2, 3), others, blocks
    sizes = (8, 16) if by_key_block else (16, 8)
    for b in range(2):
        for n in range(3):
            for block in range(blocks):
                full, partial = visited(arguments, b, n, block)
                assert len({*full, *partial}) == len(full) + len(partial)
                for other in range(others):
                    at = block * sizes[0], other * sizes[1]
                    tile = truth[b, n, at[0] : at[0] + sizes[0], at[1] : at[1] + sizes[1]]
                    assert tile.all() or other not in full
                    assert not tile.any() or other in full or other in partial
                    assert at[1] + sizes[1] <= 50 or other not in full, "no guard at the edge"


def test_a_causal_mask_has_one_range_of_full_blocks_and_few_partial_ones():
    shape = jax.ShapeDtypeStruct((1, 1024, 2, 16), jnp.float32)
    inputs = Inputs(shape, shape, shape, mask=Band(None, 0))
    arguments = kernel_arguments(inputs, Spec(softmax_scale=1.0), 128, 64)
    assert [tuple(map(len, visited(arguments, 0, 0, i))) for i in range(8)] == [
        (2 * i, 2) for i in range(8)
    ]


def test_a_mask_without_arrays_costs_nothing_at_run_time():
    """Its block map and mask operands are constants of the program."""
    shape = jax.ShapeDtypeStruct((1, 512, 2, 16), jnp.float32)

    def operands(query):
        inputs = Inputs(query, query, query, mask=Band(-100, 0))
        return kernel_arguments(inputs, Spec(softmax_scale=1.0), 64, 64).operands

    assert {eqn.primitive.name for eqn in jax.make_jaxpr(operands)(shape).eqns} <= {
        "broadcast_in_dim"
    }


def refusal(dtype="float16", device=H200, dim=64, **dtypes):
    shape = lambda name: jax.ShapeDtypeStruct((1, 8, 2, dim), dtypes.get(name, dtype))
    inputs = Inputs(shape("query"), shape("key"), shape("value"))
    return flash_triton.why_not(inputs, Spec(softmax_scale=1.0), device)


def test_unsupported_calls_are_refused_with_a_reason():
    old = H200._replace(compute_capability=(7, 5))
    other = H200._replace(kind="gfx942", compute_capability=None)
    assert refusal("float64") == "takes bfloat16, float16, float32 and no float64"
    assert refusal(key="float32") == "takes query, key and value of one dtype"
    assert refusal(dim=300) == "takes head dims up to 256 and this one is 300"
    if importlib.util.find_spec("jax_triton") is None:
        assert "is not installed" in str(refusal())
    else:
        assert refusal() is None
        assert "8.0 or higher and the device has 7.5" in str(refusal(device=old))
        assert "needs an NVIDIA GPU" in str(refusal(device=other))


def test_on_a_cpu_the_error_names_the_platform():
    x = jnp.ones((1, 8, 2, 16))
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(UnsupportedError, match="platform='triton' does not support this call"):
        flash_attention(x, x, x, platform="triton")
    assert SOURCE.backend is Backend.GPU


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_heuristic_choices_compile_without_register_spills(capability):
    proves(OP.name, SOURCE, "forward", "backward", compiled_for=f"sm_{capability}")
    kernels = compiled("triton_compile.py", capability, "causal_128_2048", guess=True)
    assert {kernel["kernel"] for kernel in kernels} == {
        "forward_kernel",
        "dkdv_kernel",
        "dq_kernel",
    }
    assert capability != 90 or all(kernel["wgmma"] for kernel in kernels)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    "what", ["full", "causal", "decode", "packed", "capped", "everything", "exact"]
)
@pytest.mark.parametrize("capability", SHARED)
def test_no_candidate_spills_registers(capability, what, dim):
    """Lengths that are multiples of the blocks and others; every candidate of the tuner."""
    compiled("triton_compile.py", capability, f"{what}_{dim}_2000", f"{what}_{dim}_2048")


@needs_triton
@pytest.mark.slow
def test_it_lowers_for_an_absent_gpu():
    """A machine with the CUDA plugin and no GPU lowers a program for an H200."""
    assert lowered("triton_lower.py") == ["1", "3"]


@pytest.mark.parametrize("name", static_mask_traces.MASKS)
def test_tracing_with_a_static_mask_compiles_nothing(name, compilations):
    with bridge.recorded_launches():
        static_mask_traces.trace(flash_triton.IMPLEMENTATION, static_mask_traces.MASKS[name])
    assert not compilations
