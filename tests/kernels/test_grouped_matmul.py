"""What the public call promises beyond the numbers that the conformance suite checks."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tiers import examples, quick

from ejkernel.modules import GroupedMatmul, GroupedMatmulConfig, grouped_matmul

ROWS, K, N, GROUPS = 40, 8, 12, 4
X = jax.random.normal(jax.random.key(0), (ROWS, K))
W = jax.random.normal(jax.random.key(1), (GROUPS, K, N))
IDS = jax.random.randint(jax.random.key(2), (ROWS,), -1, GROUPS + 2)
SIZES = jnp.array([13, 0, 20, 4])


def by_hand(x, w, ids, offset=0, existing=None):
    """Row by row, in NumPy."""
    out = np.zeros((x.shape[0], w.shape[2])) if existing is None else np.array(existing)
    for row, group in enumerate(np.asarray(ids)):
        if group >= 0 and 0 <= group - offset < w.shape[0]:
            out[row] = np.asarray(x[row], np.float64) @ np.asarray(w[group - offset], np.float64)
    return out


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def ids_of(sizes, rows=ROWS):
    ids = np.full(rows, -1)
    ids[: int(np.sum(sizes))] = np.repeat(np.arange(len(sizes)), sizes)
    return ids


# Closed forms


TOKENS = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
DOUBLE, SWAP = 2 * jnp.eye(2), jnp.eye(2)[::-1]


def test_every_row_meets_the_weight_of_its_group():
    out = grouped_matmul(TOKENS, jnp.stack([DOUBLE, SWAP]), jnp.array([1, 0, 1, 0]))
    assert out.tolist() == [[2, 1], [6, 8], [6, 5], [14, 16]]


def test_sizes_cut_the_rows_one_group_after_the_other():
    out = grouped_matmul(TOKENS, jnp.stack([DOUBLE, SWAP]), group_sizes=jnp.array([1, 2]))
    assert out.tolist() == [[2, 4], [4, 3], [6, 5], [0, 0]]


def test_ids_are_global_and_rows_of_other_shards_are_zero():
    weights = jnp.stack([DOUBLE, SWAP])
    out = grouped_matmul(TOKENS, weights, jnp.array([6, 5, 0, 7]), 5)
    assert out.tolist() == [[2, 1], [6, 8], [0, 0], [0, 0]]


def test_sizes_describe_all_groups_and_weights_some():
    sizes = jnp.array([1, 1, 2])
    out = grouped_matmul(TOKENS, DOUBLE[None], group_offset=2, group_sizes=sizes)
    assert out.tolist() == [[0, 0], [0, 0], [10, 12], [14, 16]]


def test_existing_rows_stay_where_no_weight_gives_one():
    existing = jnp.full((4, 2), 9.0)
    out = grouped_matmul(TOKENS, DOUBLE[None], jnp.array([1, 0, -1, 0]), None, existing)
    assert out.tolist() == [[9, 9], [6, 8], [9, 9], [14, 16]]


def test_the_gradient_of_existing_rows_is_that_of_the_rows_that_stay():
    ids, along = jnp.array([1, 0, -1, 0]), jnp.arange(8.0).reshape(4, 2)
    call = lambda existing: grouped_matmul(TOKENS, DOUBLE[None], ids, existing_out=existing)
    d_existing = jax.vjp(call, jnp.zeros((4, 2)))[1](along)[0]
    assert d_existing.tolist() == [[0, 1], [0, 0], [4, 5], [0, 0]]


def test_gradients_by_hand():
    ids, along = jnp.array([1, 0, 1, 7]), jnp.ones((4, 2))
    weights = jnp.stack([DOUBLE, SWAP, SWAP])
    d_tokens, d_weights = jax.vjp(lambda x, w: grouped_matmul(x, w, ids), TOKENS, weights)[1](along)
    assert d_tokens.tolist() == [[1, 1], [2, 2], [1, 1], [0, 0]]
    assert d_weights.tolist() == [[[3, 3], [4, 4]], [[6, 6], [8, 8]], [[0, 0], [0, 0]]]


def test_transposed_weights():
    close(grouped_matmul(X, W.swapaxes(1, 2), IDS, transpose_rhs=True), grouped_matmul(X, W, IDS))


def test_agrees_with_ragged_dot():
    close(grouped_matmul(X, W, group_sizes=SIZES), jax.lax.ragged_dot(X, W, SIZES))


# Properties


@functools.cache
def compiled(**static):
    def both(x, w, ids, offset, existing):
        call = lambda x, w, existing: grouped_matmul(x, w, ids, offset, existing, **static)
        out, pull_back = jax.vjp(call, x, w, existing)
        return out, pull_back(jnp.ones_like(out))

    return jax.jit(both)


@examples(25)
@hypothesis.given(
    ids=st.lists(st.integers(-2, 9), min_size=ROWS, max_size=ROWS), offset=st.integers(0, 6)
)
def test_any_ids_and_any_offset(ids, offset):
    existing = jax.random.normal(jax.random.key(5), (ROWS, N))
    run = compiled(cfg=GroupedMatmulConfig(block_m=16))
    out, (d_x, d_w, d_existing) = run(X, W, jnp.array(ids), offset, existing)
    close(out, by_hand(X, W, ids, offset, existing))
    ones = np.ones((ROWS, N))
    close(d_x, by_hand(ones, np.swapaxes(W, 1, 2), ids, offset))
    for group in range(GROUPS):
        mine = np.array(ids) == group + offset
        close(d_w[group], np.asarray(X)[mine].T @ ones[mine])
    stays = ~np.isin(ids, np.arange(offset, offset + GROUPS))
    assert np.array_equal(d_existing, np.broadcast_to(stays[:, None], (ROWS, N)))


@functools.cache
def compiled_by_sizes():
    return jax.jit(lambda x, w, sizes: grouped_matmul(x, w, group_sizes=sizes))


@examples(25)
@hypothesis.given(cuts=st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS))
def test_sizes_are_ids_said_shorter(cuts):
    sizes = np.diff([0, *sorted(cuts)])
    close(compiled_by_sizes()(X, W, jnp.array(sizes)), by_hand(X, W, ids_of(sizes)))


@pytest.mark.parametrize("sizes", [[30, 30, 0, 0], [-5, 10, 0, 9], [0, 0, 0, 2**31 - 1]])
def test_impossible_sizes_under_a_trace_touch_no_row_twice(sizes):
    """They cannot be refused there; whatever they give is finite and the rows are ours."""
    out = compiled_by_sizes()(X, W, jnp.array(sizes))
    assert np.isfinite(out).all()


# Memory that does not count


def test_nan_where_no_group_looks_never_leaks():
    sizes = jnp.array([13, 0, 20, 0])
    x = X.at[33:].set(jnp.nan)
    w = W.at[jnp.array([1, 3])].set(jnp.nan)
    out, (d_x, d_w, _) = compiled()(x, w, jnp.array(ids_of(sizes)), 0, jnp.zeros((ROWS, N)))
    assert np.isfinite(out).all()
    assert np.isfinite(d_x).all()
    assert np.isfinite(d_w).all()
    assert not d_w[jnp.array([1, 3])].any()


def test_nan_of_one_group_stays_in_it():
    x, ids = X.at[:13].set(jnp.nan), jnp.array(ids_of(SIZES))
    out, (_, d_w, _) = compiled()(x, W, ids, 0, jnp.zeros((ROWS, N)))
    assert np.isnan(out[:13]).all()
    assert np.isfinite(out[13:]).all()
    assert np.isnan(d_w[0]).all()
    assert np.isfinite(d_w[1:]).all()


def test_memory_does_not_grow_with_the_groups():
    x, w = jax.ShapeDtypeStruct((512, 64), "f4"), jax.ShapeDtypeStruct((128, 64, 64), "f4")
    ids = jax.ShapeDtypeStruct((512,), "i4")
    forward = jax.jit(grouped_matmul).lower(x, w, ids).compile().memory_analysis()
    assert forward.temp_size_in_bytes < 4 * 512 * 64 * 4
    gradient = jax.jit(jax.grad(lambda x, w, ids: grouped_matmul(x, w, ids).sum(), (0, 1)))
    used = gradient.lower(x, w, ids).compile().memory_analysis()
    assert used.temp_size_in_bytes < 8 * 512 * 64 * 4


# Dtypes


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_narrow_call_gives_a_narrow_result_from_wide_sums(dtype):
    """512 products of 1: a sum in bfloat16 would stop at 256."""
    x, w = jnp.ones((3, 512), dtype), jnp.ones((1, 512, 2), dtype)
    out = grouped_matmul(x, w, jnp.zeros(3, jnp.int32))
    assert out.dtype == dtype
    assert out.tolist() == [[512, 512]] * 3


def test_the_dtype_of_the_output_can_be_chosen():
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    out = grouped_matmul(x, w, IDS, preferred_element_type=jnp.float32)
    assert out.dtype == jnp.float32
    close(out, by_hand(x.astype(jnp.float32), w.astype(jnp.float32), IDS))


def test_float64():
    with jax.enable_x64(True):
        x, w = jnp.asarray(X, jnp.float64), jnp.asarray(W, jnp.float64)
        out = grouped_matmul(x, w, IDS)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, by_hand(x, w, IDS), rtol=1e-13, atol=1e-13)


# Transformations


def test_an_offset_may_be_traced_and_have_an_axis():
    expected = grouped_matmul(X, W, IDS, 2)
    run = jax.jit(lambda offset: grouped_matmul(X, W, IDS, offset))
    close(run(2), expected)
    close(run(jnp.array([2])), expected)
    close(grouped_matmul(X, W, IDS, np.int64(2)), expected)


@pytest.mark.parametrize("form", ["ids", "sizes"])
def test_mapped_calls_with_shared_weights_are_one_call(form):
    batch = 11
    x = jax.random.normal(jax.random.key(3), (batch, ROWS, K))
    ids = jax.random.randint(jax.random.key(4), (batch, ROWS), 0, GROUPS)
    sizes = (ids[:, None] == jnp.arange(GROUPS)[:, None]).sum(-1)
    keyword, groups = ("group_ids", ids) if form == "ids" else ("group_sizes", sizes)
    call = lambda x, groups: grouped_matmul(x, W, **{keyword: groups})
    for axes in ((0, 0), (0, None), (None, 0)):
        arguments = [v if axis == 0 else v[0] for v, axis in zip((x, groups), axes, strict=True)]
        mapped = jax.vmap(call, axes)
        assert f"length={batch}" not in str(jax.make_jaxpr(mapped)(*arguments))
        got = mapped(*arguments)
        for i in (0, 7):
            one = [v[i] if axis == 0 else v for v, axis in zip(arguments, axes, strict=True)]
            close(got[i], call(*one))


def test_maps_nest_and_take_gradients():
    x = jax.random.normal(jax.random.key(3), (2, 3, ROWS, K))
    ids = jax.random.randint(jax.random.key(4), (3, ROWS), 0, GROUPS)
    one = lambda x, ids, w: grouped_matmul(x, w, ids)
    call = jax.vmap(jax.vmap(one, (0, 0, None)), (0, None, None))
    along = jax.random.normal(jax.random.key(5), (2, 3, ROWS, N))
    d_x, d_w = jax.grad(lambda x, w: (call(x, ids, w) * along).sum(), (0, 1))(x, W)
    sums = [by_hand(along[i, j], W.swapaxes(1, 2), ids[j]) for i in range(2) for j in range(3)]
    close(d_x.reshape(-1, ROWS, K), np.stack(sums))
    flat = jnp.broadcast_to(ids, (2, 3, ROWS)).reshape(-1)
    joined = lambda w: (one(x.reshape(-1, K), flat, w) * along.reshape(-1, N)).sum()
    close(d_w, jax.grad(joined)(W))


def test_weights_may_be_mapped():
    w = jax.random.normal(jax.random.key(3), (2, GROUPS, K, N))
    got = jax.vmap(lambda w: grouped_matmul(X, w, IDS))(w)
    close(got, np.stack([by_hand(X, one, IDS) for one in w]))


@pytest.mark.parametrize(
    "existing", [None, pytest.param(jnp.ones((ROWS, N)), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("in_specs", "out_specs"),
    [
        ((P(), P("ep"), P()), P()),
        ((P("dp"), P("ep"), P("dp")), P("dp")),
        ((P("dp"), P()), P("dp")),
        ((P(), P(None, None, "ep"), P()), P(None, "ep")),
        ((P("dp", "ep"), P(None, "ep")), P("dp")),
        ((P(None, "dp"), P("ep", "dp"), None, None, P()), P()),
    ],
)
@pytest.mark.parametrize("form", quick(["ids", "sizes"], "ids"))
def test_a_mesh_changes_nothing(form, in_specs, out_specs, existing):
    if form == "sizes" and len(in_specs) > 2:
        in_specs = (*in_specs[:2], P(), *in_specs[3:])
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "ep"))
    all_sizes = jnp.array([1, 0, 2, *SIZES])
    groups = {"group_ids": IDS + 3} if form == "ids" else {"group_sizes": all_sizes}
    along = jax.random.normal(jax.random.key(5), (ROWS, N))

    def loss(x, w, existing, **request):
        out = grouped_matmul(x, w, group_offset=3, existing_out=existing, **groups, **request)
        return (out * along).sum(), out

    argnums = (0, 1) if existing is None else (0, 1, 2)
    run = jax.value_and_grad(loss, argnums, has_aux=True)
    request = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    (_, out), gradients = jax.jit(functools.partial(run, **request))(X, W, existing)
    (_, expected), expected_gradients = run(X, W, existing)
    close(out, expected)
    jax.tree.map(close, gradients, expected_gradients)


def test_the_parts_of_a_sum_over_shards_are_not_rounded():
    """Four parts of 257, 257, 257 and 261: in bfloat16 they would be 256, 256, 256 and 260."""
    row = jnp.array([256, 1, 256, 1, 256, 1, 256, 5], jnp.bfloat16)
    mesh, specs = Mesh(jax.devices()[:4], ("tp",)), (P(None, "tp"), P(None, "tp"), P())
    weights, ids = jnp.ones((1, 8, 1), jnp.bfloat16), jnp.zeros(1, jnp.int32)
    out = grouped_matmul(row[None], weights, ids, mesh=mesh, in_specs=specs)
    assert out.dtype == jnp.bfloat16
    assert out.tolist() == [[1032]]


def test_an_offset_by_hand_inside_shard_map():
    mesh = Mesh(jax.devices()[:4], ("ep",))

    def shard(x, w, ids):
        offset = jax.lax.axis_index("ep") * w.shape[0]
        return jax.lax.psum(grouped_matmul(x, w, ids, offset), "ep")

    run = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("ep"), P()), out_specs=P())
    close(jax.jit(run)(X, W, IDS), by_hand(X, W, IDS))
    along = jax.random.normal(jax.random.key(5), (ROWS, N))
    gradients = jax.grad(lambda x, w: (run(x, w, IDS) * along).sum(), (0, 1))(X, W)
    one = jax.grad(lambda x, w: (grouped_matmul(x, w, IDS) * along).sum(), (0, 1))(X, W)
    jax.tree.map(close, gradients, one)


def test_the_module_is_the_function():
    close(GroupedMatmul()(X, W, IDS), grouped_matmul(X, W, IDS))


@pytest.mark.parametrize("shape", [(0, 4, 2, 3), (5, 0, 2, 3), (5, 4, 0, 3), (5, 4, 2, 0)])
def test_nothing_times_nothing(shape):
    rows, k, groups, n = shape
    x, w, ids = jnp.ones((rows, k)), jnp.ones((groups, k, n)), jnp.zeros(rows, jnp.int32)
    assert grouped_matmul(x, w, ids).shape == (rows, n)
    assert not grouped_matmul(x, w, ids).any()
    existing = jnp.full((rows, n), 7.0)
    assert (grouped_matmul(x, w, ids, existing_out=existing) == (7 if groups == 0 else 0)).all()
    d_w = jax.grad(lambda w: grouped_matmul(x, w, ids).sum())(w)
    assert d_w.shape == w.shape


def test_numpy_arrays_are_arrays():
    got = grouped_matmul(np.asarray(X), np.asarray(W), np.asarray(IDS))
    close(got, grouped_matmul(X, W, IDS))


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_ids": jnp.arange(4)}, r"each of 40 rows, got 4; .* use group_sizes="),
        ({"group_ids": None}, "either group_ids, .* or group_sizes, got neither"),
        ({"group_sizes": SIZES}, "either group_ids, .* or group_sizes, got both"),
        ({"group_ids": jnp.ones(ROWS)}, r"group_ids must be integers \[rows\], got float32\[40\]"),
        ({"inputs": X[0]}, r"inputs must be \[rows, k\] and weights \[groups, k, n\], got \(8,\)"),
        ({"weights": W[0]}, r"inputs must be \[rows, k\] and weights \[groups, k, n\]"),
        ({"transpose_rhs": True}, r"the k of inputs .* \[groups, n, k\] must be one"),
        ({"weights": W.astype(jnp.bfloat16)}, "must have one dtype, got float32 and bfloat16"),
        ({"group_offset": -1}, "group_offset must not be negative, got -1"),
        ({"group_offset": jnp.arange(2)}, r"group_offset must be one integer, got int32\[2\]"),
        ({"group_offset": 1.5}, r"group_offset must be one integer, got float32\[\]"),
        ({"existing_out": X}, r"existing_out must be like the output, float32\[40, 12\], got"),
        ({"existing_out": jnp.zeros((ROWS, N), jnp.bfloat16)}, r"like the output.*got bfloat16"),
        ({"preferred_element_type": jnp.int32}, "preferred_element_type must be floating point"),
        ({"inputs": "rows"}, "inputs must be an array, got str"),
        ({"cfg": 128}, "cfg must be a GroupedMatmulConfig, got int"),
    ],
)
@pytest.mark.usefixtures("as_a_user_calls")
def test_a_mistake_is_named(arguments, message):
    with pytest.raises(ValueError, match=f"grouped_matmul: .*{message}"):
        grouped_matmul(**({"inputs": X, "weights": W, "group_ids": IDS} | arguments))


@pytest.mark.parametrize(
    ("sizes", "offset", "message"),
    [
        ([20, 21, 0, 0], None, "group_sizes sum to 41, past the 40 rows"),
        ([20, -1, 0, 0], None, "group_sizes must not be negative, got -1"),
        ([20, 20], None, "2 groups for 4 weights; .* needs group_offset"),
        ([8, 8, 8, 8, 8], None, "5 groups for 4 weights; .* needs group_offset"),
        ([8, 8, 8, 8, 8], 2, "5 groups for 4 weights from 2 on"),
        ([1.0, 2.0, 3.0, 4.0], None, r"group_sizes must be integers \[groups\]"),
    ],
)
@pytest.mark.usefixtures("as_a_user_calls")
def test_wrong_sizes_are_named(sizes, offset, message):
    for given in (np.array(sizes), jnp.array(sizes)):
        with pytest.raises(ValueError, match=message):
            grouped_matmul(X, W, group_offset=offset, group_sizes=given)


@pytest.mark.parametrize(
    ("in_specs", "message"),
    [
        ((P("ep"), P("ep"), P("ep")), "the mesh axis 'ep' cannot split both 'r' and 'e'"),
        ((P("ep"), P(None, None, "ep"), P("ep")), "'ep' cannot split both 'r' and 'n'"),
        ((P("ep", "ep"), P(None, "ep"), P("ep")), "'ep' cannot split both 'r' and 'k'"),
        ((P(),), "in_specs needs 2 to 5 entries"),
        ((P("ep"), P(), P()), "inputs and group_ids split the axis 'r' differently"),
        ((P(), P("ep"), P(), P("ep")), "group_offset cannot be split over a mesh"),
        ((P(), P(("ep", "dp")), P()), "'e' of 4 does not divide over mesh axis ep/dp of size 8"),
    ],
)
@pytest.mark.usefixtures("as_a_user_calls")
def test_a_wrong_spec_is_named(in_specs, message):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "ep"))
    with pytest.raises(ValueError, match=message):
        grouped_matmul(X, W, IDS, mesh=mesh, in_specs=in_specs)
    with pytest.raises(ValueError, match="group_sizes cannot be split over a mesh"):
        grouped_matmul(X, W, group_sizes=SIZES, mesh=mesh, in_specs=(P(), P(), P("ep")))


@pytest.mark.usefixtures("as_a_user_calls")
@pytest.mark.parametrize("field", ["block_m", "block_n", "block_k", "num_warps", "num_stages"])
def test_a_config_holds_positive_numbers(field):
    with pytest.raises(ValueError, match=f"GroupedMatmulConfig: {field} must be a positive int"):
        GroupedMatmulConfig(**{field: 0})
    with pytest.raises(ValueError, match="bypass_xla_tiling must be True or False, got 1"):
        GroupedMatmulConfig(bypass_xla_tiling=1)
