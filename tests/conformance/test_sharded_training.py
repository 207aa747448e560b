"""A small transformer trains on a mesh of 2x2x2 devices as it does on one."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel.modules import flash_attention, grouped_matmul
from ejkernel.types import MaskInfo

pytestmark = [
    pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices"),
    pytest.mark.slow,
]

P = PartitionSpec
LAYERS, BATCH, LENGTH, WIDTH, HEADS, KEY_HEADS, DIM, EXPERTS, VOCABULARY = (
    2,
    4,
    32,
    32,
    4,
    2,
    8,
    4,
    50,
)
STEPS = 20
SAVED = jax.checkpoint_policies.save_only_these_names(
    "flash_attention_out", "flash_attention_lse", "grouped_matmul_out"
)


class Layer(NamedTuple):
    query: jax.Array
    key: jax.Array
    value: jax.Array
    out: jax.Array
    router: jax.Array
    up: jax.Array
    down: jax.Array


class Model(NamedTuple):
    embedding: jax.Array
    layers: Layer


# Heads and the hidden columns of experts over "tensor"; "replica" holds the same everywhere.
SPECS = Model(
    embedding=P(),
    layers=Layer(
        query=P(None, None, "tensor"),
        key=P(None, None, "tensor"),
        value=P(None, None, "tensor"),
        out=P(None, "tensor"),
        router=P(),
        up=P(None, None, None, "tensor"),
        down=P(None, None, "tensor"),
    ),
)


def init():
    shapes = Model(
        embedding=(VOCABULARY, WIDTH),
        layers=Layer(
            query=(LAYERS, WIDTH, HEADS, DIM),
            key=(LAYERS, WIDTH, KEY_HEADS, DIM),
            value=(LAYERS, WIDTH, KEY_HEADS, DIM),
            out=(LAYERS, HEADS, DIM, WIDTH),
            router=(LAYERS, WIDTH, EXPERTS),
            up=(LAYERS, EXPERTS, WIDTH, 2 * WIDTH),
            down=(LAYERS, EXPERTS, 2 * WIDTH, WIDTH),
        ),
    )
    is_shape = lambda x: type(x) is tuple
    leaves, structure = jax.tree.flatten(shapes, is_leaf=is_shape)
    draw = np.random.default_rng(0).standard_normal
    return jax.tree.unflatten(structure, [jnp.asarray(0.2 * draw(shape)) for shape in leaves])


def layer(x, weights, mask):
    project = lambda w: jnp.einsum("btd,dnh->btnh", x, w)
    out = flash_attention(
        project(weights.query), project(weights.key), project(weights.value), mask_info=mask
    )
    x = x + jnp.einsum("btnh,nhd->btd", out, weights.out)
    return x + experts(x, weights)


def experts(x, weights):
    rows = x.reshape(-1, WIDTH)
    scores = jax.nn.softmax(rows @ weights.router)
    chosen = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    hidden = jax.nn.gelu(grouped_matmul(rows, weights.up, chosen))
    out = grouped_matmul(hidden, weights.down, chosen)
    return (out * jnp.take_along_axis(scores, chosen[:, None], 1)).reshape(x.shape)


def loss(model, tokens, segments):
    mask = MaskInfo.from_segments(segments).apply_causal()
    block = jax.checkpoint(lambda x, weights: layer(x, weights, mask), policy=SAVED)
    x = model.embedding[tokens]
    x, _ = jax.lax.scan(lambda x, weights: (block(x, weights), None), x, model.layers)
    logits = jax.nn.log_softmax(x[:, :-1] @ model.embedding.T)
    wanted = tokens[:, 1:, None]
    inside = segments[:, 1:] == segments[:, :-1]  # a document does not predict the next one
    return -jnp.where(inside, jnp.take_along_axis(logits, wanted, 2)[..., 0], 0).mean()


@jax.jit
def step(model, momentum, tokens, segments):
    value, gradients = jax.value_and_grad(loss)(model, tokens, segments)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda x, m: x - 0.1 * m, model, momentum), momentum, value


def train(place=lambda model, *data: (model, *data)):
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, VOCABULARY, (BATCH, LENGTH)))
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (BATCH, LENGTH)), axis=1), jnp.int32)
    model, tokens, segments = place(init(), tokens, segments)
    momentum = jax.tree.map(jnp.zeros_like, model)
    program = step.lower(model, momentum, tokens, segments).compile().as_text()
    losses = []
    for _ in range(STEPS):
        model, momentum, value = step(model, momentum, tokens, segments)
        losses.append(float(value))
    return losses, program


def test_a_sharded_transformer_trains_as_on_one_device():
    with jax.enable_x64(True):
        alone, _ = train()
        mesh = jax.make_mesh(
            (2, 2, 2), ("data", "tensor", "replica"), axis_types=(jax.sharding.AxisType.Auto,) * 3
        )

        def place(model, *data):
            put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
            return jax.tree.map(put, model, SPECS), *(put(x, P("data")) for x in data)

        split, program = train(place)
    assert alone[-1] < 0.7 * alone[0]
    np.testing.assert_allclose(split, alone, rtol=0, atol=1e-9)
    assert not re.findall(r"= \S+ all-gather\(.*", program)
