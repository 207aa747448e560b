"""Random calls that a user may make, to be compiled on default blocks."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ejkernel.modules import (
    blocksparse_attention,
    flash_attention,
    gla_attention,
    grouped_matmul,
    lightning_attention,
    recurrent_attention,
    ring_attention,
)
from tpu.ahead_of_time import GENERATIONS, compiled, compiled_over, kernels_in, mesh_of
from tpu.random_pages import PAGED

_RING = 4  # chips of a ring


class RandomCall(NamedTuple):
    """A call: what it is in words, the function, its arguments, those to differentiate by.

    `chips`: over how many the second axis of the arguments is split, along an axis named "ring".
    """

    words: str
    function: Callable[[Any], Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    differentiable: int
    chips: int = 1

    def program(self, arguments: Any) -> Any:
        """The results, and the gradients by the first arguments: one program has all kernels."""
        rest = arguments[self.differentiable :]
        if not self.differentiable:
            return self.function(rest)
        results, pull_back = jax.vjp(
            lambda *x: self.function((*x, *rest)), *arguments[: self.differentiable]
        )
        return results, pull_back(jax.tree.map(jnp.ones_like, results))


def random_call(kernel: str, number: int) -> RandomCall:
    """Call `number` of a kernel, always the same."""
    return RandomCall(*_DRAWN[kernel](random.Random(f"{kernel} {number}")))


def fits(generation: str, call: RandomCall) -> bool:
    """Whether a call compiles, and is kernels, for a generation."""
    if call.chips == 1:
        program = compiled(generation, call.program, call.arguments)
    else:
        mesh = mesh_of(GENERATIONS[generation], ring=call.chips)
        spec = PartitionSpec(None, "ring")
        program = compiled_over(mesh, spec, call.program, call.arguments)
    return kernels_in(program) >= (2 if call.differentiable else 1)


def size(draw: random.Random, low: int, high: int, multiple: int = 128) -> int:
    """Small and large alike, half of them a multiple."""
    number = round(low * (high / low) ** draw.random())
    return number if draw.random() < 0.5 else max(multiple, number // multiple * multiple)


def _named(names: list[str], arrays: list[Any], static: Any) -> str:
    """A call in words."""
    shapes = [f"{name} {x.dtype}{list(x.shape)}" for name, x in zip(names, arrays, strict=True)]
    return ", ".join([*shapes, *(f"{name}={x}" for name, x in static.items())])


def _grouped_matmul(draw: random.Random) -> tuple:
    rows, k, n = size(draw, 1, 65536), size(draw, 8, 16384), size(draw, 8, 16384)
    groups = round(2 ** draw.uniform(0, 9))
    while groups * k * n > 2**32:  # 8 GiB of weights
        groups, n = max(1, groups // 2), n if groups > 1 else n // 2
    dtype = draw.choice((jnp.bfloat16, jnp.bfloat16, jnp.float32))
    while groups * k * n * jnp.dtype(dtype).itemsize > 2**33:  # or there is no room for gradients
        groups, n = max(1, groups // 2), n if groups > 1 else n // 2
    static: dict[str, Any] = {"transpose_rhs": draw.random() < 0.3}
    if draw.random() < 0.3:
        static["preferred_element_type"] = jnp.float32
    arrays = [
        jax.ShapeDtypeStruct((rows, k), dtype),
        jax.ShapeDtypeStruct((groups, *((n, k) if static["transpose_rhs"] else (k, n))), dtype),
        # Not `group_ids`: the kernels are the same, and the compiler takes long for a sort.
        jax.ShapeDtypeStruct((groups,), jnp.int32),
    ]
    run = lambda x: grouped_matmul(*x[:2], group_sizes=x[2], **static, platform="pallas")
    return _named(["inputs", "weights", "group_sizes"], arrays, static), run, tuple(arrays), 2


def _heads(draw: random.Random) -> tuple[int, int]:
    """Query heads and key heads."""
    kv_heads = draw.choice((1, 2, 4, 8))
    return kv_heads * draw.choice((1, 2, 4, 8)), kv_heads


def _attention(draw: random.Random, function: Any, shares: int, extra: Any) -> tuple:
    """What flash attention takes, and what `extra` adds, `shares` times as long."""
    batch, (heads, kv_heads) = draw.choice((1, 2, 4)), _heads(draw)
    q_len, kv_len = size(draw, 1, 16384) * shares, size(draw, 1, 16384) * shares
    if draw.random() < 0.6:
        kv_len = q_len
    width = draw.choice((32, 64, 80, 96, 128, 192, 256))
    columns = draw.choice((width, width, 64, 128))
    while batch * q_len * heads * width > 2**31:  # more than the memory of a chip is for
        batch, q_len = max(1, batch // 2), q_len if batch > 1 else q_len // 2
    dtype = draw.choice((jnp.bfloat16, jnp.bfloat16, jnp.float32))
    static: dict[str, Any] = {"causal": draw.random() < 0.5}
    if draw.random() < 0.3:
        static["sliding_window"] = (draw.randint(1, 4096), draw.choice((0, 100)))
    if draw.random() < 0.2:
        static["logits_soft_cap"] = 30.0
    names, arrays = (
        ["query", "key", "value"],
        [
            jax.ShapeDtypeStruct((batch, q_len, heads, width), dtype),
            jax.ShapeDtypeStruct((batch, kv_len, kv_heads, width), dtype),
            jax.ShapeDtypeStruct((batch, kv_len, kv_heads, columns), dtype),
        ],
    )
    if shares == 1 and draw.random() < 0.2:
        names.append("softmax_aux")
        arrays.append(jax.ShapeDtypeStruct((heads, 1), jnp.float32))
    if shares == 1 and draw.random() < 0.2 and batch * heads * q_len * kv_len < 2**28:
        names.append("bias")
        arrays.append(jax.ShapeDtypeStruct((batch, heads, q_len, kv_len), dtype))
    differentiable = len(arrays)
    for name, x in extra(draw, batch, heads, q_len, kv_len, static).items():
        names.append(name)
        arrays.append(x)
    run = lambda x: function(**dict(zip(names, x, strict=True)), **static, platform="pallas")
    return _named(names, arrays, static), run, tuple(arrays), differentiable


def _flash_attention(draw: random.Random) -> tuple:
    return _attention(draw, flash_attention, 1, lambda *_: {})


def _blocksparse_attention(draw: random.Random) -> tuple:
    return _attention(draw, blocksparse_attention, 1, _blocks)


def _blocks(
    draw: random.Random, batch: int, heads: int, q_len: int, kv_len: int, static: dict[str, Any]
) -> dict[str, Any]:
    """A traced mask of blocks, one for all or one for each row or head."""
    side = draw.choice((64, 128, 256))
    static["block_size"] = side
    lead = draw.choice(((), (batch, 1), (heads,)))
    blocks = (-(-q_len // side), -(-kv_len // side))
    return {"block_mask": jax.ShapeDtypeStruct((*lead, *blocks), jnp.bool_)}


def _ring_attention(draw: random.Random) -> tuple:
    def run(**arguments: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        return ring_attention(**arguments, axis_name="ring", mesh=mesh)

    return *_attention(draw, run, _RING, lambda *_: {}), _RING


def _recurrence(draw: random.Random, function: Any, decays: Any) -> tuple:
    """What the recurrent operations share, and the decays of one of them."""
    batch, (heads, kv_heads) = draw.choice((1, 2, 4)), _heads(draw)
    length, width = size(draw, 1, 16384), draw.choice((16, 32, 64, 96, 128, 192, 256))
    columns = draw.choice((width, width, 64, 128, 256))
    dtype = draw.choice((jnp.bfloat16, jnp.bfloat16, jnp.float32))
    static = {"reverse": draw.random() < 0.2}
    sequences = round(2 ** draw.uniform(0, 6)) if draw.random() < 0.3 else 0
    batch = 1 if sequences else batch
    arrays = {
        "query": jax.ShapeDtypeStruct((batch, length, heads, width), dtype),
        "key": jax.ShapeDtypeStruct((batch, length, kv_heads, width), dtype),
        "value": jax.ShapeDtypeStruct((batch, length, kv_heads, columns), dtype),
        **decays(draw, (batch, length, kv_heads), width, columns, dtype),
    }
    if draw.random() < 0.3:
        name = "state" if function is recurrent_attention else "initial_state"
        shape = (sequences or batch, kv_heads, width, columns)
        arrays[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
    differentiable = len(arrays)
    if sequences:
        arrays["cu_seqlens"] = jax.ShapeDtypeStruct((sequences + 1,), jnp.int32)
    names, given = list(arrays), list(arrays.values())
    run = lambda x: function(**dict(zip(names, x, strict=True)), **static, platform="pallas")
    return _named(names, given, static), run, tuple(given), differentiable


def _gate(draw: random.Random, lead: tuple[int, ...], width: int, dtype: Any) -> dict[str, Any]:
    """A decay for every row of the state, one for all of them, or none."""
    shape = draw.choice(((*lead, width), lead, None))
    return {} if shape is None else {"gate": jax.ShapeDtypeStruct(shape, dtype)}


def _pace(draw: random.Random, lead: tuple[int, ...]) -> dict[str, Any]:
    """Perhaps a decay for every head."""
    shape = {"g_gamma": jax.ShapeDtypeStruct((lead[2],), jnp.float32)}
    return shape if draw.random() < 0.3 else {}


def _gla_attention(draw: random.Random) -> tuple:
    decays = lambda draw, lead, width, _, dtype: {
        **_gate(draw, lead, width, draw.choice((dtype, jnp.float32))),
        **_pace(draw, lead),
    }
    return _recurrence(draw, gla_attention, decays)


def _lightning_attention(draw: random.Random) -> tuple:
    return _recurrence(draw, lightning_attention, lambda draw, lead, *_: _pace(draw, lead))


def _recurrent_attention(draw: random.Random) -> tuple:
    def decays(draw: random.Random, lead: Any, width: int, columns: int, dtype: Any) -> Any:
        found = {**_gate(draw, lead, width, dtype), **_pace(draw, lead)}
        if draw.random() < 0.3:
            found["gv"] = jax.ShapeDtypeStruct((*lead, columns), dtype)
        return found

    return _recurrence(draw, recurrent_attention, decays)


_DRAWN = {
    "grouped_matmul": _grouped_matmul,
    **PAGED,
    "gla_attention": _gla_attention,
    "lightning_attention": _lightning_attention,
    "recurrent_attention": _recurrent_attention,
    "flash_attention": _flash_attention,
    "blocksparse_attention": _blocksparse_attention,
    "ring_attention": _ring_attention,
}
KERNELS = tuple(_DRAWN)
