"""Flash attention by cuDNN, through the operations that JAX has for it.

They support bfloat16 and float16, causal masks, windows, lengths, packed sequences and a bias.
Attention sinks and gradients of the log-sum-exp are computed around them, by calling the backward
operation with another log-sum-exp or other values:

- with the log-sum-exp of keys and sinks together it gives the gradients of attention with sinks;
- with values of 0 it gives the gradients of the log-sum-exp for queries, keys and bias.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import settings
from ejkernel.kernels.common.sinks import per_query, per_sink, share_of_keys, share_of_sinks
from ejkernel.kernels.flash_attention.cudnn import primitives
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device
from ejkernel.types.rules import Band, Everything, KeyLength, QueryLength, Segments

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_MOST_BYTES = 2**30  # of log-sum-exps, of which each document has a row as long as the whole


Lengths = int | jax.Array | np.ndarray  # one, or one for each batch row


class _Mask(NamedTuple):
    """A mask as cuDNN describes it."""

    causal: bool = False
    window: int | None = None  # keys that a query sees at most, its own included
    q_lengths: Lengths | None = None
    kv_lengths: Lengths | None = None
    segments: Segments | None = None

    @property
    def complete(self) -> bool:
        """Whether every query sees a key and every key is seen, whatever the arrays."""
        return self.q_lengths is None and self.kv_lengths is None and self.segments is None


def run_forward(inputs: Inputs, spec: Spec, params: FwdParams | None) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals."""
    mask = _supported_mask(inputs)
    out, lse = primitives.call_forward(*_operands(inputs, mask), **_settings(inputs, spec, mask))
    if mask.segments is not None:
        lse = _Packing(inputs, mask.segments).per_token(lse)
    seen = _seeing(inputs, mask)
    if inputs.bias is not None:  # of which a row may be -inf
        seen = seen & (lse > -jnp.inf)
    if inputs.bias is not None or not mask.complete:
        lse = jnp.where(seen, lse, -jnp.inf)
        out = jnp.where(per_query(seen), out, 0)
    if inputs.sinks is not None:
        share = per_query(share_of_keys(lse, inputs.sinks))
        out = (out.astype(jnp.float32) * share).astype(out.dtype)
    outputs = Outputs(out, lse)
    return outputs, outputs


