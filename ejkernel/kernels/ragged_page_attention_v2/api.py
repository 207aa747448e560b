"""The call: what it takes, what it means, how it becomes that of the next version."""

import dataclasses
from typing import ClassVar, Final, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike

from ejkernel.kernels.common.arguments import as_array
from ejkernel.kernels.common.paged import arguments
from ejkernel.kernels.common.paged.arguments import Options, Sequences
from ejkernel.kernels.ragged_page_attention_v2 import OP
from ejkernel.kernels.ragged_page_attention_v2.config import RaggedPageAttentionv2Config
from ejkernel.kernels.ragged_page_attention_v3.api import attend_ragged
from ejkernel.kernels.ragged_page_attention_v3.config import PagedConfig
from ejkernel.kernels.ragged_page_attention_v3.inputs import Spec
from ejkernel.ops.executor import Request
from ejkernel.ops.module import BoundFunction, Module, operation


@dataclasses.dataclass(frozen=True, kw_only=True)
class CombinedSpec(Spec):
    """The static arguments of a call."""

    config: ClassVar[type[PagedConfig]] = RaggedPageAttentionv2Config


@overload
def ragged_page_attention_v2(
    query: ArrayLike,
    kv_pages: ArrayLike,
    context_lens: ArrayLike,
    block_tables: ArrayLike,
    query_start_loc: ArrayLike,
    num_seqs: int | ArrayLike,
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
    cfg: RaggedPageAttentionv2Config | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array: ...


@overload
def ragged_page_attention_v2(
    query: ArrayLike,
    kv_pages: ArrayLike,
    context_lens: ArrayLike,
    block_tables: ArrayLike,
    query_start_loc: ArrayLike,
    num_seqs: int | ArrayLike,
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
    cfg: RaggedPageAttentionv2Config | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> tuple[jax.Array, jax.Array]: ...


@operation
def ragged_page_attention_v2(
    query: ArrayLike,
    kv_pages: ArrayLike,
    context_lens: ArrayLike,
    block_tables: ArrayLike,
    query_start_loc: ArrayLike,
    num_seqs: int | ArrayLike,
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
    cfg: RaggedPageAttentionv2Config | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: tuple[PartitionSpec | None, ...] | None = None,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Ragged attention over a cache whose pages hold keys and values together.

    The meaning is that of `ragged_page_attention_v3` with `key_pages = kv_pages[:, :, 0::2]` and
    `value_pages = kv_pages[:, :, 1::2]`, for the first `num_seqs` sequences; the cache is not
    copied. Rows of `query` from `query_start_loc[num_seqs]` on give exactly 0.

    Args:
        query: `[tokens, heads, head_dim]`, the queries of all sequences one after the other.
        kv_pages: `[pages, page_size, 2 * kv_heads, head_dim]`: even heads are keys, odd ones
            values. In float32, bfloat16, float16, float64, int8, float8_e4m3fn or float8_e5m2.
        context_lens: `[sequences]`, how many tokens each has, those of the queries included.
        block_tables: `[sequences, pages_per_sequence]`; -1 is no page, and its positions are not
            seen. Entries past the length are not looked at.
        query_start_loc: `[0, q1, q1 + q2, ...]`, sequences + 1 of them.
        num_seqs: how many of the sequences count, one number; may be traced.
        softmax_aux: attention sinks, `[sinks]` for all heads or `[heads, sinks]`.
        softmax_scale: by default `head_dim ** -0.5`.
        sliding_window: how many tokens a query sees, itself included. It may be traced, which
            only XLA supports.
        logits_soft_cap: bound of the logits.
        kv_layout: "NHD" as above, "HND" `[pages, 2 * kv_heads, page_size, head_dim]`, or "HNPD"
            `[2 * kv_heads, pages, page_size, head_dim]`.
        k_scale: what cached keys are multiplied with, a number or `[kv_heads]`; may be traced.
        v_scale: the same for values.
        return_lse: also return the log-sum-exp.
        platform: "xla", "pallas", "triton", or None for the best that supports the call.
        cfg: blocks and launch parameters; by default chosen for the call.
        mesh: run under `shard_map` over this mesh; heads can be split.
        in_specs: with `mesh`, the specs of query, kv_pages and context_lens; the others follow.
        out_specs: the spec of the output; it follows from `in_specs`.

    Returns:
        The output `[tokens, heads, head_dim]` in the dtype of the query. With `return_lse` a pair
        of it and the natural logarithm of the sum of exponentials, `[tokens, heads]` in float32
        (float64 for float64 queries): of the visible keys, without the sinks, -inf for a query that
        sees nothing.

    Raises:
        ValueError: the arguments do not fit each other.
        UnsupportedError: the requested platform does not support the call.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import ragged_page_attention_v2
    >>> ragged_page_attention_v2(
    ...     jnp.ones((8, 4, 32)),
    ...     jnp.ones((8, 16, 4, 32)),
    ...     context_lens=jnp.array([20, 31, 0]),
    ...     block_tables=jnp.array([[0, 1], [2, 3], [0, 0]]),
    ...     query_start_loc=jnp.array([0, 4, 5, 5]),
    ...     num_seqs=2,
    ... ).shape
    (8, 4, 32)
    """
    name = OP.name
    query = as_array(name, "query", query)
    arguments.check_query(name, query, (3,), "[tokens, heads, head_dim]")
    cache = arguments.cache(name, query, kv_layout, {"kv_pages": kv_pages}, combined=True)
    sequences = _sequences(
        name, query.shape[0], context_lens, block_tables, query_start_loc, num_seqs
    )
    options = Options(
        softmax_aux, softmax_scale, sliding_window, logits_soft_cap, kv_layout, k_scale, v_scale
    )
    request = Request(platform, cfg, mesh, in_specs, out_specs)
    names = ("context_lens", "block_tables")
    out, lse = attend_ragged(OP, CombinedSpec, query, cache, sequences, options, request, names)
    return (out, lse) if return_lse else out


def _sequences(
    op: str,
    tokens: int,
    context_lens: ArrayLike,
    block_tables: ArrayLike,
    query_start_loc: ArrayLike,
    num_seqs: int | ArrayLike,
) -> Sequences:
    """The first `num_seqs` sequences; the others have neither queries nor tokens."""
    lengths = arguments.integers(op, "context_lens", context_lens, "[sequences]", (1,))
    count = lengths.shape[0]
    shape = f"[{count}, pages_per_sequence]"
    table = arguments.integers(op, "block_tables", block_tables, shape, (2,))
    if table.shape[0] != count:
        raise ValueError(f"{op}: block_tables must be integers {shape}, got {list(table.shape)}.")
    starts = arguments.integers(op, "query_start_loc", query_start_loc, f"[{count + 1}]", (1,))
    number = arguments.integers(op, "num_seqs", num_seqs, "of one number", (0, 1))
    if number.size != 1:
        raise ValueError(f"{op}: num_seqs must be one number, got {list(number.shape)}.")
    number = number.reshape(())
    if isinstance(number, np.ndarray):
        if not 0 <= number <= count:
            raise ValueError(f"{op}: num_seqs must be between 0 and {count}, got {number}.")
        if isinstance(starts, np.ndarray):
            # Entries past the last sequence may be anything.
            arguments.cumulative(op, "query_start_loc", starts[: number + 1], int(number), tokens)
    if starts.shape[0] != count + 1:
        raise ValueError(
            f"{op}: query_start_loc must have {count + 1} entries, got {starts.shape[0]}."
        )
    known = all(isinstance(x, np.ndarray) for x in (lengths, starts, number))
    where = np.where if known else jnp.where
    counts = np.arange(count) < number
    return Sequences(
        where(counts, starts[:-1], np.int32(tokens))[None],
        where(counts, starts[1:] - starts[:-1], np.int32(0))[None],
        where(counts, lengths, np.int32(0))[None],
        table[None],
    )


class RaggedPageAttentionv2(Module):
    """Ragged attention over combined pages as an object; see `ragged_page_attention_v2`."""

    __call__: Final = BoundFunction(ragged_page_attention_v2)
    config: ClassVar[type[RaggedPageAttentionv2Config]] = RaggedPageAttentionv2Config
