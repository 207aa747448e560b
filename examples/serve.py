"""Serve a language model: continuous batching over a paged KV cache.

Requests arrive at random. Every step is one call of a compiled program with a fixed number of
tokens: parts of prompts and one token of each sequence that generates, in any mixture.
`ragged_page_attention_v3_update` writes their keys and values into pages and attends over them.
The tokens must be those of the model without pages, up to near-ties of the two best scores, and
nothing may be compiled after the warm-up.

    python examples/serve.py               # a small model, on any machine
    python examples/serve.py --cache int8  # a quantised cache: a quarter of the memory
    python examples/serve.py --size full   # on a GPU
"""

import argparse
import collections
import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from common import check, near_ties, normalize, rotate, same_choice, table

from ejkernel import flash_attention, ragged_page_attention_v3_update

SIZES = {
    "small": {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "requests": 24}
    | {"prompt": 48, "output": 32, "sequences": 6, "tokens": 32, "pages": 40, "page_size": 8},
    "full": {"width": 2048, "layers": 16, "heads": 16, "kv_heads": 4, "requests": 256}
    | {"prompt": 1024, "output": 256, "sequences": 64, "tokens": 512, "pages": 2048}
    | {"page_size": 64},
}
VOCABULARY = 256
INT8_SCALE = 4 / 127  # normalised keys and values are rarely above 4
# With a float32 cache a token whose score is so close to the best one counts as the same: the
# rounding errors of the scores, which are up to 25, are about 1e-5.
NEAR_TIE = 1e-3


def init(key, size):
    """Random parameters: they stand for those of a trained model."""
    width, heads, kv_heads = size["width"], size["heads"], size["kv_heads"]
    head_dim = width // heads
    shapes = {"query": (width, heads, head_dim), "key": (width, kv_heads, head_dim)}
    shapes |= {"value": (width, kv_heads, head_dim), "out": (width, width)}
    shapes |= {"up": (width, 3 * width), "down": (3 * width, width)}
    keys = iter(jax.random.split(key, size["layers"] * len(shapes) + 1))
    draw = lambda shape: width**-0.5 * jax.random.normal(next(keys), shape)
    layer = lambda: {name: draw(shape) for name, shape in shapes.items()}
    embedding = draw((VOCABULARY, width))
    return {"embedding": embedding, "layers": [layer() for _ in range(size["layers"])]}


def model(params, tokens, positions, attend):
    """Logits of tokens [tokens]; `attend(layer, query, key, value)` knows where keys are kept."""
    x = normalize(params["embedding"][tokens])
    for i, layer in enumerate(params["layers"]):
        project = lambda name, x=x, layer=layer: jnp.einsum(
            "tw,whd->thd", normalize(x), layer[name]
        )
        query, key = (rotate(normalize(project(name)), positions) for name in ("query", "key"))
        x = x + attend(i, query, key, normalize(project("value"))).reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(normalize(x) @ layer["up"]) @ layer["down"]
    return normalize(x) @ params["embedding"].T


def sampling_scores(logits, requests, positions):
    """Scores whose best is a random token, the same for the same request and position."""

    def one(logits, request, position):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), request), position)
        return 4 * logits + jax.random.gumbel(key, logits.shape)

    return jax.vmap(one)(logits, requests, positions)


@functools.partial(jax.jit, donate_argnames="cache")
def serve_step(params, cache, batch):
    """The next token of every sequence, and the cache with the keys and values of the batch."""
    cache = list(cache)
    scale = INT8_SCALE if cache[0][0].dtype == jnp.int8 else None

    def attend(i, query, key, value):
        output, *cache[i] = ragged_page_attention_v3_update(
            query,
            key,
            value,
            *cache[i],
            batch["cu_seqlens_q"],
            batch["cu_seqlens_k"],
            batch["page_indices"],
            k_scale=scale,
            v_scale=scale,
        )
        return output

    logits = model(params, batch["tokens"], batch["positions"], attend)
    last = jnp.maximum(batch["cu_seqlens_q"][1:] - 1, 0)
    scores = sampling_scores(logits[last], batch["requests"], batch["positions"][last])
    return scores.argmax(-1), cache


@jax.jit
def without_pages(params, tokens, request):
    """Scores of the token that follows each token of one sequence, all keys at hand."""
    attend = lambda _, *qkv: flash_attention(*(x[None] for x in qkv), causal=True)[0]
    positions = jnp.arange(len(tokens))
    logits = model(params, tokens, positions, attend)
    return sampling_scores(logits, jnp.full_like(tokens, request), positions)


@dataclasses.dataclass
class Request:
    """A sequence: its tokens so far, and where its keys and values are."""

    number: int
    arrives: int  # step
    tokens: list[int]
    prompt: int  # tokens
    length: int  # tokens when it ends
    cached: int = 0  # tokens whose keys and values are in pages
    pages: list[int] = dataclasses.field(default_factory=list)
    waited: int = 0  # steps until its first token


