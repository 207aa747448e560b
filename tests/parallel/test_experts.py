"""Experts split over devices compute what one device with all experts computes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tiers import examples, quick

from ejkernel.modules import grouped_matmul
from ejkernel.ops.platform import Device
from ejkernel.parallel import combine, dispatch

if len(jax.devices()) < 8:
    pytest.skip("eight devices are needed", allow_module_level=True)

EXPERTS, ROWS, WIDTH = 64, 8 * 24, 5  # of all devices
KEYS = np.random.default_rng(0)


def mesh_of(*shape, names=("ep",)):
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


EIGHT = mesh_of(8)

# Experts of the rows of all devices, in the order of the rows.
LOADS = {
    "uneven": np.minimum(KEYS.geometric(0.1, ROWS) - 1, EXPERTS - 1),
    "one_expert": np.full(ROWS, 37),
    "one_row_each": np.where(np.arange(ROWS) < EXPERTS, np.arange(ROWS), -1),
    "no_expert": np.where(KEYS.random(ROWS) < 0.5, KEYS.integers(0, EXPERTS, ROWS), EXPERTS + 3),
    "all_stay": np.repeat(np.arange(8) * 8, ROWS // 8),
}


def ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """That of JAX as it is documented, by an all-gather; NaN (77) if sizes disagree."""
    devices, own = lax.axis_size(axis_name), lax.axis_index(axis_name)
    mine = lambda x: lax.all_to_all(x, axis_name, 0, 0, tiled=True)
    every = lax.all_gather(operand, axis_name)
    begins, places, sizes = map(mine, (input_offsets, output_offsets, send_sizes))
    jax.debug.callback(SENT.append, jnp.where(jnp.arange(devices) == own, 0, _to_each(send_sizes)))
    row = jnp.arange(output.shape[0])
    inside = (row >= places[:, None]) & (row < (places + sizes)[:, None])  # [slice, row]
    one = inside.argmax(0)
    index = jnp.clip(row - places[one] + begins[one], 0, operand.shape[0] - 1)
    arrived = every[one // (sizes.size // devices), index]
    output = jnp.where(inside.any(0).reshape(-1, *[1] * (output.ndim - 1)), arrived, output)
    wrong = jnp.full_like(output, jnp.nan if jnp.issubdtype(output.dtype, jnp.floating) else 77)
    return jnp.where((recv_sizes == sizes).all(), output, wrong)


def _to_each(send_sizes):
    return send_sizes.reshape(lax.axis_size("ep"), -1).sum(1)


SENT = []  # by each exchange of each device, the rows that it sent to each other


@pytest.fixture(params=["slots", "ragged"])
def exchange(request, monkeypatch):
    """Both ways to exchange rows; on a CPU, where XLA has no ragged one, it is imitated."""
    SENT.clear()
    if request.param == "ragged":
        tpu = Device("tpu", "TPU v5 lite", None, "TPU v5 lite|0")
        monkeypatch.setattr("ejkernel.parallel.experts.device_of", lambda leaves: tpu)
        monkeypatch.setattr("jax.lax.ragged_all_to_all", ragged_all_to_all)
    return request.param


def layer(mesh=EIGHT, *, experts=EXPERTS, capacity=None, axis="ep", spec=None, matmul=False):
    """(tokens, ids, weights) -> (results, dropped rows of each device), over a mesh."""

    def local(tokens, ids, weights):
        rows, sizes, plan = dispatch(
            tokens, ids, axis_name=axis, experts=experts, capacity=capacity
        )
        if matmul:
            results = grouped_matmul(rows, weights, group_sizes=sizes)
        else:
            results = rows * jnp.repeat(weights, sizes, total_repeat_length=rows.shape[0])[:, None]
        return combine(results, plan), plan.dropped[None]

    over = P(axis)
    spec = spec or over
    return jax.shard_map(local, mesh=mesh, in_specs=(spec, spec, over), out_specs=(spec, spec))


def on_one_device(tokens, ids, weights, matmul=False):
    if matmul:
        return grouped_matmul(tokens, weights, ids)
    known = (ids >= 0) & (ids < weights.shape[0])
    return jnp.where(known[:, None], tokens * weights[ids][:, None], 0)


def arrays(rows=ROWS, experts=EXPERTS, dtype=jnp.float32, matmul=False):
    tokens, weights = jax.random.key(1), jax.random.key(2)
    shape = (experts, WIDTH, 3) if matmul else (experts,)
    return (
        jax.random.normal(tokens, (rows, WIDTH), dtype),
        jax.random.normal(weights, shape, dtype),
    )


def value_and_gradients(function, tokens, ids, weights):
    def loss(tokens, weights):
        out = function(tokens, ids, weights)
        return jnp.sum(jnp.sin(out).astype(jnp.float32)), out

    (_, out), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(tokens, weights)
    return out, *gradients


def close(got, expected, tolerance=1e-5):
    np.testing.assert_allclose(
        np.asarray(got, np.float64), np.asarray(expected, np.float64), atol=tolerance
    )


@pytest.mark.parametrize("load", quick(LOADS, "uneven", "no_expert"))
def test_value_and_gradients_are_those_of_one_device(load, exchange):
    (tokens, weights), ids = arrays(), jnp.asarray(LOADS[load])
    function = lambda *x: layer()(*x)[0]
    got = jax.jit(lambda *x: value_and_gradients(function, *x))(tokens, ids, weights)
    expected = value_and_gradients(on_one_device, tokens, ids, weights)
    jax.tree.map(close, got, expected)


@pytest.mark.parametrize("devices", quick([1, 2, 4, 8], 2))
def test_with_grouped_matmul_in_float64(devices, exchange):
    with jax.enable_x64(True):
        tokens, weights = arrays(48, 16, jnp.float64, matmul=True)
        ids = jnp.asarray(LOADS["uneven"][:48])
        function = lambda *x: layer(mesh_of(devices), experts=16, matmul=True)(*x)[0]
        got = jax.jit(lambda *x: value_and_gradients(function, *x))(tokens, ids, weights)
        expected = value_and_gradients(
            lambda *x: on_one_device(*x, matmul=True), tokens, ids, weights
        )
        for a, b in zip(got, expected, strict=True):
            close(a, b, 1e-12)


def dropped_by_hand(ids, devices, experts, capacity):
    """Which rows exceed the capacity: for each sender and receiver all but the first."""
    shares = ids.reshape(devices, -1)
    lost = np.zeros_like(shares, bool)
    for sender, share in enumerate(shares):
        sent = np.zeros(devices, int)
        for i, expert in enumerate(share):
            if 0 <= expert < experts:
                owner = expert // (experts // devices)
                lost[sender, i] = sent[owner] >= capacity
                sent[owner] += 1
    return lost


def most(ids, devices, experts):
    """The most rows from one device to one other."""
    counts = [
        np.bincount(share[(share >= 0) & (share < experts)] // (experts // devices))
        for share in ids.reshape(devices, -1)
    ]
    return int(max(max(count, default=0) for count in counts))


@pytest.mark.parametrize("missing", [0, 1, 7])
def test_what_exceeds_the_capacity_is_reported_and_comes_back_as_zeros(missing, exchange):
    (tokens, weights), ids = arrays(), LOADS["uneven"]
    capacity = most(ids, 8, EXPERTS) - missing
    lost = dropped_by_hand(ids, 8, EXPERTS, capacity)
    assert lost.any() == bool(missing)
    run = layer(capacity=capacity)
    _, dropped = jax.jit(run)(tokens, ids, weights)
    assert dropped.tolist() == lost.sum(1).tolist()
    kept = jnp.asarray(np.where(lost.reshape(-1), -1, ids))
    got = jax.jit(lambda *x: value_and_gradients(lambda *y: run(*y)[0], *x))(tokens, ids, weights)
    jax.tree.map(close, got, value_and_gradients(on_one_device, tokens, kept, weights))


def test_without_a_capacity_nothing_is_dropped(exchange):
    tokens, weights = arrays()
    _, dropped = jax.jit(layer())(tokens, LOADS["one_expert"], weights)
    assert dropped.tolist() == [0] * 8


@examples(60)
@given(st.lists(st.integers(-2, 17), min_size=24, max_size=24), st.sampled_from([1, 2, 3, 5, None]))
def test_any_load_and_capacity(ids, capacity):
    tokens, weights = arrays(24, 16)
    ids = np.array(ids, np.int32)
    lost = dropped_by_hand(ids, 4, 16, 24 if capacity is None else capacity)
    out, dropped = _compiled(capacity)(tokens, ids, weights)
    assert dropped.tolist() == lost.sum(1).tolist()
    kept = np.where(lost.reshape(-1), -1, ids)
    close(out, on_one_device(tokens, jnp.asarray(kept), weights))


_programs = {}


def _compiled(capacity):
    if capacity not in _programs:
        run = layer(mesh_of(4), experts=16, capacity=capacity)
        _programs[capacity] = jax.jit(run)
    return _programs[capacity]


@pytest.mark.parametrize("capacity", [6, None])
def test_the_fallback_sends_no_more_than_the_capacity(capacity):
    """Bytes of every all-to-all of the compiled program: forward two, with gradients four."""
    (tokens, weights), ids = arrays(), jnp.asarray(LOADS["uneven"])
    function = lambda *x: layer(capacity=capacity)(*x)[0]
    gradients = lambda *x: value_and_gradients(function, *x)
    for run, exchanges in ((function, 2), (gradients, 4)):
        text = jax.jit(run).lower(tokens, ids, weights).compile().as_text()
        sent = [rows_of(line) for line in text.splitlines() if " all-to-all(" in line]
        assert sent == [8 * (capacity or ROWS // 8)] * exchanges
        assert re.findall(r"= (\S+?)\{.* all-gather\(", text) == [f"s32[8,{EXPERTS}]"]


def rows_of(line):
    """How many rows the result of an operation has, in the text of a program."""
    shapes = re.findall(r"f32\[([\d,]+)\]", line.partition(" all-to-all(")[0])
    return sum(np.prod([int(size) for size in shape.split(",")]) for shape in shapes) / WIDTH


@pytest.mark.parametrize("exchange", ["ragged"], indirect=True)
def test_what_is_sent_are_the_rows_that_change_device(exchange):
    (tokens, weights), ids = arrays(), LOADS["uneven"]
    jax.jit(layer())(tokens, ids, weights)[0].block_until_ready()
    jax.effects_barrier()
    owner = ids.reshape(8, -1) // (EXPERTS // 8)
    moving = (owner != np.arange(8)[:, None]).sum()
    assert 0 < moving < ids.size
    assert len(SENT) == 2 * 8  # there and back, on eight devices
    assert sum(x.sum() for x in SENT) == 2 * moving


def test_promotions_that_a_program_forbids_itself_are_not_forbidden_to_us():
    ids = jnp.asarray(LOADS["uneven"])
    loss = lambda *x: layer(matmul=True, capacity=ROWS)(x[0], ids, x[1])[0].sum()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(jax.grad(loss, (0, 1)), *arrays(matmul=True))


@pytest.mark.parametrize(("rows", "columns"), [(4, 2), (2, 4)])
def test_with_a_data_axis(rows, columns, exchange):
    """Each row of devices has all experts, and exchanges only within itself."""
    (tokens, weights), ids = arrays(), jnp.asarray(LOADS["uneven"])
    mesh = mesh_of(rows, columns, names=("data", "ep"))
    function = lambda *x: layer(mesh, spec=P(("data", "ep")))(*x)[0]
    got = jax.jit(lambda *x: value_and_gradients(function, *x))(tokens, ids, weights)
    jax.tree.map(close, got, value_and_gradients(on_one_device, tokens, ids, weights))


def test_experts_over_two_axes():
    (tokens, weights), ids = arrays(), jnp.asarray(LOADS["uneven"])
    mesh = mesh_of(2, 4, names=("x", "y"))
    out, _ = jax.jit(layer(mesh, axis=("x", "y")))(tokens, ids, weights)
    close(out, on_one_device(tokens, ids, weights))


def test_rows_that_all_devices_have(exchange):
    """Each device sends all of them, and its copy comes back to it; gradients are summed."""
    (tokens, weights), ids = arrays(24), jnp.asarray(LOADS["uneven"][:24])

    def local(tokens, weights):
        rows, sizes, plan = dispatch(tokens, ids, axis_name="ep", experts=EXPERTS)
        return combine(
            rows * jnp.repeat(weights, sizes, total_repeat_length=rows.shape[0])[:, None], plan
        )

    run = jax.shard_map(local, mesh=EIGHT, in_specs=(P(), P("ep")), out_specs=P("ep"))
    loss = lambda run: lambda *x: (run(*x) ** 2).sum()
    got = jax.jit(jax.grad(loss(run), (0, 1)))(tokens, weights)
    one = lambda tokens, weights: on_one_device(tokens, ids, weights)
    expected = jax.grad(loss(one), (0, 1))(tokens, weights)
    close(got[0], 8 * expected[0], 1e-4)
    close(got[1], 8 * expected[1], 1e-4)


def test_layers_under_scan_and_remat():
    (tokens, weights), ids = arrays(), jnp.asarray(LOADS["no_expert"])
    weights = jnp.stack([weights, weights[::-1]])

    def stack(run, tokens, weights):
        step = jax.checkpoint(lambda x, w: (x + run(x, ids, w), None))
        return (lax.scan(step, tokens, weights)[0] ** 2).sum()

    got = jax.jit(jax.grad(lambda *x: stack(lambda *y: layer()(*y)[0], *x), (0, 1)))
    expected = jax.grad(lambda *x: stack(on_one_device, *x), (0, 1))(tokens, weights)
    jax.tree.map(lambda a, b: close(a, b, 1e-3), got(tokens, weights), expected)


def test_a_gradient_of_a_gradient():
    (tokens, weights), ids = arrays(), jnp.asarray(LOADS["uneven"])

    def squared_slope(run, tokens):
        slope = jax.grad(lambda x: jnp.sin(run(x, ids, weights)).sum())(tokens)
        return (slope**2).sum()

    got = jax.jit(jax.grad(lambda x: squared_slope(lambda *y: layer()(*y)[0], x)))(tokens)
    close(got, jax.grad(lambda x: squared_slope(on_one_device, x))(tokens), 1e-4)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("bfloat16", (3,)), ("int32", ()), ("float16", (2, 3)), ("uint8", (1,))]
)
def test_rows_of_any_dtype_and_rank_come_home(dtype, shape, exchange):
    ids = LOADS["no_expert"]
    rows = jnp.asarray(KEYS.integers(0, 100, (ROWS, *shape)), dtype)

    def there_and_back(rows, ids):
        sent, _, plan = dispatch(rows, ids, axis_name="ep", experts=EXPERTS)
        return combine(sent, plan)

    run = jax.shard_map(there_and_back, mesh=EIGHT, in_specs=P("ep"), out_specs=P("ep"))
    known = ((ids >= 0) & (ids < EXPERTS)).reshape(-1, *[1] * len(shape))
    got = jax.jit(run)(rows, ids)
    assert got.dtype == rows.dtype
    np.testing.assert_array_equal(got, np.where(known, rows, 0))


def test_rows_arrive_sorted_by_expert_and_then_by_sender(exchange):
    ids = np.array([3, 0, 3, 1, 0, 3, 2, 3])  # two experts on each of two devices
    rows = jnp.arange(8.0)

    def local(rows, ids):
        return dispatch(rows, ids, axis_name="ep", experts=4)[:2]

    run = jax.shard_map(local, mesh=mesh_of(2), in_specs=P("ep"), out_specs=P("ep"))
    got, sizes = jax.jit(run)(rows, ids)
    assert sizes.tolist() == [2, 1, 1, 4]
    assert got.tolist() == [1, 4, 3, 0, 0, 0, 0, 0, 6, 0, 2, 5, 7, 0, 0, 0]


def test_top_k_repeats_the_rows():
    (tokens, weights), devices = arrays(32, 16), 4
    ids = jnp.asarray(KEYS.integers(0, 16, (32, 2)))
    gates = jax.nn.softmax(jax.random.normal(jax.random.key(3), (32, 2)))

    def local(tokens, ids, gates, weights):
        twice = jnp.repeat(tokens, 2, axis=0)
        rows, sizes, plan = dispatch(twice, ids.reshape(-1), axis_name="ep", experts=16)
        scale = jnp.repeat(weights, sizes, total_repeat_length=rows.shape[0])
        results = combine(rows * scale[:, None], plan)
        return jnp.einsum("tkh,tk->th", results.reshape(-1, 2, WIDTH), gates)

    run = jax.shard_map(local, mesh=mesh_of(devices), in_specs=P("ep"), out_specs=P("ep"))
    expected = jnp.einsum("th,tk,tk->th", tokens, weights[ids], gates)
    close(jax.jit(run)(tokens, ids, gates, weights), expected)


def _inside(function, *arguments):
    over = (P("ep"),) * len(arguments)
    return jax.jit(jax.shard_map(function, mesh=EIGHT, in_specs=over, out_specs=P("ep")))(
        *arguments
    )


@pytest.mark.usefixtures("as_a_user_calls")
class TestRefusals:
    def test_outside_of_a_shard_map(self):
        with pytest.raises(ValueError, match=r"^dispatch: the axis 'ep' is not mapped here"):
            dispatch(jnp.ones((4, 2)), jnp.zeros(4, int), axis_name="ep", experts=2)

    @pytest.mark.parametrize("axis_name", [None, ["ep"], (), ("ep", 0)])
    def test_names_that_are_none(self, axis_name):
        with pytest.raises(ValueError, match=r"^dispatch: axis_name must be the name of a mesh"):
            dispatch(jnp.ones((4, 2)), jnp.zeros(4, int), axis_name=axis_name, experts=2)

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"experts": 12}, "experts must be a multiple of the 8 devices of 'ep', got 12"),
            ({"experts": 0}, "experts must be a positive int, got 0"),
            ({"capacity": 0}, "capacity must be a positive int, .* got 0"),
            ({"capacity": 1.5}, "capacity must be a positive int, .* got 1.5"),
            ({"group_ids": jnp.zeros((16, 1), int)}, r"group_ids must be integers \[rows\]"),
            ({"group_ids": jnp.zeros(16)}, r"group_ids must be integers \[rows\], got float32"),
            (
                {"group_ids": jnp.zeros(24, int)},
                "group_ids must have one entry for each row, got 3 for",
            ),
        ],
    )
    def test_arguments_that_do_not_fit(self, change, sentence):
        options = {"experts": 16, "group_ids": jnp.zeros(16, int)} | change
        ids = options.pop("group_ids")
        with pytest.raises(ValueError, match=f"^dispatch: {sentence}"):
            _inside(
                lambda x, ids: dispatch(x, ids, axis_name="ep", **options).rows,
                jnp.ones((16, 2)),
                ids,
            )

    def test_results_of_another_number(self):
        def local(x, ids):
            rows, _, plan = dispatch(x, ids, axis_name="ep", experts=8)
            return combine(rows[1:], plan)

        with pytest.raises(ValueError, match=r"^combine: rows must be one for each of the 16 that"):
            _inside(local, jnp.ones((16, 2)), jnp.zeros(16, int))

    def test_another_plan(self):
        with pytest.raises(ValueError, match=r"^combine: plan must be that of dispatch, got dict"):
            combine(jnp.ones((4, 2)), {})
