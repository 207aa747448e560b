"""The figures of gated linear attention: in chunks, against one token after the other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.cli import measure
from ejkernel.cli.figures import Figure
from ejkernel.modules import gla_attention

_SHAPE = (1, 4096, 8, 64)


def _arrays() -> tuple[jax.Array, ...]:
    """Query, key, value, gate, and a direction in which to pull gradients back."""
    query, key, value, gate, along = jax.random.normal(jax.random.key(0), (5, *_SHAPE))
    return query, key, value, jax.nn.log_sigmoid(gate + 2.0), along


def _token_by_token(
    query: jax.Array, key: jax.Array, value: jax.Array, gate: jax.Array
) -> jax.Array:
    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        query, key, value, gate = token
        state = jnp.exp(gate)[..., None] * state + key[..., None] * value[..., None, :]
        return state, jnp.einsum("bhk,bhkv->bhv", query, state)

    batch, _, heads, dim = query.shape
    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (query * dim**-0.5, key, value, gate))
    _, out = jax.lax.scan(step, jnp.zeros((batch, heads, dim, dim)), tokens)
    return jnp.moveaxis(out, 0, 1)


def _with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Result and gradients for all four arrays."""

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        out, pull_back = jax.vjp(function, *arrays[:4])
        return out, *pull_back(arrays[4])

    return run


def _programs(
    ours: Callable, plain: Callable, arrays: tuple[jax.Array, ...]
) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    """Both compiled, once their results agree."""
    mine, theirs = (jax.jit(x).lower(*arrays).compile() for x in (ours, plain))
    results = (jax.tree.leaves(program(*arrays)) for program in (mine, theirs))
    for actual, expected in zip(*results, strict=True):
        measure.check_close(actual, expected, ulps=128)
    return mine, theirs


def forward_time() -> float:
    """Time as a share of that of the scan."""
    arrays = _arrays()[:4]
    ours, plain = _programs(gla_attention, _token_by_token, arrays)
    mine, theirs = measure.interleaved(lambda: ours(*arrays), lambda: plain(*arrays), rounds=5)
    return mine / theirs


def _gradient_programs(
    arrays: tuple[jax.Array, ...],
) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    return _programs(_with_gradients(gla_attention), _with_gradients(_token_by_token), arrays)


def gradient_speed() -> float:
    """How many times as fast as the scan, result and gradients."""
    arrays = _arrays()
    ours, plain = _gradient_programs(arrays)
    mine, theirs = measure.interleaved(lambda: ours(*arrays), lambda: plain(*arrays), rounds=3)
    return theirs / mine


def gradient_memory() -> float:
    """Temporary memory as a share of that of the scan."""
    mine, theirs = (measure.memory(x).temporary for x in _gradient_programs(_arrays()))
    return mine / theirs


_SCAN = "a `lax.scan` over tokens; 1 x 4096, 8 heads of 64, float32"
FIGURES = (
    Figure(
        "gla_forward",
        f"`gla_attention` forward, time relative to {_SCAN}",
        "x",
        "lower",
        2,
        forward_time,
        operation="gla_attention",
        mask=("causal",),
    ),
    Figure(
        "gla_gradient",
        f"`gla_attention` forward + backward, speed-up over {_SCAN}",
        "x",
        "higher",
        10,
        gradient_speed,
        operation="gla_attention",
        mask=("causal",),
    ),
    Figure(
        "gla_memory",
        f"`gla_attention` forward + backward, temporary memory relative to {_SCAN}",
        "x",
        "lower",
        0.2,
        gradient_memory,
        operation="gla_attention",
        mask=("causal",),
    ),
)
