"""Linear attention in Triton: interpreted it computes what is defined, compiled it fits."""

import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.cases import Case
from conformance.oracle import assert_as_good_as_rounding
from evidence import proves
from kernels.triton_testing import H200, SHARED, compiled, lowered, marked, needs_triton

from ejkernel.cli.oracle import with_gradients
from ejkernel.errors import UnsupportedError
from ejkernel.kernels.gla_attention import OP, triton
from ejkernel.kernels.gla_attention.config import GLAttentionConfig
from ejkernel.kernels.gla_attention.inputs import Inputs, Spec
from ejkernel.kernels.gla_attention.triton import configs
from ejkernel.kernels.gla_attention.triton.operands import BEGINS, ENDS, token_lists
from ejkernel.kernels.gla_attention.workloads import WORKLOADS, attention, ends, log_decays
from ejkernel.modules import gla_attention
from ejkernel.ops import executor
from ejkernel.ops.executor import Request
from ejkernel.ops.platform import Platform
from ejkernel.ops.workload import Workload

SOURCE = next(source for source in OP.sources if source.platform is Platform.TRITON)
SMALL = GLAttentionConfig(platform="triton", block_q=16, block_rows=16, block_d=16)


def check(workload, dtype, cfg):
    case = Case(OP, SOURCE, workload)
    call = case.call(dtype)
    proves(OP.name, SOURCE, "forward", "backward")
    run = lambda inputs: executor.run(OP, inputs, call.spec, Request(cfg=cfg))
    outputs, gradients = with_gradients(run)(call.inputs)
    assert_as_good_as_rounding(case, dtype, "values", outputs)
    assert_as_good_as_rounding(case, dtype, "gradients", gradients)


@pytest.fixture(
    params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["segments", "whole"]
)
def segments(request, monkeypatch):
    """Sequences in segments of a chunk, or whole."""
    if request.param:
        monkeypatch.setattr(configs, "_LEAST_CHUNKS", 1)
    return request.param


@needs_triton
@pytest.mark.parametrize("workload", marked(WORKLOADS, "gate", "reverse", "packed_state"))
def test_interpreted_it_computes_what_is_defined(interpreter, segments, workload):
    """Values and gradients; what a kernel leaves unwritten would be NaN."""
    check(workload, jnp.float32, SMALL)


@needs_triton
@pytest.mark.parametrize("workload", marked(WORKLOADS, "gate_and_gamma"))
def test_half_precision_is_as_good_as_rounding(interpreter, segments, workload):
    check(workload, jnp.float16, SMALL)


@needs_triton
@pytest.mark.parametrize("gate", [None, 1, pytest.param(8, marks=pytest.mark.slow)])
def test_float16_does_not_overflow_before_the_output_does(interpreter, gate):
    """States, scores and decayed queries exceed 65504; outputs and gradients do not."""
    draw = lambda i: jax.random.uniform(jax.random.key(i), (1, 80, 1, 8), minval=0.5)
    query, key, value = (size * draw(i) for i, size in enumerate((6e4, 40.0, 1e3)))
    gates = None if gate is None else -0.3 * draw(3)[..., slice(8) if gate == 8 else 0]

    def run(cfg, dtype, *arrays):
        arrays = [x.astype(dtype) for x in arrays]
        out = gla_attention(*arrays, gates, softmax_scale=5e-8, cfg=cfg)
        return out.astype(jnp.float32).sum(), out

    results = [
        jax.value_and_grad(functools.partial(run, cfg, dtype), (0, 1, 2), has_aux=True)(
            query, key, value
        )
        for cfg, dtype in ((SMALL, jnp.float16), (GLAttentionConfig(platform="xla"), jnp.float32))
    ]
    assert jnp.abs(results[1][0][1]).max() < 65504
    for found, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-3 * np.abs(expected).max())


# Chunks of 16 with 9 valid tokens, or 3 and 5. Over the valid tokens the states grow to exp(48) or
# exp(60); over the whole chunk they would overflow in float32.
GROWING = {
    "cut": {"g_gamma": 6.0},
    "packed_reverse": {"g_gamma": 15.0, "cu_seqlens": ends(0, 3, 8), "reverse": True},
}
GATES = {
    "gamma": {},
    "shared_gate": {"gate": log_decays(1, 9, 2)},
    "gate": {"gate": log_decays(1, 9, 2, 8)},
}


