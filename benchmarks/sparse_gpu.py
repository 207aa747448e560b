"""Native sparse attention on a GPU: our platforms and fla, checked, then timed.

python benchmarks/sparse_gpu.py                        every case, a table
python benchmarks/sparse_gpu.py --json results.json    and the figures as JSON
python benchmarks/sparse_gpu.py --cases random,own --platforms triton --passes forward
python benchmarks/sparse_gpu.py --cases small --candidates   every configuration of that case

Some tokens, and some blocks of keys, are compared with the definition in float32: the error may be
at most twice that of the definition with inputs, products and weights rounded to bfloat16. What is
wrong, or gives other bits when it is repeated, is not timed. A card that has been busy for a second
runs slower than one that has not, so the timings of all programs are interleaved.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_cases import Program, options, report, timed
from programs import seconds_of, torch_seconds_of

from ejkernel.kernels.native_sparse_attention import triton
from ejkernel.kernels.native_sparse_attention.inputs import Inputs, Spec
from ejkernel.modules import native_sparse_attention
from ejkernel.ops.platform import device_of

PLATFORMS = ("triton", "xla")
PEERS = ("fla",)
DTYPE = jnp.bfloat16
CHECKED = 48  # tokens


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: its shape, and where its blocks come from.

    `blocks` is "random" (drawn from all blocks, those ahead of a token among them), "own" (what the
    operation selects, for keys and queries that change slowly from token to token) or "selected"
    (the same, and the selection is timed too). `compressed`: with the branch over mean keys. `bars`
    are milliseconds to reach in a pass.
    """

    name: str
    length: int = 8192
    heads: int = 64
    kv_heads: int = 4
    dim: int = 128
    choices: int = 16
    block_size: int = 64
    blocks: str = "random"
    window: int | None = None
    compressed: bool = False
    slow_on_xla: bool = True
    bars: dict[str, float] = dataclasses.field(default_factory=dict, hash=False)

    def arrays(self) -> tuple[jax.Array, ...]:
        """Query, key, value, gradient of the output, blocks."""
        keys = jax.random.split(jax.random.key(0), 5)
        draw = lambda key, heads: jax.random.normal(key, (1, self.length, heads, self.dim))
        query, d_out = draw(keys[0], self.heads), draw(keys[3], self.heads)
        key, value = draw(keys[1], self.kv_heads), draw(keys[2], self.kv_heads)
        if self.blocks != "random":
            query, key = _smooth(query), _smooth(key)
        query, key, value, d_out = (x.astype(DTYPE) for x in (query, key, value, d_out))
        if self.blocks == "random":
            shape = (1, self.length, self.kv_heads, self.choices)
            blocks = jax.random.randint(keys[4], shape, 0, -(-self.length // self.block_size))
        else:
            _, blocks = native_sparse_attention(
                query,
                key,
                value,
                block_counts=self.choices,
                block_size=self.block_size,
                return_block_indices=True,
            )
        return query, key, value, d_out, blocks

    def inputs(self) -> tuple[Inputs, Spec]:
        """The call as shapes."""
        query, key, value, _, blocks = jax.eval_shape(self.arrays)
        return Inputs(query, key, value, blocks), Spec(
            softmax_scale=self.dim**-0.5, block_size=self.block_size, sliding_window=self.window
        )


CASES = (
    Case("random", bars={"forward": 1.4, "gradients": 4.8}),
    Case("own", blocks="own", bars={"forward": 1.2, "gradients": 4.0}),
    Case("selected", blocks="selected"),
    Case("window", blocks="own", window=512),
    # At most four times as long for a head and token as with 16 heads to a key head.
    Case("group_1", heads=8, kv_heads=8, bars={"forward": 0.7, "gradients": 2.4}),
    Case("group_4", heads=16, kv_heads=4),
    Case("long", length=65536, blocks="own"),
    # The compressed branch by length, with the selection that shares its scores.
    *(
        Case(f"compressed_{length}", length=length, blocks="selected", compressed=True)
        for length in (8192, 16384, 32768, 65536)
    ),
    Case("small", length=512, heads=8, kv_heads=2, dim=64, choices=4, slow_on_xla=False),
)


def _smooth(x: jax.Array) -> jax.Array:
    """The mean over the newest 64 tokens, with variance 1."""
    sums = jnp.cumsum(x, axis=1)
    return (sums - jnp.pad(sums, ((0, 0), (64, 0), (0, 0), (0, 0)))[:, :-64]) / 8


def ours(case: Case, which: str, platform: str | None, cfg: Any = None) -> Callable:
    """(query, key, value, d_out, blocks) -> the output, or output and gradients."""

    def attend(query: Any, key: Any, value: Any, blocks: Any) -> Any:
        return native_sparse_attention(
            query,
            key,
            value,
            g_cmp=jnp.ones(query.shape[:3], query.dtype) if case.compressed else None,
            block_indices=None if case.blocks == "selected" else blocks,
            block_counts=case.choices,
            block_size=case.block_size,
            sliding_window=case.window,
            platform=platform,
            cfg=cfg,
        )

    def call(query: Any, key: Any, value: Any, d_out: Any, blocks: Any) -> Any:
        if which == "forward":
            return (attend(query, key, value, blocks),)
        out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, blocks), query, key, value)
        return out, *pull_back(d_out)

    return jax.jit(call)


