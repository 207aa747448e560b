"""Expert parallelism: rows go to the devices that have their experts, and results come back.

Every device sorts its rows by expert and tells all others how many rows it has for each expert:
no other sizes are exchanged. From that table each device knows where its rows belong on every other
device, so that they arrive sorted by expert and nothing is sorted twice.

`dispatch` is a partial permutation of the rows of all devices and `combine` is its transpose, which
makes each the gradient of the other.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Shaped

from ejkernel.kernels.common.arguments import as_array, integer_array
from ejkernel.ops.meshes import bound_axis_size, vary_as
from ejkernel.ops.platform import device_of

AxisName = str | tuple[str, ...]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Exchange:
    """What is known of an exchange while tracing."""

    axis_name: AxisName
    capacity: int  # the most rows from one device to another
    ragged: bool  # by `ragged_all_to_all`, which sends no padding


class ExpertPlan(NamedTuple):
    """Where the rows of a `dispatch` went, for `combine`; a pytree.

    Attributes:
        order: the caller's rows in the order of their experts; rows that are not sent come last.
        rank: the inverse of `order`.
        counts: how many rows each device sends for each expert, the same on all devices.
        dropped: how many rows of this device exceeded the capacity.
        exchange: the axis and the kind of the exchange, static.
    """

    order: Int[Array, "r"]
    rank: Int[Array, "r"]
    counts: Int[Array, "d e"]
    dropped: Int[Array, ""]
    exchange: _Exchange

    @property
    def received(self) -> int:
        """The rows of the buffer that `dispatch` returned."""
        return self.counts.shape[0] * self.exchange.capacity


class Dispatched(NamedTuple):
    """The rows of the experts of a device, the size of each expert's group, and the way back."""

    rows: Shaped[Array, "s ..."]
    group_sizes: Int[Array, "g"]
    plan: ExpertPlan


