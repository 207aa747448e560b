"""Flash attention in Pallas on Hopper: its work lists, its refusals, its assembly, its results.

Without a GPU the work lists are evaluated in NumPy, the kernels are assembled for an H200 (where
the CUDA plugin is installed) and interpreted (JAX 0.12 or newer). With one, results are compared
with the definition, twice, because an error that moves is a race.
"""

import dataclasses
from typing import Any

import gpu_compile
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evidence import proves
from kernels import flash_gpu_programs as programs
from kernels import static_mask_traces
from kernels.flash_gpu_programs import H200

from ejkernel import settings
from ejkernel.kernels.common import mosaic_gpu
from ejkernel.kernels.flash_attention import OP, pallas_sm90, reference
from ejkernel.kernels.flash_attention.inputs import Dropout, Inputs, Spec
from ejkernel.kernels.flash_attention.pallas_sm90 import configs, mask_operands, schedule
from ejkernel.kernels.flash_attention.pallas_sm90.configs import DK, DK_DV, DQ, DV
from ejkernel.kernels.flash_attention.pallas_sm90.gradient_kernel import staged_bias
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.platform import device_of
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
    Segments,
    TokenTypes,
)

SOURCE = next(x for x in OP.sources if (x.platform, x.backend) == ("pallas", "gpu"))


def _ids(*lengths):
    """Ids of segments of these lengths; a negative length is padding."""
    parts = [np.full(abs(x), i if x > 0 else -1) for i, x in enumerate(lengths)]
    return jnp.asarray(np.concatenate(parts)[None], jnp.int32)


def _random_mask(*shape):
    return jnp.asarray(np.random.default_rng(0).random(shape) < 0.4)


