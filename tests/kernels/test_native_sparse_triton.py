"""Native sparse attention in Triton: interpreted it computes what is defined, compiled it fits."""

import dataclasses
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
from hypothesis import strategies as st
from kernels.triton_testing import H200, SHARED, compiled, lowered, marked, needs_triton
from tiers import examples, quick

from ejkernel.cli.oracle import with_gradients
from ejkernel.errors import UnsupportedError
from ejkernel.kernels.native_sparse_attention import OP, triton
from ejkernel.kernels.native_sparse_attention import selection as xla_selection
from ejkernel.kernels.native_sparse_attention.config import NativeSparseAttentionConfig
from ejkernel.kernels.native_sparse_attention.inputs import Inputs, SelectionInputs, Spec
from ejkernel.kernels.native_sparse_attention.triton import configs, lists, operands, selection
from ejkernel.kernels.native_sparse_attention.workloads import WORKLOADS
from ejkernel.modules import native_sparse_attention
from ejkernel.ops import executor
from ejkernel.ops.executor import Request
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.platform import Backend, Platform

SOURCE = next(source for source in OP.sources if source.platform is Platform.TRITON)


def config(block_size, block_q=4, block_k=32):
    """Tiles small enough that the workloads have several, and some of them are cut."""
    return NativeSparseAttentionConfig(
        platform="triton", block_q=block_q, block_k=block_k, block_size=block_size
    )


def check(workload, dtype, **tile):
    case = Case(OP, SOURCE, workload)
    call = case.call(dtype)
    proves(OP.name, SOURCE, "forward", "backward")
    cfg = config(call.spec.block_size, **tile)
    run = lambda inputs: executor.run(OP, inputs, call.spec, Request(cfg=cfg))
    outputs, gradients = with_gradients(run)(call.inputs)
    assert_as_good_as_rounding(case, dtype, "values", outputs)
    assert_as_good_as_rounding(case, dtype, "gradients", gradients)


@needs_triton
@pytest.mark.parametrize("workload", marked(WORKLOADS, "one_token"))
def test_interpreted_it_computes_what_is_defined(interpreter, workload):
    """Values and gradients; what a kernel leaves unwritten would be NaN."""
    check(workload, jnp.float32)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "heads_of_their_own", "packed_all_branches"])
@pytest.mark.parametrize("block_q", [1, 64])
def test_half_precision_is_as_good_as_rounding(interpreter, name, block_q):
    """With the fewest tokens in a tile, and with as many as there can be."""
    workload = next(w for w in WORKLOADS if w.name == name)
    check(workload, jnp.float16, block_q=block_q, block_k=64)


