"""The part that a device uses of an array that every device has whole.

Inside a `shard_map`, or in what XLA makes of a partitioning rule. Its gradient is put back in its
place and summed over the devices, so that an array that is whole needs no collective but that sum.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Picked:
    """Which indices of an axis a device uses.

    Attributes:
        over: the mesh axes whose devices use different parts.
        count: how many indices a device uses.
        sharing: how many devices in a row use the same ones.
    """

    over: tuple[str, ...]
    count: int
    sharing: int = 1

    def start(self) -> jax.Array:
        """The first index of this device."""
        return jax.lax.axis_index(self.over) // self.sharing * self.count

    def take(self, x: jax.Array, axis: int) -> jax.Array:
        """This device's part of `x`."""
        return jax.lax.dynamic_slice_in_dim(x, self.start(), self.count, axis)

    def of_first(self, x: jax.Array) -> jax.Array:
        """`x` on the first of the devices that use the same part, 0 on the others."""
        first = jax.lax.axis_index(self.over) % self.sharing == 0
        return jnp.where(first, x, jnp.zeros_like(x))

    def put_back(self, x: jax.Array, axis: int, size: int, sums: bool) -> jax.Array:
        """All parts together: of devices that use the same one the sum, or that of the first."""
        x = x if sums else self.of_first(x)
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        whole = jnp.zeros(shape, x.dtype)
        whole = jax.lax.dynamic_update_slice_in_dim(whole, x, self.start(), axis)
        return jax.lax.psum(whole, self.over)


def picked_heads(few: int, many: int, shards: int, over: tuple[str, ...]) -> Picked | None:
    """The key heads of a device that has its share of the query heads.

    Args:
        few: the number of key heads.
        many: the number of query heads.
        shards: the number of devices that the query heads are split over.
        over: the mesh axes of these devices.

    Returns:
        None if a device's query heads do not belong to whole key heads, or to one.
    """
    group, own = many // few, many // shards
    if group % own and own % group:
        return None
    return Picked(over, max(1, own // group), max(1, group // own))
