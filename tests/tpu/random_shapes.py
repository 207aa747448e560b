"""Random calls that a user may make, to be compiled on default blocks."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.modules import flash_attention, grouped_matmul

KERNELS = ("flash_attention", "grouped_matmul")


class RandomCall(NamedTuple):
    """A call: what it is in words, the function, its arguments, those to differentiate by."""

    words: str
    function: Callable[[Any], Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    differentiable: int

    def gradient(self, arguments: Any) -> Any:
        """The gradient by the first arguments."""

        def loss(some: Any) -> jax.Array:
            out = self.function((*some, *arguments[self.differentiable :]))
            return out.astype(jnp.float32).sum()

        return jax.grad(loss)(arguments[: self.differentiable])


def random_call(kernel: str, number: int) -> RandomCall:
    """Call `number` of a kernel, always the same."""
    draw = random.Random(f"{kernel} {number}")
    return {"flash_attention": _flash_attention, "grouped_matmul": _grouped_matmul}[kernel](draw)


def _size(draw: random.Random, low: int, high: int, multiple: int = 128) -> int:
    """Small and large alike, half of them a multiple."""
    size = round(low * (high / low) ** draw.random())
    return size if draw.random() < 0.5 else max(multiple, size // multiple * multiple)


def _grouped_matmul(draw: random.Random) -> RandomCall:
    rows, k, n = _size(draw, 1, 65536), _size(draw, 8, 16384), _size(draw, 8, 16384)
    groups = round(2 ** draw.uniform(0, 9))
    while groups * k * n > 2**32:  # 8 GiB of weights
        groups, n = max(1, groups // 2), n if groups > 1 else n // 2
    dtype = draw.choice((jnp.bfloat16, jnp.bfloat16, jnp.float32))
    static = {"transpose_rhs": draw.random() < 0.3}
    if draw.random() < 0.3:
        static["preferred_element_type"] = jnp.float32
    matrix = (n, k) if static["transpose_rhs"] else (k, n)
    by_sizes = draw.random() < 0.7
    along = (groups,) if by_sizes else (rows,)
    name = "group_sizes" if by_sizes else "group_ids"
    return RandomCall(
        f"{rows} rows, {groups} weights of {matrix}, {jnp.dtype(dtype)}, {name}, {static}",
        lambda x: grouped_matmul(x[0], x[1], **{name: x[2]}, **static, platform="pallas"),
        (
            jax.ShapeDtypeStruct((rows, k), dtype),
            jax.ShapeDtypeStruct((groups, *matrix), dtype),
            jax.ShapeDtypeStruct(along, jnp.int32),
        ),
        2,
    )


def _flash_attention(draw: random.Random) -> RandomCall:
    batch, kv_heads = draw.choice((1, 2, 4)), draw.choice((1, 2, 4, 8))
    heads = kv_heads * draw.choice((1, 2, 4, 8))
    q_len, kv_len = _size(draw, 1, 16384), _size(draw, 1, 16384)
    if draw.random() < 0.6:
        kv_len = q_len
    width = draw.choice((32, 64, 80, 96, 128, 192, 256))
    columns = draw.choice((width, width, 64, 128))
    dtype = draw.choice((jnp.bfloat16, jnp.bfloat16, jnp.float32))
    static: dict[str, Any] = {"causal": draw.random() < 0.5}
    if draw.random() < 0.3:
        static["sliding_window"] = (draw.randint(1, 4096), draw.choice((0, 100)))
    if draw.random() < 0.2:
        static["logits_soft_cap"] = 30.0
    arguments = [
        jax.ShapeDtypeStruct((batch, q_len, heads, width), dtype),
        jax.ShapeDtypeStruct((batch, kv_len, kv_heads, width), dtype),
        jax.ShapeDtypeStruct((batch, kv_len, kv_heads, columns), dtype),
    ]
    names = ["query", "key", "value"]
    if draw.random() < 0.2:
        arguments.append(jax.ShapeDtypeStruct((heads, 1), jnp.float32))
        names.append("softmax_aux")
    if draw.random() < 0.2 and batch * heads * q_len * kv_len < 2**28:
        arguments.append(jax.ShapeDtypeStruct((batch, heads, q_len, kv_len), dtype))
        names.append("bias")
    shapes = ", ".join(f"{name} {x.shape}" for name, x in zip(names, arguments, strict=True))
    return RandomCall(
        f"{shapes}, {jnp.dtype(dtype)}, {static}",
        lambda x: flash_attention(**dict(zip(names, x, strict=True)), **static, platform="pallas"),
        tuple(arguments),
        len(arguments),
    )
