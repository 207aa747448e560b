"""Mean pooling in Triton: interpreted it computes what is defined, compiled it fits the chip."""

import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.cases import Case
from conformance.oracle import assert_as_good_as_rounding
from evidence import proves
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from kernels.triton_testing import H200, compiled, lowered, marked, needs_triton
from tiers import examples

from ejkernel.cli.oracle import with_gradients
from ejkernel.errors import UnsupportedError
from ejkernel.kernels.mean_pooling import OP, triton
from ejkernel.kernels.mean_pooling.config import MeanPoolingConfig
from ejkernel.kernels.mean_pooling.inputs import Inputs, Spec
from ejkernel.kernels.mean_pooling.triton import configs
from ejkernel.kernels.mean_pooling.triton.kernels import PoolingStatic
from ejkernel.kernels.mean_pooling.workloads import WORKLOADS
from ejkernel.modules import mean_pooling
from ejkernel.ops import executor
from ejkernel.ops.executor import Request
from ejkernel.ops.platform import Backend, Platform

SOURCE = next(source for source in OP.sources if source.platform is Platform.TRITON)

# Blocks so small that every row has several, of tokens and of columns.
SMALL = MeanPoolingConfig(platform="triton", block_tokens=16, block_dim=16)


def check(workload, dtype, cfg):
    case = Case(OP, SOURCE, workload)
    call = case.call(dtype)
    proves(OP.name, SOURCE, "forward", "backward")
    run = lambda inputs: executor.run(OP, inputs, call.spec, Request(cfg=cfg))
    outputs, gradients = with_gradients(run)(call.inputs)
    assert outputs.out.dtype == dtype
    assert_as_good_as_rounding(case, dtype, "values", outputs)
    assert_as_good_as_rounding(case, dtype, "gradients", gradients)


@needs_triton
@pytest.mark.parametrize("workload", marked(WORKLOADS, "mask", "packed", "packed_past_the_end"))
def test_interpreted_it_computes_what_is_defined(interpreter, workload):
    """Values and gradients; what a kernel leaves unwritten would be NaN."""
    check(workload, jnp.float32, SMALL)


@needs_triton
@pytest.mark.parametrize("workload", marked(WORKLOADS, "plain", "packed"))
def test_half_precision_is_as_good_as_rounding(interpreter, workload):
    check(workload, jnp.float16, SMALL)


@needs_triton
@pytest.mark.parametrize("workload", marked(WORKLOADS, "padding"))
def test_one_program_may_have_a_whole_row(interpreter, workload):
    check(workload, jnp.float32, MeanPoolingConfig(platform="triton", block_tokens=128))


@needs_triton
@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 40), min_size=5, max_size=5))
def test_packed_is_a_loop_over_the_sequences(interpreter, cuts):
    """Sequences that are empty, that share a block of tokens, that have several; and none."""
    cuts = [*sorted(cuts)]
    x = np.random.default_rng(0).standard_normal((40, 24)).astype(np.float32)
    along = np.random.default_rng(1).standard_normal((4, 24)).astype(np.float32)
    pool = jax.jit(lambda x, ends: mean_pooling(x, cu_seqlens=ends, cfg=SMALL))
    out, pull_back = jax.vjp(lambda x: pool(x, jnp.array(cuts)), jnp.asarray(x))
    means, expected = np.zeros((4, 24)), np.zeros((40, 24))
    for i, (start, end) in enumerate(itertools.pairwise(cuts)):
        if end > start:
            means[i] = x[start:end].mean(0)
            expected[start:end] = along[i] / (end - start)
    np.testing.assert_allclose(out, means, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pull_back(jnp.asarray(along))[0], expected, rtol=1e-6)


@needs_triton
def test_more_sequences_than_are_compared_at_once(interpreter):
    """The search has two levels from 128 boundaries on."""
    lengths = np.random.default_rng(0).integers(0, 3, 130)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    assert PoolingStatic(1, 1, 130, 1, 1, 1).search_levels == 2
    x = np.random.default_rng(1).standard_normal((ends[-1] + 5, 16)).astype(np.float32)
    out = mean_pooling(x, cu_seqlens=jnp.asarray(ends), cfg=SMALL)
    want = [x[a:b].mean(0) if b > a else np.zeros(16) for a, b in itertools.pairwise(ends)]
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


@needs_triton
def test_invalid_tokens_are_not_read(interpreter):
    x = jnp.ones((2, 40, 24)).at[:, 30:].set(jnp.nan)
    mask = jnp.ones((2, 40), bool).at[:, 30:].set(False)
    out, pull_back = jax.vjp(lambda x: mean_pooling(x, mask, cfg=SMALL), x)
    assert (out == 1).all()
    assert (pull_back(out)[0] == jnp.where(mask[..., None], 1 / 30, 0)).all()
    ends = jnp.array([0, 7, 30])
    assert (mean_pooling(x[0], cu_seqlens=ends, cfg=SMALL) == 1).all()


