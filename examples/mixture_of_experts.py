"""A top-k mixture-of-experts layer: `grouped_matmul` against dense dispatch.

Dense dispatch multiplies every token by every expert and weighs most of the results by 0.
`grouped_matmul` multiplies a token by its own experts: the work does not grow with their number.
Values and gradients must agree; the times are printed.

    python examples/mixture_of_experts.py              # on any machine
    python examples/mixture_of_experts.py --devices 4  # the experts split over 4 devices as well
    python examples/mixture_of_experts.py --size full  # on a GPU
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from common import check, table
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejkernel import grouped_matmul
from ejkernel.parallel import combine, dispatch

SIZES = {
    "small": {"tokens": 1024, "width": 64, "hidden": 128, "experts": (4, 16, 32)},
    "full": {"tokens": 16384, "width": 2048, "hidden": 1024, "experts": (8, 16, 32, 64)},
}
TOP_K = 2


def init(key, experts, width, hidden):
    """The router, and the two matrices of every expert."""
    keys = jax.random.split(key, 3)
    return {
        "router": jax.random.normal(keys[0], (width, experts)) / width**0.5,
        "up": jax.random.normal(keys[1], (experts, width, hidden)) / width**0.5,
        "down": jax.random.normal(keys[2], (experts, hidden, width)) / hidden**0.5,
    }


def route(params, tokens):
    """The gates and the experts of each token, [tokens, TOP_K]."""
    gates, experts = jax.lax.top_k(jax.nn.softmax(tokens @ params["router"]), TOP_K)
    return gates / gates.sum(-1, keepdims=True), experts


def grouped(params, tokens):
    """Each token is repeated for each of its experts, and multiplied by that expert alone."""
    gates, experts = route(params, tokens)
    rows, ids = jnp.repeat(tokens, TOP_K, axis=0), experts.reshape(-1)
    rows = jax.nn.silu(grouped_matmul(rows, params["up"], ids))
    rows = grouped_matmul(rows, params["down"], ids)
    return jnp.einsum("tkw,tk->tw", rows.reshape(-1, TOP_K, rows.shape[-1]), gates)


def dense(params, tokens):
    """Every token is multiplied by every expert; the gates of the others are 0."""
    gates, experts = route(params, tokens)
    weights = jax.nn.one_hot(experts, params["up"].shape[0])  # [tokens, TOP_K, experts]
    rows = jax.nn.silu(jnp.einsum("tw,ewh->eth", tokens, params["up"]))
    rows = jnp.einsum("eth,ehw->etw", rows, params["down"])
    return jnp.einsum("etw,tke,tk->tw", rows, weights, gates)


def split_over(devices):
    """The same layer with tokens and experts split over devices."""

    def layer(params, tokens):
        gates, experts = route(params, tokens)
        copies, ids = jnp.repeat(tokens, TOP_K, axis=0), experts.reshape(-1)
        count = params["router"].shape[1]
        rows, sizes, plan = dispatch(copies, ids, axis_name="expert", experts=count)
        rows = jax.nn.silu(grouped_matmul(rows, params["up"], group_sizes=sizes))
        rows = grouped_matmul(rows, params["down"], group_sizes=sizes)
        rows = combine(rows, plan)
        return jnp.einsum("tkw,tk->tw", rows.reshape(-1, TOP_K, rows.shape[-1]), gates)

    specs = {"router": P(), "up": P("expert"), "down": P("expert")}
    mesh = Mesh(np.array(jax.devices()[:devices]), ("expert",))
    return jax.shard_map(layer, mesh=mesh, in_specs=(specs, P("expert")), out_specs=P("expert"))


def value_and_gradients(layer):
    """The output, and the gradients of a loss with respect to parameters and tokens."""

    def loss(params, tokens):
        output = layer(params, tokens)
        return (output**2).mean(), output

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


def milliseconds(function, *arguments, runs=5):
    """The shortest of some runs, compiled before."""
    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds)


def difference(ours, theirs):
    """The largest difference of two trees, relative to the largest value of each array."""
    relative = lambda x, y: float(abs(x - y).max() / abs(y).max())
    return max(jax.tree.leaves(jax.tree.map(relative, ours, theirs)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--devices", type=int, default=1, help="devices to split the experts over")
    arguments = parser.parse_args()
    if arguments.devices > 1:
        jax.config.update("jax_num_cpu_devices", arguments.devices)
    jax.config.update("jax_default_matmul_precision", "highest")
    size = SIZES[arguments.size]

    layers = {"grouped": grouped}
    if arguments.devices > 1:
        layers[f"over {arguments.devices} devices"] = split_over(arguments.devices)
    tokens = jax.random.normal(jax.random.key(0), (size["tokens"], size["width"]))
    rows = []
    for experts in size["experts"]:
        params = init(jax.random.key(1), experts, size["width"], size["hidden"])
        reference = value_and_gradients(dense)
        expected = reference(params, tokens)
        times = [milliseconds(reference, params, tokens)]
        for name, layer in layers.items():
            run = value_and_gradients(layer)
            error = difference(run(params, tokens), expected)
            check(f"{experts} experts, {name}: as dense dispatch, up to {error:.1e}", error < 1e-4)
            times.append(milliseconds(run, params, tokens))
        ratios = (times[0] / times[1], experts / TOP_K)
        rows.append((experts, *(f"{x:.1f}" for x in (*times, *ratios))))

    print(f"\nforward and backward of {size['tokens']} tokens, top {TOP_K}, milliseconds:")
    table(("experts", "dense", *layers, "dense / grouped", "ratio of the work"), *rows)


if __name__ == "__main__":
    main()
