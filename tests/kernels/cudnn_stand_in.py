"""What cuDNN computes, in plain `jnp`: the numbers it is said to give, NaN where it writes none."""

import jax
import jax.numpy as jnp


def forward(*operands, scale, causal, padded, window, has_bias):
    """Output and log-sum-exp; of packed documents in rows of their own, as long as the whole."""
    query, _, value = operands[:3]
    used, logits, documents = _logits(operands, scale, causal, padded, window, has_bias)
    lse = jax.nn.logsumexp(logits, -1)
    weights = jnp.exp(logits - lse[..., None])
    value = jnp.repeat(value, query.shape[2] // value.shape[2], 2).astype(jnp.float32)
    out = jnp.einsum("bnts,bsnv->btnv", weights, value)
    out = jnp.where(used[0][..., None, None], out, jnp.nan).astype(query.dtype)
    lse = jnp.where(used[0][:, None], lse, jnp.nan)
    return out, lse if documents is None else _in_rows(lse, documents, query.shape)


def backward(*operands, scale, causal, padded, window, has_bias):
    """Gradients of query, key, value and bias."""
    *operands, lse, out, d_out = operands
    query, key, value, bias = operands[:4]
    used, logits, documents = _logits(operands, scale, causal, padded, window, has_bias)
    if documents is not None:
        lse = _from_rows(lse, documents, query.shape)
    groups = query.shape[2] // key.shape[2]
    wide = lambda x: x.astype(jnp.float32)
    d_out = jnp.where(used[0][..., None, None], wide(d_out), 0)
    out = jnp.where(used[0][..., None, None], wide(out), 0)
    lse = jnp.where(used[0][:, None], lse, jnp.inf)
    weights = jnp.exp(logits - lse[..., None])
    many_keys, many_values = (jnp.repeat(wide(x), groups, 2) for x in (key, value))
    d_weights = jnp.einsum("btnv,bsnv->bnts", d_out, many_values)
    delta = jnp.swapaxes((d_out * out).sum(-1), 1, 2)[..., None]
    d_logits = jnp.where(weights > 0, weights * (d_weights - delta), 0)
    d_query = scale * jnp.einsum("bnts,bsnh->btnh", d_logits, many_keys)
    d_key = scale * jnp.einsum("bnts,btnh->bsnh", d_logits, wide(query))
    d_value = jnp.einsum("bnts,btnv->bsnv", weights, d_out)
    together = lambda x: x.reshape(*x.shape[:2], -1, groups, x.shape[3]).sum(3)
    results = [
        jnp.where(used[0][..., None, None], d_query, jnp.nan).astype(query.dtype),
        jnp.where(used[1][..., None, None], together(d_key), jnp.nan).astype(key.dtype),
        jnp.where(used[1][..., None, None], together(d_value), jnp.nan).astype(value.dtype),
    ]
    if has_bias:
        axes = tuple(i for i in range(2) if bias.shape[i] == 1)
        results.append(d_logits.sum(axes, keepdims=True).astype(bias.dtype))
    return results


def _logits(operands, scale, causal, padded, window, has_bias):
    """Which queries and keys are in use, the logits, and the documents that tokens are in."""
    query, key, _, bias, q_lengths, kv_lengths, q_offsets, kv_offsets, *pages = operands
    assert all(page.size == 0 for page in pages)
    (batch, queries, heads, _), keys = query.shape, key.shape[1]
    many = jnp.repeat(key, heads // key.shape[2], 2)
    logits = scale * jnp.einsum(
        "btnh,bsnh->bnts", query.astype(jnp.float32), many.astype(jnp.float32)
    )
    if has_bias:
        assert bias.dtype == query.dtype
        assert bias.shape[2:] == logits.shape[2:]
        logits += bias.astype(jnp.float32)
    row, column = jnp.arange(queries)[:, None], jnp.arange(keys)
    visible = jnp.ones((batch, queries, keys), bool)
    if causal:
        visible &= column <= row
    if window is not None:
        assert causal
        assert not padded
        assert not has_bias
        assert queries <= keys
        visible &= column > row - window
    used = [jnp.ones((batch, queries), bool), jnp.ones((batch, keys), bool)]
    documents = None
    if padded:
        assert q_lengths.dtype == kv_lengths.dtype == jnp.int32
        used = [row[:, 0] < q_lengths[:, None], column < kv_lengths[:, None]]
        visible &= used[0][:, :, None] & used[1][:, None]
    elif q_offsets.ndim == 2:
        assert window is None
        assert not has_bias
        assert q_lengths.shape == (batch, q_offsets.shape[1] - 1)
        documents = _places(q_lengths, q_offsets, query)
        of_keys = _places(kv_lengths, kv_offsets, key)
        used = [documents[0] >= 0, of_keys[0] >= 0]
        visible = (documents[0][:, :, None] == of_keys[0][:, None]) & used[0][:, :, None]
        if causal:
            visible &= of_keys[1][:, None] <= documents[1][:, :, None]
    return used, jnp.where(visible[:, None], logits, -jnp.inf), documents


def _places(lengths, offsets, x):
    """The document that each token is in (or -1), and its place in it, [b, t]."""
    stride = x.shape[2] * x.shape[3]
    starts = (offsets.reshape(-1) // stride)[: lengths.size, None]
    token = jnp.arange(x.shape[0] * x.shape[1])
    inside = (token >= starts) & (token < starts + lengths.reshape(-1)[:, None])
    document = jnp.where(inside.any(0), inside.argmax(0), -1)
    place = token - starts[document, 0]
    return document.reshape(x.shape[:2]), place.reshape(x.shape[:2]), lengths.size


def _in_rows(lse, documents, shape):
    document, place, count = documents
    rows = jnp.full((count, shape[2], shape[1]), jnp.nan)
    document = jnp.where(document < 0, count, document)  # dropped
    return rows.at[document, :, place].set(jnp.swapaxes(lse, 1, 2), mode="drop")


def _from_rows(rows, documents, shape):
    document, place, _ = documents
    return jnp.swapaxes(rows[document, :, place], 1, 2)
