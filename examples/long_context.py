"""Long context: a language model whose one sequence is split over the devices of a mesh.

`ring_attention` passes keys and values around a ring of devices. With contiguous parts and a causal
mask the last device has the most work; with the zig-zag placement all have the same. Tokens, labels
and positions are permuted once, and nothing else of the model changes. The losses must be those of
`flash_attention` on one device.

    python examples/long_context.py              # on 8 devices of the host
    python examples/long_context.py --size full  # on the GPUs of a machine
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import check, corpus, normalize, rotate, table
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel import flash_attention, ring_attention
from ejkernel.parallel import permute_sequence

RATES = {"small": 3e-3, "full": 3e-4}
SIZES = {
    "small": {"width": 32, "layers": 1, "heads": 4, "length": 2048, "steps": 12},
    "full": {"width": 1024, "layers": 4, "heads": 8, "length": 65536, "steps": 100},
}


def init(key, *, width, layers, heads, **_):
    """The parameters: a dictionary for each layer, and the embedding."""
    shapes = {"qkv": (width, 3, heads, width // heads), "out": (width, width)}
    shapes |= {"up": (width, 3 * width), "down": (3 * width, width)}
    keys = iter(jax.random.split(key, layers * len(shapes) + 1))
    draw = lambda shape: width**-0.5 * jax.random.normal(next(keys), shape)
    layer = lambda: {name: draw(shape) for name, shape in shapes.items()}
    return {"embedding": draw((256, width)), "layers": [layer() for _ in range(layers)]}


def loss_of(params, data, attend):
    """The cross entropy of the next token; nothing here depends on the order of the tokens."""
    x = params["embedding"][data["tokens"]]
    for layer in params["layers"]:
        query, key, value = jnp.einsum("btw,wchd->cbthd", normalize(x), layer["qkv"])
        query, key = rotate(query, data["positions"]), rotate(key, data["positions"])
        x = x + attend(query, key, value).reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(normalize(x) @ layer["up"]) @ layer["down"]
    logits = normalize(x) @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, data["labels"]).mean()


def train(name, params, data, attend, rate, steps):
    """The loss of every step, and the milliseconds of one that is compiled."""
    optimizer = optax.adam(rate)

    @jax.jit
    def step(params, moments, data):
        loss, gradients = jax.value_and_grad(loss_of)(params, data, attend)
        updates, moments = optimizer.update(gradients, moments)
        return optax.apply_updates(params, updates), moments, loss

    moments, losses, seconds = optimizer.init(params), [], []
    for i in range(steps):
        start = time.perf_counter()
        params, moments, loss = jax.block_until_ready(step(params, moments, data))
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
        if i % (steps // 3) == 0:
            print(f"{name:12s} step {i:3d}  loss {loss:.4f}")
    return np.array(losses), 1e3 * min(seconds)


def imbalance(length, shards, placement):
    """The work of the slowest device in each hop, summed over hops, relative to an even share.

    Work is counted as pairs of queries and keys under the causal mask.
    """
    order = permute_sequence(np.arange(length), shards=shards, placement=placement, axis=0)
    parts = order.reshape(shards, -1)
    # For each query of device i, the keys of device j up to its position.
    pairs = lambda i, j: np.searchsorted(np.sort(parts[j]), parts[i], side="right").sum()
    work = np.array(
        [[pairs(i, (i - hop) % shards) for i in range(shards)] for hop in range(shards)]
    )
    return work.max(1).sum() / (work.sum() / shards)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)  # of the host, where it has no GPU
    jax.config.update("jax_default_matmul_precision", "highest")
    size, rate = SIZES[arguments.size], RATES[arguments.size]
    shards, length = jax.device_count(), size["length"]
    mesh = Mesh(np.array(jax.devices()), ("sequence",))

    text = corpus()[None, : length + 1]
    data = {"tokens": text[:, :-1], "labels": text[:, 1:], "positions": np.arange(length)[None]}
    params = init(jax.random.key(0), **size)
    attend = functools.partial(flash_attention, causal=True)
    expected, one_device = train("one device", params, data, attend, rate, size["steps"])
    rows = [("one device", length, f"{one_device:.0f}", "")]

    for placement in ("contiguous", "zigzag"):
        order = {"shards": shards, "placement": placement}
        attend = functools.partial(
            ring_attention, causal=True, placement=placement, axis_name="sequence", mesh=mesh
        )
        placed = {name: permute_sequence(x, **order) for name, x in data.items()}
        placed = jax.device_put(placed, NamedSharding(mesh, P(None, "sequence")))
        everywhere = jax.device_put(params, NamedSharding(mesh, P()))
        losses, took = train(placement, everywhere, placed, attend, rate, size["steps"])
        error = abs(losses - expected).max()
        check(f"{placement}: the losses are those of one device, up to {error:.1e}", error < 1e-4)
        slowest = imbalance(length, **order)
        rows.append((placement, length // shards, f"{took:.0f}", f"{slowest:.2f}"))

    print(f"\n{length} tokens on {shards} devices, causal:")
    table(("placement", "tokens of a device", "ms per step", "slowest / mean work"), *rows)
    check("the model learns", expected[-1] < expected[0])
    check("zigzag gives all devices the same work", slowest < 1.01)


if __name__ == "__main__":
    main()
