"""Grouped matmul in Pallas on Hopper: its schedule, its refusals, its assembly, its results.

Without a GPU the schedule is checked in NumPy, the kernels are assembled for an H200 (where the
CUDA plugin is installed) and interpreted (JAX 0.12 or newer). With one, results are compared with
the definition, twice, because an error that moves is a race.
"""

import gpu_compile
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evidence import proves
from kernels import grouped_matmul_gpu_programs as programs
from kernels.grouped_matmul_gpu_programs import H200

from ejkernel import settings
from ejkernel.kernels.common import mosaic_gpu
from ejkernel.kernels.grouped_matmul import OP, pallas_sm90, reference
from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.grouped_matmul.pallas_sm90 import configs
from ejkernel.kernels.grouped_matmul.pallas_sm90.schedule import schedule_tiles, tile_coordinates
from ejkernel.ops.platform import Platform, device_of

SOURCE = next(x for x in OP.sources if (x.platform, x.backend) == ("pallas", "gpu"))
SIZES = {
    "uneven": [130, 0, 1, 64, 63, 128, 200, 17],
    "none": [0, 0, 0],
    "one": [1],
    "all_one": [1] * 40,
    "past_the_end": [0, 300, 0],
    "first_empty": [0, 0, 129, 0],
}


@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("name", SIZES)
def test_the_tiles_cover_every_row_once_for_its_own_group(name, block):
    """Each row has one tile that owns it; a tile moved back stays inside of its group."""
    sizes = np.array(SIZES[name])
    rows = int(sizes.sum()) + 37
    ends = np.cumsum(sizes)
    starts = ends - sizes
    expected = np.full(rows, len(sizes))
    for group, (start, end) in enumerate(zip(starts, ends, strict=True)):
        expected[start:end] = group
    as_int = lambda x: jnp.asarray(x, jnp.int32)
    schedule = schedule_tiles(as_int(starts), as_int(ends), rows, block)
    tiles, tile_ends = map(np.asarray, schedule)
    found = np.full(rows, -1)
    for group, at, own, stop in tiles[: tile_ends[-1]]:
        assert at <= own < stop
        assert at == own or stop - at == block
        inside = slice(own, min(own + block, stop))
        assert (found[inside] == -1).all()
        found[inside] = min(group, len(sizes))
        if at < own:  # what is computed again belongs to the same group
            assert (expected[at:stop] == min(group, len(sizes))).all()
    np.testing.assert_array_equal(found, expected)


def test_groups_in_the_middle_leave_zeros_on_both_sides():
    """Weights for rows 10 to 30 of 50: the others have a tile without a weight."""
    schedule = schedule_tiles(jnp.array([10, 20]), jnp.array([20, 30]), 50, 64)
    tiles = np.asarray(schedule.tiles)[: int(schedule.tile_ends[-1])]
    assert [(min(g, 2), at, stop) for g, at, _, stop in tiles.tolist()] == [
        (0, 10, 20),
        (1, 20, 30),
        (2, 0, 10),
        (2, 30, 50),
    ]


@pytest.mark.parametrize(("rows", "columns", "band"), [(5, 3, 8), (7, 19, 8), (1, 16, 4)])
def test_every_tile_is_visited_once(rows, columns, band):
    index = jnp.arange(rows * columns, dtype=jnp.int32)
    row, column = jax.vmap(lambda i: tile_coordinates(i, rows, columns, band))(index)
    assert sorted(zip(row.tolist(), column.tolist(), strict=True)) == [
        (i, j) for i in range(rows) for j in range(columns)
    ]


@pytest.mark.parametrize(
    ("change", "device", "reason"),
    [
        ({}, H200, None),
        ({}, H200._replace(compute_capability=(8, 0)), "compute capability 9.0"),
        ({"dtype": jnp.float32}, H200, "bfloat16 or float16"),
        ({"k": 36}, H200, "k to be a multiple of 8, got 36"),
        ({"n": 20, "transposed": True}, H200, "n to be a multiple of 8, got 20"),
        ({"out": "float64"}, H200, "not float64"),
        ({"rows": 1, "k": 8, "n": 8}, H200, None),
    ],
)
def test_a_call_is_refused_with_its_reason(change, device, reason):
    if mosaic_gpu.versions.why_missing():
        pytest.skip(str(mosaic_gpu.versions.why_missing()))
    said = pallas_sm90.why_not(*programs.call(**change), device)
    assert said is None if reason is None else reason in str(said)


def test_gradients_in_another_dtype_are_refused():
    if mosaic_gpu.versions.why_missing():
        pytest.skip(str(mosaic_gpu.versions.why_missing()))
    said = pallas_sm90.why_not_backward(*programs.call(out="float32"), H200)
    assert "dtype of the inputs, bfloat16, not float32" in str(said)


