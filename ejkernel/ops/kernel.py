"""A user's own kernel: a class whose methods become an op in the table."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.tree_util import PyTreeDef
from jaxtyping import PyTree

from ejkernel.ops.implementation import ALL_FEATURES, CallInputs, Implementation, Op, Pass, Source
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.keys import without_addresses
from ejkernel.ops.platform import Backend, Device, Platform
from ejkernel.ops.registry import kernel_registry

Cfg = TypeVar("Cfg")
Out = TypeVar("Out")

_DYNAMIC = object()  # stands in the static part where an array goes
_OWN_OP = "_own_op"  # the attribute with the op of an instance whose state cannot be hashed


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """The static part of a call: where its arrays go, and every other argument."""

    treedef: PyTreeDef
    statics: tuple[Hashable, ...]
    exactly: Hashable = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "exactly", _exactly(self.statics))

    def rebuild(self, arrays: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The args and kwargs of the call with these arrays."""
        rest = iter(arrays)
        leaves = [next(rest) if leaf is _DYNAMIC else leaf for leaf in self.statics]
        return jax.tree.unflatten(self.treedef, leaves)

    def describe(self) -> list[Any]:
        """What of the call belongs to its key."""
        statics = ["array" if leaf is _DYNAMIC else repr(leaf) for leaf in self.statics]
        return [without_addresses(text) for text in (str(self.treedef), *statics)]


