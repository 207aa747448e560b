"""`equinox.nn.MultiheadAttention`, its attention computed by `flash_attention`."""

# Without Equinox a type checker takes `import equinox` for this file.
# pyright: reportAttributeAccessIssue=false

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ejkernel.modules import flash_attention

_NAME = "MultiheadAttention"
Heads = tuple[jax.Array, jax.Array, jax.Array]


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """A drop-in for `equinox.nn.MultiheadAttention`: same parameters, same pytree, same call.

    Dropout draws other bits than Equinox does, with the same probability. A row that sees no key
    gives 0 where Equinox gives the mean of all values.

    >>> import jax, jax.numpy as jnp
    >>> from ejkernel.integrations.equinox import MultiheadAttention
    >>> attention = MultiheadAttention(num_heads=4, query_size=64, key=jax.random.key(0))
    >>> x = jnp.ones((128, 64))
    >>> attention(x, x, x).shape
    (128, 64)
    """

    def __call__(
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[[jax.Array, jax.Array, jax.Array], Heads] | None = None,
        platform: str | None = None,
    ) -> jax.Array:
        """Attention of `query` over `key_` and `value`.

        Args:
            query: `[queries, query_size]`.
            key_: `[keys, key_size]`.
            value: `[keys, value_size]`.
            mask: True (or 1) where a key may be seen, `[queries, keys]` or
                `[heads, queries, keys]`.
            key: the random key of dropout.
            inference: no dropout; by default what the layer was made with.
            deterministic: the old name of `inference`.
            process_heads: changes the heads of query, key and value, `[length, heads, size]`, for
                example by a rotary embedding.
            platform: as in `flash_attention`.

        Returns:
            `[queries, output_size]`.

        Raises:
            ValueError: the arguments do not fit each other.
            RuntimeError: dropout has no key.
        """
        if deterministic is not None:
            warnings.warn(
                f"{_NAME}: deterministic= is deprecated in favour of inference=.",
                DeprecationWarning,
                stacklevel=2,
            )
            inference = deterministic
        _check_sequences(query, key_, value)
        heads = (
            self._heads(self.query_proj, query),
            self._heads(self.key_proj, key_),
            self._heads(self.value_proj, value),
        )
        if process_heads is not None:
            processed = process_heads(*heads)
            if [x.shape for x in processed] != [x.shape for x in heads]:
                raise ValueError(f"{_NAME}: process_heads must not change the shape of the heads.")
            heads = processed
        dtype = jnp.result_type(*heads)
        out = flash_attention(
            *(x[None].astype(dtype) for x in heads),
            attention_mask=self._mask(mask, query.shape[0], key_.shape[0]),
            platform=platform,
            **self._dropout(key, inference),
        )
        return jax.vmap(self.output_proj)(out.reshape(query.shape[0], -1))

    def _heads(self, projection: eqx.nn.Linear, x: jax.Array) -> jax.Array:
        return jax.vmap(projection)(x).reshape(x.shape[0], self.num_heads, -1)

    def _mask(self, mask: jax.Array | None, queries: int, keys: int) -> jax.Array | None:
        """The mask with axes for batch and heads."""
        if mask is None:
            return None
        mask = jnp.asarray(mask)
        if mask.shape not in ((queries, keys), (self.num_heads, queries, keys)):
            raise ValueError(
                f"{_NAME}: mask must be [queries, keys] = {(queries, keys)} or [heads, queries, "
                f"keys] = {(self.num_heads, queries, keys)}, got {mask.shape}."
            )
        if not jnp.issubdtype(mask.dtype, jnp.integer) and mask.dtype != jnp.bool_:
            raise ValueError(
                f"{_NAME}: mask must be boolean, got {mask.dtype}; .astype(bool) makes a mask of "
                "0 and 1 boolean."
            )
        return mask.reshape((1, *(1,) * (3 - mask.ndim), *mask.shape))

    def _dropout(self, key: jax.Array | None, inference: bool | None) -> dict[str, Any]:
        inference = self.dropout.inference if inference is None else inference
        if inference or self.dropout.p == 0:
            return {}
        if key is None:
            raise RuntimeError(f"{_NAME}: dropout needs key= unless inference=True.")
        seed = jax.random.bits(key, (), "uint32")
        return {"dropout_prob": float(self.dropout.p), "dropout_seed": seed}


def _check_sequences(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    if not query.ndim == key.ndim == value.ndim == 2:
        raise ValueError(
            f"{_NAME}: query, key_ and value must be [length, size], got {query.shape}, "
            f"{key.shape} and {value.shape}; jax.vmap maps over a batch."
        )
    if key.shape[0] != value.shape[0]:
        raise ValueError(
            f"{_NAME}: key_ and value must have the same length, "
            f"got {key.shape[0]} and {value.shape[0]}."
        )