def dispatch(
    rows: ArrayLike,
    group_ids: ArrayLike,
    *,
    axis_name: AxisName,
    experts: int,
    capacity: int | None = None,
) -> Dispatched:
    """Send each row to the device that has its expert; called in a `shard_map` over `axis_name`.

    Device `i` of the axis has the experts `[i * local, (i + 1) * local)`, with
    `local = experts // devices`. It receives the rows of its experts from all devices, sorted by
    expert, as `grouped_matmul(..., group_sizes=...)` takes them; among the rows of an expert, those
    of earlier devices come first, each device's in its own order. `combine` is the way back, and
    the gradient of `dispatch`.

    Between a TPU's or a GPU's devices rows are exchanged by `jax.lax.ragged_all_to_all`: only rows
    that change device are sent. Elsewhere an `all_to_all` sends `capacity` rows from each device to
    each other, whether in use or not.

    Args:
        rows: `[rows, ...]`, this device's rows, of any dtype; as many on every device. For a row
            that goes to several experts (top-k), repeat it.
        group_ids: `[rows]` integers, the expert of each row. A row whose id is not in
            `[0, experts)` has no expert: it is not sent, and comes back as zeros.
        axis_name: the mesh axis over which experts are split, or several axes as a tuple.
        experts: the number of experts of all devices, a multiple of the size of the axis.
        capacity: the maximum number of rows that a device sends to any one device, itself
            included. Of the rows for a device, the first `capacity` in the order of `rows` are
            sent. The rest is dropped: `plan.dropped` says how many, and they come back as zeros.
            By default all rows of a device, so that nothing is ever dropped.

    Returns:
        `(rows, group_sizes, plan)`: the rows `[devices * capacity, ...]` of this device's experts,
        zeros after the last one; the number of rows of each of its experts, `[local]`; and what
        `combine` needs.

    Raises:
        ValueError: the arguments do not fit each other, or the axis is not mapped here.

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import PartitionSpec as P
    >>> from ejkernel.modules import grouped_matmul
    >>> from ejkernel.parallel import combine, dispatch
    >>> def layer(tokens, ids, weights):
    ...     rows, sizes, plan = dispatch(tokens, ids, axis_name="ep", experts=2)
    ...     return combine(grouped_matmul(rows, weights, group_sizes=sizes), plan)
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("ep",))
    >>> layer = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    >>> weights = jnp.array([[[10.0]], [[100.0]]])
    >>> layer(jnp.array([[1.0], [2.0], [3.0]]), jnp.array([1, 0, 1]), weights).tolist()
    [[100.0], [20.0], [300.0]]
    """
    rows, ids = _arrays(rows, group_ids)
    devices = _devices(axis_name)
    local = _local_experts(experts, devices, axis_name)
    exchange = _Exchange(axis_name, _capacity(capacity, rows.shape[0]), _has_ragged(rows))
    ids = vary_as(ids, rows, lax.axis_index(axis_name))
    ids = jnp.where((ids < 0) | (ids >= experts), experts, ids).astype(jnp.int32)
    kept = _first_of_each(ids // local, devices, exchange.capacity)
    order, rank, sizes = _by_group(jnp.where(kept, ids, experts), experts)
    plan = ExpertPlan(
        order,
        rank,
        lax.all_gather(sizes, axis_name).reshape(devices, experts),
        jnp.sum(~kept, dtype=jnp.int32),
        exchange,
    )
    group_sizes = _of_this_device(plan, plan.counts).sum(0, dtype=jnp.int32)
    return Dispatched(_send(plan, vary_as(rows, *plan)), group_sizes, plan)


def combine(rows: ArrayLike, plan: ExpertPlan) -> jax.Array:
    """Send results back to the devices of their rows: the inverse of `dispatch`, and its gradient.

    Args:
        rows: `[devices * capacity, ...]`, a result for each row that `dispatch` returned, in its
            order. Their shape and dtype beyond the first axis may be others.
        plan: that of `dispatch`, in the same `shard_map`.

    Returns:
        `[rows, ...]`, the results in the order of the rows that were given to `dispatch`; zeros for
        rows that have no expert or were dropped.

    Raises:
        ValueError: the number of rows is not that of the plan.

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import PartitionSpec as P
    >>> from ejkernel.parallel import combine, dispatch
    >>> def there_and_back(x, ids):
    ...     rows, _, plan = dispatch(x, ids, axis_name="ep", experts=2)
    ...     return combine(rows, plan)
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("ep",))
    >>> run = jax.shard_map(there_and_back, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    >>> jax.jit(run)(jnp.array([5.0, 6.0, 7.0]), jnp.array([1, -1, 0])).tolist()
    [5.0, 0.0, 7.0]
    """
    if not isinstance(plan, ExpertPlan):
        raise ValueError(f"combine: plan must be that of dispatch, got {type(plan).__name__}.")
    rows = as_array("combine", "rows", rows)
    if rows.ndim == 0 or rows.shape[0] != plan.received:
        raise ValueError(
            f"combine: rows must be one for each of the {plan.received} that dispatch returned, "
            f"got {rows.shape}."
        )
    _devices(plan.exchange.axis_name, "combine")
    return _fetch(plan, vary_as(rows, *plan))


@jax.custom_vjp
def _send(plan: ExpertPlan, rows: jax.Array) -> jax.Array:
    """The caller's rows on the devices of their experts."""
    if not plan.exchange.ragged:
        leaving, arriving = _slots(plan)
        return _through_slots(plan, rows, leaving, arriving, plan.received)
    return _ragged(plan, _pick(rows, plan.order), _outward(plan), plan.received)


@jax.custom_vjp
def _fetch(plan: ExpertPlan, rows: jax.Array) -> jax.Array:
    """The rows of the experts back on the devices of their callers: the transpose of `_send`."""
    if not plan.exchange.ragged:
        leaving, arriving = _slots(plan)
        return _through_slots(plan, rows, arriving, leaving, plan.order.size)
    return _pick(_ragged(plan, rows, _back(plan), plan.order.size), plan.rank)


_send.defvjp(
    lambda plan, rows: (_send(plan, rows), plan),
    lambda plan, gradient: (None, _fetch(plan, gradient)),
)
_fetch.defvjp(
    lambda plan, rows: (_fetch(plan, rows), plan),
    lambda plan, gradient: (None, _send(plan, gradient)),
)


# The order of rows.


def _by_group(ids: jax.Array, groups: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The rows in the order of their groups, the inverse of it, and the size of each group.

    Ids are at most `groups`, which stands for no group.
    """
    index = jnp.arange(ids.size, dtype=jnp.int32)
    ordered, order = lax.sort((ids, index), num_keys=1, is_stable=True)
    rank = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
    ends = jnp.searchsorted(ordered, jnp.arange(groups, dtype=jnp.int32), side="right")
    return order, rank, jnp.diff(ends.astype(jnp.int32), prepend=0)


def _first_of_each(owners: jax.Array, devices: int, capacity: int) -> jax.Array:
    """Which rows are among the first `capacity` for their device; true for those of none."""
    if capacity >= owners.size:
        return jnp.ones_like(owners, bool)
    _, rank, sizes = _by_group(owners, devices)
    starts = jnp.append(_exclusive_sum(sizes), owners.size)  # a row of no device is before its own
    return rank - starts[owners] < capacity


def _exclusive_sum(sizes: jax.Array, axis: int = 0) -> jax.Array:
    return jnp.cumsum(sizes, axis, dtype=jnp.int32) - sizes


# Where slices of rows begin: of each sender and expert, on the sender and on the receiver.


def _starts(plan: ExpertPlan) -> jax.Array:
    """Where the rows for each expert begin among the sorted rows of each sender, [d, e]."""
    return _exclusive_sum(plan.counts, 1)


def _places(plan: ExpertPlan) -> jax.Array:
    """Where the rows of each sender for each expert begin on the device of the expert, [d, e]."""
    devices = plan.counts.shape[0]
    sizes = plan.counts.sum(0, dtype=jnp.int32)
    of_expert = _exclusive_sum(sizes.reshape(devices, -1), 1).reshape(sizes.shape)
    return of_expert[None] + _exclusive_sum(plan.counts, 0)


def _from_this_device(plan: ExpertPlan, table: jax.Array) -> jax.Array:
    """The row of this sender, [e]."""
    return lax.dynamic_index_in_dim(table, lax.axis_index(plan.exchange.axis_name), keepdims=False)


def _of_this_device(plan: ExpertPlan, table: jax.Array) -> jax.Array:
    """The columns of the experts of this device, [d, local]."""
    devices, experts = table.shape
    index = lax.axis_index(plan.exchange.axis_name)
    return lax.dynamic_index_in_dim(
        table.reshape(devices, devices, experts // devices), index, axis=1, keepdims=False
    )


# Exchange by slices: one for each device and each of its experts.


class _Slices(NamedTuple):
    """What `ragged_all_to_all` is told, each [e]."""

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array  # on the receiver
    recv_sizes: jax.Array


def _outward(plan: ExpertPlan) -> _Slices:
    """From the sorted rows of the callers to the devices of the experts."""
    return _Slices(
        _from_this_device(plan, _starts(plan)),
        _from_this_device(plan, plan.counts),
        _from_this_device(plan, _places(plan)),
        _of_this_device(plan, plan.counts).reshape(-1),
    )


def _back(plan: ExpertPlan) -> _Slices:
    """The same slices in the other direction."""
    return _Slices(
        _of_this_device(plan, _places(plan)).reshape(-1),
        _of_this_device(plan, plan.counts).reshape(-1),
        _of_this_device(plan, _starts(plan)).reshape(-1),
        _from_this_device(plan, plan.counts),
    )


def _has_ragged(rows: jax.Array) -> bool:
    """Whether XLA has `ragged_all_to_all` where these rows are; on a CPU it has none."""
    return device_of([rows]).platform in ("tpu", "gpu")


def _ragged(plan: ExpertPlan, rows: jax.Array, slices: _Slices, count: int) -> jax.Array:
    """The slices on their receivers, in a buffer of so many rows; zeros where none arrives."""
    output = vary_as(jnp.zeros((count, *rows.shape[1:]), rows.dtype), rows)
    return lax.ragged_all_to_all(rows, output, *slices, axis_name=plan.exchange.axis_name)


# Exchange by slots: `capacity` from each device to each device.


def _slots(plan: ExpertPlan) -> tuple[jax.Array, jax.Array]:
    """For each slot its row on the caller, and its row on the device of its expert, [d, c].

    Past the last row, where a slot is empty.
    """
    devices, capacity = plan.counts.shape[0], plan.exchange.capacity
    slot = jnp.arange(capacity, dtype=jnp.int32)[None]
    sizes = _from_this_device(plan, plan.counts).reshape(devices, -1).sum(1, dtype=jnp.int32)
    sorted_row = _exclusive_sum(sizes)[:, None] + slot
    leaving = jnp.where(slot < sizes[:, None], _pick(plan.order, sorted_row), plan.order.size)
    counts = _of_this_device(plan, plan.counts)  # [d, local]
    ends = jnp.cumsum(counts, 1, dtype=jnp.int32)
    expert = jnp.sum(slot[..., None] >= ends[:, None], -1, dtype=jnp.int32)  # [d, c]
    first = _of_this_device(plan, _places(plan)) - (ends - counts)
    shift = jnp.take_along_axis(first, expert, 1, mode="fill", fill_value=0)
    arriving = jnp.where(slot < ends[:, -1:], slot + shift, plan.received)
    return leaving, arriving


def _through_slots(
    plan: ExpertPlan, rows: jax.Array, source: jax.Array, target: jax.Array, count: int
) -> jax.Array:
    """Rows to the slots they leave by, and from the slots they arrive in to a buffer."""
    sent = _pick(rows, source)
    received = lax.all_to_all(sent, plan.exchange.axis_name, 0, 0, tiled=True)
    slots = np.arange(target.size, dtype=np.int32)
    slot_of_row = jnp.full_like(target, target.size, shape=count)
    slot_of_row = slot_of_row.at[target.reshape(-1)].set(slots, mode="drop")
    return _pick(received.reshape(-1, *rows.shape[1:]), slot_of_row)


def _pick(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Rows by index, zeros for an index past the last row."""
    return rows.at[index].get(mode="fill", fill_value=0)


# What is refused.


def _arrays(rows: ArrayLike, group_ids: ArrayLike) -> tuple[jax.Array, jax.Array]:
    rows = as_array("dispatch", "rows", rows)
    ids = integer_array("dispatch", "group_ids", group_ids)
    if ids.ndim != 1 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"dispatch: group_ids must be integers [rows], got {ids.dtype}{list(ids.shape)}."
        )
    if rows.shape[:1] != ids.shape:
        raise ValueError(
            f"dispatch: group_ids must have one entry for each row, got {ids.shape[0]} for rows "
            f"{rows.shape}."
        )
    return rows, ids


def _devices(axis_name: AxisName, name: str = "dispatch") -> int:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(x, str) for x in names):
        raise ValueError(
            f"{name}: axis_name must be the name of a mesh axis or a tuple of names, "
            f"got {axis_name!r}."
        )
    size = bound_axis_size(axis_name)
    if size is None:
        raise ValueError(
            f"{name}: the axis {axis_name!r} is not mapped here; call it inside a jax.shard_map "
            "over this axis, with grouped_matmul between dispatch and combine."
        )
    return size


def _local_experts(experts: int, devices: int, axis_name: AxisName) -> int:
    if not isinstance(experts, int | np.integer) or isinstance(experts, bool) or experts < 1:
        raise ValueError(f"dispatch: experts must be a positive int, got {experts!r}.")
    if experts % devices:
        raise ValueError(
            f"dispatch: experts must be a multiple of the {devices} devices of {axis_name!r}, "
            f"got {experts}."
        )
    return int(experts) // devices


def _capacity(capacity: int | None, rows: int) -> int:
    if capacity is None:
        return rows
    if not isinstance(capacity, int | np.integer) or isinstance(capacity, bool) or capacity < 1:
        raise ValueError(
            f"dispatch: capacity must be a positive int, the most rows from one device to another, "
            f"got {capacity!r}."
        )
    return min(int(capacity), rows)
