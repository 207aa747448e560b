"""Paged attention in Triton: right in the interpreter, with equal shares of work."""

import dataclasses
import functools
import importlib
import importlib.util

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.cases import Case
from conformance.oracle import assert_as_good_as_rounding, assert_same
from evidence import proves
from hypothesis import given
from hypothesis import strategies as st
from kernels.triton_testing import H200, needs_triton

from ejkernel.cli.oracle import VALUE_FLOOR
from ejkernel.errors import UnsupportedError
from ejkernel.kernels.common.triton import bridge
from ejkernel.kernels.ragged_page_attention_v3 import OP
from ejkernel.kernels.ragged_page_attention_v3 import triton as paged_triton
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Spec
from ejkernel.kernels.ragged_page_attention_v3.triton.configs import PagedTileConfig, tile_config
from ejkernel.kernels.ragged_page_attention_v3.triton.operands import kernel_arguments
from ejkernel.modules import ragged_page_attention_v3, ragged_page_attention_v3_update
from ejkernel.ops import executor, kernel_registry
from ejkernel.ops.executor import Request
from ejkernel.ops.platform import Platform

OPS = (
    "ragged_page_attention_v3",
    "page_attention",
    "ragged_page_attention_v2",
    "ragged_page_attention_v3_update",
)


def cases(*quick):
    found = []
    for name in OPS:
        op = kernel_registry.op(name)
        source = next(source for source in op.sources if source.platform is Platform.TRITON)
        for workload in importlib.import_module(f"ejkernel.kernels.{name}.workloads").WORKLOADS:
            if "test" in workload.tags:
                called = f"{name}-{workload.name}"
                marks = [] if called in quick else [pytest.mark.slow]
                case = Case(op, source, workload)
                found.append(pytest.param(case, id=called, marks=marks))
    return found


def check(case, dtype):
    call = case.call(dtype)
    request = Request(platform="triton")
    proves(case.op.name, case.source, "forward")
    run = jax.jit(lambda inputs: executor.run(case.op, inputs, call.spec, request))
    assert_as_good_as_rounding(case, dtype, "values", run(call.inputs))


@needs_triton
@pytest.mark.parametrize(
    "case", cases("ragged_page_attention_v3-heads_first", "ragged_page_attention_v3-integers")
)
def test_interpreted_it_matches_the_reference(interpreter, case):
    """Elements that a kernel does not write are NaN."""
    check(case, jnp.float32)


@needs_triton
@pytest.mark.parametrize("case", cases())
def test_half_precision_is_as_good_as_rounding(interpreter, case):
    check(case, jnp.float16)


PAGES, SIZE, KV_HEADS, HEADS, DIM = 14, 4, 2, 4, 8
# Decoding, prefilling, empty, prefilling the last part; then three rows of no sequence.
CU_Q, CU_K, TOKENS = np.array([0, 1, 6, 6, 13]), np.array([0, 9, 14, 14, 25]), 16
TABLE = np.array([[3, 7, 1], [5, 0, 13], [2, 9, 4], [10, -1, 12]])


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


QUERY = draw(0, TOKENS, HEADS, DIM)
KEYS, VALUES = draw(1, PAGES, SIZE, KV_HEADS, DIM), draw(2, PAGES, SIZE, KV_HEADS, DIM)


