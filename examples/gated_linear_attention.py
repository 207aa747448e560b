"""A language model with gated linear attention: trained in chunks, generating with a state.

`gla_attention` computes a whole sequence in chunks, which are matmuls. `recurrent_attention`
computes one token from a state of fixed size: no KV cache grows with the text. Both are the same
function, so the logits must agree.

    python examples/gated_linear_attention.py              # a small model, on any machine
    python examples/gated_linear_attention.py --size full  # on a GPU
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import check, corpus, curve, near_ties, normalize, same_choice, table

from ejkernel import gla_attention, recurrent_attention

RATES = {"small": 1e-2, "full": 1e-3}
SIZES = {
    "small": {"width": 64, "layers": 2, "heads": 2, "length": 128, "batch": 8, "steps": 240},
    "full": {"width": 768, "layers": 12, "heads": 6, "length": 4096, "batch": 8, "steps": 2000},
}
VOCABULARY = 256  # bytes


def init(key, *, width, layers, heads, **_):
    """The parameters: a dictionary for each layer, and the embedding."""
    shapes = {
        "query": (width, heads, width // heads),
        "key": (width, heads, width // heads),
        "value": (width, heads, width // heads),
        "gate": (width, heads, width // heads),
        "out": (heads, width // heads, width),
        "up": (width, 3 * width),
        "down": (3 * width, width),
    }
    keys = iter(jax.random.split(key, layers * len(shapes) + 1))
    draw = lambda shape: width**-0.5 * jax.random.normal(next(keys), shape)
    layer = lambda: {name: draw(shape) for name, shape in shapes.items()}
    return {"embedding": draw((VOCABULARY, width)), "layers": [layer() for _ in range(layers)]}


def model(params, tokens, states=None):
    """Logits of tokens [batch, length]; with states those of the tokens that follow them."""
    x = params["embedding"][tokens]
    new_states = []
    for i, layer in enumerate(params["layers"]):
        y = normalize(x)
        query, key, value, gate = (
            jnp.einsum("btw,whd->bthd", y, layer[name])
            for name in ("query", "key", "value", "gate")
        )
        gate = jax.nn.log_sigmoid(gate + 2) / 4  # the logarithm of a decay, near 1 at first
        if states is None:
            mixed = gla_attention(query, key, value, gate)
        else:
            mixed, state = recurrent_attention(query, key, value, gate, state=states[i])
            new_states.append(state)
        x = x + jnp.einsum("bthd,hdw->btw", normalize(mixed), layer["out"])
        x = x + jax.nn.gelu(normalize(x) @ layer["up"]) @ layer["down"]
    return normalize(x) @ params["embedding"].T, new_states


def loss_of(params, tokens):
    logits, _ = model(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train(params, text, rate, *, length, batch, steps, **_):
    """The trained parameters and the losses."""
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps))

    @jax.jit
    def step(params, moments, tokens):
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    moments, losses, random = optimizer.init(params), [], np.random.default_rng(0)
    for i in range(steps):
        starts = random.integers(len(text) - length, size=batch)
        tokens = text[starts[:, None] + np.arange(length + 1)]
        params, moments, loss = step(params, moments, tokens)
        losses.append(float(loss))
        if i % (steps // 6) == 0:
            print(f"step {i:5d}  loss {loss:.3f}")
    return params, losses


def generate(params, prompt, count, size):
    """Greedy tokens after a prompt [1, length], one at a time, and the logits of every token."""
    shape = (1, size["heads"], *2 * (size["width"] // size["heads"],))
    states = [jnp.zeros(shape) for _ in params["layers"]]
    step = jax.jit(model)
    logits, states = step(params, prompt, states)
    every, tokens, seconds = [logits], [prompt], []
    for _ in range(count):
        start = time.perf_counter()
        token = logits[:, -1:].argmax(-1)
        logits, states = jax.block_until_ready(step(params, token, states))
        every.append(logits)
        tokens.append(token)
        seconds.append(time.perf_counter() - start)
    state_bytes = sum(x.nbytes for x in states)
    return jnp.concatenate(tokens, 1), jnp.concatenate(every, 1), seconds, state_bytes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--plot", metavar="FILE", help="draw the curve into this file, too")
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    size["steps"] = arguments.steps or size["steps"]

    text = corpus()
    params = init(jax.random.key(0), **size)
    params, losses = train(params, text, RATES[arguments.size], **size)
    curve("loss in nats per byte", losses, arguments.plot)
    frequencies = np.bincount(text, minlength=VOCABULARY) / len(text)
    entropy = -sum(p * np.log(p) for p in frequencies if p > 0)
    final = np.mean(losses[-10:])
    check(f"the loss {final:.2f} is below the entropy of bytes {entropy:.2f}", final < entropy)

    with jax.default_matmul_precision("highest"):
        prompt = text[None, : size["length"] // 2]
        tokens, logits, seconds, state_bytes = generate(params, prompt, size["length"] // 2, size)
        in_chunks, _ = jax.jit(model)(params, tokens)
    difference = float(abs(in_chunks - logits).max() / abs(in_chunks).max())
    print(f"\ngenerated: {bytes(tokens[0, prompt.shape[1] :].tolist())!r}\n")
    claim = f"recurrent and chunked logits agree, up to {difference:.1e} of the largest"
    check(claim, difference < 1e-4)
    scores = np.asarray(in_chunks[:, prompt.shape[1] - 1 : -1])
    tolerance = 2e-4 * float(abs(in_chunks).max())  # two logits may differ
    same, close = same_choice(scores, tokens[:, prompt.shape[1] :], tolerance)
    check(f"both select the same tokens{near_ties(close.sum())}", bool((same | close).all()))

    cache = lambda context: context * 2 * 4 * size["width"] * size["layers"] // 2**10
    print(f"\ngenerating: {np.median(seconds) * 1e3:.2f} ms per token; memory in KiB, float32:")
    table(
        ("tokens of context", "state", "KV cache of softmax attention"),
        *((n, state_bytes // 2**10, cache(n)) for n in (128, 1024, 8192, 65536)),
    )


if __name__ == "__main__":
    main()
