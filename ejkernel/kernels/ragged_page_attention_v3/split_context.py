"""A cache whose pages are split over the devices of a mesh axis.

Device `i` of `n` holds the pages `[i * P / n, (i + 1) * P / n)` of `P`. It attends to those pages
of a sequence that it holds, wherever they are in the sequence, and the partial results are merged
by their log-sum-exp in float32.

The kernels need not know. Pages on other devices are marked -1, and of the pages that every
query sees whole only those of the device stay in its table: the length that is left keeps the
distances between the queries and the keys near them. So the work of a device follows the pages that
it holds. Under a window no page is left out, since the distances to older keys matter: the work of
a device follows the window.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common.paged import cache_axes
from ejkernel.kernels.common.sinks import per_query, share_of_keys
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Outputs, Spec


def over_axis(
    run: Callable[[Inputs], Outputs], inputs: Inputs, spec: Spec, axis_name: str
) -> Outputs:
    """The outputs of the whole cache from those of this device's pages, on every device."""
    partial = run(own_pages(inputs, spec, axis_name)._replace(sinks=None))
    out, lse = _merged(partial.out, partial.lse, axis_name)
    if inputs.sinks is not None:
        out = out * per_query(share_of_keys(lse, inputs.sinks))
    return Outputs(out.astype(inputs.query.dtype), lse)


def own_pages(inputs: Inputs, spec: Spec, axis_name: str) -> Inputs:
    """The call with this device's pages by their place in its share of the cache."""
    axes = cache_axes(spec.kv_layout, combined=inputs.value_pages is None)
    pages, slots = (inputs.key_pages.shape[axes.index(letter)] for letter in "pc")
    own = jnp.asarray(inputs.page_indices) - lax.axis_index(axis_name) * pages
    here = (own >= 0) & (own < pages)
    table = jnp.where(here, own, -1)
    if spec.sliding_window is not None or inputs.traced_window is not None:
        return inputs._replace(page_indices=table)
    entries = table.shape[-1]
    lens = jnp.clip(inputs.query_lens, 1, inputs.query.shape[1])
    kv_lens = jnp.minimum(inputs.kv_lens, entries * slots)
    ends = (jnp.arange(entries, dtype=jnp.int32) + 1) * slots
    seen_whole = ends <= (kv_lens - lens + 1)[..., None]  # by the first query, and so by all
    elsewhere = seen_whole & ~here
    _, table = lax.sort((elsewhere.astype(jnp.int32), table), num_keys=1, is_stable=True)
    kv_lens -= slots * elsewhere.sum(-1, dtype=jnp.int32)
    return inputs._replace(page_indices=table, kv_lens=kv_lens)


def _merged(out: jax.Array, lse: jax.Array, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """Output `[b, t, n, v]` and log-sum-exp `[b, n, t]` of the keys of all devices of an axis.

    With `w_i = exp(lse_i - max(lse))` on device `i`,

        out = sum(w_i * out_i) / sum(w_i)        lse = max(lse) + log(sum(w_i))

    in two collectives: the maximum, then both sums as one array. A partial result that saw nothing
    has `lse_i = -inf` and no weight.
    """
    largest = lax.pmax(lax.stop_gradient(lse), axis_name)
    largest = jnp.where(largest > -jnp.inf, largest, 0.0)
    weight = per_query(jnp.exp(lse - largest))
    sums = lax.psum(jnp.concatenate([out * weight, weight], axis=-1), axis_name)
    total = sums[..., -1:]
    divisor = jnp.where(total > 0, total, 1.0)
    by_head = jnp.swapaxes(divisor[..., 0], 1, 2)
    lse = jnp.where(jnp.swapaxes(total[..., 0], 1, 2) > 0, largest + jnp.log(by_head), -jnp.inf)
    return sums[..., :-1] / divisor, lse