def used_slots(window, new=True):
    """Which slots hold a token that some query sees; without `new`, one from an earlier call."""
    used = np.zeros((PAGES, SIZE), bool)
    for row, q, length in zip(TABLE, np.diff(CU_Q), np.diff(CU_K), strict=True):
        oldest = 0 if window is None else max(length - q - window + 1, 0)
        for position in range(oldest, length if new else length - q) if q else ():
            if row[position // SIZE] >= 0:
                used[row[position // SIZE], position % SIZE] = True
    return used


@needs_triton
@pytest.mark.parametrize("window", [None, 3])
def test_tokens_that_no_query_sees_do_not_change_the_output(interpreter, window):
    used = used_slots(window)[:, :, None, None]

    @jax.jit
    def run(query, keys, values):
        return ragged_page_attention_v3(
            query,
            keys,
            values,
            CU_Q,
            CU_K,
            TABLE,
            sliding_window=window,
            return_lse=True,
            platform="triton",
        )

    clean = run(QUERY, KEYS, VALUES)
    dirty = run(
        QUERY.at[CU_Q[-1] :].set(jnp.nan), *(jnp.where(used, x, jnp.nan) for x in (KEYS, VALUES))
    )
    for a, b in zip(clean, dirty, strict=True):
        assert not np.isnan(b).any()
        np.testing.assert_array_equal(a, b)
    assert not dirty[0][CU_Q[-1] :].any()


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("query", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8])
def test_an_eight_bit_cache_is_converted_exactly(interpreter, dtype, query):
    """Byte by byte for a query of 32 bits, two columns at a time for one of 16."""
    scale = jnp.array([0.5, 2.0])
    pages = [(x * 4).astype(dtype) for x in (KEYS, VALUES)]
    tolerance = 1e-5 if query == jnp.float32 else 8 * float(jnp.finfo(query).eps)

    def run(platform):
        call = lambda *given: ragged_page_attention_v3(
            *given, CU_Q, CU_K, TABLE, k_scale=scale, v_scale=scale[0], platform=platform
        )
        return jax.jit(call)(QUERY.astype(query), *pages)

    ours, known = (np.asarray(run(platform), np.float32) for platform in ("triton", "xla"))
    np.testing.assert_allclose(ours, known, rtol=tolerance, atol=tolerance * abs(known).max())


@needs_triton
@pytest.mark.slow
def test_the_cache_is_written_bit_for_bit(interpreter):
    new = draw(3, TOKENS, KV_HEADS, DIM), draw(4, TOKENS, KV_HEADS, DIM)

    def run(platform):
        call = lambda *given: ragged_page_attention_v3_update(
            *given, CU_Q, CU_K, TABLE, platform=platform
        )
        return jax.jit(call)(QUERY, *new, KEYS, VALUES)

    ours, known = run("triton"), run("xla")
    np.testing.assert_allclose(ours[0], known[0], rtol=1e-5, atol=1e-5)
    for a, b in zip(ours[1:], known[1:], strict=True):
        np.testing.assert_array_equal(a, b)


def structure(sequences, tokens, width, page_size=16, heads=8, kv_heads=2, dim=64, **fields):
    """The shapes of a call."""
    shape = lambda *sizes, dtype=jnp.int32: jax.ShapeDtypeStruct(sizes, dtype)
    pages = shape(100, page_size, kv_heads, dim, dtype=fields.pop("cache", jnp.bfloat16))
    return Inputs(
        shape(1, tokens, heads, dim, dtype=fields.pop("query", jnp.bfloat16)),
        pages,
        pages,
        shape(1, sequences),
        shape(1, sequences),
        shape(1, sequences),
        shape(1, sequences, width),
    )._replace(**fields)


def decode_share(static, queries, lens, program):
    """The (sequence, block, key head, tile) units of one program where all sequences are decode.

    By the formulas of the kernel; tile is None for a unit of overhead.
    """
    size, tokens, units = static.block_k, static.decode_tokens, []
    begin = lambda first: max(first - static.window + 1, 0) // size if static.window else 0
    for sequence, (q, length) in enumerate(zip(queries.tolist(), lens.tolist(), strict=True)):
        blocks = -(-q // tokens)
        tiles = -(-length // size) - begin(length - q)
        if static.window:
            tiles = min(tiles, (static.window + tokens - 2) // size + 2)
        for head in range(static.kv_heads):
            for block in range(blocks):
                first = length - q + block * tokens
                stop = -(-min(first + tokens, length) // size) - begin(first)
                some = [tile if tile < stop else None for tile in range(tiles)]
                units += [
                    (sequence, block, head, tile) for tile in [None] * static.item_overhead + some
                ]
    share = -(-len(units) // static.programs)
    return units[program * share : (program + 1) * share]


def listed_share(static, items, ends, program):
    """The (sequence, block, key head, tiles) of one program, by the formulas of the kernel."""
    total = int(ends[-1])
    share = -(-total // static.programs)
    at, end = program * share, min((program + 1) * share, total)
    found = []
    while at < end:
        item = int((ends <= at).sum())
        before = int(ends[item - 1]) if item else 0
        taken = min(int(ends[item]), end) - at
        found.append((*map(int, items[:, item]), range(at - before, at - before + taken)))
        at += taken
    return found


@functools.cache
def work_list(window):
    """The work list of four sequences as a function of their lengths, and the static arguments."""
    spec = Spec(softmax_scale=1.0, sliding_window=window)
    config = PagedTileConfig(32, 32, 4, 2, 7)

    def operands(query_lens, kv_lens):
        inputs = structure(4, 256, 16)._replace(
            query_starts=(jnp.cumsum(query_lens) - query_lens)[None],
            query_lens=query_lens[None],
            kv_lens=kv_lens[None],
            page_indices=jnp.zeros((1, 4, 16), jnp.int32),
        )
        static, operands = kernel_arguments(inputs, spec, config, H200)
        statics.append(static)
        return operands.work_items, operands.work_ends

    statics = []
    numbers = jax.ShapeDtypeStruct((4,), jnp.int32)
    compiled = jax.jit(operands).lower(numbers, numbers).compile()
    return compiled, statics[0]


lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 150)), min_size=4, max_size=4)


def assert_all_are_visited(visited, queries, lens, window, tokens_of):
    """Every tile that some query sees, and none twice."""
    known = set(visited)
    assert len(known) == len(visited)
    for sequence, (q, length) in enumerate(zip(queries, lens, strict=True)):
        per_block = tokens_of(q)
        for token in range(q):
            first = length - q + token // per_block * per_block
            begin = max(first - window + 1, 0) // 32 if window else 0
            own = length - q + token
            oldest = max(own - window + 1, 0) if window else 0
            for tile in range(oldest // 32 - begin, own // 32 + 1 - begin):
                for head in range(2):
                    assert (sequence, token // per_block, head, tile) in known


@hypothesis.settings(deadline=None, max_examples=40)
@given(lengths, st.sampled_from([None, 7, 64]))
def test_every_tile_has_one_program_and_shares_are_equal(drawn, window):
    queries, others = np.array(drawn, np.int32).T
    lens = queries + others
    compiled, static = work_list(window)
    items, ends = map(np.asarray, compiled(queries, lens))
    visited = [listed_share(static, items, ends, program) for program in range(static.programs)]
    sizes = [sum(len(tiles) for *_, tiles in items) for items in visited]
    total = int(ends[-1])
    share = -(-total // static.programs)
    full = total // share
    assert sizes == [*[share] * full, *[total - full * share, *[0] * 7][: static.programs - full]]
    tiles = [(s, b, h, tile) for items in visited for s, b, h, some in items for tile in some]
    few = lambda q: static.decode_tokens if q <= static.decode_tokens else static.prefill_tokens
    assert_all_are_visited(tiles, queries, lens, window, few)


@functools.cache
def decode_static(window):
    spec, statics = Spec(softmax_scale=1.0, sliding_window=window), []

    def note(inputs):
        static, operands = kernel_arguments(inputs, spec, PagedTileConfig(0, 32, 4, 2, 7), H200)
        statics.append(static)
        return operands

    jax.eval_shape(note, structure(4, 256, 16))
    return statics[0]


@hypothesis.settings(deadline=None, max_examples=40)
@given(lengths, st.sampled_from([None, 7, 64]))
def test_decode_shares_visit_every_tile_once(drawn, window):
    queries, others = np.array(drawn, np.int32).T
    lens = queries + others
    static = decode_static(window)
    visited = [decode_share(static, queries, lens, program) for program in range(7)]
    tiles = [item for share in visited for item in share if item[-1] is not None]
    assert_all_are_visited(tiles, queries, lens, window, lambda q: static.decode_tokens)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 9])
def test_a_long_sequence_beside_short_and_empty_ones(interpreter, window):
    """Decoding, items cut between programs, empty sequences, rows of no sequence."""
    queries = np.array([1, 1, 0, 3, 1, 0, 2, 1])
    lens = np.array([5, 200, 0, 17, 1, 30, 64, 33])
    table = np.random.default_rng(0).permutation(8 * 50).reshape(8, 50)
    ends = [np.cumsum([0, *x]) for x in (queries, lens)]
    query = draw(0, 14, HEADS, DIM)
    pages = draw(1, 400, SIZE, KV_HEADS, DIM), draw(2, 400, SIZE, KV_HEADS, DIM)

    def run(platform):
        call = lambda *given: ragged_page_attention_v3(
            *given, *ends, table, sliding_window=window, return_lse=True, platform=platform
        )
        return jax.jit(call)(query, *pages)

    assert_same(run("triton"), run("xla"), VALUE_FLOOR, "output and log-sum-exp")


def test_temporary_memory_follows_the_grid_and_not_the_table():
    spec = Spec(softmax_scale=1.0)

    def temporary(width):
        inputs = structure(64, 64, width)
        params = paged_triton.IMPLEMENTATION.forward.heuristic(inputs, spec, H200)
        with bridge.recorded_launches() as launches:
            jax.eval_shape(
                lambda inputs: paged_triton.run_forward(inputs, spec, params, H200), inputs
            )
        attend, combine = launches
        assert len(combine.outputs) == 2
        return [x.shape for x in attend.outputs[2:]]

    assert temporary(16) == temporary(100_000)


def test_a_preset_survives_the_conversion_to_a_configuration():
    spec = Spec(softmax_scale=1.0)
    for tokens in (64, 4096):
        for page_size in (16, 64, 256):
            for dim in (64, 128, 256):
                inputs = structure(64, tokens, 512, page_size, dim=dim)
                for params in paged_triton.IMPLEMENTATION.forward.choices(inputs, spec, H200):
                    config = tile_config(inputs, spec, params, H200)
                    assert config.block_k <= 128
                    assert bool(config.prefill_rows) == (tokens > 64)
                    assert config.programs % 132 == 0


def refusal(device=H200, **changes):
    return paged_triton.why_not(structure(4, 8, 4, **changes), Spec(softmax_scale=1.0), device)


def test_unsupported_calls_are_refused_with_a_reason():
    old = H200._replace(compute_capability=(7, 5))
    assert refusal(query=jnp.float64) == "takes bfloat16, float16, float32 and no float64"
    assert refusal(dim=300) == "takes head dims up to 256 and this one is 300"
    assert "up to 128 query heads for a key head" in str(refusal(heads=512, kv_heads=2))
    if importlib.util.find_spec("jax_triton") is None:
        assert "is not installed" in str(refusal())
    else:
        assert refusal() is None
        assert refusal(cache=jnp.float8_e4m3fn) is None
        assert "8.0 or higher and the device has 7.5" in str(refusal(old))


def test_on_a_cpu_the_error_names_the_platform():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(UnsupportedError, match="platform='triton' does not support this call"):
        ragged_page_attention_v3(QUERY, KEYS, VALUES, CU_Q, CU_K, TABLE, platform="triton")


@needs_triton
@pytest.mark.parametrize("queries", [1, 5])
def test_a_partial_result_is_not_rounded_to_the_dtype_of_the_query(interpreter, queries):
    lengths = jnp.array([[9], [12], [0]])
    inputs = Inputs(
        draw(5, 3, queries, HEADS, DIM).astype(jnp.float16),
        KEYS.astype(jnp.float16),
        VALUES.astype(jnp.float16),
        jnp.zeros((3, 1), jnp.int32),
        jnp.full((3, 1), queries),
        lengths,
        jnp.array(TABLE[:3, None]),
    )
    spec = Spec(softmax_scale=0.3, float32_out=True)
    run = lambda spec: jax.jit(lambda x: executor.run(OP, x, spec, Request("triton")))(inputs)
    got, rounded = run(spec), run(dataclasses.replace(spec, float32_out=False))
    assert got.out.dtype == jnp.float32
    assert jnp.any(got.out != got.out.astype(jnp.float16).astype(jnp.float32))
    assert jnp.array_equal(rounded.out, got.out.astype(jnp.float16))
