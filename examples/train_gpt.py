"""Train a small GPT in Flax NNX on packed documents, and on the same documents with padding.

Rows of a batch have one length, documents do not. Packed, a row holds several documents, and a
`MaskInfo` of segment ids keeps them apart; padded, it holds one. The losses are the same, and
packed rows hold more tokens of documents: with documents of a third of a row on average, almost
three times as many.

    python examples/train_gpt.py              # a small model, on any machine
    python examples/train_gpt.py --mesh 2x4   # sharded: data x tensor, on 8 devices
    python examples/train_gpt.py --size full  # on a GPU
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import check, corpus, curve, table
from flax import nnx

from ejkernel import MaskInfo, flash_attention

RATES = {"small": 2e-3, "full": 3e-4}
SIZES = {
    "small": {"width": 64, "layers": 2, "heads": 4, "length": 256, "rows": 4, "steps": 60},
    "full": {"width": 1024, "layers": 12, "heads": 16, "length": 8192, "rows": 8, "steps": 200},
}
VOCABULARY, PADDING = 256, -1
AUTO = (jax.sharding.AxisType.Auto,) * 2  # XLA splits what the parameters and batches do not say


class Block(nnx.Module):
    """Attention and an MLP; on a mesh, heads and hidden units are split over the axis "tensor"."""

    def __init__(self, width, heads, dtype, rngs):
        def linear(inputs, outputs, axes):
            draw = nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)
            return nnx.Linear(
                inputs, outputs, use_bias=False, kernel_init=draw, dtype=dtype, rngs=rngs
            )

        self.heads = heads
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        self.query, self.key, self.value = (
            linear(width, width, (None, "tensor")) for _ in range(3)
        )
        self.out = linear(width, width, ("tensor", None))
        self.up = linear(width, 4 * width, (None, "tensor"))
        self.down = linear(4 * width, width, ("tensor", None))

    def __call__(self, x, mask):
        y = self.norms[0](x)
        split = lambda linear: linear(y).reshape(*y.shape[:2], self.heads, -1)
        query, key, value = map(split, (self.query, self.key, self.value))
        attended = flash_attention(query, key, value, mask_info=mask)
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    """Logits of the next token for tokens [rows, length] and their segment ids."""

    def __init__(self, width, layers, heads, length, dtype, rngs):
        self.tokens = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.positions = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, dtype, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    @classmethod
    def of_size(cls, size, dtype):
        """A model with the parameters of seed 0."""
        shape = {name: size[name] for name in ("width", "layers", "heads", "length")}
        return cls(**shape, dtype=dtype, rngs=nnx.Rngs(0))

    def __call__(self, tokens, segment_ids):
        mask = MaskInfo.from_segments(segment_ids).apply_causal()
        positions = jnp.maximum(mask.q_position_ids, 0)  # from 0 in each document
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.tokens.attend(self.norm(x)).astype(jnp.float32)


def loss_of(model, batch):
    """The mean loss of the tokens that have a next one in their document."""
    logits = model(batch["tokens"], batch["segments"])
    has_next = batch["labels"] != PADDING
    labels = jnp.where(has_next, batch["labels"], 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return (losses * has_next).sum() / has_next.sum()


def documents(text, length, random):
    """The text, cut into documents of a third of `length` on average, in random order."""
    sizes = random.integers(length // 12, length * 7 // 12, size=3 * len(text) // length)
    cut = np.split(text, np.cumsum(sizes))[:-1]
    return [cut[i] for i in random.permutation(len(cut)) if len(cut[i])]


def rows_of(documents, length, packed):
    """Rows of tokens, labels and segment ids: each document in the first row that has space."""
    rows, used = [], []
    for document in documents:
        size = len(document)
        fits = (i for i, n in enumerate(used) if packed and n + size <= length)
        i = next(fits, len(rows))
        if i == len(rows):
            rows.append({"tokens": np.zeros(length, np.int32)})
            rows[i] |= {x: np.full(length, PADDING) for x in ("labels", "segments")}
            used.append(0)
        place = slice(used[i], used[i] + size)
        rows[i]["tokens"][place], rows[i]["segments"][place] = document, place.start
        rows[i]["labels"][place] = [*document[1:], PADDING]
        used[i] += size
    return rows


def batches(rows, count, steps):
    """Batches of rows, again from the first when all were used."""
    for step in range(steps):
        chosen = [rows[(step * count + i) % len(rows)] for i in range(count)]
        yield {name: np.stack([row[name] for row in chosen]) for name in chosen[0]}


@nnx.jit
def train_step(model, optimizer, batch):
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return loss


def train(name, rows, size, dtype, mesh_shape=(1, 1)):
    """The losses of all steps, and tokens of documents per second after the first step."""
    mesh = jax.make_mesh(mesh_shape, ("data", "tensor"), axis_types=AUTO)
    over_data = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with jax.set_mesh(mesh):
        model = GPT.of_size(size, dtype)
        optimizer = nnx.Optimizer(model, optax.adamw(size["rate"]), wrt=nnx.Param)
    losses, seconds, tokens = [], [], []
    for i, batch in enumerate(batches(rows, size["rows"], size["steps"])):
        start = time.perf_counter()
        with jax.set_mesh(mesh):
            loss = train_step(model, optimizer, jax.device_put(batch, over_data))
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
        tokens.append((batch["segments"] != PADDING).sum())
        if i % max(1, size["steps"] // 4) == 0:
            print(f"{name:8s} step {i:4d}  loss {losses[-1]:.3f}")
    compiled = slice(min(1, len(seconds) - 1), None)  # the first step compiles
    return np.array(losses), sum(tokens[compiled]) / sum(seconds[compiled])


def same_loss(documents, size):
    """The loss of documents, packed and padded, with the parameters that training begins with."""
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=AUTO)
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        model = GPT.of_size(size, jnp.float32)
        rows = (rows_of(documents, size["length"], packed) for packed in (True, False))
        return [float(loss_of(model, next(batches(x, len(x), 1)))) for x in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--mesh", default="1x1", help="data x tensor, as in 2x4")
    parser.add_argument("--plot", metavar="FILE", help="draw the curve into this file, too")
    arguments = parser.parse_args()
    size = SIZES[arguments.size] | {"rate": RATES[arguments.size]}
    size["steps"] = arguments.steps or size["steps"]
    dtype = jnp.float32 if arguments.size == "small" else jnp.bfloat16
    mesh_shape = tuple(map(int, arguments.mesh.split("x")))
    jax.config.update("jax_num_cpu_devices", int(np.prod(mesh_shape)))

    text = corpus()
    cut = documents(text, size["length"], np.random.default_rng(0))
    packed, padded = (rows_of(cut, size["length"], x) for x in (True, False))
    print(f"{len(cut)} documents: {len(packed)} rows packed, {len(padded)} rows padded")
    tokens = sum(len(document) for document in cut)
    per_row, padded_per_row = tokens / len(packed), tokens / len(padded)
    ratio = per_row / padded_per_row
    check(f"packed rows hold {ratio:.2f} times the tokens, at least 2.2", ratio >= 2.2)
    first, second = same_loss(cut[:8], size)
    check(f"packing leaves the loss as it is: {first:.6f}", abs(first - second) < 1e-4)

    losses, rate = train("packed", packed, size, dtype)
    _, padded_rate = train("padded", padded, size, dtype)
    curve("loss with packed documents", losses, arguments.plot)
    check("the model learns", losses[-5:].mean() < 0.8 * losses[0])
    if mesh_shape != (1, 1):
        sharded, _ = train("sharded", packed, size, dtype, mesh_shape)
        error = abs(sharded - losses).max()
        check(f"sharded over {arguments.mesh}: the same losses, up to {error:.1e}", error < 1e-3)

    print()
    table(
        ("rows", "tokens of documents per row", "per second", "seconds for a million"),
        ("packed", f"{per_row:.0f}", f"{rate:.0f}", f"{1e6 / rate:.1f}"),
        ("padded", f"{padded_per_row:.0f}", f"{padded_rate:.0f}", f"{1e6 / padded_rate:.1f}"),
    )


if __name__ == "__main__":
    main()