class Kernel(Generic[Cfg, Out]):
    """Base class of kernels that the framework configures, measures, caches and differentiates.

    A subclass defines `run(*args, cfg, **kwargs)` and `heuristic_cfg(inv)`; where the hardware
    matters also `run_gpu`, `run_tpu` or `run_cpu`; for a choice of configurations
    `candidate_cfgs(inv)`; for a gradient of its own `fwd_with_residuals` and `vjp` (without them
    JAX differentiates `run`). Bump `version` when old measurements no longer hold.

    >>> import dataclasses, jax.numpy as jnp
    >>> from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel
    >>> @dataclasses.dataclass(frozen=True)
    ... class Block:
    ...     size: int = 128
    >>> class Scale(Kernel[Block, jax.Array]):
    ...     def run(self, x, *, factor=2.0, cfg):
    ...         return x * factor
    ...     def heuristic_cfg(self, inv):
    ...         return Block()
    >>> executor = Executor(ConfigSelectorChain(cache=ConfigCache()))
    >>> executor(Scale("scale_example"), jnp.ones(3), factor=3.0)
    Array([3., 3., 3.], dtype=float32)
    """

    op_id: str | None = None
    version: str = "0"

    def __init__(self, op_id: str | None = None) -> None:
        self.op_id = op_id or type(self).op_id or f"{type(self).__module__}.{type(self).__name__}"

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Canonicalise a call before anything looks at it."""
        return args, kwargs

    def run(self, *args: Any, cfg: Cfg, **kwargs: Any) -> Out:
        """Compute the result with this configuration."""
        raise NotImplementedError(f"{type(self).__name__} must define run().")

    def heuristic_cfg(self, inv: Invocation) -> Cfg:
        """The configuration to use when nothing was measured."""
        raise NotImplementedError(f"{type(self).__name__} must define heuristic_cfg().")

    def candidate_cfgs(self, inv: Invocation) -> Sequence[Cfg]:
        """The configurations worth measuring."""
        return [self.heuristic_cfg(inv)]

    def fwd_with_residuals(self, *args: Any, cfg: Cfg, **kwargs: Any) -> tuple[Out, Any]:
        """The result, and what `vjp` needs besides it."""
        raise NotImplementedError(f"{type(self).__name__} must define fwd_with_residuals().")

    def vjp(
        self, residuals: Any, y: Out, dy: Out, *args: Any, cfg: Cfg, **kwargs: Any
    ) -> tuple[Any, ...]:
        """One gradient for each positional argument; None where there is none."""
        raise NotImplementedError(f"{type(self).__name__} must define vjp().")

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Op, CallInputs, KernelCall]:
        """The call as an op, its arrays, and the rest."""
        leaves, treedef = jax.tree.flatten(self.prepare(*args, **kwargs))
        arrays = tuple(leaf for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray))
        statics = tuple(
            _DYNAMIC if isinstance(leaf, jax.Array | np.ndarray) else leaf for leaf in leaves
        )
        try:
            hash(statics)
        except TypeError as error:
            raise ValueError(f"{self.op_id}: static arguments must be hashable: {error}.") from None
        return self.as_op(), arrays, KernelCall(treedef, statics)

    def as_op(self) -> Op:
        """The op of this kernel; instances in the same state share it, and so what it compiled."""
        state = {name: value for name, value in vars(self).items() if name != _OWN_OP}
        try:
            return _op_of(type(self), _exactly(tuple(sorted(state.items()))), _Held(self))
        except TypeError:  # state that cannot be hashed: this instance has an op of its own
            known, op = vars(self).get(_OWN_OP, ({}, None))
            if op is None or not _is_same_state(known, state):
                op = _make_op(copy.copy(self))
                vars(self)[_OWN_OP] = (state, op)
            return op


class _Held:
    """Carries an instance through a cache key in which it does not take part."""

    def __init__(self, kernel: Kernel[Any, Any]) -> None:
        self.kernel = kernel

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)


def _exactly(value: Any) -> Hashable:
    """What is equal for values that a program cannot tell apart: 2 is neither 2.0 nor True."""
    if isinstance(value, tuple):
        return (type(value), *map(_exactly, value))
    if isinstance(value, float | complex):
        return (type(value), repr(value))  # tells 0.0 from -0.0, and takes NaN for itself
    return (type(value), value)


def _is_same_state(known: dict[str, Any], state: dict[str, Any]) -> bool:
    """Whether no attribute was set anew; that a list has changed in place is not seen."""
    return known.keys() == state.keys() and all(known[name] is state[name] for name in known)


@functools.lru_cache(maxsize=256)
def _op_of(kind: type, state: Hashable, held: _Held) -> Op:
    # A copy: attributes that are set later make another op.
    return _make_op(copy.copy(held.kernel))


def _make_op(kernel: Kernel[Any, Any]) -> Op:
    sources = []
    for backend in (Backend.GPU, Backend.TPU, Backend.CPU, Backend.ANY):
        name = "run" if backend is Backend.ANY else f"run_{backend.value}"
        if hasattr(kernel, name):
            implementation = _implementation(kernel, getattr(kernel, name))
            sources.append(Source(Platform.XLA, backend, implementation))
    op = Op(
        name=str(kernel.op_id),
        sources=sources,
        config=object,
        version=str(kernel.version),
        differentiable_by_jax=type(kernel).vjp is Kernel.vjp,
        backward_follows_forward=True,
    )
    kernel_registry.add(op)
    return op


def _implementation(kernel: Kernel[Any, Any], run: Callable[..., Any]) -> Implementation:
    def value(arrays: CallInputs, spec: KernelCall, cfg: object) -> tuple[PyTree, None]:
        args, kwargs = spec.rebuild(arrays)
        return run(*args, cfg=cfg, **kwargs), None

    def forward(arrays: CallInputs, spec: KernelCall, cfg: object) -> tuple[PyTree, PyTree]:
        args, kwargs = spec.rebuild(arrays)
        y, residuals = kernel.fwd_with_residuals(*args, cfg=cfg, **kwargs)
        return y, (residuals, y)

    def backward(
        arrays: CallInputs,
        saved: tuple[PyTree, PyTree],
        dy: PyTree,
        spec: KernelCall,
        cfg: object,
    ) -> tuple[PyTree, ...]:
        args, kwargs = spec.rebuild(arrays)
        grads = kernel.vjp(saved[0], saved[1], dy, *args, cfg=cfg, **kwargs)
        if len(grads) != len(args):
            raise ValueError(
                f"{kernel.op_id}: vjp must return {len(args)} gradients, one for each positional "
                f"argument, got {len(grads)}."
            )
        return _per_array(str(kernel.op_id), grads, args, kwargs, spec)

    def heuristic(arrays: CallInputs, spec: KernelCall, device: Device) -> Any:
        return kernel.heuristic_cfg(Invocation(kernel.as_op(), arrays, spec, device))

    def candidates(arrays: CallInputs, spec: KernelCall, device: Device) -> Sequence[Any]:
        return kernel.candidate_cfgs(Invocation(kernel.as_op(), arrays, spec, device))

    return Implementation(
        forward=Pass(run=value, features=ALL_FEATURES, heuristic=heuristic, candidates=candidates),
        backward=None
        if type(kernel).vjp is Kernel.vjp
        else Pass(run=backward, features=ALL_FEATURES),
        residuals=forward,
    )


def _per_array(
    op_id: str,
    grads: tuple[PyTree, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    spec: KernelCall,
) -> tuple[PyTree, ...]:
    """Gradients of the positional arguments as gradients of the call's arrays, in their order."""
    flat: list[Any] = []
    for position, (grad, arg) in enumerate(zip(grads, args, strict=True)):
        leaves, places = jax.tree.leaves(grad), jax.tree_util.tree_leaves_with_path(arg)
        if len(leaves) == len(places):
            flat += leaves
            continue
        found = dict(jax.tree_util.tree_leaves_with_path(grad))  # without what is None
        flat += [found.pop(path, None) for path, _ in places]
        if found:
            raise ValueError(
                f"{op_id}: vjp must return gradients of the structure of their arguments, got "
                f"{jax.tree.structure(grad)} for argument {position}, {jax.tree.structure(arg)}."
            )
    flat += [None] * len(jax.tree.leaves(kwargs))
    pairs = zip(flat, spec.statics, strict=True)
    return tuple(grad for grad, static in pairs if static is _DYNAMIC)