def fla_peer(case: Case, which: str, arrays: tuple[jax.Array, ...]) -> Callable | None:
    """The same pass by flash-linear-attention, for the selected branch alone."""
    others = case.window is not None or case.compressed or case.blocks == "selected"
    if others or case.heads < 16 * case.kv_heads:
        return None
    try:
        import torch  # type: ignore[import-not-found]
        from fla.ops.nsa import parallel_nsa  # type: ignore[import-not-found]
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    query, key, value, d_out, blocks = (torch.from_dlpack(x) for x in arrays)
    gate = torch.ones(query.shape[:3], dtype=query.dtype, device=query.device)
    floats = [x.detach().requires_grad_(which != "forward") for x in (query, key, value)]

    def run() -> tuple[Any, ...]:
        out = parallel_nsa(
            q=floats[0],
            k=floats[1],
            v=floats[2],
            g_slc=gate,
            block_indices=blocks,
            block_counts=case.choices,
            block_size=case.block_size,
        )
        out = out[0] if isinstance(out, tuple) else out
        if which == "forward":
            return (out,)
        return out, *torch.autograd.grad(out, floats, d_out)

    return run


def _by_fla(case: Case, which: str, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    run = fla_peer(case, which, arrays)
    assert run is not None
    return tuple(jnp.from_dlpack(x.detach().contiguous()) for x in run())


def definition(case: Case, arrays: tuple, tokens: Any, rounded: Callable) -> jax.Array:
    """The output of these tokens, [tokens, n, h]."""
    query, key, value, _, blocks = (x[0] for x in arrays)
    query, key, value = (rounded(x.astype(jnp.float32)) for x in (query[tokens], key, value))
    at = jnp.arange(case.length)
    past = at <= tokens[:, None]  # [tokens, s]
    chosen = (blocks[tokens][..., None] == at // case.block_size).any(-2)  # [tokens, k, s]
    query = query.reshape(len(tokens), case.kv_heads, -1, case.dim)

    def attend(visible: jax.Array, key: jax.Array = key, value: jax.Array = value) -> jax.Array:
        logits = case.dim**-0.5 * rounded(jnp.einsum("tkgh,skh->tkgs", query, key))
        some = visible.any(-1, keepdims=True)
        logits = jnp.where(visible, logits, jnp.where(some, -jnp.inf, 0.0))
        weights = rounded(jnp.where(some, jax.nn.softmax(logits), 0.0))
        return rounded(jnp.einsum("tkgs,skh->tkgh", weights, value))

    out = attend((chosen & past[:, None])[:, :, None])
    if case.window is not None:
        out += attend((past & (at > tokens[:, None] - case.window))[:, None, None])
    if case.compressed:
        count = case.length // case.block_size
        cut = lambda x: x[: count * case.block_size].reshape(count, -1, *x.shape[1:])
        complete = (jnp.arange(count) + 1) * case.block_size <= tokens[:, None] + 1
        out += attend(complete[:, None, None], *(rounded(cut(x).mean(1)) for x in (key, value)))
    return out.reshape(len(tokens), case.heads, case.dim)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _differences(case: Case, which: str, arrays: tuple, results: tuple, tokens: Any) -> list:
    """For each result the largest error, that of rounding, and the largest number."""
    query, key, value, d_out, blocks = arrays
    narrow = lambda x: x.astype(DTYPE).astype(jnp.float32)
    cut = [results[0][0, tokens], *(x[0] for x in results[1:])]
    if which == "gradients":
        cut[1] = cut[1][tokens]

    def values(rounded: Callable) -> tuple[jax.Array, ...]:
        run = lambda *x: definition(case, (*x, d_out, blocks), tokens, rounded)
        if which == "forward":
            return (run(query, key, value),)
        out, pull_back = jax.vjp(run, query, key, value)
        d_query, d_key, d_value = pull_back(d_out[0, tokens].astype(jnp.float32))
        return out, d_query[0, tokens], d_key[0], d_value[0]

    with jax.default_matmul_precision("highest"):
        truth, rounded = values(lambda x: x), values(narrow)
    largest = lambda *x: jnp.stack([jnp.abs(y.astype(jnp.float32)).max() for y in x])
    return [
        largest(x.astype(jnp.float32) - true, near.astype(jnp.float32) - true, true)
        for x, true, near in zip(cut, truth, rounded, strict=True)
    ]


def checked(case: Case, which: str, arrays: tuple, run: Callable) -> dict[str, Any]:
    """Errors relative to the largest number; gradients are those of some tokens alone."""
    tokens = np.unique(np.linspace(0, case.length - 1, CHECKED).astype(np.int32))
    only = np.isin(np.arange(case.length), tokens)
    query, key, value, d_out, blocks = arrays
    d_out = jnp.where(only[None, :, None, None], d_out, 0)
    results = tuple(run(query, key, value, d_out, blocks))
    found = _differences(case, which, (query, key, value, d_out, blocks), results, tokens)
    errors = {}
    for name, three in zip(("out", "d_query", "d_key", "d_value"), found, strict=False):
        error, plain, scale = (float(x) for x in three)
        if not error <= 2 * plain + 1e-5 * scale:  # NaN is wrong too
            return {"wrong": name, "error": error / scale, "plain": plain / scale}
        errors[name] = error / scale
    return {"errors": errors}


def configurations(case: Case, which: str) -> list[Any]:
    """What the tuner may choose for a pass."""
    inputs, spec = case.inputs()
    implementation = triton.IMPLEMENTATION
    chosen = implementation.forward if which == "forward" else implementation.backward
    assert chosen is not None
    return chosen.choices(inputs, spec, device_of([jnp.zeros(1)]))


def programs(
    case: Case, which: str, arrays: tuple, chosen: argparse.Namespace
) -> dict[str, Program]:
    """The implementations by name."""
    found: dict[str, Program] = {}
    for platform in filter(None, chosen.platforms.split(",")):
        if platform == "xla" and case.slow_on_xla and not chosen.slow:
            continue
        cfgs = [None]
        if platform == "triton" and chosen.candidates:
            cfgs = configurations(case, which)
        for cfg in cfgs:
            sizes = [] if cfg is None else [x for x in cfg.to_dict().values() if isinstance(x, int)]
            run = ours(case, which, platform, cfg)
            call = functools.partial(run, *arrays)
            found[" ".join(["ours", platform, *map(str, sizes)])] = Program(
                functools.partial(checked, case, which, arrays, run),
                functools.partial(seconds_of, call),
                call,
            )
    if "fla" in chosen.peers.split(","):
        peer = fla_peer(case, which, arrays)
        if peer is not None:
            by_fla = functools.partial(_by_fla, case, which)
            found["fla"] = Program(
                functools.partial(checked, case, which, arrays, by_fla),
                functools.partial(torch_seconds_of, peer),
            )
    return found


def measure(
    case: Case, which: str, arrays: tuple, chosen: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Every implementation of one pass: milliseconds and errors, or why there are none."""
    return timed(programs(case, which, arrays, chosen), case.bars.get(which))


def main() -> None:
    description = "Native sparse attention on a GPU, and its peer."
    parser = options(description, CASES, PLATFORMS, PEERS)
    parser.add_argument("--slow", action="store_true", help="XLA also where it takes a second")
    report(CASES, parser.parse_args(), measure)


if __name__ == "__main__":
    main()
