"""How a program to be compiled and compared is described."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PEERS = "jax.experimental.pallas.ops.tpu."


class Part(NamedTuple):
    """Blocks of a kernel's program that use the matrix unit, by number, and how often each runs.

    `units`: tiles of 512 x 512 (x 512) that they do in all; `steps`: in so many steps of the grid,
    one block in each, or in one step all of them. `ends`: how often what happens at the ends of a
    row of tiles happens for that. `copies`: the block that starts the copies of a tile, by its
    number among the scalar ones when the longest comes first, and how often it runs; where it is
    given, the tile is in a loop of its own, and `units` are MiB of keys and values.
    """

    blocks: dict[int, int]
    units: float = 1.0
    steps: int = 1
    ends: int = 0
    copies: tuple[int, int] | None = None


class Subject(NamedTuple):
    """A program, which parts of its kernel stand for what, and what is in the kernel's name."""

    build: Callable[[], tuple[Callable[[Any], Any], Any]]
    parts: dict[str, Part]
    kernel: str = ""


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
