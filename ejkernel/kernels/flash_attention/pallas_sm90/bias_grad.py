"""The gradient of a bias on Hopper, a kernel of its own: whoever does not ask pays nothing.

| the bias has | its gradient |
|---|---|
| a number for every logit | is written tile by tile |
| the same for several batch rows or heads | is added up in global memory by the one warpgroup that has these queries in all of them, one after the other |
| one for all keys | is a sum over the tiles of a line, for every batch row and head |
| one for all queries | is the same with tiles transposed |

The first takes no memory of its own, the second an array of the size of the bias in float32, the
others one number for every token and head, and XLA adds up what is shared of these. A bias of
[1, 1, t, s] keeps only t / 128 multiprocessors busy.
"""  # noqa: E501

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.kernels.flash_attention.pallas_sm90.backward_kernel import Part, Tiles
from ejkernel.kernels.flash_attention.pallas_sm90.deal import Units, dealt

# Of a kernel that sums nothing.
ALONE = Tiles(consumers=2, columns=64, stages=4, overlap=False)


def bias_gradient(
    run: Callable[[Part, Tiles], list[jax.Array]], inputs: Inputs, spec: Spec
) -> jax.Array:
    """[#b, #n, #t, #s] like the bias, from the kernel that `run` runs."""
    bias: jax.Array = inputs.bias  # type: ignore[assignment]
    t, s = bias.shape[2:]
    if t > 1 and s > 1:
        (whole,) = run(Part(for_keys=False, summed=(), logits=True), ALONE)
        return whole[:, :, :t, :s].astype(bias.dtype)
    of_keys = s > 1
    (rows,) = run(Part(for_keys=of_keys, summed=(), rows="logits"), ALONE)
    length = (inputs.key if of_keys else inputs.query).shape[1]
    rows = rows[..., None, :length] if of_keys else rows[..., :length, None]
    shared = [axis for axis, size in enumerate(bias.shape) if size == 1]
    total = rows.sum(shared, keepdims=True) / (1.0 - spec.dropout_prob)
    return total.astype(bias.dtype)


def together(count: jax.Array, units: Units, shape: tuple[int, ...]) -> jax.Array:
    """The order of units [laps, workers] in which one worker has all that share rows of a bias.

    Args:
        count: how many tiles the lines have, [b', n', lines].
        units: of which there is one for every batch row, head and line.
        shape: of the bias.
    """
    lines, bias_rows, bias_heads = count.shape[2], *shape[:2]
    lengths = jnp.broadcast_to(count, (units.batch, units.heads, lines))
    rows, heads = units.batch // bias_rows, units.heads // bias_heads  # that share
    lengths = lengths.reshape(bias_rows, rows, bias_heads, heads, lines).sum((1, 3))
    alone = units._replace(pairs=1, workers=min(units.workers, lengths.size))
    first = dealt(lengths.reshape(-1), alone)  # [laps, workers], as if nothing was shared
    line, where = first % lines, first // lines
    row, head = where // bias_heads * rows, where % bias_heads * heads
    row = row + jnp.arange(rows * heads, dtype=jnp.int32)[:, None, None] // heads
    head = head + jnp.arange(rows * heads, dtype=jnp.int32)[:, None, None] % heads
    unit = jnp.where(first >= 0, (row * units.heads + head) * lines + line, -1)
    return jnp.swapaxes(unit, 0, 1).reshape(-1, first.shape[1])  # [laps * members, workers]
