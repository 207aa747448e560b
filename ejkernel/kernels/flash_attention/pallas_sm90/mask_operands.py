"""The arrays that the Hopper kernels read for mask, bias and dropout.

A mask comes in a normal form: bounds of each query, pairs of ids, a dense remainder, unions of
these. XLA computes it before the kernel starts; that of a mask without arrays is computed when the
call is traced.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention.inputs import Inputs
from ejkernel.kernels.flash_attention.static_arrays import static_constants
from ejkernel.types.kernel_mask import KernelMask, kernel_mask, without_kernel_mask
from ejkernel.types.rules import Everything, Rule


def why_not(rule: Rule) -> str | None:
    """Why the kernels cannot evaluate this mask, or None."""
    kinds = without_kernel_mask(rule)
    return f"does not support masks made of {', '.join(kinds)}" if kinds else None


def partial_tile_mask(
    rule: Rule, q_len: int, kv_len: int, q_size: int, kv_size: int
) -> KernelMask | None:
    """The mask of partial tiles, padded to whole blocks; None when every pair is visible."""
    if isinstance(rule, Everything) and kv_len == kv_size:
        return None
    if not jax.tree.leaves(rule):
        return static_constants(padded_kernel_mask, rule, q_len, kv_len, q_size, kv_size)
    return padded_kernel_mask(rule, q_len, kv_len, q_size, kv_size)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def padded_kernel_mask(
    rule: Rule, q_len: int, kv_len: int, q_size: int, kv_size: int
) -> KernelMask:
    """The normal form of a mask, padded to whole blocks; it hides the padding of the keys."""
    mask = kernel_mask(rule, q_len, kv_len, q_size, kv_size)
    hides_padding = kv_len < kv_size or not jax.tree.leaves(mask)
    return mask.up_to(kv_len - 1, q_size) if hides_padding else mask


@dataclasses.dataclass(frozen=True)
class MaskCondition:
    """A `KernelMask` inside a kernel: the prefix of its arrays' names, and how many there are."""

    prefix: str
    id_pairs: int
    unions: tuple[tuple["MaskCondition", ...], ...]


@dataclasses.dataclass(frozen=True)
class TileOperands:
    """The arrays of mask, bias and dropout, by the names under which a kernel gets them."""

    arrays: dict[str, jax.Array]
    condition: MaskCondition | None

    @property
    def masked(self) -> bool:
        return self.condition is not None


def tile_operands(
    inputs: Inputs,
    mask: KernelMask | None,
    q_size: int,
    kv_size: int,
    transposed: bool = False,
    transpose_bias: bool = False,
) -> TileOperands:
    """The operands of tiles of queries with keys, or `transposed` of keys with queries.

    Arrays of pairs are transposed with the tiles. The bias has a flag of its own, because a staged
    bias is transposed on its way to registers.
    """
    arrays: dict[str, jax.Array] = {}

    def add_condition(mask: KernelMask, prefix: str) -> MaskCondition:
        parts = {"lower": mask.lower, "upper": mask.upper, "dense": mask.dense}
        if mask.dense is not None and transposed:
            parts["dense"] = jnp.swapaxes(mask.dense, 2, 3)
        for i, (query, key) in enumerate(mask.id_pairs):
            parts |= {f"query_id_{i}": query, f"key_id_{i}": key}
        arrays.update({prefix + name: x for name, x in parts.items() if x is not None})
        unions = tuple(
            tuple(add_condition(one, f"{prefix}{i}_{j}_") for j, one in enumerate(union))
            for i, union in enumerate(mask.unions)
        )
        return MaskCondition(prefix, len(mask.id_pairs), unions)

    condition = None if mask is None else add_condition(mask, "")
    if inputs.bias is not None:
        bias = _padded_bias(inputs.bias, q_size, kv_size)
        arrays["bias"] = jnp.swapaxes(bias, 2, 3) if transpose_bias else bias
    if inputs.dropout is not None:
        seed, batch, head = (jnp.asarray(x).reshape(-1) for x in inputs.dropout[:3])
        arrays |= {"seed": seed, "batch_index": batch, "head_index": head}
    return TileOperands(arrays, condition)


def _padded_bias(bias: jax.Array, q_size: int, kv_size: int) -> jax.Array:
    t, s = bias.shape[2:]
    padding = [(0, 0), (0, 0), (0, 0 if t == 1 else q_size - t), (0, 0 if s == 1 else kv_size - s)]
    return jnp.pad(bias, padding) if any(b for _, b in padding) else bias