@needs_triton
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("growing", GROWING)
def test_gradients_are_finite_where_states_grow_and_a_chunk_is_cut(interpreter, growing, gate):
    """Padding does not count towards the growth: its decay would be inf, and 0 * inf is NaN."""
    arguments = attention(batch=1, length=9) | GROWING[growing] | GATES[gate]
    check(Workload(growing, arguments), jnp.float32, SMALL)


@needs_triton
@pytest.mark.parametrize(
    "gate", [-jnp.inf, *(pytest.param(x, marks=pytest.mark.slow) for x in (-50.0, -1e4))]
)
def test_gates_that_forget_everything_are_exact(interpreter, gate):
    """After such a gate the sequence begins anew: nothing is divided by a decay."""
    query, key, value = (jax.random.normal(jax.random.key(i), (1, 40, 1, 8)) for i in range(3))
    gates = jnp.full((1, 40, 1, 8), -0.1).at[:, 23].set(gate)

    def run(first, query, key, value, gates):
        out = gla_attention(query, key, value, gates, platform="triton", cfg=SMALL)
        return out[:, first:].sum()

    gradients = jax.grad(run, (1, 2, 3, 4))(23, query, key, value, gates)
    later = (x[:, 23:] for x in (query, key, value, gates))
    alone = jax.grad(run, (1, 2, 3, 4))(0, *later)
    for whole, part in zip(gradients, alone, strict=True):
        np.testing.assert_allclose(whole[:, 23:], part, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(whole[:, :23], 0.0, atol=1e-6)


@needs_triton
@pytest.mark.parametrize(
    ("block_rows", "head_dim"),
    [
        (32, 40),
        (64, 96),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in itertools.product((16, 32, 64, 128), (104, 136))
        ),
    ],
)
def test_blocks_of_rows_with_mild_and_strong_gates(interpreter, block_rows, head_dim):
    """Only the first of several blocks of rows has gates whose decays overflow as one factor."""
    sizes = (head_dim, head_dim, 8)
    arrays = [jax.random.normal(jax.random.key(i), (1, 20, 1, x)) for i, x in enumerate(sizes)]
    gates = jnp.full((1, 20, 1, head_dim), -0.1).at[..., 0].set(-50.0)

    def run(cfg, *arrays):
        out = gla_attention(*arrays, cfg=cfg)
        return (out**2).sum(), out

    results = [
        jax.value_and_grad(functools.partial(run, cfg), (0, 1, 2, 3), has_aux=True)(*arrays, gates)
        for cfg in (
            GLAttentionConfig(platform="triton", block_q=16, block_rows=block_rows),
            GLAttentionConfig(platform="xla"),
        )
    ]
    for found, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


@needs_triton
def test_tokens_of_no_sequence_are_not_read(interpreter):
    """A NaN there would reach a gradient, as 0 * NaN."""
    arrays = [np.random.default_rng(i).standard_normal((45, 2, 8)) for i in range(4)]
    arrays[3] = -np.abs(arrays[3])
    for x in arrays:
        x[43:] = np.nan
    ends = jnp.array([0, 7, 7, 30, 43])

    def run(*arrays):
        out, state = gla_attention(
            *arrays, cu_seqlens=ends, return_state=True, platform="triton", cfg=SMALL
        )
        return out.sum() + state.sum(), out

    (_, out), gradients = jax.value_and_grad(run, (0, 1, 2, 3), has_aux=True)(
        *(jnp.asarray(x, jnp.float32) for x in arrays)
    )
    assert (out[43:] == 0).all()
    assert not any(np.isnan(x).any() for x in (out, *gradients))
    assert all((x[43:] == 0).all() for x in gradients)


