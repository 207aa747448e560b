"""Flash attention in Pallas on Hopper with 1 to 17 queries and keys, values and gradients.

Such a call is one tile that is mostly padding, an axis of its bias or mask may have size 1, and few
queries take the split-KV kernel. Without a GPU some of these calls are lowered, and interpreted
with JAX 0.12 or newer. On a GPU every feature meets every number of queries and of keys.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evidence import proves
from kernels.flash_gpu_programs import H200
from kernels.test_flash_pallas_gpu import SOURCE, needs_interpreter
from tiers import quick

from ejkernel import flash_attention, settings
from ejkernel.cli.oracle import Truth, direction, moved, on_the_host, with_dtype
from ejkernel.kernels.common import mosaic_gpu
from ejkernel.kernels.flash_attention import OP, pallas_sm90
from ejkernel.kernels.flash_attention.inputs import Inputs
from ejkernel.kernels.flash_attention.pallas_sm90 import backward_fused
from ejkernel.ops import default_executor
from ejkernel.ops.config import BwdParams
from ejkernel.ops.platform import device_of
from ejkernel.types import MaskInfo

LENGTHS = range(1, 18)
BATCH, HEADS, HEAD_DIM = 2, 4, 64
FUSED = BwdParams(deterministic=False)


def _segments(draw, queries, keys):
    """Ids in ascending order, and padding."""
    ids = [np.sort(draw.integers(-1, 3, (BATCH, size))) for size in (queries, keys)]
    return MaskInfo.from_segments(*map(jnp.asarray, ids))


def _bias(draw, *shape):
    return jnp.asarray(draw.standard_normal(shape), jnp.float32)


FEATURES = {
    "plain": lambda draw, queries, keys: {},
    "causal": lambda draw, queries, keys: {"causal": True},
    "window": lambda draw, queries, keys: {"sliding_window": (3, 2)},
    "bias": lambda draw, queries, keys: {"bias": _bias(draw, 1, HEADS, queries, keys)},
    "bias_of_heads": lambda draw, queries, keys: {"bias": _bias(draw, 1, HEADS, 1, 1)},
    "sinks": lambda draw, queries, keys: {"softmax_aux": _bias(draw, HEADS, 2)},
    "soft_cap": lambda draw, queries, keys: {"logits_soft_cap": 2.0},
    "segments": lambda draw, queries, keys: {"mask_info": _segments(draw, queries, keys)},
    "dense": lambda draw, queries, keys: {
        "attention_mask": jnp.asarray(draw.random((BATCH, 1, queries, keys)) < 0.6)
    },
    "dropout": lambda draw, queries, keys: {"dropout_prob": 0.2, "dropout_seed": 7},
    "gqa": lambda draw, queries, keys: {"causal": True, "causal_offset": 2},
    "everything": lambda draw, queries, keys: {
        "bias": _bias(draw, BATCH, 1, queries, keys),
        "softmax_aux": _bias(draw, HEADS, 2),
        "logits_soft_cap": 2.0,
        "mask_info": _segments(draw, queries, keys),
        "sliding_window": (3, 2),
        "dropout_prob": 0.2,
        "dropout_seed": 7,
    },
}


def _invocation(feature, queries, keys, seed=0):
    """The call in float32, with fewer key heads where the feature is GQA."""
    draw = np.random.default_rng(seed)
    kv_heads = 1 if feature in ("gqa", "everything") else HEADS
    sizes = (queries, HEADS), (keys, kv_heads), (keys, kv_heads)
    arrays = [_bias(draw, BATCH, *size, HEAD_DIM) for size in sizes]
    options = FEATURES[feature](draw, queries, keys)
    return default_executor().invocation(flash_attention, *arrays, **options)


def _values_and_gradients(spec, device, params=None):
    """Both passes as a function of the inputs; `params` are of the backward.

    Not through the primitive of the package, which cannot hold the effects of the interpreter.
    """

    def run(inputs):
        outputs, saved = pallas_sm90.run_forward(inputs, spec, None, device)
        gradients = pallas_sm90.run_backward(
            inputs, saved, direction(outputs), spec, params, device
        )
        return outputs, gradients

    return jax.jit(run)


def _backwards(inputs: Inputs, spec):
    """The parameters of the backward passes that support the call."""
    return (None, FUSED) if backward_fused.why_not(inputs, spec) is None else (None,)


def _check(feature, queries, keys):
    """Values and gradients are as near the definition as rounding to bfloat16 allows."""
    proves(OP.name, SOURCE, "forward", "backward")
    truth = Truth(lambda seed: _invocation(feature, queries, keys, seed))
    with on_the_host():
        call = _invocation(feature, queries, keys)
        inputs = with_dtype(call.inputs, jnp.bfloat16)
    inputs = moved(inputs)
    device = device_of(jax.tree.leaves(inputs))
    for params in _backwards(inputs, call.spec):
        run = _values_and_gradients(call.spec, device, params)
        outputs, gradients = run(inputs)
        found = truth.of_values(outputs, jnp.bfloat16)
        found += truth.of_gradients(gradients, jnp.bfloat16)
        bad = [str(deviation) for deviation in found if not deviation.fine]
        assert not bad, (feature, queries, keys, params, bad)


LOWERED = [(feature, 1, 1) for feature in FEATURES]
LOWERED += [("bias_of_heads", 1, 17), ("everything", 1, 17), ("everything", 17, 1)]
QUICK = [("bias", 1, 1), ("everything", 1, 1), ("bias_of_heads", 1, 17)]


def _name(feature_and_lengths):
    return "-".join(map(str, feature_and_lengths))


@pytest.mark.skipif(
    mosaic_gpu.versions.why_missing() is not None, reason=str(mosaic_gpu.versions.why_missing())
)
@pytest.mark.parametrize("feature_and_lengths", quick(LOWERED, *QUICK), ids=_name)
def test_short_calls_are_lowered_with_their_gradients(feature_and_lengths):
    call = _invocation(*feature_and_lengths)
    inputs = with_dtype(call.inputs, jnp.bfloat16)
    for params in _backwards(inputs, call.spec):
        traced = _values_and_gradients(call.spec, H200, params).trace(inputs)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 11)])
def test_interpreted_short_calls_are_those_of_the_reference(feature, queries, keys):
    with settings.override(interpret=True):
        _check(feature, queries, keys)


@pytest.mark.gpu
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("queries", LENGTHS)
def test_short_calls_on_the_card(feature, queries):
    """Each feature with every number of queries and every number of keys, paired differently."""
    shift = list(FEATURES).index(feature)
    _check(feature, queries, 1 + (queries - 1 + shift) % len(LENGTHS))


@pytest.mark.gpu
@pytest.mark.parametrize("feature", FEATURES)
def test_one_query_and_one_key_on_the_card(feature):
    _check(feature, 1, 1)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("queries", LENGTHS)
def test_every_pair_of_short_lengths_on_the_card(feature, queries):
    for keys in LENGTHS:
        _check(feature, queries, keys)
