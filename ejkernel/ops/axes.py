"""The axis letters of a call: read off the annotations of `Inputs` and `Outputs`.

`b` batch, `t` query length, `s` key length, `n` query heads, `k` key heads, `h` head dim, `v` value
dim. `#x` may be 1. Sharding, batching and cache keys all follow from these letters, so no op says
any of them a second time.
"""

import functools
import types
import typing

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, KeyPath, SequenceKey
from jaxtyping import PyTree


@functools.cache
def type_hints(owner: type) -> dict[str, object]:
    """The annotations of the fields of a class."""
    return typing.get_type_hints(owner)


def of_leaves(tree: object) -> list[tuple[str, ...] | None]:
    """Letters of every leaf of `tree`, in the order of its leaves; None where nothing says."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [_letters(tree, path, leaf) for path, leaf in paths]


def of_field(owner: type, field: str, rank: int | None = None) -> tuple[str, ...]:
    """Letters of one array field of `owner`; of several forms that of this rank, or the first."""
    return _dimensions(type_hints(owner).get(field), rank) or ()


def of_fields(owner: type, batched: bool = True) -> list[tuple[str, ...]]:
    """Letters of every field of a NamedTuple of arrays.

    A field may have two forms, `Float[Array, "r n"] | Float[Array, "b r n"]`: `batched` says which.
    """
    hints = type_hints(owner)
    return [_form(hints.get(field), batched) for field in owner._fields]  # pyright: ignore[reportAttributeAccessIssue]


def leads(letters: tuple[str, ...] | None) -> bool:
    """Whether the first axis is the batch."""
    return bool(letters) and letters[0] in ("b", "#b")


def _form(annotation: object, batched: bool) -> tuple[str, ...]:
    members = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    forms = [letters for member in members if (letters := _dimensions(member, None))]
    return next((form for form in forms if leads(form) == batched), forms[0] if forms else ())


def _letters(tree: PyTree, path: KeyPath, leaf: object) -> tuple[str, ...] | None:
    annotation = None
    for key in path:
        match key:
            case GetAttrKey(name=name):
                annotation = type_hints(type(tree)).get(name)
                tree = getattr(tree, name)
            case SequenceKey(idx=position):
                tree = tree[position]
            case DictKey(key=name):
                tree = tree[name]
            case FlattenedIndexKey():
                return None
    return _dimensions(annotation, getattr(leaf, "ndim", None))


def _dimensions(annotation: object, rank: int | None) -> tuple[str, ...] | None:
    """The letters of a jaxtyping annotation, or of the member of a union that has this rank."""
    if _is_union(annotation):
        members = (_dimensions(member, rank) for member in typing.get_args(annotation))
        return next((letters for letters in members if letters is not None), None)
    dimensions = getattr(annotation, "dim_str", None)
    if dimensions is None:
        return None
    letters = tuple(dimensions.split())
    return letters if rank is None or len(letters) == rank else None


def _is_union(annotation: object) -> bool:
    return isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
