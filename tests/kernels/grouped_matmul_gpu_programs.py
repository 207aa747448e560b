"""Calls of grouped matmul to compile for an H200, by name."""

import functools
import itertools

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.mosaic_gpu import versions
from ejkernel.kernels.grouped_matmul import pallas_sm90
from ejkernel.kernels.grouped_matmul.inputs import Inputs, Outputs, Spec, TransposedInputs
from ejkernel.ops.platform import Device

H200 = Device("gpu", "NVIDIA H200", (9, 0), "NVIDIA H200|absent")


def call(
    rows=4096,
    k=2048,
    n=1536,
    experts=8,
    dtype=jnp.bfloat16,
    transposed=False,
    out=None,
    ids=False,
    offset=False,
    existing=False,
):
    """Inputs, as shapes, and the spec of a call."""
    numbers = lambda size: jax.ShapeDtypeStruct((size,), jnp.int32)
    weights = (experts, n, k) if transposed else (experts, k, n)
    kind = TransposedInputs if transposed else Inputs
    inputs = kind(
        inputs=jax.ShapeDtypeStruct((rows, k), dtype),
        weights=jax.ShapeDtypeStruct(weights, dtype),
        group_ids=numbers(rows) if ids else None,
        group_sizes=None if ids else numbers(experts + 2 * offset),
        groups=numbers(experts) if offset else None,
        existing_out=jax.ShapeDtypeStruct((rows, n), out or dtype) if existing else None,
    )
    return inputs, Spec(transpose_rhs=transposed, preferred_element_type=out)


def forward_program(params, **shape):
    """The forward pass and what it takes, for `gpu_compile`."""
    inputs, spec = call(**shape)
    return lambda inputs: pallas_sm90.run_forward(inputs, spec, params, H200)[0], inputs


def backward_program(params, **shape):
    """The backward pass and what it takes."""
    inputs, spec = call(**shape)
    n = inputs.weights.shape[1 if spec.transpose_rhs else 2]
    d_out = jax.ShapeDtypeStruct((inputs.inputs.shape[0], n), inputs.inputs.dtype)
    run = lambda inputs, d_outputs: pallas_sm90.run_backward(
        inputs, (), d_outputs, spec, params, H200
    )
    return run, inputs, Outputs(d_out)


# Every way that a kernel is composed: widths of tiles, layouts, dtypes, whole and odd sizes.
SHAPES = {
    "plain": {},
    "narrow": {"n": 1408},
    "transposed": {"transposed": True},
    "odd": {"rows": 1001, "k": 72, "n": 200},
    "odd_transposed": {"rows": 1001, "k": 72, "n": 200, "transposed": True},
    "float16": {"dtype": jnp.float16},
    "float32": {"out": "float32"},
    "ids": {"ids": True, "offset": True, "existing": True},
}


def _programs():
    # Of 128 experts each has few rows, for which there are tiles of their own.
    for experts, (name, shape) in itertools.product((128, 8), SHAPES.items()):
        shape = shape | {"experts": experts}
        inputs, spec = call(**shape)
        for direction, program in (("forward", forward_program), ("backward", backward_program)):
            offered = getattr(pallas_sm90.IMPLEMENTATION, direction)
            if versions.why_missing() or offered.refusal(inputs, spec, H200):
                continue
            for params in offered.choices(inputs, spec, H200):
                sizes = f"{params.block_m}x{params.block_n}x{params.num_stages}"
                run = functools.partial(program, params, **shape)
                yield f"{direction}-{name}-{sizes}", run


PROGRAMS = dict(_programs())
# All tiles, though not in every way.
QUICK = [name for name in PROGRAMS if "-plain-" in name]