def run_backward(
    inputs: Inputs, residuals: Outputs, d_outputs: Outputs, spec: Spec, params: BwdParams | None
) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none."""
    mask = _supported_mask(inputs)
    settings, operands = _settings(inputs, spec, mask), _operands(inputs, mask)
    packing = None if mask.segments is None else _Packing(inputs, mask.segments)
    seen = residuals.lse > -jnp.inf
    share = None if inputs.sinks is None else share_of_keys(residuals.lse, inputs.sinks)

    def gradients(
        value: jax.Array, lse: jax.Array, out: jax.Array, d_out: jax.Array
    ) -> list[jax.Array]:
        if inputs.bias is not None or not mask.complete:
            lse = jnp.where(seen, lse, jnp.inf)  # weights of 0 for a row that sees nothing
        rows = lse if packing is None else packing.per_document(lse)
        others = [*operands[:2], value, *operands[3:]]
        return primitives.call_backward(*others, rows, out, d_out.astype(out.dtype), **settings)

    lse = residuals.lse if share is None else residuals.lse - jnp.log(share)
    found = gradients(inputs.value, lse, residuals.out, d_outputs.out)
    found = _with_lse_gradient(found, gradients, inputs, residuals, d_outputs.lse, seen)
    d_query, d_key, d_value, *rest = found
    if not mask.complete:
        keys = _seen_keys(inputs, mask)[..., None, None]
        d_query = jnp.where(_seeing(inputs, mask)[:, 0, :, None, None], d_query, 0)
        d_key, d_value = jnp.where(keys, d_key, 0), jnp.where(keys, d_value, 0)
    d_sinks = None
    if inputs.sinks is not None:
        products = residuals.out.astype(jnp.float32) * d_outputs.out.astype(jnp.float32)
        taken = jnp.swapaxes(products.sum(-1), 1, 2) * share_of_sinks(residuals.lse, inputs.sinks)
        d_sinks = per_sink(-taken.sum((0, 2)), inputs.sinks)
    d_bias = rest[0] if rest else None
    return Inputs(d_query, d_key, d_value, bias=d_bias, sinks=d_sinks, mask=None)


def _with_lse_gradient(
    found: list[jax.Array],
    gradients: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], list[jax.Array]],
    inputs: Inputs,
    residuals: Outputs,
    d_lse: jax.Array,
    seen: jax.Array,
) -> list[jax.Array]:
    """`found` plus the gradients of the log-sum-exp: weights times `d_lse` for the logits.

    The backward pass computes weights * (d_out @ value.T - sum(d_out * out)) for the logits. With
    values of 0, and `d_out` and `out` whose products sum to -d_lse, that is weights * d_lse.
    Where nobody uses the log-sum-exp XLA knows that its gradient is 0, and leaves this out.
    """

    def added(found: list[jax.Array]) -> list[jax.Array]:
        of_rows = jnp.where(seen, d_lse, 0.0)
        size = jnp.abs(of_rows).max()
        size = jnp.where(size > 0.0, size, 1.0)
        scaled = per_query(of_rows / size)  # within what float16 can say
        coarse = scaled.astype(residuals.out.dtype)
        fine = (scaled - coarse.astype(scaled.dtype)).astype(coarse.dtype)
        width = ((0, 0), (0, 0), (0, 0), (0, residuals.out.shape[3] - 2))
        out = jnp.pad(jnp.concatenate([-coarse, -fine], -1), width)
        d_out = jnp.pad(jnp.ones_like(out[..., :2]), width)
        more = gradients(jnp.zeros_like(inputs.value), residuals.lse, out, d_out)
        more[2] = jnp.zeros_like(more[2])  # the log-sum-exp knows no values
        return [
            (x.astype(jnp.float32) + size * y.astype(jnp.float32)).astype(x.dtype)
            for x, y in zip(found, more, strict=True)
        ]

    return jax.lax.cond(jnp.any(d_lse != 0.0), added, lambda found: found, found)


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why cuDNN does not support the call, or None."""
    if reason := primitives.why_missing(device):
        return reason
    query, value = inputs.query, inputs.value
    dtypes = {x.dtype for x in (*inputs[:3], inputs.bias) if x is not None}
    if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
        return f"needs bfloat16 or float16 alone, got {', '.join(sorted(map(str, dtypes)))}"
    hopper = (device.compute_capability or (9, 0)) >= (9, 0)
    for name, dim in (("head", query.shape[3]), ("value", value.shape[3])):
        most = 256 if hopper else 128
        if dim % 8 or not 8 <= dim <= most:
            return f"needs a {name} dim that is a multiple of 8 up to {most}, got {dim}"
    version = primitives.version()
    if query.shape[3] != value.shape[3] and not (hopper and (version is None or version >= 91000)):
        return "needs a value dim equal to the head dim before cuDNN 9.10 and before Hopper"
    bias = inputs.bias
    if bias is not None and bias.shape[2:] != (query.shape[1], inputs.key.shape[1]):
        return f"needs a bias for every query and key, got one of shape {bias.shape}"
    if query.shape[1] == inputs.key.shape[1] == 1:
        return "needs more than one query and one key"
    mask = _read(inputs)
    if isinstance(mask, str):
        return mask
    return None if mask.segments is None else _why_not_packed(inputs, mask.segments, hopper)


def _why_not_packed(inputs: Inputs, segments: Segments, hopper: bool) -> str | None:
    query, version = inputs.query, primitives.version()
    if not (hopper and (version is None or version >= 90600)):
        return "needs a Hopper GPU and cuDNN 9.6 for packed documents"
    if inputs.bias is not None:
        return "does not support a bias with packed documents"
    if query.shape[3] != inputs.value.shape[3]:
        return "needs a value dim equal to the head dim for packed documents"
    if query.size >= 2**31 or inputs.key.size >= 2**31:
        return "counts the elements of packed documents in 32 bits, which is not enough"
    statistics = 4 * math.prod(query.shape[:3]) * (segments.documents or 0)
    if statistics > _MOST_BYTES:
        return f"keeps {statistics} bytes of log-sum-exps for {segments.documents} documents"
    return None