def problem(length=40, batch=1, kv_heads=2, group=2, choices=3, block_size=8, cu_seqlens=None):
    """Inputs whose blocks are drawn from those of the longest sequence there can be, and none."""
    rng = np.random.default_rng(length + group)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    index = rng.integers(-1, -(-length // block_size) + 1, (batch, length, kv_heads, choices))
    inputs = Inputs(
        draw(batch, length, kv_heads * group, 16),
        draw(batch, length, kv_heads, 16),
        draw(batch, length, kv_heads, 16),
        jnp.asarray(index, jnp.int32),
        cu_seqlens=None if cu_seqlens is None else jnp.asarray(cu_seqlens, jnp.int32),
    )
    return inputs, Spec(softmax_scale=0.25, block_size=block_size)


def chosen_keys(inputs, spec):
    """For each batch row, key head and token the first keys of its blocks, by the definition."""
    b, t, k, _ = inputs.block_indices.shape
    bounds = [0, t] if inputs.cu_seqlens is None else [int(x) for x in inputs.cu_seqlens]
    found = {}
    for row, head, token in np.ndindex(b, k, t):
        starts = [x for x in bounds[:-1] if x <= token]
        listed = set()
        if token < bounds[-1]:
            most = (token - starts[-1]) // spec.block_size
            named = (int(x) for x in inputs.block_indices[row, token, head])
            listed = {starts[-1] + x * spec.block_size for x in named if 0 <= x <= most}
        found[row, head, token] = listed
    return found


BOUNDS = st.lists(st.integers(0, 40), min_size=3, max_size=3).map(lambda x: [0, *sorted(x)])


def arguments(tokens, cu_seqlens, block_size, **sizes):
    inputs, spec = problem(cu_seqlens=cu_seqlens, block_size=block_size, **sizes)
    config = configs.SelectedTileConfig(tokens, 1, 16, 4, 1)
    static = operands.static_arguments(inputs, spec, config)
    return inputs, spec, static, operands.key_blocks(inputs, spec)


@functools.partial(jax.jit, static_argnames=("static", "spec"))
def inverse_lists(inputs, spec, static):
    blocks = operands.key_blocks(inputs, spec)
    return blocks, lists.key_lists(inputs, blocks, static)


@pytest.mark.parametrize("longest", quick([2, 2048], 2))
@examples(20)
@given(cu_seqlens=st.none() | BOUNDS)
def test_every_block_has_the_tokens_that_chose_it(longest, cu_seqlens):
    """In ascending order and once, in items of bounded length that its keys can find."""
    inputs, spec, static, _ = arguments(1, cu_seqlens, 3 if longest == 2 else 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists, "_ROWS_OF_AN_ITEM", 2 * longest)  # two heads a token
        assert lists.item_length(static) == longest
        blocks, found = jax.tree.map(np.asarray, inverse_lists(inputs, spec, static))
    wanted = {}
    for (row, head, token), starts in chosen_keys(inputs, spec).items():
        for start in starts:
            wanted.setdefault((row, head, start), []).append(token)
    seen = {}
    for item, (block, first, last) in enumerate(found.items.T):
        assert last - first <= longest
        head, number = divmod(block, static.numbers)
        start = int(blocks.spans[0, number])
        listed = [token for token in found.tokens[first:last] if token >= 0]
        if listed:
            seen.setdefault((*divmod(head, static.kv_heads), start), []).extend(listed)
            row, kv_head = divmod(head, static.kv_heads)
            first_item, end = found.items_of_keys[:, row, kv_head, start]
            assert first_item <= item < end
    assert seen == wanted
    assert found.items_of_keys.shape == (2, 1, 2, 40)


@needs_triton
@pytest.mark.parametrize(
    ("tokens", "cu_seqlens", "block_size"),
    [(4, None, 8), (1, [0, 9, 9, 31], 3), (64, [0, 40], 16), (16, [0, 1, 33], 8)],
)
def test_a_tile_visits_what_its_tokens_chose(interpreter, tokens, cu_seqlens, block_size):
    """Each block once, with a bit for every token that chose it; no tile has two sequences."""
    inputs, spec, static, blocks = arguments(tokens, cu_seqlens, block_size, choices=5)
    found = jax.tree.map(np.asarray, lists.tile_lists(inputs, blocks, static, H200))
    wanted = chosen_keys(inputs, spec)
    covered = []
    for tile, (start, end) in enumerate(found.tokens.T):
        covered += range(start, end)
        for head in range(static.kv_heads):
            count = found.counts[0, head, tile]
            spans = found.spans[0, head, tile, :, :count]
            members = found.members[0, head, tile, :count].astype(np.uint32)
            assert list(spans[0]) == sorted(set(spans[0]))
            for token in range(start, end):
                word, bit = divmod(token - start, 32)
                mine = members[:, word] >> np.uint32(bit) & 1
                assert set(spans[0][mine == 1]) == wanted[0, head, token]
    assert covered == list(range(40))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "packed"])
def test_long_lists_are_cut_into_items(interpreter, monkeypatch, name):
    """The gradient of a block is the sum of several parts."""
    monkeypatch.setattr(lists, "_ROWS_OF_AN_ITEM", 8)
    check(next(w for w in WORKLOADS if w.name == name), jnp.float32)


@needs_triton
def test_what_nobody_sees_is_not_read(interpreter):
    """Blocks that nobody chose, and tokens past the last sequence, hold no numbers."""
    inputs, spec = problem(cu_seqlens=[0, 16, 33], block_size=8)
    index = inputs.block_indices.at[:, :16].set(jnp.arange(3) % 2).at[:, 16:].set(-1)
    index = index.at[:, 24:33, :, 0].set(0)
    unseen = np.zeros(40, bool)
    unseen[24:] = True  # of the second sequence only block 0 is chosen
    poisoned = lambda x, where: jnp.where(where[None, :, None, None], jnp.nan, x)
    clean = inputs._replace(block_indices=index)
    dirty = clean._replace(
        query=poisoned(inputs.query, np.arange(40) >= 33),
        key=poisoned(inputs.key, unseen),
        value=poisoned(inputs.value, unseen),
    )
    cfg = config(8)
    run = lambda inputs: executor.run(OP, inputs, spec, Request(cfg=cfg))
    expected, got = with_gradients(run)(clean), with_gradients(run)(dirty)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (got[0].out[:, 33:] == 0).all()


