"""Flow matching that samples in one step: a mean flow, trained with `jax.jvp` through attention.

The network u(z, r, t) learns the average velocity between the times r and t of a flow from data at
time 0 to noise at time 1. It satisfies u = v - (t - r) du/dt, where v is the velocity and du/dt a
derivative along the flow: one `jax.jvp` of the network, `flash_attention` included. A sample takes
one evaluation: noise - u(noise, 0, 1). (Mean Flows, arXiv:2505.13447)

The data are rings: 16 points at equal angles on the unit circle, turned by a random angle that each
point can learn only from the others.

    python examples/flow_matching.py              # a small model, on any machine
    python examples/flow_matching.py --size full  # on a GPU
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import check, curve, normalize, table

from ejkernel import flash_attention

RATES = {"small": 3e-3, "full": 1e-3}
SIZES = {
    "small": {"width": 64, "layers": 2, "heads": 4, "batch": 64, "steps": 400},
    "full": {"width": 256, "layers": 6, "heads": 8, "batch": 4096, "steps": 20000},
}
POINTS = 16
ANGLES = 2 * np.pi * np.arange(POINTS) / POINTS


def rings(key, count):
    """Points [count, POINTS, 2] on the unit circle."""
    angles = ANGLES + jax.random.uniform(key, (count, 1), maxval=2 * np.pi)
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def distance_to_rings(points):
    """Root mean square distance of points [count, POINTS, 2] to the nearest ring."""
    z = points[..., 0] + 1j * points[..., 1]
    turned = (z * np.exp(-1j * ANGLES)).mean(-1, keepdims=True)
    nearest = turned / abs(turned) * np.exp(1j * ANGLES)
    return float(jnp.sqrt((abs(z - nearest) ** 2).mean()))


def init(key, *, width, layers, heads, **_):
    """The parameters: of the inputs, of each layer, and of the output, which begins at 0."""
    shapes = {"qkv": (width, 3, heads, width // heads), "out": (width, width)}
    shapes |= {"up": (width, 3 * width), "down": (3 * width, width)}
    keys = iter(jax.random.split(key, layers * len(shapes) + 3))
    draw = lambda *shape: width**-0.5 * jax.random.normal(next(keys), shape)
    return {
        "point": draw(2, width),
        "position": draw(POINTS, width),
        "time": draw(2 * 8, width),
        "layers": [{name: draw(*shape) for name, shape in shapes.items()} for _ in range(layers)],
        "velocity": jnp.zeros((width, 2)),
    }


def network(params, z, r, t, attend=flash_attention):
    """The average velocity [batch, POINTS, 2] between r and t [batch, 1]."""
    frequencies = 2.0 ** np.arange(-1, 3)
    waves = [wave(time * frequencies) for time in (t, t - r) for wave in (jnp.sin, jnp.cos)]
    time = jnp.concatenate(waves, axis=-1) @ params["time"]
    x = z @ params["point"] + params["position"] + time[:, None]
    for layer in params["layers"]:
        query, key, value = jnp.einsum("btw,wchd->cbthd", normalize(x), layer["qkv"])
        x = x + attend(query, key, value).reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(normalize(x) @ layer["up"]) @ layer["down"]
    return normalize(x) @ params["velocity"]


def along_the_flow(params, z, r, t, velocity, attend=flash_attention):
    """u, and its derivative with respect to t while z moves with the velocity and r stands."""
    tangents = (velocity, jnp.zeros_like(r), jnp.ones_like(t))
    return jax.jvp(lambda z, r, t: network(params, z, r, t, attend), (z, r, t), tangents)


def draw_batch(key, batch):
    """Points z on straight lines from rings to noise, two times, and the velocity at t."""
    keys = jax.random.split(key, 4)
    data, noise = rings(keys[0], batch), jax.random.normal(keys[1], (batch, POINTS, 2))
    t, r = jnp.sort(jax.random.uniform(keys[2], (2, batch, 1)), axis=0)[::-1]
    r = jnp.where(jax.random.bernoulli(keys[3], 0.5, r.shape), t, r)  # the velocity itself
    z = (1 - t[..., None]) * data + t[..., None] * noise
    return z, r, t, noise - data


def loss_of(params, batch):
    _, r, t, velocity = batch
    u, derivative = along_the_flow(params, *batch)
    target = jax.lax.stop_gradient(velocity - (t - r)[..., None] * derivative)
    error = ((u - target) ** 2).mean((1, 2))
    return (error / jax.lax.stop_gradient(error + 1e-2)).mean(), error.mean()


def sample(params, noise):
    """Rings from noise, in one step."""
    zeros, ones = jnp.zeros((len(noise), 1)), jnp.ones((len(noise), 1))
    return noise - network(params, noise, zeros, ones)


def train(params, noise, rate, *, batch, steps, **_):
    """The trained parameters, and distances of samples to rings in the course of the training."""
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps))

    @jax.jit
    def step(params, moments, key):
        gradients, error = jax.grad(loss_of, has_aux=True)(params, draw_batch(key, batch))
        updates, moments = optimizer.update(gradients, moments)
        return optax.apply_updates(params, updates), moments, error

    moments, distances, sampled = optimizer.init(params), [], jax.jit(sample)
    for i, key in enumerate(jax.random.split(jax.random.key(1), steps)):
        params, moments, error = step(params, moments, key)
        if i % (steps // 20) == 0:
            distances.append(distance_to_rings(sampled(params, noise)))
        if i % (steps // 5) == 0:
            print(f"step {i:5d}  squared error {error:.3f}  distance {distances[-1]:.3f}")
    return params, distances


def drawing(points, size=17):
    """The points of one ring as text."""
    grid = np.full((size, 2 * size), " ")
    for x, y in np.clip(np.asarray(points), -1.5, 1.5) / 3 + 0.5:
        grid[round((1 - y) * (size - 1)), round(x * (2 * size - 1))] = "o"
    return ["".join(row) for row in grid]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--plot", metavar="FILE", help="draw the curve into this file, too")
    arguments = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    size = SIZES[arguments.size]

    noise = jax.random.normal(jax.random.key(3), (256, POINTS, 2))
    params = init(jax.random.key(0), **size)
    params, distances = train(params, noise, RATES[arguments.size], **size)
    curve("distance of samples to the nearest ring", distances, arguments.plot)

    z, r, t, velocity = draw_batch(jax.random.key(2), 64)
    _, ours = along_the_flow(params, z, r, t, velocity)
    _, plain = along_the_flow(params, z, r, t, velocity, jax.nn.dot_product_attention)
    error = float(abs(ours - plain).max() / abs(plain).max())
    check(
        f"jvp through flash_attention is that of plain attention, up to {error:.1e}", error < 1e-4
    )

    samples = sample(params, noise)
    rows = [("noise", distance_to_rings(noise)), ("one step", distance_to_rings(samples))]
    print("\nnoise" + " " * 31 + "the sample that one step makes of it")
    for left, right in zip(drawing(noise[0]), drawing(samples[0]), strict=True):
        print(left, "|", right)
    table(("points", "distance to the nearest ring"), *rows)
    check("one step brings the noise within a third of its distance", rows[1][1] < rows[0][1] / 3)


if __name__ == "__main__":
    main()