@pytest.mark.parametrize("experts", [8, 128])  # many rows each, few rows each
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_candidate_is_what_it_says_and_fits_shared_memory(direction, experts):
    inputs, spec = programs.call(experts=experts)
    for params in getattr(pallas_sm90.IMPLEMENTATION, direction).choices(inputs, spec, H200):
        tiles = configs.gmm_tiles(inputs, params)
        assert configs.to_params(tiles) == params
        both = [tiles, configs.tgmm_tiles(inputs, params)]
        for one in both:
            barriers = 8 * (2 * one.stages + 1)
            assert one.shared_bytes + barriers <= 232448 - 1024
            assert one.stages >= 2


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_rows_that_are_not_sorted_go_to_triton(direction):
    """Its kernels need no sorted copy of them; sorted ones are multiplied faster here."""
    (inputs, spec), one = programs.call(), getattr(pallas_sm90.IMPLEMENTATION, direction)
    assert one.yields_to(inputs, spec, H200) == frozenset()
    ids = jax.ShapeDtypeStruct(inputs.inputs.shape[:1], jnp.int32)
    unsorted = inputs._replace(group_ids=ids, group_sizes=None)
    assert one.yields_to(unsorted, spec, H200) == {Platform.TRITON}


def test_parameters_become_tiles_that_exist():
    inputs, _ = programs.call()
    ask = lambda **sizes: configs.gmm_tiles(inputs, GroupedMatmulConfig(**sizes))
    sizes = lambda tiles: (tiles.block_m, tiles.block_n, tiles.stages)
    assert sizes(ask(block_m=1, block_n=8, num_stages=1)) == (16, 128, 2)
    assert sizes(ask(block_m=1024, block_n=1024, num_stages=64)) == (128, 256, 4)


@pytest.mark.parametrize(
    ("rows", "experts", "block"), [(256, 256, 16), (4096, 128, 64), (8192, 8, 128)]
)
def test_few_rows_in_a_group_get_small_tiles(rows, experts, block):
    inputs, spec = programs.call(rows=rows, experts=experts)
    assert configs.heuristic_forward(inputs, spec, H200).block_m == block


needs_assembler = pytest.mark.skipif(
    gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not())
)


def _check_assembly(names):
    directions = sorted({name.partition("-")[0] for name in names})
    proves(OP.name, SOURCE, *directions, compiled_for="sm_90")
    reports = gpu_compile.compile_all("kernels.grouped_matmul_gpu_programs", names)
    # Of two programs with the same kernel, only the first has it assembled.
    assert reports[names[0]].kernels >= 1
    for name, report in reports.items():
        assert (name, report.spilled, report.complaints) == (name, 0, [])


@needs_assembler
@pytest.mark.parametrize("part", range(2))
def test_every_configuration_assembles_without_spills(part):
    _check_assembly(programs.QUICK[part::2])


@needs_assembler
@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_configuration_assembles_in_other_ways(part):
    _check_assembly([name for name in programs.PROGRAMS if name not in programs.QUICK][part::4])


CALLS = {
    "plain": {"rows": 640, "k": 192, "n": 384, "sizes": SIZES["uneven"]},
    "narrow": {"rows": 640, "k": 128, "n": 384 + 64, "sizes": SIZES["uneven"]},
    "transposed": {"rows": 640, "k": 192, "n": 320, "sizes": SIZES["uneven"], "transposed": True},
    "float16": {"rows": 640, "k": 64, "n": 256, "sizes": SIZES["uneven"], "dtype": jnp.float16},
    "float32": {"rows": 640, "k": 64, "n": 256, "sizes": SIZES["uneven"], "out": "float32"},
    "odd": {"rows": 637, "k": 72, "n": 200, "sizes": SIZES["uneven"]},
    "odd_transposed": {"rows": 613, "k": 8, "n": 24, "sizes": SIZES["uneven"], "transposed": True},
    "no_rows": {"rows": 70, "k": 64, "n": 64, "sizes": SIZES["none"]},
    "one_row": {"rows": 1, "k": 64, "n": 64, "sizes": SIZES["one"]},
    "one_row_each": {"rows": 40, "k": 128, "n": 256, "sizes": SIZES["all_one"]},
}


def _draw(sizes, **shape) -> tuple[Inputs, Spec]:
    """A call with numbers; those of rows past the last group are not numbers."""
    inputs, spec = programs.call(experts=len(sizes), **shape)
    generator = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(generator.standard_normal(x.shape), x.dtype)
    rows = draw(inputs.inputs).at[sum(sizes) :].set(jnp.nan)
    return inputs._replace(
        inputs=rows, weights=draw(inputs.weights), group_sizes=jnp.array(sizes, jnp.int32)
    ), spec


