"""What a `MaskInfo` holds, and the few things everything else of it is built from."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ejkernel.types import mask_ids
from ejkernel.types.arguments import concrete, numbers
from ejkernel.types.conversion import KEY_PADDING_POSITION, segment_positions
from ejkernel.types.rule_arrays import take
from ejkernel.types.rules import Rule
from ejkernel.types.sharding import AxisName

if TYPE_CHECKING:
    from typing import Self
else:
    # The checker that tests run sees one method at a time, where `Self` means nothing.
    Self = Any

_BOOL = np.dtype(bool)
_CHILDREN = ("rule", "q_positions", "kv_positions", "ids_rule", "q_ids", "kv_ids")
_STATIC = (
    "q_len",
    "kv_len",
    "mask_dtype",
    "batch_axis_name",
    "qheads_axis_name",
    "kvheads_axis_name",
    "sequence_axis_name",
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MaskBase:
    """The fields of a `MaskInfo`, its pytree, its cache.

    Attributes:
        rule: which pairs are allowed. This alone decides; the rest is about tokens.
        q_len: number of queries.
        kv_len: number of keys.
        q_positions: positions of the queries, where they were given or are no longer derivable.
        kv_positions: the same for keys.
        ids_rule: the rule that segment ids are read from, where that is not `rule`.
        q_ids: segment ids to report for queries instead of those of the rule.
        kv_ids: the same for keys.
        mask_dtype: dtype of `attention_mask`.
        batch_axis_name: mesh axes of the batch.
        qheads_axis_name: mesh axes of the query heads.
        kvheads_axis_name: mesh axes of the key heads.
        sequence_axis_name: mesh axes of the sequence.
    """

    rule: Rule
    q_len: int
    kv_len: int
    q_positions: Int[Array, "#b t"] | Int[Array, "t"] | None = None
    kv_positions: Int[Array, "#b s"] | Int[Array, "s"] | None = None
    ids_rule: Rule | None = None
    q_ids: Int[Array, "#b t"] | Int[Array, "t"] | None = None
    kv_ids: Int[Array, "#b s"] | Int[Array, "s"] | None = None
    mask_dtype: np.dtype = _BOOL
    batch_axis_name: AxisName = ("dp", "fsdp")
    qheads_axis_name: AxisName = "tp"
    kvheads_axis_name: AxisName = "tp"
    sequence_axis_name: AxisName = "sp"

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, cls._unflatten, _flatten)

    @classmethod
    def _unflatten(cls, static: tuple, children: Any) -> Self:
        # No `__init__`: JAX may put anything where the arrays stood.
        mask = object.__new__(cls)
        mask.__dict__.update(zip(_STATIC, static, strict=True))
        mask.__dict__.update(zip(_CHILDREN, children, strict=True))
        return mask

    @property
    def batch_size(self) -> int | None:
        """Number of batch rows; None where `vmap` has taken the batch axis away."""
        sizes = [rule.batch_size for rule in (self.rule, self.ids_rule) if rule is not None]
        arrays = (self.q_ids, self.kv_ids, self.q_positions, self.kv_positions)
        sizes += [array.shape[0] for array in arrays if array is not None and array.ndim == 2]
        return max((size for size in sizes if size is not None), default=None)

    @property
    def shape(self) -> tuple[int, ...]:
        """`(batch_size, q_len, kv_len)`, without the batch where there is none."""
        lengths = (self.q_len, self.kv_len)
        return lengths if self.batch_size is None else (self.batch_size, *lengths)

    def _changed(self, **changes: Any) -> Self:
        """A copy with other field values; nothing cached is carried over."""
        values = {name: getattr(self, name) for name in (*_CHILDREN, *_STATIC)} | changes
        return type(self)._unflatten(
            tuple(values[name] for name in _STATIC), tuple(values[name] for name in _CHILDREN)
        )

    def _cached(self, key: Any, compute: Callable[[], Any]) -> Any:
        """`compute()`, once; what was computed under a trace belongs to it and is not kept."""
        cache = self.__dict__.setdefault("_cache", {})
        if key in cache:
            return cache[key]
        value = compute()
        if concrete(value):
            cache[key] = value
        return value

    def _with_numbers(self, where: str, value: Any) -> tuple[Self, Any]:
        """One number per batch row; a mask of batch 1 takes the batch of the numbers."""
        value = numbers(f"MaskInfo.{where}", value, self.batch_size)
        if jnp.ndim(value) == 1 and value.shape[0] != self.batch_size:  # type: ignore
            return self._with_batch(value.shape[0]), value  # type: ignore
        return self, value

    def _with_batch(self, size: int) -> Self:
        grow = lambda array: (
            None if array is None else jnp.broadcast_to(array, (size, array.shape[1]))
        )
        return self._changed(
            rule=self.rule.with_batch(size),
            ids_rule=None if self.ids_rule is None else self.ids_rule.with_batch(size),
            q_positions=grow(self.q_positions),
            kv_positions=grow(self.kv_positions),
            q_ids=grow(self.q_ids),
            kv_ids=grow(self.kv_ids),
        )

    def _restricted(self, rule: Rule, **changes: Any) -> Self:
        """The mask with one rule more."""
        if self.batch_size is not None:
            rule = rule.with_batch(self.batch_size)
        ids_rule = self.ids_rule
        if ids_rule is not None:
            ids_rule = ids_rule & mask_ids.id_rules(rule)
        return self._changed(rule=self.rule & rule, ids_rule=ids_rule, **changes)

    def _sliced(self, q_start: Any, q_len: int, k_start: Any, k_len: int) -> Self:
        """The mask of a rectangle that lies inside this one."""
        q_positions, kv_positions = self.q_positions, self.kv_positions
        # Once tokens are cut away, positions can no longer be counted from the ids.
        if mask_ids.has_segments(self._ids_source):
            q_positions, kv_positions = self._positions()
        part = lambda array, start, length: (
            None if array is None else take(array, start, length, -1, fill=-1)
        )
        cut = lambda rule: rule.slice(q_start, q_len, k_start, k_len)
        return self._changed(
            rule=cut(self.rule),
            ids_rule=None if self.ids_rule is None else cut(self.ids_rule),
            q_len=q_len,
            kv_len=k_len,
            q_positions=part(q_positions, q_start, q_len),
            kv_positions=part(kv_positions, k_start, k_len),
            q_ids=part(self.q_ids, q_start, q_len),
            kv_ids=part(self.kv_ids, k_start, k_len),
        )

    @property
    def _ids_source(self) -> Rule:
        return self.rule if self.ids_rule is None else self.ids_rule

    def _ids(self) -> tuple[jax.Array, jax.Array]:
        """The segment ids to report."""
        return self._cached("ids", lambda: mask_ids.reported(self))

    def _valid(self) -> tuple[jax.Array, jax.Array]:
        """Which queries and keys are tokens rather than padding: where the ids are not negative."""
        return self._cached("valid", lambda: mask_ids.valid(self))

    def _positions(self) -> tuple[jax.Array, jax.Array]:
        return self._cached("positions", self._compute_positions)

    def _compute_positions(self) -> tuple[jax.Array, jax.Array]:
        q_positions, kv_positions = self.q_positions, self.kv_positions
        if q_positions is None or kv_positions is None:
            # Of the segments themselves: chunks and token types do not move a token.
            q_ids, kv_ids = mask_ids.derived(self)
            if q_positions is None:
                q_positions = segment_positions(q_ids, padding=-1)
            if kv_positions is None:
                kv_positions = segment_positions(kv_ids, padding=KEY_PADDING_POSITION)
        return q_positions, kv_positions


def _flatten(mask: MaskBase) -> tuple[tuple, tuple]:
    values = mask.__dict__
    return tuple(values[n] for n in _CHILDREN), tuple(values[n] for n in _STATIC)


def _flatten_with_keys(mask: MaskBase) -> tuple[tuple, tuple]:
    children, static = _flatten(mask)
    keys = map(jax.tree_util.GetAttrKey, _CHILDREN)
    return tuple(zip(keys, children, strict=True)), static
