"""Paged attention in Triton: resources of compiled kernels, and results on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evidence import proves
from kernels.triton_testing import SHARED, compiled, lowered, needs_triton, other_process

from ejkernel.modules import ragged_page_attention_v3, ragged_page_attention_v3_update
from ejkernel.ops import kernel_registry
from ejkernel.ops.platform import Platform

MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}


def forward_is_proven(*operations, compiled_for=None):
    """The running test proves the forward pass of these operations in Triton."""
    for name in operations:
        sources = kernel_registry.op(name).sources
        source = next(source for source in sources if source.platform is Platform.TRITON)
        proves(name, source, "forward", compiled_for=compiled_for)


def assert_fits(capability, *calls, guess=False):
    """The compiled kernels of all candidates, or of the heuristic's choice: one wave, no spills."""
    kernels = compiled("paged_compile.py", capability, *calls, guess=guess)
    assert {"attention_kernel", "combine_kernel"} <= {kernel["kernel"] for kernel in kernels}
    for kernel in kernels:
        if kernel["kernel"] == "attention_kernel":
            # All programs fit in one wave: with equal shares a second wave would double the time.
            programs, warps, _ = kernel["launch"]
            resident = -(-programs // MULTIPROCESSORS[capability])
            registers = -(-kernel["registers"] // 8) * 8 * 32 * warps
            assert resident * registers <= 65536, kernel
            assert resident * kernel["shared"] <= SHARED[capability], kernel
    return kernels


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_heuristic_choices_compile_without_register_spills(capability):
    calls = (
        "decode_128_64_bfloat16_plain",
        "mixed_128_64_bfloat16_all",
        "decode_64_16_e4m3_update",
    )
    operations = ("ragged_page_attention_v3", "ragged_page_attention_v3_update")
    forward_is_proven(*operations, compiled_for=f"sm_{capability}")
    kernels = assert_fits(capability, *calls, guess=True)
    assert "cache_write_kernel" in {kernel["kernel"] for kernel in kernels}
    rows = [k for k in kernels if k["kernel"] == "attention_kernel" and k["rows"] > 16]
    assert rows
    assert capability != 90 or all(kernel["wgmma"] for kernel in rows)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_cache_write_compiles(capability):
    caches = ("bfloat16", "e4m3", "int8")
    kernels = assert_fits(capability, *(f"decode_128_16_{cache}_update" for cache in caches))
    assert [kernel["kernel"] for kernel in kernels].count("cache_write_kernel") >= len(caches)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("cache", ["bfloat16", "e4m3", "e5m2", "int8", "float32"])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("what", ["decode", "mixed"])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_no_candidate_spills_registers(capability, what, dim, cache):
    """Pages smaller than a tile, as large, and larger; every candidate of the tuner."""
    calls = [f"{what}_{dim}_{size}_{cache}_{kind}" for size in (16, 64, 256) for kind in KINDS]
    assert_fits(capability, *calls)


KINDS = ("plain", "all", "combined")


@needs_triton
def test_offsets_in_a_cache_of_more_than_two_to_the_31_elements_have_64_bits():
    found = dict(line.split(maxsplit=1) for line in other_process("paged_large.py") if " " in line)
    assert found == {"cache_write_kernel": "i64", "attention_kernel": "i64"}


@needs_triton
@pytest.mark.slow
def test_it_lowers_for_an_absent_gpu():
    """Two kernels for each operation, and a third that writes a donated cache in place."""
    assert lowered("paged_lower.py") == ["2 0", "2 0", "2 0", "3 2"]


# One long, empty ones, some of several queries; then rows of no sequence.
QUERIES, LENGTHS = np.array([1, 1, 0, 3, 1, 0, 2, 9]), np.array([5, 3000, 0, 170, 1, 30, 640, 77])
SIZE, TOKENS, HEADS, KV_HEADS, DIM = 16, 24, 32, 8, 128
ENDS = [np.cumsum([0, *x]).astype(np.int32) for x in (QUERIES, LENGTHS)]
WIDTH = -(-int(LENGTHS.max()) // SIZE)
TABLE = np.random.default_rng(0).permutation(8 * WIDTH).reshape(8, WIDTH).astype(np.int32)


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def cache(dtype):
    """Keys, values and their scales; of 8 bits every number that there is."""
    shape = (2, 8 * WIDTH, SIZE, KV_HEADS, DIM)
    if jnp.dtype(dtype).itemsize > 1:
        return *draw(1, *shape), {}
    codes = np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)
    pages = jax.lax.bitcast_convert_type(jnp.asarray(codes), dtype)
    if dtype != jnp.int8:
        pages = jnp.where(jnp.isfinite(pages.astype(jnp.float32)), pages, jnp.zeros((), dtype))
    scale = 1 / jnp.abs(pages.astype(jnp.float32)).max() * jnp.linspace(0.5, 2, KV_HEADS)
    return *pages, {"k_scale": scale, "v_scale": scale}


def largest(a, b=0.0):
    return float(jnp.abs(a.astype(jnp.float32) - b).max())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8])
def test_on_a_gpu_it_is_as_accurate_as_plain_attention(dtype):
    forward_is_proven("ragged_page_attention_v3")
    query, (keys, values, scales) = draw(0, TOKENS, HEADS, DIM), cache(dtype)

    def run(query, keys, values, platform):
        call = lambda *given: ragged_page_attention_v3(
            *given, *ENDS, TABLE, **scales, platform=platform
        )
        return jax.jit(call)(query, keys, values)

    wide = [x if x.dtype.itemsize == 1 else x.astype(jnp.float32) for x in (keys, values)]
    with jax.default_matmul_precision("highest"):
        exact = run(query.astype(jnp.float32), *wide, "xla")
    plain, ours = (run(query, keys, values, platform) for platform in ("xla", "triton"))
    rounding = float(jnp.finfo(jnp.bfloat16).eps) / 2 * largest(exact)
    assert largest(ours, exact) <= 2 * max(largest(plain, exact), rounding)
    assert not ours[QUERIES.sum() :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8])
def test_on_a_gpu_the_cache_is_written_bit_for_bit(dtype):
    forward_is_proven("ragged_page_attention_v3_update")
    query, (keys, values, scales) = draw(0, TOKENS, HEADS, DIM), cache(dtype)
    new = draw(3, TOKENS, KV_HEADS, DIM), draw(4, TOKENS, KV_HEADS, DIM)

    def run(platform):
        call = lambda *given: ragged_page_attention_v3_update(
            *given, *ENDS, TABLE, **scales, platform=platform
        )
        return jax.jit(call)(query, *new, keys, values)

    bits = lambda x: np.asarray(x).view(np.uint8)
    for ours, known in zip(run("triton")[1:], run("xla")[1:], strict=True):
        np.testing.assert_array_equal(bits(ours), bits(known))
