"""Query heads in parts, each of which one kernel works on."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention.inputs import Inputs
from ejkernel.types.rules import Everything


class HeadParts(NamedTuple):
    """So many parts with `each` heads of every group, taken out and put back by slices.

    A gather would do as well, but the compiler may want all of an array in VMEM for it.
    """

    kv_heads: int
    count: int
    each: int

    @classmethod
    def of(cls, inputs: Inputs, each: int) -> "HeadParts":
        """Parts of a call; masks of their own keep all heads together."""
        kv_heads = inputs.key.shape[2]
        group = inputs.query.shape[2] // kv_heads
        if (inputs.mask or Everything()).heads > 1:
            each = group
        return cls(kv_heads, group // each, each)

    @property
    def heads(self) -> int:
        """Of all parts."""
        return self.kv_heads * self.count * self.each

    def pick(self, x: jax.Array, axis: int, part: int) -> jax.Array:
        """The heads of a part, from an axis of all."""
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        apart = x.reshape(*before, self.kv_heads, self.count, self.each, *after)
        apart = jax.lax.index_in_dim(apart, part, axis + 1, keepdims=False)
        return apart.reshape(*before, self.kv_heads * self.each, *after)

    def joined(self, parts: list[jax.Array], axis: int) -> jax.Array:
        """All heads, from what each part has along an axis."""
        before, after = parts[0].shape[:axis], parts[0].shape[axis + 1 :]
        apart = [x.reshape(*before, self.kv_heads, 1, self.each, *after) for x in parts]
        return jnp.concatenate(apart, axis + 1).reshape(*before, self.heads, *after)
