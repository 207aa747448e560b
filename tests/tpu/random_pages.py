"""Random calls of attention over pages, for `random_shapes`."""

import functools
import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.modules import (
    page_attention,
    ragged_page_attention_v2,
    ragged_page_attention_v3,
    ragged_page_attention_v3_update,
)

_CACHES = (jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn)
_LAYOUTS = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3), "HNPD": (2, 0, 1, 3)}


class _Model(NamedTuple):
    """What the four operations share."""

    heads: int
    kv_heads: int
    width: int
    columns: int
    sequences: int
    per_sequence: int
    page_size: int
    dtype: Any
    cache_dtype: Any
    layout: str

    def pages(self, heads: int, width: int) -> jax.ShapeDtypeStruct:
        """A cache of 1 GiB at most."""
        token = self.kv_heads * max(self.width, self.columns) * jnp.dtype(self.cache_dtype).itemsize
        most = 2**30 // (self.page_size * token)
        sizes = (min(self.sequences * self.per_sequence, most), self.page_size, heads, width)
        return _array(*(sizes[i] for i in _LAYOUTS[self.layout]), dtype=self.cache_dtype)


def _array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _model(draw: random.Random) -> _Model:
    kv_heads = draw.choice((1, 2, 3, 4, 5, 8, 10, 16, 32))
    width = draw.choice((64, 80, 96, 128, 128, 128, 192, 256))
    return _Model(
        heads=kv_heads * draw.choice((1, 2, 3, 4, 5, 7, 8)),
        kv_heads=kv_heads,
        width=width,
        columns=draw.choice((width, width, width, 64, 128)),
        sequences=round(2 ** draw.uniform(0, 9)),
        per_sequence=round(2 ** draw.uniform(0, 11)),
        page_size=draw.choice((8, 16, 16, 32, 64, 128, 256)),
        dtype=draw.choice((jnp.bfloat16, jnp.bfloat16, jnp.float32)),
        cache_dtype=draw.choice(_CACHES),
        layout=draw.choice(("NHD", "NHD", "HND", "HNPD")),
    )


def _call(
    draw: random.Random, model: _Model, function: Any, arrays: dict[str, jax.ShapeDtypeStruct]
) -> tuple:
    """A call with these arrays, and what all of them may have besides."""
    static: dict[str, Any] = {"kv_layout": model.layout}
    if draw.random() < 0.3:
        static["sliding_window"] = draw.randint(1, 4096)
    if draw.random() < 0.2:
        static["logits_soft_cap"] = 30.0
    if draw.random() < 0.3:
        arrays["softmax_aux"] = _array(model.heads, 1, dtype=jnp.float32)
    if jnp.dtype(model.cache_dtype).itemsize == 1:
        scale = _array(model.kv_heads, dtype=jnp.float32)
        arrays |= {"k_scale": scale, "v_scale": scale}
    shapes = [f"{name} {x.dtype}{list(x.shape)}" for name, x in arrays.items()]
    words = ", ".join([*shapes, *(f"{name}={x}" for name, x in static.items())])
    run = functools.partial(function, **static, platform="pallas")
    names = tuple(arrays)
    return words, lambda x: run(**dict(zip(names, x, strict=True))), tuple(arrays.values()), 0


def _tokens(draw: random.Random, model: _Model) -> int:
    """As many as there are sequences, where all of them decode, or more."""
    if draw.random() < 0.3:
        return model.sequences
    return max(model.sequences, round(2 ** draw.uniform(0, 13)))


def _page_attention(draw: random.Random) -> tuple:
    model, queries = _model(draw), draw.choice((1, 1, 1, 2, 5))
    arrays = {
        "query": _array(model.sequences, queries, model.heads, model.width, dtype=model.dtype),
        "key_cache": model.pages(model.kv_heads, model.width),
        "value_cache": model.pages(model.kv_heads, model.columns),
        "context_lens": _array(model.sequences),
        "block_tables": _array(model.sequences, model.per_sequence),
    }
    return _call(draw, model, page_attention, arrays)


def _ragged_v2(draw: random.Random) -> tuple:
    model = _model(draw)
    model = model._replace(columns=model.width)
    arrays = {
        "query": _array(_tokens(draw, model), model.heads, model.width, dtype=model.dtype),
        "kv_pages": model.pages(2 * model.kv_heads, model.width),
        "context_lens": _array(model.sequences),
        "block_tables": _array(model.sequences, model.per_sequence),
        "query_start_loc": _array(model.sequences + 1),
        "num_seqs": _array(1),
    }
    return _call(draw, model, ragged_page_attention_v2, arrays)


def _ragged_v3(draw: random.Random, update: bool) -> tuple:
    model = _model(draw)
    tokens = _tokens(draw, model)
    of_tokens = lambda heads, width: _array(tokens, heads, width, dtype=model.dtype)
    keys, values = (model.kv_heads, model.width), (model.kv_heads, model.columns)
    arrays = {"query": of_tokens(model.heads, model.width)}
    if update:
        arrays |= {"key": of_tokens(*keys), "value": of_tokens(*values)}
    arrays |= {
        "key_pages": model.pages(*keys),
        "value_pages": model.pages(*values),
        "cu_seqlens_q": _array(model.sequences + 1),
        "cu_seqlens_k": _array(model.sequences + 1),
        "page_indices": _array(model.sequences, model.per_sequence),
    }
    function = ragged_page_attention_v3_update if update else ragged_page_attention_v3
    return _call(draw, model, function, arrays)


PAGED = {
    "page_attention": _page_attention,
    "ragged_page_attention_v2": _ragged_v2,
    "ragged_page_attention_v3": functools.partial(_ragged_v3, update=False),
    "ragged_page_attention_v3_update": functools.partial(_ragged_v3, update=True),
}