@needs_triton
def test_a_sequence_does_not_reach_its_neighbours(interpreter):
    """Sequences end within a tile of tokens, and within a block of keys."""
    inputs, spec = problem(cu_seqlens=[0, 13, 27, 40], block_size=8)
    middle = (np.arange(40) >= 13) & (np.arange(40) < 27)
    poisoned = lambda x: jnp.where(middle[None, :, None, None], jnp.nan, x)
    dirty = inputs._replace(**{x: poisoned(getattr(inputs, x)) for x in ("query", "key", "value")})
    cfg = config(8)
    run = lambda inputs: executor.run(OP, inputs, spec, Request(cfg=cfg)).out[:, ~middle]
    expected, got = with_gradients(run)(inputs), with_gradients(run)(dirty)
    np.testing.assert_array_equal(expected[0], got[0])
    for a, b in zip(expected[1], got[1], strict=True):  # of query, key and value
        np.testing.assert_array_equal(a[:, ~middle], b[:, ~middle])


@needs_triton
@pytest.mark.slow
def test_the_window_may_be_traced(interpreter):
    inputs, _ = problem()
    run = functools.partial(
        native_sparse_attention,
        *inputs[:3],
        block_indices=inputs.block_indices,
        block_size=8,
        cfg=config(8),
    )
    expected = run(sliding_window=5)
    got = jax.jit(lambda window: run(sliding_window=window))(jnp.int32(5))
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def by_group(inputs):
    """The queries with an axis for the heads of a key head."""
    b, t, _, h = inputs.query.shape
    return inputs.query.reshape(b, t, inputs.key.shape[2], -1, h)


def both_selections(count, cu_seqlens=None, **sizes):
    """The blocks that Triton chooses, and those that XLA chooses."""
    inputs, spec = problem(cu_seqlens=cu_seqlens, **sizes)
    call = SelectionInputs(by_group(inputs), inputs.key, jnp.arange(count), inputs.cu_seqlens)
    by_xla, _ = xla_selection.run(call, spec, None)
    by_triton, _ = selection.run(call, spec, None, H200)
    return np.asarray(by_triton.blocks), np.asarray(by_xla.blocks)


@needs_triton
@pytest.mark.parametrize(
    ("count", "cu_seqlens", "sizes"),
    [
        (1, None, {}),
        (2, None, {"block_size": 64}),
        pytest.param(3, [0, 9, 9, 31], {"group": 3}, marks=pytest.mark.slow),
        pytest.param(9, [0, 40], {"group": 16}, marks=pytest.mark.slow),
        # More blocks than are visited at once.
        pytest.param(4, None, {"block_size": 4, "length": 90}, marks=pytest.mark.slow),
    ],
)
def test_it_selects_the_blocks_that_xla_selects(interpreter, count, cu_seqlens, sizes):
    found, expected = both_selections(count, cu_seqlens, **sizes)
    np.testing.assert_array_equal(found, expected)
    proves(OP.name, SOURCE, "forward")


@needs_triton
@pytest.mark.slow
def test_of_equal_scores_the_earlier_block_is_selected(interpreter):
    inputs, spec = problem(block_size=4, length=90)
    same = jnp.broadcast_to(inputs.key[:, :1], inputs.key.shape)
    call = SelectionInputs(by_group(inputs), same, jnp.arange(4))
    found, _ = selection.run(call, spec, None, H200)
    assert found.blocks[0, 89, 0].tolist() == [22, 0, 1, 2]
    assert found.blocks[0, 6, 1].tolist() == [1, 0, -1, -1]


@needs_triton
@pytest.mark.parametrize(
    ("group", "options", "chosen"),
    [
        (2, {"platform": "triton"}, "triton"),
        (2, {"cfg": config(8)}, "triton"),
        (2, {"platform": "xla"}, "xla"),
        (17, {"platform": "triton"}, "xla"),  # float32 tiles have 16 rows
    ],
)
def test_the_selection_runs_on_the_named_platform(interpreter, monkeypatch, group, options, chosen):
    """Or by XLA, if the platform does not support the selection."""
    ran = []
    for platform, module in (("xla", xla_selection), ("triton", selection)):

        def run(inputs, spec, params, device, platform=platform, original=module.IMPLEMENTATION):
            ran.append(platform)
            return original.forward(inputs, spec, params, device=device)

        spied = dataclasses.replace(module.IMPLEMENTATION.forward, run=run)
        monkeypatch.setattr(module, "IMPLEMENTATION", Implementation(forward=spied))
    inputs, _ = problem(length=33, group=group)
    with executor.use(executor.Executor(executor.default_executor().chooser)):
        native_sparse_attention(*inputs[:3], block_counts=3, block_size=8, **options)
    assert set(ran) == {chosen}


