"""The figure of ring attention: a device needs memory for its share of the sequence alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.cli import fresh, measure
from ejkernel.cli.figures import Figure
from ejkernel.modules import flash_attention, ring_attention

_DEVICES, _LENGTH, _HEADS, _HEAD_DIM = 8, 8192, 8, 64


def _with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Result and gradients, pulled back along the last argument."""

    def run(
        query: jax.Array, key: jax.Array, value: jax.Array, along: jax.Array
    ) -> tuple[jax.Array, ...]:
        out, pull_back = jax.vjp(function, query, key, value)
        return out, *pull_back(along)

    return jax.jit(run)


def growth(causal: bool) -> float:
    """Temporary memory of a device against flash attention on its share; needs eight devices."""
    mesh = Mesh(np.array(jax.devices()[:_DEVICES]), ("sp",))
    ring = _with_gradients(
        lambda *arrays: ring_attention(
            *arrays, axis_name="sp", mesh=mesh, causal=causal, method="ring"
        )
    )
    flash = _with_gradients(lambda *arrays: flash_attention(*arrays, causal=causal))
    arrays = jax.random.normal(jax.random.key(0), (4, 1, _LENGTH, _HEADS, _HEAD_DIM))
    split = jax.device_put(tuple(arrays), NamedSharding(mesh, PartitionSpec(None, "sp")))
    program = ring.lower(*split).compile()
    if "collective-permute" not in program.as_text():
        raise measure.WrongResultError("nothing goes round the ring")
    whole = flash(*jax.device_put(tuple(arrays), jax.devices()[0]))
    for got, expected, ulps in zip(program(*split), whole, (32, 128, 128, 128), strict=True):
        measure.check_close(got, expected, ulps=ulps)
    share = jax.ShapeDtypeStruct((1, _LENGTH // _DEVICES, _HEADS, _HEAD_DIM), jnp.float32)
    alone = flash.lower(share, share, share, share).compile()
    return measure.memory(program).temporary / measure.memory(alone).temporary


def memory() -> float:
    """The larger of the two, causal and not, in a process that has eight host devices."""
    return fresh.value(
        "import jax",
        'jax.config.update("jax_platforms", "cpu")',
        f'jax.config.update("jax_num_cpu_devices", {_DEVICES})',
        "from ejkernel.cli import figures_ring",
        "max(figures_ring.growth(causal) for causal in (False, True))",
    )


FIGURES = (
    Figure(
        "ring_memory",
        "`ring_attention` on 8 host devices, forward + backward, temporary memory of a device "
        "relative to `flash_attention` on its shard; length 8192, 8 heads of 64, float32",
        "x",
        "lower",
        2,
        memory,
        operation="ring_attention",
        mask=("causal", "none"),
    ),
)
