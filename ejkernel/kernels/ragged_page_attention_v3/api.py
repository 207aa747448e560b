"""The call: what it takes, what it means, how it becomes `Inputs` and `Spec`."""

import dataclasses
from typing import Any, ClassVar, Final, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike

from ejkernel.kernels.common.arguments import as_array
from ejkernel.kernels.common.attention import sinks_per_head
from ejkernel.kernels.common.paged import LAYOUTS, arguments
from ejkernel.kernels.common.paged.arguments import Cache, Options, Sequences
from ejkernel.kernels.ragged_page_attention_v3 import OP
from ejkernel.kernels.ragged_page_attention_v3.config import RaggedPageAttentionv3Config
from ejkernel.kernels.ragged_page_attention_v3.inputs import APART, COMBINED, Outputs, Spec
from ejkernel.ops import executor, split_axis
from ejkernel.ops.executor import Request
from ejkernel.ops.implementation import Op
from ejkernel.ops.module import BoundFunction, Module, operation
from ejkernel.ops.split_axis import SplitAxis

# Where the axes of a ragged call's arrays stand in those of `Inputs` and `Outputs`.
RAGGED, RAGGED_LSE = (None, 0, 1, 2), (None, 1, 0)


@overload
def ragged_page_attention_v3(
    query: ArrayLike,
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
    axis_name: str | None = None,
    platform: str | None = None,
    cfg: RaggedPageAttentionv3Config | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array: ...


@overload
def ragged_page_attention_v3(
    query: ArrayLike,
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
    axis_name: str | None = None,
    platform: str | None = None,
    cfg: RaggedPageAttentionv3Config | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> tuple[jax.Array, jax.Array]: ...


@operation
def ragged_page_attention_v3(
    query: ArrayLike,
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
    axis_name: str | None = None,
    platform: str | None = None,
    cfg: RaggedPageAttentionv3Config | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of ragged sequences, prefilling and decoding together, over a cache of pages.

    The queries of a sequence are the last of its tokens: query `i` of `q` sits at position
    `p = length - q + i` and sees the positions up to `p`, with a window `w` those in `(p - w, p]`.
    Position `j` lies in slot `j % page_size` of page `page_indices[sequence, j // page_size]`. Over
    the keys that it sees,

        logits = soft_cap(softmax_scale * query @ (k_scale * key).T)
        output = exp(logits) / (sum(exp(logits)) + sum(exp(softmax_aux))) @ (v_scale * value)

    with `soft_cap(x) = logits_soft_cap * tanh(x / logits_soft_cap)`. A query that sees nothing, and
    a row of `query` that belongs to no sequence, gives exactly 0. Slots that no query sees may hold
    anything. Time and memory follow the lengths, not the sizes of the table and the cache.

    With `axis_name` the cache is split over a mesh axis of `n` devices: device `i` holds the pages
    `[i * pages / n, (i + 1) * pages / n)`, and `page_indices` count all of them. Each device
    attends to the pages that it holds, and the results are merged in float32. Called in a
    `shard_map` over `axis_name`, the pages are this device's share, and query, lengths and
    `page_indices` are the same on all of them; elsewhere arrays are whole, and are split over the
    axis of `mesh=`, of `jax.set_mesh`, or of a surrounding `with mesh:`.

    Args:
        query: `[tokens, heads, head_dim]`, the queries of all sequences one after the other.
        key_pages: `[pages, page_size, kv_heads, head_dim]`; `heads` is a multiple of `kv_heads`. In
            float32, bfloat16, float16, float64, int8, float8_e4m3fn or float8_e5m2.
        value_pages: `[pages, page_size, kv_heads, value_dim]`, in the same dtype.
        cu_seqlens_q: `[0, q1, q1 + q2, ...]`: how many queries each sequence has.
        cu_seqlens_k: `[0, l1, l1 + l2, ...]`: how many tokens, those of the queries included.
        page_indices: `[sequences, pages_per_sequence]`, or the same flat; -1 is no page, and its
            positions are not seen. Entries past the length are not looked at.
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
        mesh: run under `shard_map` over this mesh; heads can be split.
        in_specs: with `mesh`, the specs of query, key_pages and value_pages; the others follow. By
            default with `axis_name`, only the pages are split.
        out_specs: the spec of the output; it follows from `in_specs`.

    Returns:
        The output `[tokens, heads, value_dim]` in the dtype of the query. With `return_lse` a pair
        of it and the natural logarithm of the sum of exponentials, `[tokens, heads]` in float32
        (float64 for float64 queries): of the visible keys, without the sinks, -inf for a query that
        sees nothing. Gradients flow through both, to the query, the sinks, the scales and a cache
        in floating point.

    Raises:
        ValueError: the arguments do not fit each other.
        UnsupportedError: the requested platform does not support the call.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import ragged_page_attention_v3
    >>> pages = jnp.ones((8, 16, 2, 32))
    >>> out = ragged_page_attention_v3(
    ...     jnp.ones((5, 4, 32)),
    ...     pages,
    ...     pages,
    ...     cu_seqlens_q=jnp.array([0, 4, 5]),
    ...     cu_seqlens_k=jnp.array([0, 20, 51]),
    ...     page_indices=jnp.array([[0, 1], [2, 3]]),
    ... )
    >>> out.shape
    (5, 4, 32)
    """
    name = OP.name
    query = as_array(name, "query", query)
    arguments.check_query(name, query, (3,), "[tokens, heads, head_dim]")
    arrays = {"key_pages": key_pages, "value_pages": value_pages}
    cache = arguments.cache(name, query, kv_layout, arrays)
    sequences = ragged_sequences(name, query, cu_seqlens_q, cu_seqlens_k, page_indices)
    options = Options(
        softmax_aux, softmax_scale, sliding_window, logits_soft_cap, kv_layout, k_scale, v_scale
    )
    request = Request(platform, cfg, mesh, in_specs, out_specs)
    names = ("cu_seqlens_k", "page_indices")
    out, lse = attend_ragged(OP, Spec, query, cache, sequences, options, request, names, axis_name)
    return (out, lse) if return_lse else out


def ragged_sequences(
    op: str,
    query: jax.Array,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    page_indices: ArrayLike,
) -> Sequences:
    """The sequences of a ragged call from its cumulative lengths."""
    cu_q = arguments.cumulative(op, "cu_seqlens_q", cu_seqlens_q, None, query.shape[0])
    count = cu_q.shape[0] - 1
    cu_k = arguments.cumulative(op, "cu_seqlens_k", cu_seqlens_k, count, None)
    shape = f"[{count}, pages_per_sequence], or the same flat"
    table = arguments.integers(op, "page_indices", page_indices, shape, (1, 2))
    if (table.ndim == 2 and table.shape[0] != count) or table.size % max(count, 1):
        raise ValueError(f"{op}: page_indices must be integers {shape}, got {list(table.shape)}.")
    table = table.reshape(1, count, table.size // max(count, 1))
    differences = lambda x: (x[1:] - x[:-1])[None]
    return Sequences(cu_q[None, :-1], differences(cu_q), differences(cu_k), table)


def ragged_out_specs(out_specs: object) -> Any:
    """Specs of a ragged output, or of it and its log-sum-exp, for the axes of `Outputs`."""
    if isinstance(out_specs, PartitionSpec):
        return arguments.rearranged(out_specs, *RAGGED)
    return arguments.rearranged_specs(out_specs, RAGGED, RAGGED_LSE)


def without_rows(outputs: Any) -> Any:
    """The output [tokens, heads, value_dim] and log-sum-exp [tokens, heads] of the only row.

    `outputs` are those of this op, or of the one that also writes the cache.
    """
    return outputs._replace(out=outputs.out[0], lse=outputs.lse[0].T)


def attend_ragged(
    op: Op,
    spec_type: type[Spec],
    query: jax.Array,
    cache: Cache,
    sequences: Sequences,
    options: Options,
    request: Request,
    names: tuple[str, str],
    axis_name: str | None = None,
) -> Outputs:
    """`attend` for queries [tokens, heads, head_dim], which become one row and back."""
    request = dataclasses.replace(
        request,
        in_specs=arguments.rearranged_specs(request.in_specs, RAGGED),
        out_specs=ragged_out_specs(request.out_specs),
        finish=without_rows,
    )
    rows = jax.lax.expand_dims(query, (0,))
    return attend(op, spec_type, rows, cache, sequences, options, request, names, axis_name)


def attend(
    op: Op,
    spec_type: type[Spec],
    query: jax.Array,
    cache: Cache,
    sequences: Sequences,
    options: Options,
    request: Request,
    names: tuple[str, str],
    axis_name: str | None = None,
) -> Outputs:
    """Check the arguments that the operations over pages share, and run the call.

    `names` are what the op calls its lengths and its table of pages.
    """
    heads, head_dim = query.shape[2:]
    spec = spec_type(**arguments.statics(op.name, head_dim, options))
    split = _split(op.name, query, cache, options.kv_layout, request, axis_name)
    whole = cache._replace(pages=split.whole(cache.pages))
    arguments.check_sequences(op.name, sequences, whole, spec.sliding_window, names)
    layouts = COMBINED if cache.values is None else APART
    inputs = layouts[spec.kv_layout](
        query,
        cache.keys,
        cache.values,
        *sequences,
        sinks=sinks_per_head(op.name, options.softmax_aux, heads),
        k_scale=arguments.scale(op.name, "k_scale", options.k_scale, cache.kv_heads),
        v_scale=arguments.scale(op.name, "v_scale", options.v_scale, cache.kv_heads),
        traced_window=arguments.traced_window(op.name, options),
    )
    if 0 in (query.size, cache.keys.size, cache.value_dim, sequences.page_indices.size):
        nothing = nothing_seen(query, cache)
        return nothing if request.finish is None else request.finish(nothing)
    if split.name is not None:
        spec = dataclasses.replace(spec, float32_out=True)  # of each device, before they are merged
    request = dataclasses.replace(
        request, mesh=split.mesh, in_specs=split.in_specs, axis_name=split.name
    )
    return executor.run(op, inputs, spec, request)


def _split(
    op: str,
    query: jax.Array,
    cache: Cache,
    layout: str,
    request: Request,
    axis_name: str | None,
) -> SplitAxis:
    """Over which devices the pages are split, or are to be."""
    arrays = {"query": query, cache.names[0]: cache.keys}
    if cache.values is not None:
        arrays[cache.names[1]] = cache.values
    entries: list[str | None] = [None, None, None, None]
    entries[LAYOUTS[layout].index("p")] = axis_name
    return split_axis.resolve(
        op,
        axis_name,
        arrays=arrays,
        lengths={"pages": cache.pages},
        specs=(PartitionSpec(), *[PartitionSpec(*entries)] * (len(arrays) - 1)),
        mesh=request.mesh,
        in_specs=request.in_specs,
    )


def nothing_seen(query: jax.Array, cache: Cache) -> Outputs:
    """The results of a call without queries, pages or sequences."""
    b, t, heads, _ = query.shape
    dtype = jnp.promote_types(query.dtype, np.float32)
    return Outputs(
        jnp.zeros((b, t, heads, cache.value_dim), query.dtype),
        jnp.full((b, heads, t), -jnp.inf, dtype),
    )


class RaggedPageAttentionv3(Module):
    """Ragged attention over pages as an object; see `ragged_page_attention_v3`."""

    __call__: Final = BoundFunction(ragged_page_attention_v3)
    config: ClassVar[type[RaggedPageAttentionv3Config]] = RaggedPageAttentionv3Config
