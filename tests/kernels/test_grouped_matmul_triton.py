"""Grouped matmul in Triton: interpreted it computes what is defined, compiled it fits the chip."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.cases import Case
from conformance.oracle import assert_as_good_as_rounding
from evidence import proves
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kernels.triton_testing import H200, SHARED, compiled, lowered, marked, needs_triton

from ejkernel.cli.oracle import with_gradients
from ejkernel.errors import UnsupportedError
from ejkernel.kernels.grouped_matmul import OP, triton
from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.inputs import Inputs, Spec
from ejkernel.kernels.grouped_matmul.triton.operands import group_offsets, max_tiles, tile_list
from ejkernel.kernels.grouped_matmul.workloads import WORKLOADS
from ejkernel.modules import grouped_matmul
from ejkernel.ops import executor
from ejkernel.ops.executor import Request
from ejkernel.ops.platform import Backend, Platform

SOURCE = next(source for source in OP.sources if source.platform is Platform.TRITON)

# Tiles small enough that a group has several, and a band of them is not all there is.
SMALL = GroupedMatmulConfig(platform="triton", block_m=16, block_n=16, block_k=16)


def check(workload, dtype, cfg):
    case = Case(OP, SOURCE, workload)
    call = case.call(dtype)
    proves(OP.name, SOURCE, "forward", "backward")
    run = lambda inputs: executor.run(OP, inputs, call.spec, Request(cfg=cfg))
    outputs, gradients = with_gradients(run)(call.inputs)
    assert outputs.out.dtype == call.spec.output_dtype(call.inputs)
    assert_as_good_as_rounding(case, dtype, "values", outputs)
    assert_as_good_as_rounding(case, dtype, "gradients", gradients)


@needs_triton
@pytest.mark.parametrize(
    "workload", marked(WORKLOADS, "ids", "rows_past_the_sum", "transposed", "existing_sizes")
)
def test_interpreted_it_computes_what_is_defined(interpreter, workload):
    """Values and gradients; what a kernel leaves unwritten would be NaN."""
    check(workload, jnp.float32, SMALL)


@needs_triton
@pytest.mark.parametrize("workload", marked(WORKLOADS, "offset_array"))
def test_half_precision_is_as_good_as_rounding(interpreter, workload):
    check(workload, jnp.float16, SMALL)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ids", "sizes", "one_row"])
def test_tiles_of_the_usual_size(interpreter, name):
    workload = next(w for w in WORKLOADS if w.name == name)
    check(workload, jnp.float32, GroupedMatmulConfig(platform="triton"))


@functools.partial(jax.jit, static_argnames=("rows", "weights", "block"))
def listed(sizes, ids, offset, rows, weights, block):
    """The tiles of a call of so many rows and weights, and the row at each sorted position."""
    groups = offset + jnp.arange(weights, dtype=jnp.int32)
    inputs = Inputs(jnp.zeros((rows, 5)), jnp.zeros((weights, 5, 3)), ids, sizes, groups)
    groups = group_offsets(inputs, ())
    order = jnp.arange(rows) if groups.order is None else groups.order
    return tile_list(groups.offsets, block, max_tiles(rows, weights, block)), order


def covered(*call, rows=256, weights=4, block=16):
    """The weight of each row as the tiles say, and how many tiles have rows."""
    tiles, order = map(np.asarray, listed(*call, rows, weights, block))
    found = np.full(rows, -2)
    busy = [bool(end > start) for _, start, end in tiles.T]
    for weight, start, end in tiles.T:
        assert end - start <= block
        assert (found[order[start:end]] == -2).all(), "a row in two tiles"
        found[order[start:end]] = weight
    assert busy == sorted(busy, reverse=True), "tiles without rows come last"
    return found, sum(busy)


@hypothesis_settings(deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 42]), min_size=6, max_size=6),
    offset=st.integers(0, 4),
    block=st.sampled_from([16, 32]),
)
def test_every_row_is_in_one_tile_of_its_weight(sizes, offset, block):
    """Of six groups four have a weight here, or fewer; no tile is half empty without need."""
    groups = np.full(256, -1)
    groups[: sum(sizes)] = np.repeat(np.arange(6), sizes)
    here = (groups >= offset) & (groups < offset + 4)
    offset = np.int32(offset)
    found, tiles = covered(np.array(sizes, np.int32), None, offset, block=block)
    np.testing.assert_array_equal(found, np.where(here, groups - offset, -1))
    ends = np.cumsum([0, *sizes, 0, 0, 0, 0])[offset : offset + 5]
    pieces = np.diff([0, *ends, 256])
    assert tiles == sum(-(-pieces // block))

    ids = np.random.default_rng(0).permutation(groups).astype(np.int32)
    here = (ids >= offset) & (ids < offset + 4)
    found, _ = covered(None, ids, offset, block=block)
    np.testing.assert_array_equal(found, np.where(here, ids - offset, -1))


def test_the_most_tiles_there_can_be():
    """Every group one row past a full tile, and rows before and after that have no weight."""
    sizes = np.array([1, 17, 17, 17, 17, 1], np.int32)
    _, tiles = covered(sizes, None, np.int32(1), rows=70)
    assert tiles == 10 == max_tiles(70, 4, 16)


@needs_triton
def test_rows_of_no_group_are_not_read(interpreter):
    """A NaN there would reach the gradient of a weight, as 0 * NaN."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((40, 24)).astype(np.float32)
    rows[25:] = np.nan
    weights = jnp.asarray(rng.standard_normal((3, 24, 40)), jnp.float32)
    sizes = jnp.array([7, 0, 18])

    def total(rows, weights):
        out = grouped_matmul(rows, weights, group_sizes=sizes, cfg=SMALL)
        return out.sum(), out

    gradients, out = jax.grad(total, (0, 1), has_aux=True)(jnp.asarray(rows), weights)
    assert (out[25:] == 0).all()
    assert (gradients[0][25:] == 0).all()
    assert (gradients[1][1] == 0).all()
    assert not any(np.isnan(x).any() for x in (out, *gradients))
    want = np.concatenate([rows[:7] @ weights[0], rows[7:25] @ weights[2]])
    np.testing.assert_allclose(out[:25], want, rtol=1e-5, atol=1e-5)