def _check(inputs: Inputs, spec: Spec, params=None, runs: int = 1, **changes) -> None:
    """Output and gradients are as near the definition as rounding to the dtype allows.

    `changes` are to the device of the call.
    """
    device = device_of(jax.tree.leaves(inputs))._replace(**changes)
    wide = [x.astype(jnp.float32) for x in inputs[:2]]
    used = jnp.arange(wide[0].shape[0]) < np.sum(inputs.group_sizes)
    wide[0] = jnp.where(used[:, None], wide[0], 0.0)
    narrow = lambda x: x.astype(inputs.inputs.dtype).astype(jnp.float32)
    same = lambda x: x
    full = Spec(transpose_rhs=spec.transpose_rhs, preferred_element_type="float32")

    def define(rounded):
        run = lambda *given: reference.forward(
            inputs._replace(inputs=given[0], weights=given[1]), full, rounded
        )
        outputs, pull_back = jax.vjp(run, *wide)
        d_out = np.random.default_rng(1).standard_normal(outputs.out.shape)
        d_out = narrow(jnp.asarray(d_out, jnp.float32))
        return d_out, [outputs.out, *pull_back(Outputs(d_out))]

    d_out, exact = define(same)
    rounded = [*define(narrow)[1]]
    rounded[1:] = map(narrow, rounded[1:])
    d_out = jnp.where(used[:, None], d_out, jnp.nan).astype(inputs.inputs.dtype)
    forward = jax.jit(lambda x: pallas_sm90.run_forward(x, spec, params, device)[0].out)
    results = [[forward(inputs)] for _ in range(runs)]
    proves(OP.name, SOURCE, "forward")
    if spec.preferred_element_type is None:
        proves(OP.name, SOURCE, "backward")
        backward = jax.jit(
            lambda x, d: pallas_sm90.run_backward(x, (), Outputs(d), spec, params, device)[:2]
        )
        results = [[*one, *backward(inputs, d_out)] for one in results]
    for got, truth, coarse in zip(results[0], exact, rounded, strict=False):
        got, truth, coarse = (np.asarray(x, np.float64) for x in (got, truth, coarse))
        error, allowed = (np.abs(x - truth).max() for x in (got, coarse))
        assert error <= 2 * allowed + 128 * np.finfo(np.float32).eps * np.abs(truth).max()
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, results[0])


needs_interpreter = pytest.mark.skipif(
    mosaic_gpu.versions.why_missing(interpreted=True) is not None,
    reason=str(mosaic_gpu.versions.why_missing(interpreted=True)),
)
QUICK = ("odd", "one_row")


@needs_interpreter
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CALLS],
)
def test_interpreted_it_multiplies(name):
    """Barriers, copies, stages and masks as on the card; each matmul completes at once."""
    with settings.override(interpret=True):
        _check(*_draw(**CALLS[name]), multiprocessors=3)  # several tiles for each


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "odd"])
def test_every_access_is_ordered_by_a_barrier(name, monkeypatch):
    monkeypatch.setattr(mosaic_gpu.versions, "detect_races", True)
    # No tile is moved back: two would write the same numbers to the same rows, on purpose.
    call = CALLS[name] | {"rows": 601, "sizes": [128, 0, 17, 100, 256, 3]}
    with settings.override(interpret=True):
        _check(*_draw(**call), multiprocessors=3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "params",
    configs.candidates_forward(*programs.call(), H200),
    ids=lambda x: f"{x.block_m}x{x.block_n}x{x.num_stages}",
)
@pytest.mark.parametrize("name", CALLS)
def test_small_calls_in_every_candidate_on_the_card(name, params):
    _check(*_draw(**CALLS[name]), params, runs=3)


@pytest.mark.gpu
def test_small_integers_are_exact_on_the_card():
    """Long enough for several tiles in a thread block and all stages to be used again."""
    inputs, spec = programs.call(rows=20000, k=512, n=1408, experts=7)
    generator = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(generator.integers(-1, 2, x.shape), x.dtype)
    sizes = generator.multinomial(19990, np.full(7, 1 / 7))
    inputs = inputs._replace(
        inputs=draw(inputs.inputs),
        weights=draw(inputs.weights),
        group_sizes=jnp.asarray(sizes, jnp.int32),
    )
    spec = Spec(preferred_element_type="float32")
    device = device_of(jax.tree.leaves(inputs))
    run = jax.jit(lambda x: pallas_sm90.run_forward(x, spec, None, device)[0].out)
    got = np.asarray(run(inputs))
    rows, weights = (np.asarray(x, np.float32) for x in inputs[:2])
    ends = np.cumsum(sizes)
    for group, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        inside = slice(end - size, end)
        np.testing.assert_array_equal(got[inside], rows[inside] @ weights[group])
    assert not got[ends[-1] :].any()