@pytest.mark.parametrize(("chunk", "segment"), [(16, 16), (16, 32), (16, 96), (32, 64)])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("ends", [None, (0, 7, 7, 30, 90), (0, 0, 96), (5, 80, 81, 82)])
def test_every_token_is_in_one_chunk_of_one_segment(chunk, segment, reverse, ends):
    """In the order of time, whole sequences from their first token to their last."""
    shape = jnp.zeros((1, 96, 1, 1))
    packed = None if ends is None else jnp.array([ends])
    lists = token_lists(Inputs(shape, shape, shape, cu_seqlens=packed), reverse, chunk, segment)
    visited: dict[int, list[int]] = {}
    chunks = [int(x) for x in lists.chunks[0][1]]
    for token, length, sequence, first_chunk, flags in np.asarray(lists.segments[0]).T:
        if length == 0:
            continue
        tokens = visited.setdefault(int(sequence), [])
        assert (not tokens) == bool(flags & BEGINS)
        step = -1 if reverse else 1
        tokens += range(token, token + step * length, step)
        parts = chunks[first_chunk : first_chunk + -(-length // chunk)]
        assert sum(parts) == length <= segment
        assert max(parts) <= chunk
        starts = np.asarray(lists.chunks[0][0])[first_chunk : first_chunk + len(parts)]
        np.testing.assert_array_equal(starts, token + step * chunk * np.arange(len(parts)))
        assert bool(flags & ENDS) == (len(tokens) == _length(ends, sequence))
    for sequence, (first, end) in enumerate(itertools.pairwise(ends or (0, 96))):
        order = list(range(first, end))[:: -1 if reverse else 1]
        assert visited.get(sequence, []) == order


def _length(ends, sequence):
    ends = ends or (0, 96)
    return ends[sequence + 1] - ends[sequence]


def refusal(dtype="float16", width=16, device=H200):
    shape = jax.ShapeDtypeStruct((1, 64, 2, width), dtype)
    return triton.why_not(Inputs(shape, shape, shape), Spec(softmax_scale=1.0), device)


def test_it_says_what_it_cannot_do():
    assert refusal("float64") == "takes bfloat16, float16, float32 and no float64"
    assert refusal(width=288) == "takes a head_dim of at most 256, got 288"
    old = H200._replace(compute_capability=(7, 5))
    if importlib.util.find_spec("jax_triton") is not None:
        assert refusal() is None
        assert "8.0 or higher and the device has 7.5" in str(refusal(device=old))


def test_on_a_cpu_it_is_refused_in_words():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    x = jnp.ones((1, 32, 2, 16))
    with pytest.raises(UnsupportedError, match="platform='triton' does not support this call"):
        gla_attention(x, x, x, platform="triton")


def test_configurations_that_name_rows_block_k_still_load():
    """Only those of Triton: on XLA and TPUs it counts key heads."""
    read = GLAttentionConfig.from_dict
    assert read({"platform": "triton", "block_k": 16}) == GLAttentionConfig(
        platform="triton", block_rows=16
    )
    assert read({"platform": "xla", "block_k": 16}).block_k == 16
    assert read(SMALL.to_dict()) == SMALL


@needs_triton
@pytest.mark.slow
def test_a_decoding_step_updates_a_donated_state_in_place():
    assert lowered("gla_lower.py") == ["1 1 0", "1 1 1"]


CALLS = [
    f"{gate}_{sizes}"
    for gate in ("plain", "gamma", "head", "channel", "wide", "exact")
    for sizes in ("128_128_8192", "64_64_2000", "256_256_4096", "64_128_8192", "100_60_1000")
] + [
    f"half-{gate}_{sizes}"
    for gate in ("plain", "head", "channel", "wide")
    for sizes in ("128_128_8192", "256_256_4096")
]


@needs_triton
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_first_choices_compile_without_local_memory(capability):
    calls = ("gamma_128_128_8192", "channel_128_128_8192")
    proves(OP.name, SOURCE, "forward", "backward", compiled_for=f"sm_{capability}")
    kernels = compiled("gla_compile.py", capability, *calls, guess=True)
    assert capability != 90 or all(k["wgmma"] for k in kernels if k["kernel"] != "scan_kernel")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("capability", SHARED)
def test_no_candidate_uses_local_memory(capability, name):
    compiled("gla_compile.py", capability, name)