BLOCKS = Blocks(jnp.ones((1, 1, 32, 32), bool), 128, 128)
PACKED = Segments(_ids(70, 45, 100, -25), _ids(70, 45, 100, -25))
_LAID = _ids(70, 45, 1, 100, -24)
DOCUMENTS = Segments(_LAID, _LAID, documents=8)
STARTS = jnp.array([[0, 70, 115, 116, 216, 216, 216, 216, 216]], jnp.int32)
RULES = {
    "everything": Everything(),
    "causal": Band(None, 0),
    "causal_later": Band(None, 37),
    "causal_earlier": Band(None, -50),
    "window": Band(-40, 3),
    "traced_window": Band(jnp.array([-40]), jnp.array(3)),
    "rows_apart": Band(None, jnp.array([5, -60])),
    "packed": PACKED & Band(None, 0),
    "documents": DOCUMENTS & Band(-60, 0),
    "documents_from": Segments(_LAID, _LAID, 8, STARTS) & Band(None, 0),
    "documents_late": Segments(_LAID, _LAID, 8, STARTS) & Band(70, 90),
    "positions": Band(-30, 0, jnp.arange(240, dtype=jnp.int32)[None] // 2 * 2),
    "chunks": Chunks(48, 7, 3),
    "lengths": KeyLength(jnp.array([100, 0])) & QueryLength(130),
    "types": TokenTypes(_ids(50, 90, 100), _ids(110, 30, 100), "none"),
    "keys": Dense(_random_mask(2, 1, 1, 240)),
    "dense": And((Dense(_random_mask(1, 2, 240, 240)), Band(None, 0))),
    "dense_twice": Dense(_random_mask(1, 2, 240, 240)) & Dense(_random_mask(2, 1, 240, 1)),
    "prefix": Or((Band(None, 0), KeyLength(jnp.array([100, 0])))),
    "images": Or((Band(-60, 0), TokenTypes(_ids(50, 90, 100), _ids(50, 90, 100), "both"))),
    "unions": PACKED & Or((Band(-9, 0), Dense(_random_mask(1, 2, 240, 240)))) & Or((Chunks(20),)),
    "nested": Or((Band(None, -30) & Or((Chunks(48), KeyLength(9))), QueryLength(7))),
    "one_of_all": Or((Band(None, 0), And(()))),
    "none": Or(()),
}


@pytest.mark.parametrize(
    ("name", "blocks"), [*((name, (128, 64)) for name in RULES), ("packed", (64, 128))]
)
def test_the_tile_lists_show_exactly_the_mask(name, blocks):
    """What a kernel visits and what it evaluates there is the mask, each pair once."""
    rule, (block_q, block_k) = RULES[name], blocks
    batch, heads, length = 2, 2, 240
    q_size, kv_size = (-(-length // block) * block for block in blocks)
    items = _items(batch, heads)
    found = schedule.query_block_schedule(rule, items, length, length, block_q, block_k)
    mask = mask_operands.partial_tile_mask(rule, length, length, q_size, kv_size)
    work_list, packed, count, partial, index = map(np.asarray, found)
    work_list, packed = work_list[work_list >= 0], packed[work_list >= 0]
    q_blocks = q_size // block_q
    assert sorted(work_list) == list(range(batch * heads * q_blocks))
    shown = np.zeros((batch, heads, q_size, kv_size), int)
    for item, counts in zip(work_list, packed, strict=True):
        row, head, q_block = np.unravel_index(item, (batch, heads, q_blocks))
        at = (row % count.shape[0], head % count.shape[1], q_block)
        assert schedule.unpack_counts(jnp.asarray(counts)) == (count[at], partial[at])
        assert sorted(index[at]) == list(range(kv_size // block_k))
        for step, block in enumerate(index[at][: count[at]]):
            q = np.arange(q_block * block_q, (q_block + 1) * block_q)
            k = np.arange(block * block_k, (block + 1) * block_k)
            tile = np.ones((block_q, block_k), int)
            if step < partial[at] and mask is not None:
                tile = _evaluate(mask, row, head, q, k).astype(int)
            shown[row, head, q[0] : q[-1] + 1, k[0] : k[-1] + 1] += tile
    expected = np.broadcast_to(rule.dense(length, length), (batch, heads, length, length))
    np.testing.assert_array_equal(shown[:, :, :length, :length], expected.astype(int))
    assert not shown[:, :, :length, length:].any()


@pytest.mark.parametrize("name", ["causal", "window", "documents_from", "chunks", "lengths"])
def test_only_blocks_with_a_visible_pair_are_visited(name):
    """Where each query sees a range of keys; and only those that hide something are partial."""
    length, block = 240, 16
    found = schedule.query_block_schedule(RULES[name], _items(2, 2), length, length, block, block)
    seen = np.broadcast_to(RULES[name].dense(length, length), (2, 1, length, length))
    tiles = seen.reshape(2, 15, block, 15, block).transpose(0, 1, 3, 2, 4).reshape(2, 15, 15, -1)
    some, every = tiles.any(-1).sum(-1), tiles.all(-1).sum(-1)
    count, partial = (np.broadcast_to(x[:, 0], some.shape) for x in (found.count, found.partial))
    np.testing.assert_array_equal(count, np.maximum(some, 1))
    np.testing.assert_array_equal(count - partial, every)


def _items(batch, heads, l2_group_bytes=1, thread_blocks=5):
    return schedule.WorkItems(batch, heads, 1, batch * heads, l2_group_bytes, thread_blocks)


@pytest.mark.parametrize("rule", [Band(None, 0), Everything(), Band(-1023, 0)])
@pytest.mark.parametrize("heads", [1, 16, 40])
@pytest.mark.parametrize("megabytes", [1, 8, 64])
def test_the_work_list_is_balanced(rule, heads, megabytes):
    """Each item once; no thread block has more than a hundredth, or an item, beyond its share."""
    items = _items(1, heads, megabytes * 2**20, thread_blocks=132)
    found = schedule.query_block_schedule(rule, items, 16384, 16384, 128, 128)
    work_list, lengths = np.asarray(found.work_list), np.tile(np.asarray(found.count)[0, 0], heads)
    assert sorted(work_list[work_list >= 0]) == list(range(128 * heads))
    loads = np.where(work_list >= 0, lengths[work_list], 0).sum(0)
    assert loads.max() <= max(loads.mean() * 1.01, loads.mean() + lengths.max())


def test_what_a_section_reads_stays_in_l2():
    """Heads of 8 MiB: no more than two of them are processed at a time."""
    items = _items(1, 16, 8 * 2**20, thread_blocks=132)
    found = schedule.query_block_schedule(Band(None, 0), items, 16384, 16384, 128, 128)
    for wave in np.asarray(found.work_list):
        assert len(set(wave[wave >= 0] // 128)) <= 2


def _evaluate(mask, row, head, q, k):
    """A tile of the mask, from the arrays that the kernel reads."""
    pick = lambda x: np.asarray(x)[row % x.shape[0]]
    tile = np.ones((len(q), len(k)), bool)
    if mask.lower is not None:
        tile &= k >= pick(mask.lower)[q][:, None]
    if mask.upper is not None:
        tile &= k <= pick(mask.upper)[q][:, None]
    for queries, keys in mask.id_pairs:
        tile &= pick(queries)[q][:, None] == pick(keys)[k]
    if mask.dense is not None:
        dense = pick(mask.dense)
        tile &= dense[head % dense.shape[0]][np.ix_(q, k)] != 0
    for union in mask.unions:
        tile &= np.any([_evaluate(one, row, head, q, k) for one in union], axis=0)
    return tile


def test_blocks_that_see_nothing_are_not_visited():
    """Eight documents: a query block visits only its own."""
    ids = _ids(*[128] * 8)
    found = schedule.query_block_schedule(Segments(ids, ids), _items(1, 1), 1024, 1024, 128, 128)
    assert found.count.tolist() == [[[1] * 8]]
    assert found.partial.tolist() == [[[0] * 8]]
    assert found.index[0, 0, :, 0].tolist() == list(range(8))


def test_registers_of_all_warpgroups_fit():
    """With more than there are, a thread block waits for ever."""
    for consumers in (2, 3):
        consumer, producer = mosaic_gpu.register_budget(consumers)
        at_launch = mosaic_gpu.REGISTER_FILE // (128 * (consumers + 1)) // 8 * 8
        assert 128 * (consumers * consumer + producer) <= mosaic_gpu.REGISTER_FILE
        assert consumers * consumer + producer <= at_launch * (consumers + 1)
        assert producer <= at_launch <= consumer
        assert consumer % 8 == producer % 8 == 0


@pytest.mark.parametrize(
    ("change", "device", "reason"),
    [
        ({}, H200._replace(compute_capability=(8, 0)), "compute capability 9.0"),
        ({"dtype": jnp.float32}, H200, "bfloat16 or float16"),
        ({"head_dim": 36}, H200, "head dim that is a multiple of 8"),
        ({"head_dim": 264}, H200, "up to 256"),
        ({"queries": 4090}, H200, None),
        ({"mask": Or((Band(None, 0), Chunks(64)))}, H200, None),
        ({"mask": Or((Band(None, 0), BLOCKS))}, H200, "masks made of Blocks"),
        ({}, H200, None),
        ({"head_dim": 192, "value_dim": 128, "mask": RULES["causal"]}, H200, None),
    ],
)
def test_a_call_is_refused_with_its_reason(change, device, reason):
    if mosaic_gpu.versions.why_missing():
        pytest.skip(str(mosaic_gpu.versions.why_missing()))
    said = pallas_sm90.why_not(*programs.call(**change), device)
    assert said is None if reason is None else reason in str(said)


@pytest.mark.parametrize(
    "dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256,) * 2]
)
def test_every_candidate_fits_shared_memory(dims):
    inputs, spec = programs.call(head_dim=dims[0], value_dim=dims[1])
    choices = pallas_sm90.IMPLEMENTATION.forward.choices(inputs, spec, H200)
    assert choices
    for params in choices:
        tiles = configs.forward_tiles(inputs, params)
        assert (tiles.block_q, tiles.block_k) == (params.q_blocksize, params.kv_blocksize)
        assert tiles.shared_bytes(*dims) <= configs.FORWARD_SHARED_BYTES


@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        (None, 192),
        (Band(None, 0), 192),
        (Band(-1023, 0), 192),
        (Band(-127, 0), 128),
        (Band(None, 0) & Band(-300, 300), 128),
        (Chunks(64), 128),
        (DOCUMENTS & Band(None, 0), 192),
        (PACKED & Band(None, 0), 128),
    ],
)
def test_head_dim_64_takes_three_warpgroups_where_masks_are_wide_bounds(mask, rows):
    """Few keys for each query leave most of a large tile hidden; ids take registers."""
    inputs, _ = programs.call(head_dim=64, mask=mask)
    assert configs.forward_tiles(inputs, None).block_q == rows
    assert configs.forward_tiles(programs.call(mask=mask)[0], None).block_q == 128


def test_a_bias_for_every_pair_is_staged_through_shared_memory():
    """Two stages for each warpgroup where they fit; transposed in a dK/dV kernel."""

    def stages(task, **change):
        inputs, spec = programs.call(**change)
        of_keys, of_queries = configs.backward_tiles(inputs, spec, None)
        found = staged_bias(task, of_keys[0] if task.keys_resident else of_queries, inputs)
        return (found.stages, found.transposed) if found else None

    pairs: dict[str, Any] = {"bias": programs.PAIRS}
    assert stages(DK_DV, **pairs) == (2, True)
    assert stages(DQ, **pairs) == (2, False)
    assert stages(DV, head_dim=256, **pairs) is None
    assert stages(DK_DV) is None
    assert stages(DK_DV, bias=(1, 8, 1, 4096)) is None
    wide = programs.call(**pairs)[0]
    wide = wide._replace(bias=jax.ShapeDtypeStruct(programs.PAIRS, jnp.float32))
    of_keys, _ = configs.backward_tiles(wide, programs.call()[1], None)
    assert not staged_bias(DK_DV, of_keys[0], wide)


needs_assembler = pytest.mark.skipif(
    gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not())
)


def _check_assembly(names):
    directions = {"forward" if name.startswith("forward-") else "backward" for name in names}
    proves(OP.name, SOURCE, *sorted(directions), compiled_for="sm_90")
    reports = gpu_compile.compile_all("kernels.flash_gpu_programs", names)
    # Of two programs with the same kernel, only the first has it assembled.
    assert reports[names[0]].kernels >= 1
    for name, report in reports.items():
        assert (name, report.spilled, report.complaints) == (name, 0, [])


def test_the_backward_takes_every_head_dim_and_feature():
    if mosaic_gpu.versions.why_missing():
        pytest.skip(str(mosaic_gpu.versions.why_missing()))
    refused = lambda **change: _refused_backward(*programs.call(**change))
    for head_dim in (8, 128, 192, 256):
        assert refused(head_dim=head_dim) is None
        assert refused(head_dim=head_dim, dropout=True, soft_cap=50.0) is None
        assert refused(head_dim=head_dim, bias=(1, 8, 4096, 4096), sinks=True) is None
    assert "multiple of 8 up to 256, got 264" in refused(head_dim=264)


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("value_dim", [16, 64, 96, 128, 192, 256])
def test_every_kernel_of_the_backward_fits_shared_memory(head_dim, value_dim):
    """At least two stages of the operands of accumulating matmuls."""
    inputs, spec = programs.call(head_dim=head_dim, value_dim=value_dim, sinks=True)
    for params in pallas_sm90.IMPLEMENTATION.backward.choices(inputs, spec, H200):
        of_keys, of_queries = configs.backward_tiles(inputs, spec, params)
        tasks = [DV, DK] if len(of_keys) == 2 else [DK_DV]
        with_sinks = dataclasses.replace(DQ, row_sums="weights")
        for task, tiles in zip((*tasks, with_sinks), (*of_keys, of_queries), strict=True):
            stages = task.stages(tiles, (head_dim, value_dim))
            assert stages is not None
            assert min(stages[i] for i in task.accumulated) >= 2
            # With overlap, a stage is released a tile later.
            assert not tiles.overlap or task == DV or stages[0] >= 3


# The fused backward is assembled where its own tests are.
UNFUSED = [name for name in programs.PROGRAMS if not name.startswith("fused-")]


@needs_assembler
@pytest.mark.parametrize("part", range(8))
def test_every_configuration_assembles_without_spills(part):
    _check_assembly([name for name in UNFUSED if name in programs.QUICK][part::8])


@needs_assembler
@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_configuration_assembles_with_other_features(part):
    _check_assembly([name for name in UNFUSED if name not in programs.QUICK][part::8])


def _draw(inputs: Inputs, seed: int = 0) -> Inputs:
    """Random numbers for the shapes of a call; arrays stay as they are."""
    generator = np.random.default_rng(seed)

    def draw(x):
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(generator.standard_normal(x.shape), x.dtype)
        return jnp.zeros(x.shape, x.dtype)

    inputs = jax.tree.map(draw, inputs)
    if inputs.dropout is not None:
        indices = (jnp.arange(x.shape[0], dtype=jnp.int32) for x in inputs.dropout[1:])
        inputs = inputs._replace(dropout=Dropout(jnp.int32(7), *indices))
    return inputs


def _check(inputs: Inputs, spec: Spec, params=None, runs: int = 1, **changes) -> None:
    """The forward pass is as near the definition as rounding to the dtype allows.

    `changes` are to the device of the call.
    """
    device = device_of(jax.tree.leaves(inputs))._replace(**changes)
    proves(OP.name, SOURCE, "forward")
    exact, rounded = (reference.forward(_wide(inputs), spec, x) for x in (_same, _rounding(inputs)))
    run = jax.jit(lambda x: pallas_sm90.run_forward(x, spec, params, device)[0])
    _compare([run(inputs) for _ in range(runs)], exact, rounded)


def _check_backward(inputs: Inputs, spec: Spec, params=None, runs: int = 1) -> None:
    """The same of the backward pass, given what a forward pass in the dtype hands over."""
    proves(OP.name, SOURCE, "backward")
    wide = _wide(inputs)
    names = [name for name in inputs._fields[:5] if getattr(inputs, name) is not None]
    draw = lambda x: jnp.asarray(np.random.default_rng(1).standard_normal(x.shape), x.dtype)

    def gradients(rounded):
        values = [getattr(wide, name) for name in names]
        run = lambda *given: reference.forward(
            wide._replace(**dict(zip(names, given, strict=True))), spec, rounded
        )
        outputs, pull_back = jax.vjp(run, *values)
        d_outputs = jax.tree.map(draw, outputs)
        d_outputs = d_outputs._replace(
            out=d_outputs.out.astype(inputs.query.dtype).astype(jnp.float32),
            lse=jnp.where(jnp.isfinite(outputs.lse), d_outputs.lse, 0.0),
        )
        return outputs, d_outputs, pull_back(d_outputs)

    outputs, d_outputs, exact = gradients(_same)
    device = device_of(jax.tree.leaves(inputs))
    narrow = lambda x: x._replace(out=x.out.astype(inputs.query.dtype))
    run = jax.jit(lambda *given: pallas_sm90.run_backward(*given, spec, params, device))
    results = [run(inputs, narrow(outputs), narrow(d_outputs)) for _ in range(runs)]
    results = [[getattr(result, name) for name in names] for result in results]
    _compare(results, exact, gradients(_rounding(inputs))[2])


def _same(x):
    return x


def _rounding(inputs):
    return lambda x: x.astype(inputs.query.dtype).astype(x.dtype)


def _wide(inputs: Inputs) -> Inputs:
    names = [name for name in inputs._fields[:4] if getattr(inputs, name) is not None]
    return inputs._replace(**{name: getattr(inputs, name).astype(jnp.float32) for name in names})


def _compare(results, exact, rounded) -> None:
    """Within twice what rounding costs, a floor of some float32 roundings, and always the same."""
    for got, truth, coarse in zip(results[0], exact, rounded, strict=True):
        got, truth, coarse = (np.asarray(x, np.float64) for x in (got, truth, coarse))
        finite = np.isfinite(truth)
        np.testing.assert_array_equal(np.isfinite(got), finite)
        error, allowed = (np.abs(x[finite] - truth[finite]).max() for x in (got, coarse))
        assert error <= 2 * allowed + 128 * np.finfo(np.float32).eps * np.abs(truth[finite]).max()
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, results[0])


_STARTED = _ids(100, 80, 60, -16)
FROM_STARTS = Segments(_STARTED, _STARTED, 4, jnp.array([[0, 100, 180, 240, 240]], jnp.int32))
SMALL = {"batch": 2, "queries": 256, "heads": 2, "kv_heads": 1, "head_dim": 64}
INTERPRETED = {
    "plain": {},
    "causal": {"mask": Band(None, 0)},
    "window": {"mask": Band(-40, 0)},
    "blind": {"mask": Band(None, -70)},
    "packed": {"batch": 1, "mask": Segments(_ids(100, 60, 80, -16), _ids(100, 60, 80, -16))},
    "documents": {"batch": 1, "mask": FROM_STARTS & Band(None, 0), "head_dim": 128},
    "lengths": {"mask": KeyLength(jnp.array([50, 0]))},
    "prefix": {"mask": Or((Band(None, 0), KeyLength(jnp.array([100, 0]))))},
    "union": {"mask": Or((Band(-70, 0), Segments(_ids(90, 100, 66), _ids(90, 100, 66))))},
    "dense": {"queries": 128, "mask": Dense(_random_mask(1, 2, 128, 128))},
    "bias": {"queries": 128, "bias": (1, 2, 128, 128)},
    "bias_alone": {"batch": 1, "queries": 128, "bias": (1, 2, 128, 128)},
    "bias_of_keys": {"queries": 128, "bias": (1, 1, 1, 128)},
    "bias_of_queries": {"queries": 128, "bias": (2, 2, 128, 1)},
    "bias_of_heads": {"queries": 128, "bias": (1, 2, 1, 1)},
    "bias_of_all": {"queries": 200, "bias": (1, 1, 200, 200), "mask": Band(None, 0)},
    "bias_of_rows": {"bias": (2, 1, 256, 256), "mask": Band(None, -70), "sinks": True},
    "bias_capped": {"queries": 128, "bias": (1, 2, 128, 128), "soft_cap": 2.0, "dropout": True},
    "soft_cap": {"queries": 128, "soft_cap": 2.0},
    "soft_cap_far": {"queries": 128, "soft_cap": 100.0},
    "soft_cap_masked": {"head_dim": 128, "soft_cap": 2.0, "mask": Band(None, 0)},
    "sinks": {"queries": 128, "sinks": True, "mask": Band(None, -5)},
    "dropout": {"queries": 128, "dropout": True},
    "dropout_and_wide": {"queries": 128, "head_dim": 256, "dropout": True, "mask": Band(None, 0)},
    "lengths_apart": {"queries": 200, "keys": 328, "mask": Band(None, 128)},
    "dims_apart": {"queries": 128, "head_dim": 96, "value_dim": 64},
    "results_among_queries": {"queries": 128, "head_dim": 256},
    "wide": {"head_dim": 256, "mask": Band(None, 0), "sinks": True},
    "everything": {
        "queries": 128,
        "head_dim": 256,
        "bias": (1, 2, 128, 128),
        "sinks": True,
        "dropout": True,
        "soft_cap": 2.0,
        "mask": Band(-40, 0),
    },
    "wide_heads": {"queries": 128, "head_dim": 256, "value_dim": 64},
    "wide_values": {"queries": 128, "head_dim": 64, "value_dim": 256},
    "few_queries": {"queries": 8, "keys": 200, "mask": Band(None, 192)},
    "split_keys": {
        "queries": 3,
        "keys": 1024,
        "heads": 4,
        "kv_heads": 2,
        "sinks": True,
        "mask": KeyLength(jnp.array([900, 300])) & Band(None, 800),
    },
    "few_queries_union": {"queries": 4, "keys": 72, "mask": Band(None, 9) | Band(50, None)},
    "split_bias": {"queries": 1, "keys": 1024, "heads": 4, "bias": (1, 4, 1, 1024)},
    "float16": {"queries": 128, "dtype": jnp.float16},
    "odd_lengths": {"queries": 127, "keys": 201, "mask": Band(None, 74)},
    "odd_dims": {"queries": 63, "head_dim": 40, "value_dim": 24, "mask": Band(None, 0)},
    "odd_and_aliased": {"queries": 130, "head_dim": 256},
    "one_query": {"queries": 1, "keys": 63},
    "odd_dims_alike": {"queries": 63, "head_dim": 40, "value_dim": 48},
}


needs_interpreter = pytest.mark.skipif(
    mosaic_gpu.versions.why_missing(interpreted=True) is not None,
    reason=str(mosaic_gpu.versions.why_missing(interpreted=True)),
)


def _interpreted_call(name):
    inputs, spec = programs.call(**(SMALL | INTERPRETED[name]))
    return _draw(inputs), spec


@needs_interpreter
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "causal" else [pytest.mark.slow])
        for name in INTERPRETED
    ],
)
def test_interpreted_it_computes_attention(name):
    """Barriers, copies, stages and masks as on the card; matmuls complete at once."""
    with settings.override(interpret=True):
        _check(*_interpreted_call(name))


