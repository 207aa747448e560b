"""Your own kernel in `ejkernel.ops`: the sum with a residual and its RMS norm, in one pass.

    total = x + residual
    normalised = total / sqrt(mean(total ** 2)) * weight

The kernel has a Triton implementation for NVIDIA GPUs and one in JAX for everything else, a
gradient of its own, and candidates: `Tuner` runs each, compares its results, and times it. The
fastest is remembered for calls of these shapes.

    python examples/own_kernel.py                       # the JAX implementation on a CPU
    EJKERNEL_INTERPRET=1 python examples/own_kernel.py  # Triton's interpreter; needs Triton
    python examples/own_kernel.py --size full           # on a GPU
"""

from __future__ import annotations  # of device functions: importing this needs no Triton

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from common import check, table

from ejkernel.kernels.common.triton import bridge
from ejkernel.kernels.common.triton.device_types import Pointer, StaticArguments
from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Kernel, Tuner
from ejkernel.ops.platform import device_of

SIZES = {"small": (96, 200), "full": (16384, 4096)}  # tokens, width
EPSILON = 1e-6
tl: Any = None  # `triton.language`, once a kernel is launched


@dataclasses.dataclass(frozen=True)
class AddNormConfig:
    """Which implementation runs, the rows that it works on at once, and the warps of a program."""

    implementation: str = "xla"
    rows: int = 16
    warps: int = 4


TRITON = [AddNormConfig("triton", *size) for size in ((1, 4), (1, 8), (2, 8), (4, 16))]


@dataclasses.dataclass(frozen=True)
class AddNormStatic(StaticArguments):
    """What Triton compiles a kernel for."""

    count: int
    width: int
    rows: int
    columns: int  # the next power of two
    epsilon: float = EPSILON


@bridge.triton_jit
def add_norm_kernel(
    x: Pointer,
    residual: Pointer,
    weight: Pointer,
    normalised: Pointer,
    total: Pointer,
    static: AddNormStatic,
):
    """One program for each block of rows: reads them once, writes both results."""
    rows = tl.program_id(0) * static.rows + tl.arange(0, static.rows)[:, None]
    columns = tl.arange(0, static.columns)[None, :]
    places = rows * static.width + columns
    inside = (rows < static.count) & (columns < static.width)
    sums = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    sums += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(sums * sums, axis=1) / static.width + static.epsilon)
    weights = tl.load(weight + columns, mask=columns < static.width, other=0.0).to(tl.float32)
    tl.store(normalised + places, sums * scale[:, None] * weights, mask=inside)
    tl.store(total + places, sums, mask=inside)


def in_triton(x, residual, weight, cfg):
    """The kernel on arrays [tokens, width]."""
    count, width = x.shape
    static = AddNormStatic(count, width, cfg.rows, bridge.padded_size(width))
    launch_config = bridge.LaunchConfig(-(-count // cfg.rows), cfg.warps, num_stages=1)
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2
    arrays = [x, residual, weight]
    return tuple(
        bridge.launch(add_norm_kernel, arrays, outputs, static, launch_config, device_of(arrays))
    )


def in_jax(x, residual, weight, cfg=None):
    """The definition, on a block of rows at a time if there is a configuration."""

    def rows(pair):
        total = pair[0].astype(jnp.float32) + pair[1].astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(total**2, axis=-1, keepdims=True) + EPSILON)
        return (total * scale * weight).astype(x.dtype), total.astype(x.dtype)

    return jax.lax.map(rows, (x, residual), batch_size=cfg.rows) if cfg else rows((x, residual))


class AddNorm(Kernel[AddNormConfig, tuple[jax.Array, jax.Array]]):
    """`executor(AddNorm(), x, residual, weight)` gives the normalised sum, and the sum."""

    version = "1"

    def __init__(self):
        super().__init__("add_norm")

    def run(self, x, residual, weight, *, cfg):
        return (in_triton if cfg.implementation == "triton" else in_jax)(x, residual, weight, cfg)

    def heuristic_cfg(self, inv):
        return self.candidate_cfgs(inv)[0]

    def candidate_cfgs(self, inv):
        x, *_ = inv.args
        in_blocks = [AddNormConfig("xla", rows) for rows in (32, 16, len(x))]
        refused = bridge.why_not(inv.device, x.dtype)  # the reason, or None
        return in_blocks if refused else [*TRITON, *in_blocks]

    def fwd_with_residuals(self, x, residual, weight, *, cfg):
        normalised, total = self.run(x, residual, weight, cfg=cfg)
        return (normalised, total), total

    def vjp(self, total, _, d_outputs, x, residual, weight, *, cfg):
        d_normalised, d_total = (d.astype(jnp.float32) for d in d_outputs)
        total = total.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(total**2, axis=-1, keepdims=True) + EPSILON)
        unit, d_unit = total * scale, d_normalised * weight
        d_total += scale * (d_unit - unit * jnp.mean(d_unit * unit, axis=-1, keepdims=True))
        d_weight = (d_normalised * unit).sum(0).astype(weight.dtype)
        return d_total.astype(x.dtype), d_total.astype(residual.dtype), d_weight


def difference(ours, theirs):
    """The largest difference, relative to the largest value."""
    return max(float(abs(x - y).max() / abs(y).max()) for x, y in zip(ours, theirs, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    tokens, width = SIZES[parser.parse_args().size]
    measured, events = [], []
    chain = ConfigSelectorChain(
        cache=ConfigCache(),
        policy=AutotunePolicy(),
        tuner=Tuner(report=measured.append),
        on_event=lambda name, **_: events.append(name),
    )
    executor, kernel = Executor(chain), AddNorm()
    x, residual = jax.random.normal(jax.random.key(0), (2, tokens, width))
    arrays = x, residual, 1 + 0.1 * jax.random.normal(jax.random.key(1), (width,))

    executor(kernel, *arrays)  # measures the candidates, once
    for progress in measured:
        print(f"[{progress.number}/{progress.total}] {progress.candidate}: {progress.outcome}")
    jax.jit(lambda *arrays: executor(kernel, *arrays))(*arrays)
    check("the second call measures nothing", events.count("autotune_start") == 1)

    loss = lambda run: lambda *arrays: sum((jnp.sin(y) * y).sum() for y in run(*arrays))
    gradients = lambda run: jax.grad(loss(run), argnums=(0, 1, 2))(*arrays)
    for cfg in kernel.candidate_cfgs(executor.invocation(kernel, *arrays)):
        run = lambda *arrays, cfg=cfg: executor(kernel, *arrays, cfg=cfg)
        values = difference(run(*arrays), in_jax(*arrays))
        slopes = difference(gradients(run), gradients(in_jax))
        claim = f"{cfg.implementation:6s} rows={cfg.rows:<5d} warps={cfg.warps}: as defined,"
        claim += f" values up to {values:.0e}, gradients up to {slopes:.0e}"
        check(claim, values < 1e-5 and slopes < 1e-4)

    chosen = executor.choose_config(kernel, *arrays).params
    print(f"\n{tokens} tokens of {width}; chosen: {chosen}")
    table(("candidate", "outcome"), *((x.candidate, x.outcome) for x in measured))


if __name__ == "__main__":
    main()