def why_not_backward(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why cuDNN does not support the backward pass, or None."""
    if reason := why_not(inputs, spec, device):
        return reason
    if settings.deterministic():
        return "is nondeterministic, which EJKERNEL_DETERMINISTIC forbids"
    if inputs.bias is not None and (inputs.query.shape[1] % 2 or inputs.key.shape[1] % 2):
        return "needs even numbers of queries and keys for the gradient of a bias"
    return None


def _supported_mask(inputs: Inputs) -> _Mask:
    mask = _read(inputs)
    if isinstance(mask, str):
        raise NotImplementedError(f"flash_attention: cuDNN {mask}.")
    return mask


def _read(inputs: Inputs) -> _Mask | str:
    """The mask as cuDNN describes it, or why it does not support it."""
    queries, keys = inputs.query.shape[1], inputs.key.shape[1]
    lows, highs, lengths, segments = [], [], {}, None
    for part in (inputs.mask or Everything()).parts():
        if isinstance(part, Band) and part.q_positions is None:
            if any(not isinstance(end, int | None) for end in (part.low, part.high)):
                return "needs causal offsets and windows that are numbers, not arrays"
            lows += [] if part.low is None else [part.low]
            highs += [] if part.high is None else [part.high]
        elif isinstance(part, KeyLength | QueryLength) and type(part) not in lengths:
            lengths[type(part)] = part.length
        elif isinstance(part, Segments) and segments is None:
            if part.documents is None:
                return "supports packed documents of cum_seqlens_q only, not other segment ids"
            segments = part
        elif not isinstance(part, Everything):
            return f"does not support masks of {part!r}"
    low, high = max(lows, default=-queries), min(highs, default=keys)
    windowed, causal = low > 1 - queries, high < keys - 1
    if (causal and high != 0) or (windowed and not (causal and low <= 0)):
        return "supports only causal masks without offset, and windows that end at the query"
    if segments is not None and lengths:
        return "does not support lengths with packed documents"
    if windowed and (lengths or segments is not None or inputs.bias is not None or queries > keys):
        return "supports a window without lengths, documents or bias, up to as many queries as keys"
    return _Mask(
        causal,
        1 - low if windowed else None,
        lengths.get(QueryLength),
        lengths.get(KeyLength),
        segments,
    )


def _seeing(inputs: Inputs, mask: _Mask) -> jax.Array:
    """Which queries see a key, [b or 1, 1, t]."""
    if mask.segments is not None:
        return (mask.segments.q_ids >= 0)[:, None]
    index = jnp.arange(inputs.query.shape[1], dtype=jnp.int32)[None]
    q_lengths, kv_lengths = _lengths(inputs, mask)
    return ((index < q_lengths[:, None]) & (kv_lengths > 0)[:, None])[:, None]


def _seen_keys(inputs: Inputs, mask: _Mask) -> jax.Array:
    """Which keys a query may see, [b or 1, s]."""
    if mask.segments is not None:
        return mask.segments.kv_ids >= 0
    index = jnp.arange(inputs.key.shape[1], dtype=jnp.int32)[None]
    q_lengths, kv_lengths = _lengths(inputs, mask)
    return (index < kv_lengths[:, None]) & (q_lengths > 0)[:, None]


def _lengths(inputs: Inputs, mask: _Mask) -> tuple[jax.Array, jax.Array]:
    """Queries and keys in use, [b] each."""

    def of(given: Lengths | None, x: jax.Array) -> jax.Array:
        length = jnp.asarray(x.shape[1] if given is None else given, jnp.int32)
        return jnp.broadcast_to(jnp.clip(length, 0, x.shape[1]), x.shape[:1])

    return of(mask.q_lengths, inputs.query), of(mask.kv_lengths, inputs.key)


class _Packing:
    """Where the documents of each row lie, and how cuDNN numbers their log-sum-exps.

    To cuDNN every document is a batch row of its own, as long as the whole: [b * m, n, t].
    """

    def __init__(self, inputs: Inputs, segments: Segments) -> None:
        batch, tokens, heads, _ = inputs.query.shape
        count = segments.documents or 1
        ids = jnp.broadcast_to(segments.q_ids, (batch, tokens))
        self.ids = jnp.where(ids < 0, count, ids)  # [b, t], padding after the last
        number = jnp.arange(count + 1, dtype=jnp.int32)
        before = self.ids[:, None, :] < number[:, None]
        self.starts = before.sum(-1, dtype=jnp.int32)  # [b, m + 1]
        self.lengths = self.starts[:, 1:] - self.starts[:, :-1]  # [b, m]
        self.shape = (batch, count, heads, tokens)

    def offsets(self, x: jax.Array) -> jax.Array:
        """Where in the memory of `x` each document begins, [b, m + 1], unused ones at its end."""
        batch, tokens, heads, dim = x.shape
        row = tokens * jnp.arange(batch, dtype=jnp.int32)[:, None]
        used = (row + self.starts[:, :-1]).reshape(-1) * (heads * dim)
        return jnp.pad(used, (0, batch), constant_values=x.size).reshape(batch, -1)

    def per_token(self, rows: jax.Array) -> jax.Array:
        """From rows of documents to [b, n, t]."""
        batch, count, heads, tokens = self.shape
        ids = jnp.minimum(self.ids, count - 1)  # [b, t]
        place = jnp.arange(tokens, dtype=jnp.int32) - jnp.take_along_axis(self.starts, ids, 1)
        row = (ids + count * jnp.arange(batch, dtype=jnp.int32)[:, None]) * heads
        head = jnp.arange(heads, dtype=jnp.int32)[:, None]
        index = (row[:, None] + head) * tokens + place[:, None]
        return rows.reshape(-1).at[index].get(mode="promise_in_bounds")

    def per_document(self, lse: jax.Array) -> jax.Array:
        """From [b, n, t] to rows of documents; their ends, past a document, are never read."""
        batch, count, heads, tokens = self.shape
        place = self.starts[:, :-1, None] + jnp.arange(tokens, dtype=jnp.int32)
        lane = jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, 1, heads, 1)
        index = lane * tokens + jnp.minimum(place, tokens - 1)[:, :, None]
        rows = lse.reshape(-1).at[index].get(mode="promise_in_bounds")
        return rows.reshape(batch * count, heads, tokens)


def _operands(inputs: Inputs, mask: _Mask) -> list[jax.Array]:
    """Query, key, value, bias, lengths and offsets of queries and keys; empty where there is none.

    The last two are the pages of a KV cache, which flash attention does not have.
    """
    query, key, value = inputs[:3]
    none = jnp.zeros(0, query.dtype)
    lengths, offsets = (none, none), (none, none)
    if mask.segments is not None:
        packing = _Packing(inputs, mask.segments)
        lengths = (packing.lengths, packing.lengths)
        offsets = (packing.offsets(query), packing.offsets(key))
    elif not mask.complete:
        lengths = _lengths(inputs, mask)
    bias = none if inputs.bias is None else inputs.bias
    return [query, key, value, bias, *lengths, *offsets, none, none]


def _settings(inputs: Inputs, spec: Spec, mask: _Mask) -> dict[str, Any]:
    """The static arguments of both passes."""
    padded = not mask.complete and mask.segments is None
    return {
        "scale": float(spec.softmax_scale),
        "causal": mask.causal,
        "padded": padded,
        "window": mask.window,
        "has_bias": inputs.bias is not None,
    }


_FEATURES = frozenset({"causal", "window", "segments", "lengths", "bias", "sinks"})

IMPLEMENTATION = Implementation(
    forward=Pass(run=run_forward, features=_FEATURES, why_not=why_not),
    backward=Pass(run=run_backward, features=_FEATURES, why_not=why_not_backward),
)
