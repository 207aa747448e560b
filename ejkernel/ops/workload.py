"""A named call, described without allocating it: tests, tuner and benchmark all draw from these."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Draw:
    """An argument made from a random key when the workload is built."""

    make: Callable[[jax.Array, DTypeLike], Any]

    def __call__(self, key: jax.Array, dtype: DTypeLike) -> Any:
        return self.make(key, dtype)


def normal(*shape: int, scale: float = 1.0) -> Draw:
    """Standard normal floats in the workload's dtype."""

    def draw(key: jax.Array, dtype: DTypeLike) -> jax.Array:
        return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return Draw(draw)


def value(make: Callable[[], Any]) -> Draw:
    """An argument that depends on no key: segment ids, page tables, a MaskInfo."""
    return Draw(lambda key, dtype: make())


def boolean(*shape: int, chance: float = 0.5) -> Draw:
    """Independent booleans, True with this chance."""
    return Draw(lambda key, dtype: jax.random.bernoulli(key, chance, shape))


@dataclasses.dataclass(frozen=True)
class Workload:
    """One call of an op: `function(**workload.build())`.

    `tags` say what it is for: "test" is small enough for the conformance suite, of which the "core"
    goes through every transformation; "tune" is a shape of a named model that tuned tables cover.
    """

    name: str
    arguments: Mapping[str, Any]
    tags: frozenset[str] = frozenset({"test"})

    def core(self) -> "Workload":
        """The same call as one of the few that stand for all the others."""
        return dataclasses.replace(self, tags=self.tags | {"core"})

    def build(self, seed: int = 0, dtype: DTypeLike = jnp.float32) -> dict[str, Any]:
        """The arguments, freshly drawn."""
        keys = jax.random.split(jax.random.key(seed), max(len(self.arguments), 1))
        return {
            name: argument(key, dtype) if isinstance(argument, Draw) else argument
            for key, (name, argument) in zip(keys, self.arguments.items(), strict=False)
        }

    def abstract(self, dtype: DTypeLike = jnp.float32) -> dict[str, Any]:
        """The arguments as shapes where they are arrays."""
        drawn = {n: a for n, a in self.arguments.items() if isinstance(a, Draw)}
        shapes = jax.eval_shape(lambda: {n: a(jax.random.key(0), dtype) for n, a in drawn.items()})
        return {**self.arguments, **shapes}


def is_differentiable(x: object) -> bool:
    """Whether an argument is an array that can have a gradient."""
    return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)
