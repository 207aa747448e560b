"""The call: what it takes, what it means, how it becomes `Inputs` and `Spec`."""

from collections.abc import Sequence
from typing import ClassVar, Final, Literal, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike

from ejkernel.kernels.common.arguments import as_array, check_floating
from ejkernel.kernels.common.attention import sinks_per_head
from ejkernel.kernels.common.paged import arguments, cache_axes
from ejkernel.kernels.common.paged.arguments import Cache, Options, Sequences
from ejkernel.kernels.ragged_page_attention_v3.api import (
    RAGGED,
    RAGGED_LSE,
    nothing_seen,
    ragged_sequences,
    without_rows,
)
from ejkernel.kernels.ragged_page_attention_v3_update import OP
from ejkernel.kernels.ragged_page_attention_v3_update.config import (
    RaggedPageAttentionv3UpdateConfig,
)
from ejkernel.kernels.ragged_page_attention_v3_update.inputs import LAYOUTS, Outputs, Spec
from ejkernel.ops import executor
from ejkernel.ops.executor import Request
from ejkernel.ops.module import BoundFunction, Module, operation

# The results carry the letters of the layout, by which a mesh splits them.
_OPS = {
    layout: OP.renamed(OP.name, outputs=outputs) if layout != "NHD" else OP
    for layout, (_, outputs) in LAYOUTS.items()
}


@overload
def ragged_page_attention_v3_update(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    page_indices: ArrayLike,
    *,
    softmax_aux: ArrayLike | None = None,
    softmax_scale: float | None = None,
    sliding_window: int | ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    kv_layout: str = "NHD",
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    return_lse: Literal[False] = False,
    platform: str | None = None,
    cfg: RaggedPageAttentionv3UpdateConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]: ...


@overload
def ragged_page_attention_v3_update(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    page_indices: ArrayLike,
    *,
    softmax_aux: ArrayLike | None = None,
    softmax_scale: float | None = None,
    sliding_window: int | ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    kv_layout: str = "NHD",
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    return_lse: Literal[True],
    platform: str | None = None,
    cfg: RaggedPageAttentionv3UpdateConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]: ...