@needs_triton
def test_calls_joined_by_vmap_are_one_launch(interpreter):
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.integers(-3, 4, (2, 20, 24)), jnp.float32)
    weights = jnp.asarray(rng.integers(-3, 4, (3, 24, 16)), jnp.float32)
    ids = jnp.asarray(rng.integers(-1, 4, (2, 20)), jnp.int32)
    run = lambda rows, ids: grouped_matmul(rows, weights, ids, cfg=SMALL)
    together = jax.vmap(run)(rows, ids)
    np.testing.assert_array_equal(together, [run(*one) for one in zip(rows, ids, strict=True)])


def refusal(dtype="float16", device=H200, weights=None, spec=None):
    shape = jax.ShapeDtypeStruct
    inputs = Inputs(shape((8, 16), dtype), shape((2, 16, 16), weights or dtype))
    return triton.why_not(inputs, spec or Spec(), device)


def test_it_says_what_it_cannot_do():
    old = H200._replace(compute_capability=(7, 5))
    other = H200._replace(kind="gfx942", compute_capability=None)
    assert refusal("float64") == "takes bfloat16, float16, float32 and no float64"
    assert refusal(spec=Spec(preferred_element_type="float8_e4m3fn")) == (
        "takes bfloat16, float16, float32 and no float8_e4m3fn"
    )
    assert refusal(weights="float32") == "takes inputs and weights of one dtype"
    if importlib.util.find_spec("jax_triton") is None:
        assert "is not installed" in str(refusal())
    else:
        assert refusal() is None
        assert "8.0 or higher and the device has 7.5" in str(refusal(device=old))
        assert "needs an NVIDIA GPU" in str(refusal(device=other))


def test_on_a_cpu_it_is_refused_in_words():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    rows, weights = jnp.ones((8, 16)), jnp.ones((2, 16, 16))
    with pytest.raises(UnsupportedError, match="platform='triton' does not support this call"):
        grouped_matmul(rows, weights, group_sizes=jnp.array([4, 4]), platform="triton")
    assert SOURCE.backend is Backend.GPU


CALLS = [
    "half_sizes_4096_4096_14336",
    "half_sizes_128_2048_1400_t",
    "half_ids_4096_2000_1400",
    "half_sizes_16_1000_1000_t",
    "half_ids_16_4096_2048",
    "half_sizes_32_2048_2048",
    "half_ids_64_2048_1408_t",
    "half_ids_64_2000_1400",
    "exact_sizes_512_512_512",
    "exact_ids_8_500_500_t",
]


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_first_choices_compile_without_local_memory(capability):
    calls = ("half_sizes_4096_4096_14336", "half_ids_64_2048_1408_t")
    proves(OP.name, SOURCE, "forward", "backward", compiled_for=f"sm_{capability}")
    kernels = compiled("grouped_matmul_compile.py", capability, *calls, guess=True)
    assert {kernel["kernel"] for kernel in kernels} == {"gmm_kernel", "tgmm_kernel"}
    assert capability != 90 or all(k["wgmma"] for k in kernels if k["call"] == calls[0])


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("capability", SHARED)
def test_no_candidate_uses_local_memory(capability, name):
    """All that the tuner may choose, where blocks cut the matrices evenly and where not."""
    compiled("grouped_matmul_compile.py", capability, name)


@needs_triton
@pytest.mark.slow
def test_it_lowers_for_a_gpu_that_is_not_here():
    """A program for an H200 is made on any machine that has the plugin's code."""
    assert lowered("grouped_matmul_lower.py") == ["1", "2"]