@needs_interpreter
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "packed" else [pytest.mark.slow])
        for name in INTERPRETED
    ],
)
def test_interpreted_it_computes_gradients(name):
    inputs, spec = _interpreted_call(name)
    if reason := _refused_backward(inputs, spec):
        pytest.skip(reason)
    with settings.override(interpret=True):
        _check_backward(inputs, spec)


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["causal", "packed", "dims_apart", "odd_lengths", "soft_cap_masked", "wide", "bias_of_rows"],
)
def test_every_access_is_ordered_by_a_barrier(name, monkeypatch):
    monkeypatch.setattr(mosaic_gpu.versions, "detect_races", True)
    inputs, spec = _interpreted_call(name)
    with settings.override(interpret=True):
        _check(inputs, spec)
        _check_backward(inputs, spec)


@needs_interpreter
@pytest.mark.parametrize(
    "name",
    ["documents", *(pytest.param(x, marks=[pytest.mark.slow]) for x in ("dims_apart", "wide"))],
)
def test_one_thread_block_processes_item_after_item(name, monkeypatch):
    """Buffers of queries and results are reused, and no access is out of order."""
    monkeypatch.setattr(mosaic_gpu.versions, "detect_races", True)
    with settings.override(interpret=True):
        _check(*_interpreted_call(name), multiprocessors=1)


