"""Traces the passes of a platform of flash attention for an H200 that is not present."""

import jax
from kernels.flash_gpu_programs import H200, call

from ejkernel.types.rules import Band, Chunks, Everything

MASKS = {
    "none": None,
    "everything": Everything(),
    "causal": Band(None, 0),
    "window": Band(-100, 0),
    "chunks": Chunks(256),
    "union": Band(None, -50) | Band(10, 60),
}


def trace(implementation, mask, *backward_params):
    """Trace the forward pass and the backward pass of a call with this mask."""
    inputs, spec = call(head_dim=64, batch=1, queries=500, heads=4, kv_heads=2, mask=mask)
    forward, backward = implementation.forward, implementation.backward
    params = forward.heuristic(inputs, spec, H200)
    outputs, residuals = jax.eval_shape(lambda x: forward(x, spec, params, device=H200), inputs)
    for params in (backward.heuristic(inputs, spec, H200), *backward_params):
        run = lambda *arrays, params=params: backward(*arrays, spec, params, device=H200)
        jax.eval_shape(run, inputs, residuals, outputs)
