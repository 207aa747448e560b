"""`MaskInfo`, one object for a mask in all its representations, and the plain conversions."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from ejkernel.types import debug, mask_ids
from ejkernel.types.arguments import integers
from ejkernel.types.conversion import (
    attention_mask_to_qkv_cu_seqlens as attention_mask_to_qkv_cu_seqlens,
)
from ejkernel.types.conversion import cu_seqlens_to_mask as cu_seqlens_to_mask
from ejkernel.types.conversion import mask_to_segment_ids as mask_to_segment_ids
from ejkernel.types.conversion import (
    qkv_cu_seqlens_to_attention_mask as qkv_cu_seqlens_to_attention_mask,
)
from ejkernel.types.conversion import qkv_cu_seqlens_to_qkv_masks as qkv_cu_seqlens_to_qkv_masks
from ejkernel.types.conversion import qkv_masks_to_cu_seqlens as qkv_masks_to_cu_seqlens
from ejkernel.types.conversion import segment_ids_to_mask as segment_ids_to_mask
from ejkernel.types.conversion import segment_ids_to_qkv_masks as segment_ids_to_qkv_masks
from ejkernel.types.mask_base import Self
from ejkernel.types.mask_constructors import MaskConstructors, _ids_of_pairs
from ejkernel.types.rules import And, Or, Rule, Segments
from ejkernel.types.sharding import AxisName, fitted_sharding
from ejkernel.types.sharding import MaskSharding as MaskSharding


class _Keep:
    """Stands for "as it is" where None means "none"."""

    def __repr__(self) -> str:
        return "KEEP"


KEEP = _Keep()


@debug.watch
class MaskInfo(MaskConstructors):
    """Which keys each query may see, from segments, masks or lengths, through transformations.

    A mask is held as rules; nothing of size Q x K exists until `attention_mask` or `bias` is read.
    It is immutable and a pytree whose arrays all begin with the batch axis, so that it passes
    through `jit`, `vmap`, `grad` and `shard_map`. Reading it never changes what it means.

    >>> import jax.numpy as jnp
    >>> mask = MaskInfo.from_segments(jnp.array([[1, 1, 2, 2, -1]])).apply_causal()
    >>> mask.shape
    (1, 5, 5)
    >>> mask.attention_mask[0, 0].astype(int).tolist()
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
    """

    def replace(
        self,
        *,
        attention_mask: Any = KEEP,
        q_segment_ids: Any = KEEP,
        kv_segment_ids: Any = KEEP,
        cu_seqlens_q: Any = KEEP,
        cu_seqlens_kv: Any = KEEP,
        q_positions: Any = KEEP,
        kv_positions: Any = KEEP,
        batch_axis_name: AxisName | _Keep = KEEP,
        qheads_axis_name: AxisName | _Keep = KEEP,
        kvheads_axis_name: AxisName | _Keep = KEEP,
        sequence_axis_name: AxisName | _Keep = KEEP,
    ) -> Self:
        """A mask with some of its parts replaced; what is not named stays.

        Args:
            attention_mask: a mask of pairs of this mask's lengths to take the place of all rules;
                None leaves only what the segment ids say.
            q_segment_ids: ids `(B, Q)` to take the place of those in the rules; None drops the
                segments of queries and keys.
            kv_segment_ids: ids `(B, K)`, likewise.
            cu_seqlens_q: start and end pairs `(2 B,)`, another way to give `q_segment_ids`.
            cu_seqlens_kv: another way to give `kv_segment_ids`.
            q_positions: positions `(B, Q)`; None to count them in the segments.
            kv_positions: positions `(B, K)`, likewise.
            batch_axis_name: mesh axes of the batch.
            qheads_axis_name: mesh axes of the query heads.
            kvheads_axis_name: mesh axes of the key heads.
            sequence_axis_name: mesh axes of the sequence.

        Returns:
            The new mask.

        Raises:
            ValueError: if a shape does not fit, or both ids and lengths are given for one side.

        >>> import jax.numpy as jnp
        >>> mask = MaskInfo.from_segments(jnp.array([[0, 0, 0]])).apply_causal()
        >>> mask = mask.replace(q_segment_ids=jnp.array([[0, 0, -1]]))
        >>> mask.attention_mask[0, 0].astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 0]]
        """
        mask = self
        if attention_mask is not KEEP:
            mask = mask._with_mask(attention_mask)
        q_ids = self._new_ids("q", q_segment_ids, cu_seqlens_q, self.q_len)
        kv_ids = self._new_ids("kv", kv_segment_ids, cu_seqlens_kv, self.kv_len)
        if q_ids is not KEEP or kv_ids is not KEEP:
            mask = mask._with_ids(q_ids, kv_ids)
        positions = {"q_positions": q_positions, "kv_positions": kv_positions}
        names = {
            "batch_axis_name": batch_axis_name,
            "qheads_axis_name": qheads_axis_name,
            "kvheads_axis_name": kvheads_axis_name,
            "sequence_axis_name": sequence_axis_name,
        }
        cleared = {name: None for name, value in positions.items() if value is None}
        given = {name: None if value is KEEP else value for name, value in positions.items()}
        mask = mask._changed(**{k: v for k, v in names.items() if v is not KEEP}, **cleared)
        return mask._with_positions("MaskInfo.replace", **given)

    def get_shardings(self, sequence_parallel: bool = False, *, mesh: Any) -> MaskSharding:
        """How each representation of the mask lies on a mesh.

        Axis names that the mesh lacks are dropped, and so are axes that do not divide a dimension.

        Args:
            sequence_parallel: shard the sequence over `sequence_axis_name` too: queries of the mask
                of pairs, queries and keys of ids and positions.
            mesh: a `jax.sharding.Mesh`.

        Returns:
            A `NamedSharding` for the mask of pairs, for ids, and for positions that were given;
            None for the rest.

        >>> import jax
        >>> mask = MaskInfo.from_random(batch_size=2, q_len=8)
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("dp",))
        >>> tuple(mask.get_shardings(mesh=mesh).q_segment_ids.spec)
        ('dp', None)
        """
        batch = self.batch_size or 1
        sequence = self.sequence_axis_name if sequence_parallel else None
        tokens = lambda length: fitted_sharding(
            mesh, (batch, length), (self.batch_axis_name, sequence)
        )
        return MaskSharding(
            attention_mask=fitted_sharding(
                mesh,
                (batch, self.rule.heads, self.q_len, self.kv_len),
                (self.batch_axis_name, self.qheads_axis_name, sequence, None),
            ),
            q_segment_ids=tokens(self.q_len),
            kv_segment_ids=tokens(self.kv_len),
            q_positions=None if self.q_positions is None else tokens(self.q_len),
            kv_positions=None if self.kv_positions is None else tokens(self.kv_len),
        )

    @staticmethod
    def get_empty_sharding() -> MaskSharding:
        """A `MaskSharding` of nothing.

        >>> MaskInfo.get_empty_sharding().attention_mask is None
        True
        """
        return MaskSharding()

    def visualize(
        self,
        block_size: int = 32,
        batch: int = 0,
        head: int = 0,
        fit_in_screen: bool = True,
        max_rows: int = 32,
        max_cols: int = 64,
        charset: Literal["unicode", "ascii"] = "unicode",
        show_segments: bool = True,
        return_str: bool = False,
    ) -> str | None:
        """Print the mask of one head of one batch row, block by block.

        A block is full if all its pairs are allowed, empty if none is, else partial.

        Args:
            block_size: queries and keys in a block.
            batch: the batch row.
            head: the head.
            fit_in_screen: draw larger blocks where there would be more than `max_rows` rows or
                `max_cols` columns of them.
            max_rows: see `fit_in_screen`.
            max_cols: see `fit_in_screen`.
            charset: `"unicode"` or `"ascii"`.
            show_segments: label rows and columns of blocks with their segment ids.
            return_str: return the text instead of printing it.

        Returns:
            None, or the text.

        Raises:
            IndexError: if the mask has no such batch row or head.
            ValueError: if the character set is unknown, or the mask is being traced.

        >>> import jax.numpy as jnp
        >>> mask = MaskInfo.from_segments(jnp.array([[0, 0, 1, 1]]))
        >>> mask.visualize(block_size=2, charset="ascii", show_segments=False)
        Attention mask (batch=0, head=0) block=(2x2) mask_shape=(1, 1, 4, 4)
          ====
        ||##  ||
        ||  ##||
          ====
        Legend mask: full='██'/##, partial='░░'/.., empty='  '
        """
        from ejkernel.types.render import render_text

        text = render_text(
            self,
            block_size,
            batch,
            head,
            fit_in_screen,
            max_rows,
            max_cols,
            charset,
            show_segments,
        )
        if return_str:
            return text
        print(text)
        return None

    def to_svg(self, batch: int = 0, head: int = 0, max_blocks: int = 64) -> str:
        """A picture of one head of one batch row, as SVG.

        Args:
            batch: the batch row.
            head: the head.
            max_blocks: draw at most this many blocks along each side.

        Returns:
            An `<svg>` element.

        Raises:
            IndexError: if the mask has no such batch row or head.
            ValueError: if the mask is being traced.

        >>> MaskInfo.from_random(batch_size=1, q_len=8).to_svg()[:4]
        '<svg'
        """
        from ejkernel.types.svg import render_svg

        return render_svg(self, batch, head, max_blocks)

    def _repr_html_(self) -> str:
        from ejkernel.types.svg import render_html

        return render_html(self)

    def __repr__(self) -> str:
        batch = "" if self.batch_size is None else f"batch_size={self.batch_size}, "
        return f"MaskInfo({batch}q_len={self.q_len}, kv_len={self.kv_len}, rule={self.rule!r})"

    def _with_mask(self, attention_mask: Any) -> Self:
        if attention_mask is None:
            return self._changed(rule=Segments(*self._ids()), ids_rule=None)
        given = type(self).from_attention_mask(attention_mask)
        if given.shape[1:] != (self.q_len, self.kv_len):
            raise ValueError(
                "MaskInfo.replace: attention_mask must be of this mask's lengths "
                f"{(self.q_len, self.kv_len)}, got {given.shape[1:]}."
            )
        return self._changed(rule=given.rule, ids_rule=None, q_ids=None, kv_ids=None)

    def _new_ids(self, side: str, ids: Any, cu_seqlens: Any, length: int) -> Any:
        """Ids of one side as an array, None, or KEEP."""
        if ids is not KEEP and cu_seqlens is not KEEP:
            raise ValueError(
                f"MaskInfo.replace: give {side}_segment_ids or cu_seqlens_{side}, not both."
            )
        if ids is None or cu_seqlens is None:
            return None
        if cu_seqlens is not KEEP:
            ids = _ids_of_pairs(f"MaskInfo.replace: cu_seqlens_{side}", cu_seqlens, length)
        if ids is KEEP:
            return KEEP
        ids = integers(f"MaskInfo.replace: {side}_segment_ids", ids, 2)
        if ids.shape[1] != length or ids.shape[0] not in (1, self.batch_size):
            raise ValueError(
                f"MaskInfo.replace: {side}_segment_ids must have shape "
                f"{(self.batch_size, length)}, got {ids.shape}."
            )
        return jnp.broadcast_to(ids, (self.batch_size, length))

    def _with_ids(self, q_ids: Any, kv_ids: Any) -> Self:
        """The mask with other segments, or none, wherever its rules speak of segments."""
        if q_ids is None or kv_ids is None:
            segments = None
        else:
            old_q, old_kv = mask_ids.derived(self)
            segments = Segments(
                old_q if q_ids is KEEP else q_ids, old_kv if kv_ids is KEEP else kv_ids
            )
        rule = _with_segments(self.rule, segments)
        if segments is not None and "segments" not in self.rule.features():
            rule = rule & segments
        ids_rule = None
        if self.ids_rule is not None or not mask_ids.has_segments(rule):
            # All are tokens, if nothing else says which are: a mask has a batch even without rules.
            shown = segments or Segments(*_zero_ids(self.shape))
            ids_rule = mask_ids.id_rules(_with_segments(self._ids_source, None)) & shown
        return self._changed(rule=rule, ids_rule=ids_rule, q_ids=None, kv_ids=None)


def _zero_ids(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    *batch, q_len, kv_len = shape
    return jnp.zeros((*batch, q_len), jnp.int32), jnp.zeros((*batch, kv_len), jnp.int32)


def _with_segments(rule: Rule, segments: Segments | None) -> Rule:
    """`rule` with `segments` in place of every segment rule; None lets every segment see all."""
    if isinstance(rule, Segments):
        return And(()) if segments is None else segments
    if isinstance(rule, And | Or):
        parts = tuple(_with_segments(part, segments) for part in rule.rules)
        return type(rule)(parts)
    return rule
