"""The figures of grouped matmul: one matmul with all rows, against every row times every weight."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.cli import measure
from ejkernel.cli.figures import Figure
from ejkernel.modules import grouped_matmul

_ROWS, _COLUMNS, _GROUPS = 4096, 512, 64


def _arrays() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rows, weights, uneven sizes, and a direction in which to pull gradients back."""
    keys = jax.random.split(jax.random.key(0), 3)
    generator = np.random.default_rng(0)
    sizes = generator.multinomial(_ROWS, generator.dirichlet(np.ones(_GROUPS)))
    return (
        jax.random.normal(keys[0], (_ROWS, _COLUMNS)),
        jax.random.normal(keys[1], (_GROUPS, _COLUMNS, _COLUMNS)),
        jnp.asarray(sizes, jnp.int32),
        jax.random.normal(keys[2], (_ROWS, _COLUMNS)),
    )


def _ours(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return grouped_matmul(rows, weights, group_sizes=sizes)


def _with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Result and gradients for the rows and the weights."""

    def run(
        rows: jax.Array, weights: jax.Array, sizes: jax.Array, along: jax.Array
    ) -> tuple[jax.Array, ...]:
        out, pull_back = jax.vjp(
            lambda rows, weights: function(rows, weights, sizes), rows, weights
        )
        return out, *pull_back(along)

    return jax.jit(run)


def _check(
    arrays: tuple[jax.Array, ...],
    out: jax.Array,
    d_rows: jax.Array | None = None,
    d_weights: jax.Array | None = None,
) -> None:
    """Compare some groups with matmuls in float64."""
    rows, weights, sizes, along = (np.asarray(x, np.float64) for x in arrays)
    ends = np.cumsum(sizes).astype(int)
    for group in range(0, _GROUPS, 7):
        mine = slice(ends[group] - int(sizes[group]), ends[group])
        if mine.stop == mine.start:
            continue
        measure.check_close(out[mine], rows[mine] @ weights[group], ulps=32)
        if d_rows is not None and d_weights is not None:
            measure.check_close(d_rows[mine], along[mine] @ weights[group].T, ulps=128)
            measure.check_close(d_weights[group], rows[mine].T @ along[mine], ulps=128)


def forward_speed() -> float:
    """How many times as fast as `jax.lax.ragged_dot`."""
    arrays = _arrays()
    ours, plain = jax.jit(_ours), jax.jit(jax.lax.ragged_dot)
    _check(arrays, ours(*arrays[:3]))
    mine, theirs = measure.interleaved(
        lambda: ours(*arrays[:3]), lambda: plain(*arrays[:3]), rounds=3
    )
    return theirs / mine


def gradient_speed() -> float:
    """The same for result and gradients."""
    arrays = _arrays()
    ours, plain = _with_gradients(_ours), _with_gradients(jax.lax.ragged_dot)
    _check(arrays, *ours(*arrays))
    mine, theirs = measure.interleaved(lambda: ours(*arrays), lambda: plain(*arrays), rounds=3)
    return theirs / mine


_WHAT = "`jax.lax.ragged_dot`; 4096 rows, k = n = 512, 64 groups of uneven sizes, float32"
FIGURES = (
    Figure(
        "grouped_matmul",
        f"`grouped_matmul` forward, speed-up over {_WHAT}",
        "x",
        "higher",
        20,
        forward_speed,
        operation="grouped_matmul",
        mask=(),
    ),
    Figure(
        "grouped_matmul_gradient",
        f"`grouped_matmul` forward + backward, speed-up over {_WHAT}",
        "x",
        "higher",
        15,
        gradient_speed,
        operation="grouped_matmul",
        mask=(),
    ),
)
