"""Linear attention on a GPU: our platforms and fla, checked, then timed.

python benchmarks/linear_gpu.py                        every case, a table
python benchmarks/linear_gpu.py --json results.json    and the figures as JSON
python benchmarks/linear_gpu.py --cases gla,lightning --passes forward
python benchmarks/linear_gpu.py --cases gla --candidates   every configuration of that case

The first two heads are compared with the definition in float32, token by token: the error may be at
most twice that of the definition with inputs and output rounded to bfloat16, or 0.4 % of the
largest number. What is wrong, or gives other bits when it is repeated, is not timed. A card that
has been busy for a second runs slower than one that has not, so the timings are interleaved.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_cases import Program, options, report, timed
from programs import seconds_of, torch_seconds_of

from ejkernel.kernels.gla_attention import reference, triton
from ejkernel.kernels.gla_attention.inputs import Inputs, Spec
from ejkernel.modules import gla_attention, lightning_attention, recurrent_attention
from ejkernel.ops.platform import device_of

PLATFORMS = ("triton", "xla")
PEERS = ("fla",)
DTYPE = jnp.bfloat16
CHECKED = 2  # heads


@dataclasses.dataclass(frozen=True)
class Case:
    """A call; `bars` are milliseconds to reach in a pass, `bar` the bytes a second of decoding."""

    name: str
    op: str
    batch: int = 4
    length: int = 8192
    heads: int = 16
    dim: int = 128
    value_dim: int | None = None
    gates: str = "mild"
    decoding: bool = False
    bars: dict[str, float] = dataclasses.field(default_factory=dict, compare=False)

    def arrays(self) -> dict[str, jax.Array]:
        """The arrays of the call by name, and `d_out`."""
        keys = jax.random.split(jax.random.key(0), 6)
        shape = (self.batch, self.length, self.heads)
        draw = lambda key, dim: jax.random.normal(key, (*shape, dim)).astype(DTYPE)
        width = self.value_dim or self.dim
        arrays = {
            "query": draw(keys[0], self.dim),
            "key": draw(keys[1], self.dim),
            "value": draw(keys[2], width),
            "d_out": draw(keys[3], width),
        }
        if self.op == "gla":
            gate = jax.nn.log_sigmoid(jax.random.normal(keys[4], (*shape, self.dim)))
            strong = jax.random.bernoulli(keys[5], 1e-3, gate.shape) & (self.gates == "strong")
            arrays["gate"] = jnp.where(strong, -1e4, gate).astype(DTYPE)
        elif self.op == "lightning":
            slopes = -8.0 / self.heads * jnp.arange(self.heads)
            arrays["g_gamma"] = jnp.broadcast_to(slopes, (self.batch, self.heads))
        if self.decoding:
            state = (self.batch, self.heads, self.dim, width)
            arrays["state"] = jax.random.normal(keys[5], state)
        return arrays

    def bytes(self) -> int:
        """Bytes that a decoding step cannot avoid: its state, read and written."""
        return 8 * self.batch * self.heads * self.dim * (self.value_dim or self.dim)


CASES = (
    Case("gla", "gla", bars={"forward": 0.70, "gradients": 3.0}),
    Case("lightning", "lightning", bars={"forward": 0.28, "gradients": 1.0}),
    Case("recurrent", "recurrent", bars={"forward": 0.28, "gradients": 1.0}),
    # At most 1.15 times as long as the same tokens in a batch of 4.
    Case("gla_one", "gla", batch=1, length=32768),
    Case("lightning_one", "lightning", batch=1, length=32768),
    Case("recurrent_one", "recurrent", batch=1, length=32768),
    Case("gla_strong", "gla", gates="strong"),
    Case("gla_64", "gla", dim=64),
    Case("gla_256", "gla", heads=8, dim=256),
    Case("lightning_64_128", "lightning", dim=64, value_dim=128),
    Case("decode", "lightning", batch=256, length=1, decoding=True),
    Case("decode_four", "lightning", batch=256, length=4, decoding=True),
    Case("small", "gla", batch=1, length=100, heads=2, dim=16),
    Case("decode_gla", "gla", batch=256, length=1, decoding=True),
)


def call_of(case: Case, platform: str | None, cfg: Any) -> Callable:
    """(arrays) -> output, and the state of a decoding step."""

    def call(arrays: dict[str, jax.Array]) -> Any:
        given = {name: x for name, x in arrays.items() if name not in ("d_out", "state")}
        state = arrays.get("state")
        options = {"platform": platform, "cfg": cfg}
        if case.op == "recurrent":
            return recurrent_attention(**given, state=state, **options)[: 1 + case.decoding]
        function = gla_attention if case.op == "gla" else lightning_attention
        out = function(**given, initial_state=state, return_state=case.decoding, **options)
        return out if case.decoding else (out,)

    return call


def ours(case: Case, which: str, platform: str | None, cfg: Any = None) -> Callable:
    """(arrays) -> the outputs, or the output and the gradients of the arrays."""
    call = call_of(case, platform, cfg)

    def gradients(arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        names = [name for name in arrays if name != "d_out"]
        run = lambda *x: call(dict(zip(names, x, strict=True)))[0]
        out, pull_back = jax.vjp(run, *(arrays[name] for name in names))
        return out, *pull_back(arrays["d_out"])

    return jax.jit(call if which == "forward" else gradients)


def decoding_step(run: Callable, arrays: dict[str, jax.Array]) -> Callable[[], Any]:
    """() -> the output of one more step: the state is donated and fed back."""
    step = jax.jit(lambda given, state: run(given | {"state": state}), donate_argnums=1)
    given = {name: x for name, x in arrays.items() if name != "state"}
    states = [arrays["state"].copy()]

    def call() -> jax.Array:
        out, after = step(given, states.pop())
        states.append(after)
        return out

    return call


def fla_peer(case: Case, which: str, arrays: dict[str, jax.Array]) -> Callable | None:
    """The same pass by flash-linear-attention."""
    try:
        import torch  # type: ignore[import-not-found]
        from fla.ops.gla import chunk_gla  # type: ignore[import-not-found]
        from fla.ops.simple_gla import chunk_simple_gla  # type: ignore[import-not-found]
    except ImportError:
        return None
    if case.decoding or not torch.cuda.is_available():
        return None
    given = {name: torch.from_dlpack(x) for name, x in arrays.items()}
    names = [name for name in ("query", "key", "value", "gate") if name in given]
    leaves = [given[name].detach().requires_grad_(which != "forward") for name in names]

    def run() -> tuple[Any, ...]:
        if case.op == "gla":
            out = chunk_gla(*leaves, scale=case.dim**-0.5)
        else:
            gamma = given["g_gamma"][0] if "g_gamma" in given else None
            out = chunk_simple_gla(*leaves, g_gamma=gamma, scale=case.dim**-0.5)
        out = out[0] if isinstance(out, tuple) else out
        if which == "forward":
            return (out,)
        return out, *torch.autograd.grad(out, leaves, given["d_out"])

    return run


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def definition(
    case: Case, which: str, rounded: bool, arrays: dict[str, jax.Array]
) -> tuple[jax.Array, ...]:
    """What `ours` gives for the first heads, in float32."""
    cut = {
        name: x[:1, :CHECKED] if name in ("g_gamma", "state") else x[:1, :, :CHECKED]
        for name, x in arrays.items()
    }
    names = [name for name in cut if name != "d_out"]
    narrow = lambda x: x.astype(DTYPE).astype(jnp.float32)

    def run(*x: jax.Array) -> tuple[jax.Array, ...]:
        given = dict(zip(names, x, strict=True))
        state = given.pop("state", None)
        inputs = Inputs(**given, initial_state=None if state is None else state[:, None])
        inputs = jax.tree.map(lambda y: y.astype(jnp.float32), inputs)
        spec = Spec(softmax_scale=case.dim**-0.5)
        out, after = reference.forward(inputs, spec, narrow if rounded else lambda y: y)
        return (out, after[:, 0])[: 1 + case.decoding]

    with jax.default_matmul_precision("highest"):
        if which == "forward":
            return run(*(cut[name] for name in names))
        out, pull_back = jax.vjp(lambda *x: run(*x)[0], *(cut[name] for name in names))
        return out, *pull_back(cut["d_out"].astype(jnp.float32))


def checked(case: Case, which: str, arrays: dict[str, jax.Array], run: Callable) -> dict[str, Any]:
    """Errors relative to the largest number."""
    results = run(arrays)
    truth, rounded = (definition(case, which, narrow, arrays) for narrow in (False, True))
    errors = []
    for result, true, near in zip(results, truth, rounded, strict=True):
        index = tuple(slice(0, size) for size in true.shape)
        part = np.asarray(result[index], np.float32)
        true, near = np.asarray(true, np.float32), np.asarray(near, np.float32)
        scale = float(np.abs(true).max())
        error, plain = (float(np.abs(x - true).max()) for x in (part, near))
        errors.append(error / scale)
        if not error <= max(2 * plain, 4e-3 * scale):  # NaN is wrong too
            return {"wrong": len(errors) - 1, "error": error / scale, "plain": plain / scale}
    return {"errors": errors}


def configurations(case: Case, which: str) -> list[Any]:
    """What the tuner may choose for a pass."""
    arrays = jax.eval_shape(case.arrays)
    arrays = {name: x for name, x in arrays.items() if name not in ("d_out", "state")}
    passes = triton.IMPLEMENTATION
    chosen = passes.forward if which == "forward" else passes.backward
    assert chosen is not None
    spec = Spec(softmax_scale=case.dim**-0.5)
    return list(chosen.choices(Inputs(**arrays), spec, device_of([jnp.zeros(1)])))


def programs(
    case: Case, which: str, arrays: dict[str, jax.Array], chosen: argparse.Namespace
) -> dict[str, Program]:
    """The implementations by name."""
    found: dict[str, Program] = {}
    for platform in filter(None, chosen.platforms.split(",")):
        cfgs: list[Any] = [None]
        if platform == "triton" and chosen.candidates:
            cfgs = configurations(case, which)
        for cfg in cfgs:
            sizes = [] if cfg is None else [x for x in cfg.to_dict().values() if isinstance(x, int)]
            run = ours(case, which, platform, cfg)
            call = functools.partial(run, arrays)
            again = decoding_step(run, arrays) if case.decoding else call
            found[" ".join(["ours", platform, *map(str, sizes)])] = Program(
                functools.partial(checked, case, which, arrays, run),
                functools.partial(seconds_of, again),
                call,
            )
    peer = fla_peer(case, which, arrays) if "fla" in chosen.peers.split(",") else None
    if peer is not None:
        found["fla"] = Program(None, functools.partial(torch_seconds_of, peer))
    return found


def measure(
    case: Case, which: str, arrays: dict[str, jax.Array], chosen: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Every implementation of one pass: milliseconds and errors, or why there are none."""
    results = timed(programs(case, which, arrays, chosen), case.bars.get(which))
    for result in results.values():
        if case.decoding and "ms" in result:
            result["TB/s"] = case.bytes() / result["ms"] / 1e9
    return results


def passes_of(case: Case, passes: Sequence[str]) -> list[str]:
    """Decoding has no gradients."""
    return [which for which in passes if which == "forward" or not case.decoding]


def main() -> None:
    parser = options("Linear attention on a GPU, and its peer.", CASES, PLATFORMS, PEERS)
    report(CASES, parser.parse_args(), measure, passes_of)


if __name__ == "__main__":
    main()