def test_results_never_reach_into_other_queries():
    """Where they share a buffer, a warpgroup's results are as large as its queries."""
    for head_dim in range(16, 257, 16):
        for value_dim in range(16, 257, 16):
            for sizes in ((2, 128, 2), (2, 64, 4), (3, 64, 4)):
                tiles = configs.ForwardTileConfig(*sizes)
                rows = tiles.stages * tiles.block_k
                whole = tiles.shared_bytes(head_dim, value_dim) // 2
                resident = whole - rows * (head_dim + value_dim)
                buffers = tiles.query_buffers(head_dim, value_dim)
                own = 0 if head_dim == value_dim else value_dim
                assert resident == tiles.block_q * (buffers * head_dim + own)


def _refused_backward(inputs, spec):
    return pallas_sm90.IMPLEMENTATION.backward.refusal(inputs, spec, H200)


@pytest.mark.gpu
@pytest.mark.parametrize("name", INTERPRETED)
def test_small_calls_on_the_card(name):
    inputs, spec = _interpreted_call(name)
    _check(inputs, spec, runs=3)
    if not _refused_backward(inputs, spec):
        _check_backward(inputs, spec, runs=3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256,) * 2]
)
@pytest.mark.parametrize("name", programs.FEATURES)
def test_every_feature_in_every_candidate_on_the_card(name, dims):
    """Long enough for several items a thread block, and for all stages to be reused."""
    feature = programs.FEATURES[name]()
    inputs, spec = programs.call(head_dim=dims[0], value_dim=dims[1], **feature)
    if reason := pallas_sm90.why_not(inputs, spec, H200):
        pytest.skip(reason)
    inputs = _draw(inputs)
    for params in pallas_sm90.IMPLEMENTATION.forward.choices(inputs, spec, H200):
        _check(inputs, spec, params, runs=2)
    if _refused_backward(inputs, spec):
        return
    for params in pallas_sm90.IMPLEMENTATION.backward.choices(inputs, spec, H200):
        _check_backward(inputs, spec, params, runs=2)


def test_parameters_become_tiles_that_exist():
    """Blocks smaller than a warpgroup's, or larger than memory, take the nearest that there is."""
    inputs, _ = programs.call()
    ask = lambda **sizes: configs.forward_tiles(inputs, FwdParams(**sizes))
    assert (ask(q_blocksize=16, kv_blocksize=8).block_q, ask(kv_blocksize=8).block_k) == (64, 64)
    assert ask(q_blocksize=512, kv_blocksize=512).block_q == 192
    assert ask(kv_blocksize=128, num_stages=9).stages == 2
    assert dataclasses.is_dataclass(ask())


@pytest.mark.parametrize("name", static_mask_traces.MASKS)
def test_tracing_with_a_static_mask_compiles_nothing(name, compilations):
    static_mask_traces.trace(
        pallas_sm90.IMPLEMENTATION, static_mask_traces.MASKS[name], BwdParams(deterministic=False)
    )
    assert not compilations
