"""Programs for four H200 that are not present: which kernels they start, what they exchange.

Run as a program it compiles every call and prints what it found as JSON. It needs a process of its
own, as `gpu_compile` does.
"""

import json
import re

import gpu_compile
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel import blocksparse_attention, flash_attention, gla_attention, grouped_matmul

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
_HEADS = (P("rows", None, "columns"),) * 3
_QKV = ((2, 1024, 8, 128),) + ((2, 1024, 4, 128),) * 2

# Function, shapes, how they are sharded.
CALLS = {
    "flash_attention": (lambda *x: flash_attention(*x, causal=True), _QKV, _HEADS),
    "blocksparse_attention": (lambda *x: blocksparse_attention(*x, causal=True), _QKV, _HEADS),
    "gla_attention": (lambda *x: gla_attention(*x), _QKV, _HEADS),
    "grouped_matmul": (
        lambda x, w: grouped_matmul(x, w, jnp.arange(1024) // 256),
        ((1024, 256), (4, 256, 512)),
        (P("rows"), P(None, None, "columns")),
    ),
}


def _mesh(kind: AxisType) -> Mesh:
    devices = np.array(gpu_compile.devices(4)).reshape(2, 2)
    return Mesh(devices, ("rows", "columns"), axis_types=(kind,) * 2)


def _program(name: str, kind: str, gradients: bool) -> str:
    function, shapes, specs = CALLS[name]
    mesh = _mesh(KINDS[kind])
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    loss = lambda *x: function(*x).astype(jnp.float32).sum()
    run = jax.grad(loss, tuple(range(len(shapes)))) if gradients else function
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(run).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).compile().as_text()


def _found(program: str) -> dict[str, list[str]]:
    names = r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    return {
        "kernels": sorted(set(re.findall(r'custom_call_target="([^"]*)"', program))),
        "collectives": sorted(set(re.findall(names, program))),
    }


def main() -> None:
    gpu_compile.use_the_assembler()
    found = {
        f"{name} {kind} {'gradients' if gradients else 'forward'}": _found(
            _program(name, kind, gradients)
        )
        for name in CALLS
        for kind in KINDS
        for gradients in (False, True)
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