def refusal(dtype="float16", device=H200, head_dim=64, value=None):
    shape = jax.ShapeDtypeStruct
    inputs = Inputs(
        shape((1, 64, 4, head_dim), dtype),
        shape((1, 64, 2, head_dim), dtype),
        shape((1, 64, 2, head_dim), value or dtype),
        shape((1, 64, 2, 3), "int32"),
    )
    return triton.why_not(inputs, Spec(softmax_scale=1.0, block_size=16), device)


def test_it_says_what_it_cannot_do():
    assert refusal("float64") == "takes bfloat16, float16, float32 and no float64"
    assert refusal(value="float32") == "takes query, key and value of one dtype"
    assert refusal(head_dim=288) == "takes head dims up to 256 and this one is 288"
    if importlib.util.find_spec("jax_triton") is None:
        assert "is not installed" in str(refusal())
    else:
        assert refusal() is None
        old = H200._replace(compute_capability=(7, 5))
        assert "8.0 or higher and the device has 7.5" in str(refusal(device=old))


def test_the_selection_says_what_it_cannot_do():
    shape = jax.ShapeDtypeStruct

    def refusal(group=2, count=16, key="float16", head_dim=64):
        call = SelectionInputs(
            shape((1, 64, 2, group, head_dim), "float16"),
            shape((1, 64, 2, head_dim), key),
            shape((count,), "int32"),
        )
        return selection.why_not(call, Spec(softmax_scale=1.0, block_size=16), H200)

    assert refusal(group=65) == "takes up to 64 query heads to a key head, not 65"
    assert refusal(count=129) == "chooses up to 128 blocks and not 129"
    assert refusal(key="float32") == "takes query and key of one dtype"
    assert refusal(head_dim=257) == "takes head dims up to 256 and this one is 257"


def test_on_a_cpu_it_is_refused_in_words():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    inputs, _ = problem()
    with pytest.raises(UnsupportedError, match="platform='triton' does not support this call"):
        native_sparse_attention(*inputs[:3], block_size=8, platform="triton")
    assert SOURCE.backend is Backend.GPU


def test_tiles_are_of_sizes_that_triton_supports():
    """Whatever a configuration says, and however many heads share a key head."""
    inputs, spec = problem()
    for group in (1, 2, 3, 8, 16, 100):
        query = jax.ShapeDtypeStruct((1, 4096, 2 * group, 64), jnp.float16)
        key = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.float16)
        call = inputs._replace(query=query, key=key, value=key)
        for block_size in (8, 16, 48, 64, 80, 128):
            spec = dataclasses.replace(spec, block_size=block_size)
            for block_q in (1, 5, 64, 1000):
                params = config(block_size, block_q=block_q, block_k=100)
                tile = configs.from_params(params, call, spec)
                rows = tile.tokens * tile.head_block
                assert rows in (16, 32, 64)
                assert tile.block_k in (16, 32, 64, 128)
                assert tile.block_k == 16 or -(-block_size // tile.block_k) * tile.block_k <= (
                    4 / 3 * block_size
                )


CALLS = [
    "half_16_128_64",
    "half_1_128_64",
    "half_4_64_64_packed",
    "half_2_256_32",
    "half_3_128_48_packed",
    "half_128_128_64",
    "exact_4_128_64",
    "exact_1_256_64",
    "exact_16_64_64",
]
MATMULS = {"forward_kernel", "dq_kernel", "dkdv_kernel", "selection_kernel"}
KERNELS = MATMULS | {"tile_list_kernel", "sum_kernel"}


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_first_choices_compile_without_local_memory(capability):
    calls = ("half_16_128_64", "half_1_128_64")
    proves(OP.name, SOURCE, "forward", "backward", compiled_for=f"sm_{capability}")
    kernels = compiled("native_sparse_compile.py", capability, *calls, guess=True)
    assert {kernel["kernel"] for kernel in kernels} == KERNELS
    assert capability != 90 or all(k["wgmma"] for k in kernels if k["kernel"] in MATMULS)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("capability", SHARED)
def test_no_candidate_uses_local_memory(capability, name):
    """All that the tuner may choose."""
    compiled("native_sparse_compile.py", capability, name)


@needs_triton
@pytest.mark.slow
def test_it_lowers_for_a_gpu_that_is_not_present():
    """Lists and attention; then the lists again, and three kernels of gradients; a selection."""
    assert lowered("native_sparse_lower.py") == ["2", "6", "3"]
