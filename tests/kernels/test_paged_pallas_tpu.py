"""The TPU kernels over pages: many blocks and tiles, unused memory, blocks that fit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.oracle import assert_same
from tiers import quick

from ejkernel import settings
from ejkernel.cli.oracle import VALUE_FLOOR, Truth, with_dtype
from ejkernel.kernels.common.mosaic_tpu.memory import core_of
from ejkernel.kernels.ragged_page_attention_v3 import OP, pallas_tpu, reference
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Spec
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.configs import (
    cache_layout,
    kernel_configs,
    vmem_estimate,
)
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.schedule import work_list
from ejkernel.kernels.ragged_page_attention_v3.workloads import ragged
from ejkernel.kernels.ragged_page_attention_v3_update import pallas_tpu as update
from ejkernel.modules import (
    PageAttentionConfig,
    RaggedPageAttentionv3Config,
    page_attention,
    ragged_page_attention_v2,
    ragged_page_attention_v3,
    ragged_page_attention_v3_update,
)
from ejkernel.ops import default_executor, executor
from ejkernel.ops.executor import Request
from ejkernel.ops.platform import Device
from ejkernel.ops.workload import Workload

KINDS = ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"]
PAGES, SIZE, KV_HEADS, HEADS, DIM, TOKENS = 14, 4, 2, 4, 8, 16
# Decoding, prefilling, empty, prefilling the last part; then three rows of no sequence.
CU_Q, CU_K = np.array([0, 1, 6, 6, 13]), np.array([0, 9, 14, 14, 25])
TABLE = np.array([[3, 7, 1], [5, 0, 13], [2, 9, 4], [10, -1, 12]])


def interpreted():
    return settings.override(interpret=jax.default_backend() != "tpu")


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


QUERY = draw(TOKENS, HEADS, DIM)
KEYS, VALUES = draw(PAGES, SIZE, KV_HEADS, DIM, seed=1), draw(PAGES, SIZE, KV_HEADS, DIM, seed=2)
NEW_KEYS, NEW_VALUES = draw(TOKENS, KV_HEADS, DIM, seed=3), draw(TOKENS, KV_HEADS, DIM, seed=4)


def used_slots(window=None, new=True):
    """Which slots hold a token that some query sees; without `new`, one from an earlier call."""
    used = np.zeros((PAGES, SIZE), bool)
    for row, q, length in zip(TABLE, np.diff(CU_Q), np.diff(CU_K), strict=True):
        oldest = 0 if window is None else max(length - q - window + 1, 0)
        for position in range(oldest, length if new else length - q) if q else ():
            if row[position // SIZE] >= 0:
                used[row[position // SIZE], position % SIZE] = True
    return used


def poisoned(pages, used):
    return jnp.where(used[:, :, None, None], pages, jnp.nan)


def assert_unchanged(run, clean, dirty):
    with interpreted():
        run = jax.jit(run)
        for a, b in zip(run(*clean), run(*dirty), strict=True):
            assert not np.isnan(b).any()
            np.testing.assert_array_equal(a, b)


@pytest.mark.tpu
@pytest.mark.parametrize("queries", [2, 8])  # packed, by head
def test_slots_that_no_query_sees_never_leak(queries):
    window, rows = 3, QUERY.at[CU_Q[-1] :].set(jnp.nan)
    cfg = RaggedPageAttentionv3Config(num_queries_per_block=queries * 8, num_kv_pages_per_block=2)
    run = lambda *x: ragged_page_attention_v3(
        *x, CU_Q, CU_K, TABLE, sliding_window=window, return_lse=True, platform="pallas", cfg=cfg
    )
    used = used_slots(window)
    dirty = (rows, poisoned(KEYS, used), poisoned(VALUES, used))
    assert_unchanged(run, (QUERY, KEYS, VALUES), dirty)


@pytest.mark.tpu
def test_slots_of_combined_pages_that_no_query_sees_never_leak():
    combined = jnp.stack([KEYS, VALUES], axis=3).reshape(PAGES, SIZE, 2 * KV_HEADS, DIM)
    run = lambda *x: ragged_page_attention_v2(
        *x, np.diff(CU_K), TABLE, CU_Q, 4, return_lse=True, platform="pallas"
    )
    assert_unchanged(run, (QUERY, combined), (QUERY, poisoned(combined, used_slots())))


def assert_as_xla_has_it(run, clean, dirty, touched=False):
    """Kernels on dirty pages give what XLA gives on clean ones, but for the heads touched."""
    expected = jax.jit(lambda *x: run(*x, "xla"))(*clean)
    with interpreted():
        found = jax.jit(lambda *x: run(*x, "pallas"))(*dirty)
    touched = np.broadcast_to(touched, found[0].shape[:2])
    assert not np.isfinite(found[0][touched]).any()
    rest = lambda outputs: [x[~touched] for x in outputs]
    assert_same(rest(found), rest(expected), VALUE_FLOOR, "what the other heads see")


@pytest.mark.tpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_what_a_head_sees_never_reaches_another_head(where, poison, layout):
    """Once in a block that is seen as a whole, once in one that is not."""
    lengths, table = np.array([9, 6, 11, 0]), np.array([[3, 7, 1], [5, 0, 2], [9, 4, 8], [6, 6, 6]])
    order = (lambda x: jnp.swapaxes(x, 1, 2)) if layout == "HND" else (lambda x: x)
    run = lambda keys, values, platform: page_attention(
        *(QUERY[:4], order(keys), order(values), lengths, table),
        kv_layout=layout,
        return_lse=True,
        cfg=PageAttentionConfig(pages_per_compute_block=2),
        platform=platform,
    )
    dirty = [KEYS, VALUES]
    dirty[where] = dirty[where].at[[3, 8], [1, 2], [0, 1]].set(poison)
    touched = np.zeros((4, HEADS), bool)
    touched[0, :2] = touched[2, 2:] = True
    assert_as_xla_has_it(run, (KEYS, VALUES), dirty, touched)


@pytest.mark.tpu
def test_a_head_of_combined_pages_never_reaches_another():
    combined = jnp.stack([KEYS, VALUES], axis=3).reshape(PAGES, SIZE, 2 * KV_HEADS, DIM)
    run = lambda pages, platform: ragged_page_attention_v2(
        *(QUERY, pages, np.diff(CU_K), TABLE, CU_Q, 4), return_lse=True, platform=platform
    )
    touched = np.zeros((TOKENS, HEADS), bool)
    touched[0, 2:] = True
    assert_as_xla_has_it(run, (combined,), (combined.at[3, 0, 3].set(jnp.nan),), touched)


@pytest.mark.tpu
@pytest.mark.parametrize(("heads", "pages"), [(3, 32), (9, 8)])
def test_a_part_of_a_block_may_have_any_number_of_heads(heads, pages):
    """A block whose halves begin with a register, one whose do not; the sequence ends within."""
    size = 16
    cache = tuple(draw(pages, size, heads, DIM, seed=i) for i in (1, 2))
    table, lengths = np.arange(pages)[None], np.array([size * pages - 20])
    run = lambda *x: (page_attention(draw(1, heads, DIM), *x[:2], lengths, table, platform=x[2]),)
    assert_as_xla_has_it(run, cache, cache)


@pytest.mark.tpu
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_caches_of_eight_bits_with_traced_scales(dtype):
    """As XLA computes them, whatever lies where no query looks."""
    used, scale = used_slots(), jnp.array([0.5, 2.0])
    pages = [x.astype(dtype) for x in (KEYS, VALUES)]
    dirty = [poisoned(x.astype(jnp.float32), used).astype(dtype) for x in pages]

    def run(platform, pages, k_scale, v_scale):
        return ragged_page_attention_v3(
            *(QUERY, *pages, CU_Q, CU_K, TABLE), k_scale=k_scale, v_scale=v_scale, platform=platform
        )

    expected = jax.jit(run, static_argnums=0)("xla", pages, scale, scale[0])
    with interpreted():
        found = jax.jit(run, static_argnums=0)("pallas", dirty, scale, scale[0])
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.tpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_slots_that_no_token_is_written_to_stay_as_they_are(layout):
    """The cache comes back with the new tokens and is otherwise the same, NaN for NaN."""
    order = (lambda x: jnp.swapaxes(x, 1, 2)) if layout == "HND" else (lambda x: x)
    run = lambda query, key, value, keys, values, platform: ragged_page_attention_v3_update(
        *(query, key, value, order(keys), order(values), CU_Q, CU_K, TABLE),
        kv_layout=layout,
        platform=platform,
    )
    old = used_slots(new=False)
    arrays = (QUERY, NEW_KEYS, NEW_VALUES, poisoned(KEYS, old), poisoned(VALUES, old))
    expected = jax.jit(lambda *x: run(*x, "xla"))(*arrays)
    with interpreted():
        found = jax.jit(lambda *x: run(*x, "pallas"))(*arrays)
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5, atol=2e-6)
    for a, b in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.tpu
@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_pages_are_updated_however_many_are_in_flight(monkeypatch, in_flight):
    """Eight where they fit into VMEM; a smaller ring buffer must write the same."""
    monkeypatch.setattr(update.PageBuffers, "most_in_flight", lambda self, device: in_flight)
    query, (key, value) = draw(TOKENS, HEADS, DIM), draw(2, TOKENS, KV_HEADS, DIM, seed=1)
    pages = draw(2, PAGES, KV_HEADS, SIZE, DIM, seed=2)
    names = ("query", "key", "value", "key_pages", "value_pages")
    given = dict(zip(names, (query, key, value, *pages), strict=True))
    given |= {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "page_indices": TABLE, "kv_layout": "HND"}
    call = default_executor().invocation(ragged_page_attention_v3_update, **given)
    with interpreted():
        found = update.write_tokens(call.inputs, call.spec, Device("tpu", "TPU v4", None, ""))
    expected = ragged_page_attention_v3_update(**given, platform="xla")[1:]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("kind", "count"), [("TPU v4", 2), ("TPU v5 lite", 8), ("TPU7x", 8)])
def test_as_many_pages_are_in_flight_as_vmem_holds(kind, count):
    device = Device("tpu", kind, None, kind)
    large = update.PageBuffers((5, 256, 256), np.dtype("float32"))
    assert large.most_in_flight(device) == count
    assert large.bytes(count) <= core_of(device).vmem
    assert update.PageBuffers((128, 256, 256), large.dtype).most_in_flight(device) == 0


@pytest.mark.tpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_many_blocks_give_what_the_reference_defines(layout, dtype):
    """Sequences over several blocks of copies in flight, tiles that end within one."""
    shape = ragged(
        (1, 40, 1, 7, 1),
        (150, 90, 3, 64, 81),
        heads=8,
        kv_heads=2,
        head_dim=32,
        page_size=8,
        holes=((0, 3), (1, 11)),
        layout=layout,
    )
    workload = Workload("many", shape | {"kv_layout": layout})
    call = lambda seed: default_executor().invocation(
        ragged_page_attention_v3, **workload.build(seed)
    )
    mine = call(0)
    cfg = RaggedPageAttentionv3Config(num_kv_pages_per_block=2, num_queries_per_block=16)
    run = lambda x: executor.run(mine.op, x, mine.spec, Request(platform="pallas", cfg=cfg))
    with interpreted():
        outputs = jax.jit(run)(with_dtype(mine.inputs, dtype))
    for deviation in Truth(call).of_values(outputs, dtype):
        assert deviation.fine, deviation


def ragged_inputs(lengths, kv_lengths, tokens=64, pages=32, slots=16):
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    shape = lambda *x: jax.ShapeDtypeStruct(x, jnp.bfloat16)
    row = lambda x: np.asarray(x, np.int32)[None]
    table = jax.ShapeDtypeStruct((1, len(lengths), pages), jnp.int32)
    cache = shape(1024, slots, 8, 128)
    return Inputs(
        shape(1, tokens, 32, 128), cache, cache, row(starts), row(lengths), row(kv_lengths), table
    )


def listed(inputs, size, **options):
    given = {"all_sequences": False, "cores": 1, "window": None} | options
    found = work_list(inputs, size, block_positions=32, page_size=16, **given)
    fields = (found.sequence, found.row, found.rows, found.position, found.begin, found.end)
    bounds = found.core_bounds.tolist()
    return [tuple(int(x[i]) for x in fields) for i in range(bounds[-1])], bounds


def test_the_work_list_holds_the_tiles_of_queries_that_see_something():
    inputs = ragged_inputs((1, 9, 0, 3, 4), (40, 9, 0, 100, 2))
    # The last sequence has two tokens more than the cache: those see nothing.
    assert listed(inputs, 1)[0] == [(0, 0, 1, 39, 0, 2)]
    assert listed(inputs, 4)[0] == [
        (1, 1, 4, 0, 0, 1),
        (1, 5, 4, 4, 0, 1),
        (1, 9, 1, 8, 0, 1),
        (3, 10, 3, 97, 0, 4),
        (4, 15, 2, 0, 0, 1),
    ]
    assert listed(inputs, 4, window=20)[0][3] == (3, 10, 3, 97, 2, 4)


def test_two_cores_share_the_blocks_and_not_the_tiles():
    inputs = ragged_inputs((1,) * 5, (320, 32, 32, 32, 32))
    assert listed(inputs, 1, cores=2)[1] == [0, 1, 5]


SPEC = Spec(softmax_scale=1.0)


def call_of(slots, kv_heads, heads, dim, pages, dtype, tokens):
    shape = lambda *x, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(x, dtype)
    cache, number = shape(4096, slots, kv_heads, dim, dtype=dtype), shape(1, 64, dtype=jnp.int32)
    table = shape(1, 64, pages, dtype=jnp.int32)
    return Inputs(shape(1, tokens, heads, dim), cache, cache, number, number, number, table)


@pytest.mark.parametrize("kind", quick(KINDS, "TPU v5 lite"))
def test_default_blocks_fit_by_construction(kind):
    device = Device("tpu", kind, None, kind)
    random = np.random.default_rng(0)
    for _ in range(200):
        kv_heads = int(random.choice([1, 2, 3, 4, 8, 16, 32]))
        inputs = call_of(
            slots=int(random.choice([1, 8, 16, 32, 64, 128, 256])),
            kv_heads=kv_heads,
            heads=kv_heads * int(random.choice([1, 2, 4, 7, 8])),
            dim=int(random.choice([64, 96, 128, 192, 256])),
            pages=int(random.choice([1, 7, 64, 512, 8192])),
            dtype=random.choice([jnp.bfloat16, jnp.float32, jnp.int8]),
            tokens=int(random.choice([1, 64, 8192])),
        )
        layout = cache_layout(inputs, SPEC)
        reason = pallas_tpu.why_not(inputs, SPEC, device)
        if reason:
            assert "VMEM" in reason
            assert kind == "TPU v4"
            continue
        for config in kernel_configs(inputs, SPEC, SPEC.config(), device):
            assert vmem_estimate(inputs, layout, config) <= core_of(device).vmem


def test_the_table_of_pages_may_be_larger_than_scalar_memory():
    device = Device("tpu", "TPU v5 lite", None, "")
    inputs = call_of(16, 8, 32, 128, 1 << 20, jnp.bfloat16, 64)
    assert 4 * inputs.page_indices.size > core_of(device).smem
    assert pallas_tpu.why_not(inputs, SPEC, device) is None


def test_more_sequences_than_scalar_memory_can_list_are_refused():
    device = Device("tpu", "TPU v5 lite", None, "")
    inputs = call_of(16, 8, 32, 128, 4, jnp.bfloat16, 1)
    many = jax.ShapeDtypeStruct((100_000, 1), jnp.int32)
    inputs = inputs._replace(
        query=jax.ShapeDtypeStruct((100_000, 1, 32, 128), jnp.bfloat16), kv_lens=many
    )
    assert "scalar memory" in (pallas_tpu.why_not(inputs, SPEC, device) or "")


@pytest.mark.tpu
@pytest.mark.parametrize("queries", [1, 5])
def test_a_partial_result_is_not_rounded_to_the_dtype_of_the_query(queries):
    lengths = jnp.array([[9], [12], [0]])
    inputs = Inputs(
        draw(3, queries, HEADS, DIM, seed=5).astype(jnp.bfloat16),
        KEYS.astype(jnp.bfloat16),
        VALUES.astype(jnp.bfloat16),
        jnp.zeros((3, 1), jnp.int32),
        jnp.full((3, 1), queries),
        lengths,
        jnp.array(TABLE[:3, None]),
    )
    spec = Spec(softmax_scale=0.3, float32_out=True)
    with interpreted():
        got = jax.jit(lambda x: executor.run(OP, x, spec, Request("pallas")))(inputs)
    wanted = reference.forward(inputs, spec)
    assert got.out.dtype == jnp.float32
    np.testing.assert_allclose(got.out, wanted.out, rtol=0, atol=2e-2)  # rounded weights
    assert jnp.any(got.out != got.out.astype(jnp.bfloat16).astype(jnp.float32))
    whole = dataclasses.replace(spec, float32_out=False)
    with interpreted():
        rounded = jax.jit(lambda x: executor.run(OP, x, whole, Request("pallas")))(inputs)
    assert jnp.array_equal(rounded.out, got.out.astype(jnp.bfloat16))