@needs_triton
def test_boundaries_past_the_tokens_stay_inside(interpreter):
    run = jax.jit(lambda x, ends: mean_pooling(x, cu_seqlens=ends, cfg=SMALL))
    ends = jnp.array([0, 12, 900])
    assert (run(jnp.ones((20, 8)), ends) == 1).all()
    gradient = jax.grad(lambda x: run(x, ends).sum())(jnp.ones((20, 8)))
    np.testing.assert_allclose(gradient[:, 0], [1 / 12] * 12 + [1 / 8] * 8)


@needs_triton
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_mapped_calls_are_one_launch(interpreter, axes):
    x = jax.random.normal(jax.random.key(3), (3, 20, 8))
    ends = jnp.sort(jax.random.randint(jax.random.key(4), (3, 4), 0, 20)).at[:, 0].set(0)
    arguments = [v if axis == 0 else v[0] for v, axis in zip((x, ends), axes, strict=True)]
    call = lambda x, ends: mean_pooling(x, cu_seqlens=ends, cfg=SMALL)
    gradient = jax.grad(lambda x, ends: (call(x, ends) ** 2).sum())
    for function in (call, gradient):
        together = jax.vmap(function, axes)(*arguments)
        one = [v[2] if axis == 0 else v for v, axis in zip(arguments, axes, strict=True)]
        np.testing.assert_allclose(together[2], function(*one), rtol=1e-6)


@needs_triton
def test_a_jacobian_has_cotangents_of_its_own(interpreter):
    """Only the gradients of the outputs are mapped."""
    x, ends = jnp.ones((20, 2)), jnp.array([0, 5, 20])
    jacobian = jax.jacrev(lambda x: mean_pooling(x, cu_seqlens=ends, cfg=SMALL))(x)
    np.testing.assert_allclose(
        jacobian[:, 0, :, 0], [[0.2] * 5 + [0] * 15, [0] * 5 + [1 / 15] * 15]
    )


def test_the_forward_divides_rows_only_where_they_do_not_fill_the_gpu():
    """8 rows of 4096 x 4096 numbers are read whole, in cache lines; one row is read in parts."""
    blocks = lambda *shape, **packed: configs.heuristic_forward(
        Inputs(jax.ShapeDtypeStruct(shape, jnp.bfloat16), **packed), Spec(), H200
    )
    assert (blocks(8, 4096, 4096).block_tokens, blocks(8, 4096, 4096).block_dim) == (4096, 64)
    assert (blocks(64, 512, 768).block_tokens, blocks(64, 512, 768).block_dim) == (512, 64)
    assert (blocks(1, 4096, 4096).block_tokens, blocks(1, 4096, 4096).block_dim) == (32, 512)
    ends = jax.ShapeDtypeStruct((9,), jnp.int32)
    packed = blocks(32768, 4096, cu_seqlens=ends)
    assert (packed.block_tokens, packed.block_dim) == (128, 512)


def refusal(dtype, device=H200):
    return triton.why_not(Inputs(jax.ShapeDtypeStruct((2, 8, 16), dtype)), Spec(), device)


def test_configurations_that_name_tokens_block_size_still_load():
    """Only those of Triton: on XLA it is another number of tokens."""
    read = MeanPoolingConfig.from_dict
    assert read({"platform": "triton", "block_size": 16}) == MeanPoolingConfig(
        platform="triton", block_tokens=16
    )
    assert read({"platform": "xla", "block_size": 16}).block_size == 16
    assert read(SMALL.to_dict()) == SMALL


def test_it_says_what_it_cannot_do():
    assert refusal("float64") == "takes bfloat16, float16, float32 and no float64"
    if importlib.util.find_spec("jax_triton") is None:
        assert "is not installed" in str(refusal("float16"))
    else:
        assert refusal("float16") is None
        old = H200._replace(compute_capability=(7, 5))
        assert "8.0 or higher and the device has 7.5" in str(refusal("float16", old))


def test_on_a_cpu_it_is_refused_in_words():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(UnsupportedError, match="platform='triton' does not support this call"):
        mean_pooling(jnp.ones((2, 8, 16)), platform="triton")
    assert SOURCE.backend is Backend.GPU


CALLS = [
    "padded_8_4096_4096",
    "mask_8_4096_4096",
    "packed_32768_4096",
    "mask_2_500_1000",
    "packed_4096_1000",
    "exact_4096_768",
    "odd_2000_77",
]


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_first_choices_compile_without_local_memory(capability):
    proves(OP.name, SOURCE, "forward", "backward", compiled_for=f"sm_{capability}")
    calls = ("mask_8_4096_4096", "packed_32768_4096")
    kernels = compiled("mean_pooling_compile.py", capability, *calls, guess=True)
    names = (
        "sum_padded",
        "sum_packed",
        "combine",
        "broadcast_gradient",
        "broadcast_packed_gradient",
    )
    assert {kernel["kernel"] for kernel in kernels} == {f"{name}_kernel" for name in names}
    for kernel in kernels:
        assert kernel["wide"], kernel


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_no_candidate_uses_local_memory(capability, name):
    """All that the tuner may choose, where blocks divide the arrays evenly and where not."""
    compiled("mean_pooling_compile.py", capability, name)


@needs_triton
@pytest.mark.slow
def test_it_lowers_for_a_gpu_that_is_not_here():
    """A program for an H200 is made on any machine that has the plugin's code."""
    assert lowered("mean_pooling_lower.py") == ["1", "2", "2", "3"]
