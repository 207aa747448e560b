"""The call: what it takes, what it means, how it becomes that of the ragged op."""

import dataclasses
from typing import Any, ClassVar, Final, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike

from ejkernel.kernels.common.arguments import as_array
from ejkernel.kernels.common.paged import arguments
from ejkernel.kernels.common.paged.arguments import Options, Sequences
from ejkernel.kernels.page_attention import OP
from ejkernel.kernels.page_attention.config import PageAttentionConfig
from ejkernel.kernels.ragged_page_attention_v3.api import attend
from ejkernel.kernels.ragged_page_attention_v3.config import PagedConfig
from ejkernel.kernels.ragged_page_attention_v3.inputs import Spec
from ejkernel.ops.executor import Request
from ejkernel.ops.module import BoundFunction, Module, operation


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageSpec(Spec):
    """The static arguments of a call."""

    config: ClassVar[type[PagedConfig]] = PageAttentionConfig


@overload
def page_attention(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    context_lens: ArrayLike,
    block_tables: ArrayLike,
    *,
    softmax_aux: ArrayLike | None = None,
    softmax_scale: float | None = None,
    sliding_window: int | ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    kv_layout: str = "NHD",
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    return_lse: Literal[False] = False,
    axis_name: str | None = None,
    platform: str | None = None,
    cfg: PageAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array: ...


@overload
def page_attention(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    context_lens: ArrayLike,
    block_tables: ArrayLike,
    *,
    softmax_aux: ArrayLike | None = None,
    softmax_scale: float | None = None,
    sliding_window: int | ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    kv_layout: str = "NHD",
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    return_lse: Literal[True],
    axis_name: str | None = None,
    platform: str | None = None,
    cfg: PageAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> tuple[jax.Array, jax.Array]: ...


@operation
def page_attention(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    context_lens: ArrayLike,
    block_tables: ArrayLike,
    *,
    softmax_aux: ArrayLike | None = None,
    softmax_scale: float | None = None,
    sliding_window: int | ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    kv_layout: str = "NHD",
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    return_lse: bool = False,
    axis_name: str | None = None,
    platform: str | None = None,
    cfg: PageAttentionConfig | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of a batch of decoding sequences over a cache of pages.

    Position `j` of sequence `b` lies in slot `j % page_size` of page
    `block_tables[b, j // page_size]`. The queries of a sequence are the last of its tokens: query
    `i` of `q` sits at position `p = context_lens[b] - q + i` and sees the positions up to `p`, with
    a window `w` those in `(p - w, p]`. Over the keys that it sees,

        logits = soft_cap(softmax_scale * query @ (k_scale * key).T)
        output = exp(logits) / (sum(exp(logits)) + sum(exp(softmax_aux))) @ (v_scale * value)

    with `soft_cap(x) = logits_soft_cap * tanh(x / logits_soft_cap)`. A query that sees nothing
    gives exactly 0. Slots that no query sees may hold anything. Time and memory follow the lengths,
    not the sizes of the table and the cache.

    With `axis_name` the cache is split over a mesh axis of `n` devices: device `i` holds the pages
    `[i * pages / n, (i + 1) * pages / n)`, and `block_tables` count all of them. Each
    device attends to the pages that it holds, and the results are merged in float32. Called in a
    `shard_map` over `axis_name`, the caches are this device's share, and query, lengths and tables
    are the same on all of them; elsewhere arrays are whole, and are split over the axis of `mesh=`,
    of `jax.set_mesh`, or of a surrounding `with mesh:`.

    Args:
        query: `[batch, 1, heads, head_dim]` or `[batch, heads, head_dim]`; with several queries for
            each sequence `[batch, queries, heads, head_dim]`.
        key_cache: `[pages, page_size, kv_heads, head_dim]`; `heads` is a multiple of
            `kv_heads`. In float32, bfloat16, float16, float64, int8, float8_e4m3fn or float8_e5m2.
        value_cache: `[pages, page_size, kv_heads, value_dim]`, in the same dtype.
        context_lens: `[batch]`, how many tokens each sequence has, those of the queries included.
        block_tables: `[batch, max_blocks]`; -1 is no page, and its positions are not seen. Entries
            past the length are not looked at.
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
        axis_name: the mesh axis over which the pages are split; by default they are not.
        platform: "xla", "pallas", "triton", or None for the best that supports the call.
        cfg: blocks and launch parameters; by default chosen for the call.
        mesh: run under `shard_map` over this mesh; batch and heads can be split.
        in_specs: with `mesh`, the specs of query, key_cache and value_cache; the others follow. By
            default with `axis_name`, only the pages are split.
        out_specs: the spec of the output; it follows from `in_specs`.

    Returns:
        The output in the shape and dtype of the query, its last axis `value_dim`. With `return_lse`
        a pair of it and the natural logarithm of the sum of exponentials,
        `[batch, heads, queries]` (`[batch, heads]` for a query without that axis) in float32
        (float64 for float64 queries): of the visible keys, without the sinks, -inf for a query that
        sees nothing. Gradients flow through both, to the query, the sinks, the scales and a cache
        in floating point.

    Raises:
        ValueError: the arguments do not fit each other.
        UnsupportedError: the requested platform does not support the call.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import page_attention
    >>> cache = jnp.ones((8, 16, 2, 32))
    >>> page_attention(
    ...     jnp.ones((2, 1, 4, 32)),
    ...     cache,
    ...     cache,
    ...     jnp.array([20, 7]),
    ...     jnp.array([[0, 1], [2, -1]]),
    ... ).shape
    (2, 1, 4, 32)
    """
    name = OP.name
    query = as_array(name, "query", query)
    shape = "[batch, queries, heads, head_dim] or [batch, heads, head_dim]"
    arguments.check_query(name, query, (3, 4), shape)
    arrays = {"key_cache": key_cache, "value_cache": value_cache}
    cache = arguments.cache(name, query, kv_layout, arrays)
    alone = query.ndim == 3
    if alone:
        query = jax.lax.expand_dims(query, (1,))
    batch, queries = query.shape[:2]
    lengths = arguments.integers(name, "context_lens", context_lens, f"[{batch}]", (1,))
    table = arguments.integers(name, "block_tables", block_tables, f"[{batch}, max_blocks]", (2,))
    for what, x in (("context_lens", lengths), ("block_tables", table)):
        if x.shape[0] != batch:
            raise ValueError(
                f"{name}: {what} must have one row for each of the {batch} sequences, "
                f"got {list(x.shape)}."
            )
    numbers = np if isinstance(batch, int) else jnp  # NumPy's can be checked, if there are so many
    sequences = Sequences(
        numbers.zeros((batch, 1), jnp.int32),
        numbers.full((batch, 1), queries, jnp.int32),
        lengths[:, None],
        table[:, None],
    )
    options = Options(
        softmax_aux, softmax_scale, sliding_window, logits_soft_cap, kv_layout, k_scale, v_scale
    )
    if alone:
        in_specs = arguments.rearranged_specs(in_specs, _ALONE)
        out_specs = _out_specs(out_specs)
    request = Request(platform, cfg, mesh, in_specs, out_specs)
    names = ("context_lens", "block_tables")
    out, lse = attend(OP, PageSpec, query, cache, sequences, options, request, names, axis_name)
    if alone:
        out = out.reshape(batch, *out.shape[2:])
    if not return_lse:
        return out
    return out, lse.reshape(lse.shape[:2]) if alone else lse


_ALONE = (0, None, 1, 2)  # where the axes of a query without the axis of queries stand


def _out_specs(specs: object) -> Any:
    if isinstance(specs, PartitionSpec):
        return arguments.rearranged(specs, *_ALONE)
    return arguments.rearranged_specs(specs, _ALONE)


class PageAttention(Module):
    """Attention over pages as an object; see `page_attention`."""

    __call__: Final = BoundFunction(page_attention)
    config: ClassVar[type[PageAttentionConfig]] = PageAttentionConfig