@operation
def ragged_page_attention_v3_update(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    page_indices: ArrayLike,
    *,
    softmax_aux: ArrayLike | None = None,
    softmax_scale: float | None = None,
    sliding_window: int | ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    kv_layout: str = "NHD",
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: RaggedPageAttentionv3UpdateConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array] | tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Write new keys and values into the pages of ragged sequences, then attend over them.

    Token `i` of a sequence's `q` new ones becomes position `p = length - q + i`: slot
    `p % page_size` of page `page_indices[sequence, p // page_size]`. Then the meaning is that of
    `ragged_page_attention_v3`, on the cache as it is now. No other slot changes by a bit. A token
    whose page is -1, or that belongs to no sequence, is not written.

    The cache holds `key / k_scale` and `value / v_scale` in its own dtype: int8 rounded to the
    nearest integer, int8 and 8-bit floats saturated. Attention reads them back as later calls will.

    Under `jax.jit` with `donate_argnames=("key_pages", "value_pages")` the tokens are written in
    place; a cache that is not donated is copied.

    Args:
        query: `[tokens, heads, head_dim]`, the queries of all sequences one after the other.
        key: `[tokens, kv_heads, head_dim]`, the new keys, one for each query.
        value: `[tokens, kv_heads, value_dim]`, the new values.
        key_pages: `[pages, page_size, kv_heads, head_dim]`; `heads` is a multiple of `kv_heads`. In
            float32, bfloat16, float16, float64, int8, float8_e4m3fn or float8_e5m2.
        value_pages: `[pages, page_size, kv_heads, value_dim]`, in the same dtype.
        cu_seqlens_q: `[0, q1, q1 + q2, ...]`: how many new tokens each sequence has.
        cu_seqlens_k: `[0, l1, l1 + l2, ...]`: how many tokens in all, the new ones included.
        page_indices: `[sequences, pages_per_sequence]`, or the same flat; -1 is no page. No two
            new tokens may share a slot.
        softmax_aux: attention sinks, `[sinks]` for all heads or `[heads, sinks]`.
        softmax_scale: by default `head_dim ** -0.5`.
        sliding_window: how many tokens a query sees, itself included. It may be traced, which
            only XLA supports.
        logits_soft_cap: bound of the logits.
        kv_layout: "NHD" as above, "HND" `[pages, kv_heads, page_size, head_dim]`, or "HNPD"
            `[kv_heads, pages, page_size, head_dim]`.
        k_scale: what cached keys are multiplied with, a number or `[kv_heads]`; may be traced.
        v_scale: the same for values.
        return_lse: also return the log-sum-exp.
        platform: "xla", "pallas", "triton", or None for the best that supports the call.
        cfg: blocks and launch parameters; by default chosen for the call.
        mesh: run under `shard_map` over this mesh; heads can be split.
        in_specs: with `mesh`, the specs of query, key and value; the others follow from them.
        out_specs: the specs of the results; they follow from `in_specs`.

    Returns:
        `(output, key_pages, value_pages)`, with `return_lse`
        `(output, lse, key_pages, value_pages)`; output and lse as those of
        `ragged_page_attention_v3`. Gradients flow through all of them, to everything but a cache of
        integers and what is written into one.

    Raises:
        ValueError: the arguments do not fit each other.
        UnsupportedError: the requested platform does not support the call.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import ragged_page_attention_v3_update
    >>> pages = jnp.zeros((8, 16, 2, 32))
    >>> out, key_pages, value_pages = ragged_page_attention_v3_update(
    ...     jnp.ones((3, 4, 32)),
    ...     jnp.ones((3, 2, 32)),
    ...     jnp.ones((3, 2, 32)),
    ...     pages,
    ...     pages,
    ...     cu_seqlens_q=jnp.array([0, 2, 3]),
    ...     cu_seqlens_k=jnp.array([0, 2, 20]),
    ...     page_indices=jnp.array([[0, 1], [2, 3]]),
    ... )
    >>> key_pages[:, :, 0, 0].sum(axis=1).tolist()
    [2.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """
    name = OP.name
    query = as_array(name, "query", query)
    arguments.check_query(name, query, (3,), "[tokens, heads, head_dim]")
    arrays = {"key_pages": key_pages, "value_pages": value_pages}
    cache = arguments.cache(name, query, kv_layout, arrays)
    new_key, new_value = _tokens(name, query, key, value, cache)
    sequences = ragged_sequences(name, query, cu_seqlens_q, cu_seqlens_k, page_indices)
    _check_new(name, sequences)
    options = Options(
        softmax_aux, softmax_scale, sliding_window, logits_soft_cap, kv_layout, k_scale, v_scale
    )
    spec = Spec(**arguments.statics(name, query.shape[2], options))
    names = ("cu_seqlens_k", "page_indices")
    arguments.check_sequences(name, sequences, cache, spec.sliding_window, names)
    rows, new_keys, new_values = _as_rows((query, new_key, new_value))
    inputs = LAYOUTS[kv_layout][0](
        rows,
        new_keys,
        new_values,
        cache.keys,
        cache.separate_values,
        *sequences,
        sinks=sinks_per_head(name, softmax_aux, query.shape[1]),
        k_scale=arguments.scale(name, "k_scale", k_scale, cache.kv_heads),
        v_scale=arguments.scale(name, "v_scale", v_scale, cache.kv_heads),
        traced_window=arguments.traced_window(name, options),
    )
    if 0 in (query.size, cache.keys.size, cache.value_dim, sequences.page_indices.size):
        nothing = Outputs(*nothing_seen(rows, cache), inputs.key_pages, inputs.value_pages)
        outputs = without_rows(nothing)
    else:
        request = Request(
            platform,
            cfg,
            mesh,
            arguments.rearranged_specs(in_specs, RAGGED, RAGGED, RAGGED),
            _out_specs(out_specs, return_lse),
            finish=without_rows,
        )
        outputs = executor.run(_OPS[kv_layout], inputs, spec, request)
    pages = _one_of_each_head(outputs, kv_layout, cache.kv_heads)
    results = (outputs.out, outputs.lse) if return_lse else (outputs.out,)
    return (*results, *pages)


@jax.jit
def _as_rows(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Arrays of tokens as one row each, all by one program in an eager call."""
    return tuple(jax.lax.expand_dims(x, (0,)) for x in arrays)


def _tokens(
    op: str, query: jax.Array, key: ArrayLike, value: ArrayLike, cache: Cache
) -> tuple[jax.Array, jax.Array]:
    """The new keys and values, one for each query, fitting the cache."""
    found = []
    for name, x, last in (("key", key, query.shape[2]), ("value", value, cache.value_dim)):
        x = as_array(op, name, x)
        wanted = (query.shape[0], cache.kv_heads, last)
        check_floating(op, name, x.dtype)
        if x.shape != wanted:
            raise ValueError(
                f"{op}: {name} must be {list(wanted)}, as query and cache have it, "
                f"got {list(x.shape)}."
            )
        found.append(x)
    return found[0], found[1]


def _check_new(op: str, sequences: Sequences) -> None:
    """No sequence has more new tokens than tokens."""
    _, new, lengths, _ = sequences
    if isinstance(new, np.ndarray) and isinstance(lengths, np.ndarray) and (new > lengths).any():
        worst = int((new - lengths).argmax())
        raise ValueError(
            f"{op}: cu_seqlens_k counts the new tokens too; sequence {worst} has "
            f"{new[0, worst]} new ones of {lengths[0, worst]}."
        )


def _out_specs(
    specs: PartitionSpec | Sequence[PartitionSpec] | None, return_lse: bool
) -> PartitionSpec | tuple[PartitionSpec | None, ...] | None:
    """Specs of the results in the order of `Outputs`, which always have the log-sum-exp."""
    if specs is None or isinstance(specs, PartitionSpec):
        return specs if specs is None else arguments.rearranged(specs, *RAGGED)
    out, *rest = specs
    lse = arguments.rearranged(rest.pop(0) if return_lse else out, *RAGGED_LSE)
    return (arguments.rearranged(out, *RAGGED), lse, *rest)


def _one_of_each_head(outputs: Outputs, layout: str, kv_heads: int) -> tuple[jax.Array, jax.Array]:
    """The cache without the copies that a mesh with more shards than key heads has made."""
    axis = cache_axes(layout).index("k")
    copies = outputs.key_pages.shape[axis] // kv_heads
    if copies == 1:
        return outputs.key_pages, outputs.value_pages
    once = lambda x: jax.lax.slice_in_dim(x, 0, None, copies, axis)
    return once(outputs.key_pages), once(outputs.value_pages)


class RaggedPageAttentionv3Update(Module):
    """Ragged attention that writes the cache as an object; see the function of that name."""

    __call__: Final = BoundFunction(ragged_page_attention_v3_update)
    config: ClassVar[type[RaggedPageAttentionv3UpdateConfig]] = RaggedPageAttentionv3UpdateConfig
