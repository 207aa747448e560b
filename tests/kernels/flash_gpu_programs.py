"""Calls of flash attention to compile for an H200, by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.flash_attention import pallas_sm90
from ejkernel.kernels.flash_attention.inputs import Dropout, Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.pallas_sm90 import backward_fused, configs
from ejkernel.kernels.flash_attention.pallas_sm90.forward import forward
from ejkernel.ops.config import BwdParams
from ejkernel.ops.platform import Device
from ejkernel.types.rules import Band, Chunks, Dense, Everything, KeyLength, Segments

H200 = Device("gpu", "NVIDIA H200", (9, 0), "NVIDIA H200|absent")


def _shape(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def call(
    head_dim=128,
    value_dim=None,
    batch=2,
    queries=4096,
    keys=None,
    heads=8,
    kv_heads=2,
    dtype=jnp.bfloat16,
    mask=None,
    bias=None,
    sinks=False,
    dropout=False,
    soft_cap=None,
):
    """Inputs, as shapes, and the spec of a call."""
    keys = keys or queries
    inputs = Inputs(
        query=_shape(batch, queries, heads, head_dim, dtype=dtype),
        key=_shape(batch, keys, kv_heads, head_dim, dtype=dtype),
        value=_shape(batch, keys, kv_heads, value_dim or head_dim, dtype=dtype),
        bias=None if bias is None else _shape(*bias, dtype=dtype),
        sinks=_shape(heads, 2, dtype=jnp.float32) if sinks else None,
        mask=mask or Everything(),
        dropout=None,
    )
    if dropout:
        numbers = functools.partial(_shape, dtype=jnp.int32)
        inputs = inputs._replace(dropout=Dropout(numbers(), numbers(batch), numbers(heads)))
    spec = Spec(
        softmax_scale=head_dim**-0.5,
        logits_soft_cap=soft_cap,
        dropout_prob=0.1 if dropout else 0.0,
    )
    return inputs, spec


CAUSAL = Band(None, 0)


def _documents(rows=2, length=4096, count=7):
    """Ids of documents of random lengths."""
    ids = np.sort(np.random.default_rng(0).integers(0, count, (rows, length)), axis=-1)
    return jnp.asarray(ids, jnp.int32)


def _packed(documents=None):
    ids = _documents()
    return Segments(ids, ids, documents) & CAUSAL


@functools.cache
def _random_mask():
    return Dense(jnp.asarray(np.random.default_rng(0).random((1, 1, 4096, 4096)) < 0.5))


PAIRS = (1, 8, 4096, 4096)
BIASES = {
    "bias": PAIRS,
    "bias_unmasked": PAIRS,
    "bias_of_keys": (2, 1, 1, 4096),
    "bias_of_heads": (1, 8, 1, 1),
    "everything": PAIRS,
}
# Functions, because some masks are large.
FEATURES = {
    "full": dict,
    "causal": lambda: {"mask": CAUSAL},
    "window": lambda: {"mask": Band(-1023, 0)},
    "packed": lambda: {"mask": _packed()},
    "documents": lambda: {"mask": _packed(8)},
    "chunks": lambda: {"mask": Chunks(512)},
    "lengths": lambda: {"mask": KeyLength(jnp.array([3000, 100])) & CAUSAL},
    "dense": lambda: {"mask": _random_mask()},
    "prefix": lambda: {"mask": CAUSAL | KeyLength(jnp.array([3000, 100]))},
    "union": lambda: {"mask": CAUSAL | Segments(_documents(), _documents())},
    "bias": lambda: {"bias": BIASES["bias"], "mask": CAUSAL},
    "bias_unmasked": lambda: {"bias": BIASES["bias"]},
    "bias_of_keys": lambda: {"bias": BIASES["bias_of_keys"], "mask": CAUSAL},
    "bias_of_heads": lambda: {"bias": BIASES["bias_of_heads"], "mask": CAUSAL},
    "soft_cap": lambda: {"soft_cap": 50.0, "mask": CAUSAL},
    "sinks": lambda: {"sinks": True, "mask": Band(-127, 0)},
    "dropout": lambda: {"dropout": True, "mask": CAUSAL},
    "everything": lambda: {
        "bias": BIASES["bias"],
        "sinks": True,
        "dropout": True,
        "soft_cap": 50.0,
        "mask": Band(-1023, 0),
    },
    "float16": lambda: {"dtype": jnp.float16, "mask": CAUSAL},
    "odd": lambda: {"queries": 4093, "mask": CAUSAL},
}


def forward_program(tiles, feature, **dims):
    """The forward pass and what it takes, for `gpu_compile`."""
    inputs, spec = call(**dims, **FEATURES[feature]())
    return lambda inputs: forward(inputs, spec, tiles, H200), inputs


def decode_program(params, **dims):
    """One query for each sequence, on keys that are split."""
    lengths = KeyLength(jnp.array([3000, 8192]))
    inputs, spec = call(queries=1, keys=8192, mask=lengths, **dims)
    return lambda inputs: pallas_sm90.run_forward(inputs, spec, params, H200)[0], inputs


def backward_program(params, feature, **dims):
    """The backward pass and what it takes."""
    inputs, spec = call(**dims, **FEATURES[feature]())
    batch, queries, heads, _ = inputs.query.shape
    out = _shape(batch, queries, heads, inputs.value.shape[3], dtype=inputs.query.dtype)
    outputs = Outputs(out, _shape(batch, heads, queries, dtype=jnp.float32))

    def run(inputs, residuals, d_outputs):
        return pallas_sm90.run_backward(inputs, residuals, d_outputs, spec, params, H200)

    return run, inputs, outputs, outputs


DIMS = ((64, 64), (96, 64), (96, 96), (128, 64), (128, 128), (192, 128), (192, 192), (256, 256))
# Everywhere; the other features where most models are, and where registers are fewest.
THOROUGH = ((64, 64), (128, 128), (256, 256))
DIFFERENT = ("full", "causal", "packed", "documents", "soft_cap", "dropout", "odd")


def _programs():
    implementation = pallas_sm90.IMPLEMENTATION
    for head_dim, value_dim in DIMS:
        dims = {"head_dim": head_dim, "value_dim": value_dim}
        for params in implementation.forward.choices(*call(queries=1, **dims), H200):
            sizes = f"{params.q_blocksize}x{params.kv_blocksize}x{params.num_stages}"
            run = functools.partial(decode_program, params, **dims)
            yield f"forward-decode-{head_dim}-{value_dim}-{sizes}", run
        for name in FEATURES if (head_dim, value_dim) in THOROUGH else DIFFERENT:
            inputs, spec = call(**FEATURES[name](), **dims)
            refused = pallas_sm90.why_not(inputs, spec, H200)
            for params in () if refused else implementation.forward.choices(inputs, spec, H200):
                tiles = configs.forward_tiles(inputs, params)
                sizes = f"{tiles.block_q}x{tiles.block_k}x{tiles.stages}"
                run = functools.partial(forward_program, tiles, name, **dims)
                yield f"forward-{name}-{head_dim}-{value_dim}-{sizes}", run
            for params in implementation.backward.choices(inputs, spec, H200):
                sizes = f"{params.q_blocksize}x{params.kv_blocksize}x{params.num_stages}"
                run = functools.partial(backward_program, params, name, **dims)
                yield f"backward-{name}-{head_dim}-{value_dim}-{sizes}", run
            if name != "sinks" and backward_fused.why_not(inputs, spec) is None:
                run = functools.partial(
                    backward_program, BwdParams(deterministic=False), name, **dims
                )
                yield f"fused-{name}-{head_dim}-{value_dim}-64x128", run


PROGRAMS = dict(_programs())


def _is_quick(name):
    """Everything with head dim 128; elsewhere all tiles, but not with every feature."""
    _, feature, *dims, _ = name.split("-")
    narrow = dims == ["64", "64"] and feature == "sinks"
    return narrow or dims == ["128", "128"] or feature in ("causal", "dropout", "decode")


QUICK = list(filter(_is_quick, PROGRAMS))
