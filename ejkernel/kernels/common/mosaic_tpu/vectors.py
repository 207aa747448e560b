"""Lanes and matmuls of the TPU kernels."""

from typing import Any, Protocol, runtime_checkable

import jax

from ejkernel.kernels.common.precision import tile_product
from ejkernel.kernels.common.refs import Ref

LANES = 128
SUBLANES = 8
# Below every logit and finite: exp2(-inf - LEAST) is 0, where exp2(-inf - -inf) is NaN.
LEAST = -1e30
# The fields of a tuple that a kernel is given: arrays in XLA, refs inside the kernel.
ArrayOrRef = jax.Array | Ref


@runtime_checkable
class VmemRef(Ref, Protocol):
    """An array in VMEM, whose registers may be read as words of another dtype."""

    def bitcast(self, dtype: Any) -> Ref: ...


def matmul_nn(left: jax.Array, right: jax.Array) -> jax.Array:
    """`left @ right`, accumulated in float32."""
    return tile_product(left, right, (1, 0))


def matmul_nt(left: jax.Array, right: jax.Array) -> jax.Array:
    """`left @ right.T`, accumulated in float32."""
    return tile_product(left, right, (1, 1))