def random_requests(size, random):
    """Requests with random prompts and lengths, at random times."""
    arrives = np.cumsum(random.exponential(2.0, size["requests"])).astype(int)
    for number, step in enumerate(arrives):
        prompt = random.integers(size["prompt"] // 4, size["prompt"] + 1)
        output = random.integers(size["output"] // 4, size["output"] + 1)
        tokens = random.integers(VOCABULARY, size=prompt).tolist()
        yield Request(number, step, tokens, prompt, prompt + output)


class Server:
    """Continuous batching: requests join and leave between steps."""

    def __init__(self, params, size, cache_dtype):
        self.params, self.size = params, size
        shape = (size["pages"], size["page_size"], size["kv_heads"], size["width"] // size["heads"])
        self.cache = [[jnp.zeros(shape, cache_dtype) for _ in "kv"] for _ in params["layers"]]
        self.free_pages = list(range(size["pages"]))
        self.waiting = collections.deque()
        self.running = [None] * size["sequences"]

    def admit(self):
        """Give waiting requests a slot and all the pages that they will need."""
        for i, request in enumerate(self.running):
            if request is None and self.waiting:
                count = -(-self.waiting[0].length // self.size["page_size"])
                if count <= len(self.free_pages):
                    self.running[i] = self.waiting.popleft()
                    self.running[i].pages = [self.free_pages.pop() for _ in range(count)]

    def batch(self):
        """The arguments of a step, of fixed shapes: generating sequences first, then prompts."""
        counts, lengths = np.zeros((2, len(self.running)), np.int32)
        most_pages = -(-(self.size["prompt"] + self.size["output"]) // self.size["page_size"])
        batch = {name: np.zeros(self.size["tokens"], np.int32) for name in ("tokens", "positions")}
        batch["page_indices"] = np.full((len(counts), most_pages), -1, np.int32)
        batch["requests"] = np.zeros(len(counts), np.int32)
        slots = [(i, request) for i, request in enumerate(self.running) if request]
        left = self.size["tokens"]
        for i, request in sorted(slots, key=lambda x: len(x[1].tokens) == x[1].prompt):
            counts[i] = min(left, len(request.tokens) - request.cached)
            left -= counts[i]
        for i, request in slots:
            start, end = counts[:i].sum(), request.cached + counts[i]
            place = slice(start, start + counts[i])
            batch["tokens"][place] = request.tokens[request.cached : end]
            batch["positions"][place] = np.arange(request.cached, end)
            batch["page_indices"][i, : len(request.pages)] = request.pages
            batch["requests"][i], lengths[i] = request.number, end if counts[i] else 0
        for name, values in (("cu_seqlens_q", counts), ("cu_seqlens_k", lengths)):
            batch[name] = np.concatenate([[0], np.cumsum(values)]).astype(np.int32)
        return batch, counts

    def step(self):
        """Run one step; the requests that have a new token."""
        self.admit()
        batch, counts = self.batch()
        tokens, self.cache = serve_step(self.params, self.cache, batch)
        streamed = []
        for i, (request, token) in enumerate(zip(self.running, np.asarray(tokens), strict=True)):
            if request is None:
                continue
            request.cached += counts[i]
            if request.cached == len(request.tokens):  # not in the middle of its prompt
                request.tokens.append(int(token))
                streamed.append(request)
            if len(request.tokens) == request.length:
                self.free_pages += request.pages
                self.running[i] = None
        return streamed


def serve(server, requests):
    """Run all requests; the number of steps, and the seconds and new tokens of each."""
    arriving, now, seconds, streamed = collections.deque(requests), 0, [], []
    while arriving or server.waiting or any(server.running):
        while arriving and arriving[0].arrives <= now:
            server.waiting.append(arriving.popleft())
        start = time.perf_counter()
        new = server.step()
        seconds.append(time.perf_counter() - start)
        streamed.append(len(new))
        for request in new:
            request.waited = request.waited or now + 1 - request.arrives
        if now % 20 == 0:
            running = sum(x is not None for x in server.running)
            print(f"step {now:4d}: {running} running, {len(server.waiting)} waiting, ", end="")
            print(f"{len(server.free_pages)} pages free, {sum(streamed)} tokens streamed")
        now += 1
    return seconds, streamed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--cache", choices=("float32", "int8"), default="float32")
    arguments = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    size = SIZES[arguments.size]

    params = init(jax.random.key(0), size)
    server = Server(params, size, arguments.cache)
    server.step()  # the warm-up: an empty batch has the shapes of every other
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    requests = list(random_requests(size, np.random.default_rng(0)))
    seconds, streamed = serve(server, requests)
    check(f"{len(compiled)} programs compiled in {len(seconds)} steps", not compiled)
    check("all pages are free again", len(server.free_pages) == size["pages"])

    tolerance = NEAR_TIE if arguments.cache == "float32" else 0.0
    same, close = [], []
    for request in requests:
        tokens = np.zeros(size["prompt"] + size["output"], np.int32)
        tokens[: request.length] = request.tokens
        scores = np.asarray(without_pages(params, tokens, request.number))
        scores = scores[request.prompt - 1 : request.length - 1]
        found = same_choice(scores, tokens[request.prompt : request.length], tolerance)
        same, close = np.append(same, found[0]), np.append(close, found[1])
    share = (same + close).mean()
    least = 1.0 if arguments.cache == "float32" else 0.9
    claim = f"{share:.1%} of {len(same)} tokens are those of the model without pages"
    check(f"{claim}{near_ties(int(close.sum()))}, at least {least:.0%}", share >= least)

    waited = [request.waited for request in requests]
    cache = sum(x.nbytes for x in jax.tree.leaves(server.cache))
    print()
    table(
        ("requests", "tokens", "tokens/s", "ms per step", "steps to first token", "cache, KiB"),
        (
            len(requests),
            sum(streamed),
            f"{sum(streamed) / sum(seconds):.0f}",
            f"{1e3 * np.median(seconds):.2f}",
            f"{np.median(waited):.0f}, at most {max(waited)}",
            cache // 2**10,
        ),
    )


if __name__ == "__main__":
    main()
