"""Block-sparse attention, a hop of a ring, and mean pooling on a GPU: checked, then timed.

python benchmarks/blocks_gpu.py                        every case, a table
python benchmarks/blocks_gpu.py --json results.json    and the figures as JSON
python benchmarks/blocks_gpu.py --cases blocks_128 --platforms pallas --passes forward

One block of keys in eight is drawn for each block of queries. `over share` is the time with the
blocks over an eighth of that of flash attention without a mask on the same platform; of a hop,
whose results are in float32 until they are combined, over all of it. The first heads, or the
first rows, are compared with the definition in float32: the error may be at most twice that of the
definition with its output rounded to bfloat16, or 0.4 % of the largest number. What is wrong, or
gives other bits when it is repeated, is not timed.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_cases import Program, options, report, timed
from programs import seconds_of

from ejkernel.modules import (
    blocksparse_attention,
    flash_attention,
    mean_pooling,
    ring_attention,
)

PLATFORMS = ("pallas", "triton", "xla")
DTYPE = jnp.bfloat16
CHECKED = 2  # heads, or rows
SHARE = 8  # one block of so many is visible


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Attention with random blocks, the same for all heads or drawn for each."""

    name: str
    block_size: int
    per_head: bool = False
    length: int = 8192
    heads: int = 16
    dim: int = 128

    def arrays(self) -> tuple[jax.Array, ...]:
        """Query, key, value, gradient of the output."""
        keys = jax.random.split(jax.random.key(0), 4)
        shape = (1, self.length, self.heads, self.dim)
        return tuple(jax.random.normal(key, shape).astype(DTYPE) for key in keys)

    @property
    def share(self) -> float:
        """The part of the keys that a query sees."""
        return 1 / SHARE

    def mask(self) -> np.ndarray:
        """[heads or 1, query blocks, key blocks], as many visible blocks in every row."""
        count = self.length // self.block_size
        drawn = np.random.default_rng(0).random((self.heads if self.per_head else 1, count, count))
        return drawn.argsort(-1).argsort(-1) < max(1, count // SHARE)

    def call(self, platform: str, whole: bool = False) -> Callable:
        """(query, key, value) -> output; `whole`: without the blocks."""
        if whole:
            return functools.partial(flash_attention, platform=platform)
        return functools.partial(
            blocksparse_attention,
            block_mask=self.mask(),
            block_size=self.block_size,
            platform=platform,
        )

    def definition(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """The output of the first heads."""
        visible = jnp.asarray(self.mask()[:CHECKED])
        visible = jnp.repeat(jnp.repeat(visible, self.block_size, 1), self.block_size, 2)
        logits = self.dim**-0.5 * jnp.einsum("btnh,bsnh->bnts", query, key)
        weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf))
        return jnp.einsum("bnts,bsnh->btnh", weights, value)

    def checked(self, x: jax.Array) -> jax.Array:
        """The part that is compared with the definition."""
        return x[:, :, :CHECKED]


@dataclasses.dataclass(frozen=True)
class Hop(Blocks):
    """Ring attention of one device, which is one hop over all of its keys."""

    block_size: int = 64

    @property
    def share(self) -> float:
        """A hop without a mask sees every key."""
        return 1.0

    def mask(self) -> np.ndarray:
        """Every block."""
        return np.ones_like(super().mask())

    def call(self, platform: str, whole: bool = False) -> Callable:
        """(query, key, value) -> output; `whole`: by flash attention."""
        return functools.partial(flash_attention if whole else ring_attention, platform=platform)


@dataclasses.dataclass(frozen=True)
class Pooling:
    """The means of sequences."""

    name: str
    batch: int
    length: int
    dim: int

    def arrays(self) -> tuple[jax.Array, ...]:
        """The tokens, and the gradient of the means."""
        keys = jax.random.split(jax.random.key(0))
        shape = (self.batch, self.length, self.dim)
        x = jax.random.normal(keys[0], shape).astype(DTYPE)
        return x, jax.random.normal(keys[1], (self.batch, self.dim)).astype(DTYPE)

    def call(self, platform: str) -> Callable:
        """(tokens) -> means."""
        return functools.partial(mean_pooling, platform=platform)

    def definition(self, x: jax.Array) -> jax.Array:
        """The means of the first rows."""
        return x.mean(1)

    def checked(self, x: jax.Array) -> jax.Array:
        """The part that is compared with the definition."""
        return x[:CHECKED]

    def bytes(self) -> int:
        """Bytes that a pass cannot avoid: the tokens, read or written."""
        return self.batch * self.length * self.dim * DTYPE.dtype.itemsize


CASES = (
    Blocks("blocks_128", 128),
    Blocks("blocks_64", 64),
    Blocks("blocks_head", 128, per_head=True),
    Hop("hop"),
    Pooling("pooling", 8, 4096, 4096),
    Pooling("pooling_short", 64, 512, 768),
)


def results_of(call: Callable, which: str) -> Callable:
    """(arrays) -> the output, or the output and gradients."""

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        if which == "forward":
            return (call(*arrays[:-1]),)
        out, pull_back = jax.vjp(call, *arrays[:-1])
        return out, *pull_back(arrays[-1].astype(out.dtype))

    return jax.jit(run)


def check(case: Any, which: str, arrays: tuple[jax.Array, ...], run: Callable) -> dict[str, Any]:
    """Errors relative to the largest number."""
    narrow = lambda x: x.astype(DTYPE).astype(jnp.float32)
    cut = [case.checked(x).astype(jnp.float32) for x in arrays]
    define = lambda rounded: results_of(lambda *x: rounded(case.definition(*x)), which)
    with jax.default_matmul_precision("highest"):
        truth, near = define(lambda x: x)(*cut), define(narrow)(*cut)
    errors = []
    for found, true, rounded in zip(run(*arrays), truth, near, strict=True):
        error, plain = (
            float(jnp.abs(x.astype(jnp.float32) - true).max())
            for x in (case.checked(found), narrow(rounded))
        )
        scale = float(jnp.abs(true).max())
        errors.append(error / scale)
        if not error <= max(2 * plain, 4e-3 * scale):  # NaN is wrong too
            return {"wrong": len(errors) - 1, "error": error / scale, "plain": plain / scale}
    return {"errors": errors}


def measure(
    case: Any, which: str, arrays: tuple[jax.Array, ...], chosen: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Every platform: milliseconds and errors, or why there are none."""
    programs = {}
    for platform in filter(None, chosen.platforms.split(",")):
        run = results_of(case.call(platform), which)
        call = functools.partial(run, *arrays)
        programs[f"ours {platform}"] = Program(
            functools.partial(check, case, which, arrays, run),
            functools.partial(seconds_of, call),
            call,
        )
        if isinstance(case, Blocks):
            whole = functools.partial(results_of(case.call(platform, True), which), *arrays)
            programs[f"whole {platform}"] = Program(None, functools.partial(seconds_of, whole))
    results = timed(programs)
    for name, result in results.items():
        whole_ms = results.get(name.replace("ours", "whole"), {}).get("ms")
        if "ms" not in result:
            continue
        if isinstance(case, Pooling):
            passes = 1 if which == "forward" else 2
            result["TB/s"] = passes * case.bytes() / result["ms"] / 1e9
        elif name.startswith("ours") and whole_ms:
            result["over share"] = result["ms"] / (case.share * whole_ms)
    return results


def main() -> None:
    parser = options(
        "Block-sparse attention, a hop, and mean pooling on a GPU.", CASES, PLATFORMS, ()
    )
    report(CASES, parser.parse_args(), measure)


if __name__ == "__main__":
    main()
