"""Runs a call: choose, differentiate, batch, shard; compiled once, then looked up."""

import contextlib
import contextvars
import dataclasses
import functools
import reprlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeAlias, TypeVar, overload

import jax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from ejkernel import settings
from ejkernel.errors import PerformanceWarning, UnsupportedError
from ejkernel.ops import differentiable, recording, sharded, symbolic
from ejkernel.ops.cache import ConfigCache
from ejkernel.ops.capture import CallCapture, CapturedCall, several_devices
from ejkernel.ops.config import Config
from ejkernel.ops.implementation import CallInputs, CallSpec, Choice, Op
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.kept import KeptPrograms
from ejkernel.ops.kernel import Kernel
from ejkernel.ops.meshes import surrounding_mesh
from ejkernel.ops.persistent import PersistentCache
from ejkernel.ops.platform import Device, Platform, device_of
from ejkernel.ops.policy import policy_override
from ejkernel.ops.registry import kernel_registry
from ejkernel.ops.selection import ConfigSelectorChain, check_config
from ejkernel.ops.table_file import StoredConfig

P = ParamSpec("P")
Out = TypeVar("Out")
# A function or module of `ejkernel.modules`, or a user's kernel.
Runnable: TypeAlias = Callable[..., Any] | Kernel[Any, Any]
_SPECS = ("mesh", "in_specs", "out_specs")


@dataclasses.dataclass(frozen=True)
class Request:
    """How the caller wants a call to be run; specs given as a list become a tuple.

    `finish(outputs)`, a function of a module, rearranges the results in the program of the call.
    `axis_name` is the mesh axis of `Op.sequence`: of `mesh`, of the types, or mapped already.
    `precision`, JAX's default for matmuls, and `deterministic` are those around the call: a
    backward pass, and what XLA splits over devices, are traced later, perhaps under others.
    """

    platform: str | None = None
    cfg: object = None
    mesh: Mesh | AbstractMesh | None = None
    in_specs: object = None
    out_specs: object = None
    finish: Callable[[Any], Any] | None = None
    axis_name: str | None = None
    precision: str | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("in_specs", "out_specs"):
            if isinstance(specs := getattr(self, name), list):
                object.__setattr__(self, name, tuple(specs))


class Executor:
    """Runs operations and kernels with the configurations that `chooser` selects.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import FlashAttention
    >>> from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor
    >>> executor = Executor(ConfigSelectorChain(cache=ConfigCache()))
    >>> x = jnp.ones((1, 16, 2, 8))
    >>> executor(FlashAttention(), query=x, key=x, value=x, causal=True).shape
    (1, 16, 2, 8)
    """

    def __init__(self, chooser: ConfigSelectorChain) -> None:
        self.chooser = chooser
        self._compiled = KeptPrograms()

    @overload
    def __call__(self, kernel: Kernel[Any, Out], *args: Any, **kwargs: Any) -> Out: ...

    @overload
    def __call__(self, kernel: Callable[P, Out], *args: P.args, **kwargs: P.kwargs) -> Out: ...

    def __call__(self, kernel: Runnable, *args: Any, **kwargs: Any) -> Any:
        """Run a module of `ejkernel.modules`, or a `Kernel`, with this call's arguments."""
        if not isinstance(kernel, Kernel):
            with use(self):
                return kernel(*args, **kwargs)
        request = _request_of(kernel, kwargs)
        if request.mesh is not None:
            return self._over_mesh(kernel, args, kwargs, request)
        op, arrays, call = kernel.bind(args, kwargs)
        return self.run(op, arrays, call, request)

    def run(self, op: Op, inputs: CallInputs, spec: CallSpec, request: Request) -> Any:
        """The outputs of `op`; the one path every call takes."""
        check_config(op, request.cfg)
        leaves, treedef = jax.tree.flatten(inputs)
        request = _with_mesh(op, leaves, request)
        device = device_of(leaves)
        key = (
            op,
            op.revision,
            kernel_registry.registrations,
            treedef,
            spec,
            request,
            device,
            self.chooser.state(),
            recording.state(),
            *[(x.shape, x.dtype) for x in leaves],
        )
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compile(op, inputs, spec, request, device)
            self._compiled.put(key, compiled)
        elif self.chooser.on_event is not None and _is_chosen_before_tracing(op, leaves, request):
            # Repeat the selection, so that the callback is notified.
            self.chooser.choose(Invocation(op, inputs, spec, device, request.platform), request.cfg)
        return compiled(*leaves)

    def invocation(self, kernel: Runnable, *args: object, **kwargs: object) -> Invocation:
        """The call that `executor(kernel, ...)` would make; caches know it by its `key`."""
        if isinstance(kernel, Kernel):
            if _request_of(kernel, kwargs).mesh is not None:
                raise several_devices(str(kernel.op_id))
            op, arrays, call = kernel.bind(args, kwargs)
            return Invocation(op, arrays, call, device_of(jax.tree.leaves(arrays)))
        try:
            with use(CallCapture(_DEFAULT.run)):
                kernel(*args, **kwargs)
        except CapturedCall as captured:
            return captured.invocation
        raise ValueError(
            f"{kernel!r} called no operation with these arguments; arrays without elements make no "
            "call."
        )

    def choose_config(
        self, kernel: Runnable, *args: object, cfg: object = None, **kwargs: object
    ) -> Choice:
        """The platform and parameters that `executor(kernel, ...)` would run with."""
        return self.chooser.choose(self.invocation(kernel, *args, **kwargs), cfg)

    def compile(
        self, kernel: Runnable, *args: object, cfg: object = None, **kwargs: object
    ) -> Callable[..., Any]:
        """A jitted function of the arrays of this example call, its configuration chosen now."""
        example = (args, kwargs)
        if cfg is None and isinstance(kernel, Kernel) and kwargs.keys().isdisjoint(_SPECS):
            cfg = self.choose_config(kernel, *args, **kwargs).params
        leaves, treedef = jax.tree.flatten(example)
        is_array = list(map(_is_array, leaves))

        @jax.jit
        def run(arrays: list[Any]) -> Any:
            rest = iter(arrays)
            merged = [next(rest) if a else x for a, x in zip(is_array, leaves, strict=True)]
            call_args, call_kwargs = jax.tree.unflatten(treedef, merged)
            extra = {} if cfg is None else {"cfg": cfg}
            return self(kernel, *call_args, **call_kwargs, **extra)

        def runner(*call_args: object, **call_kwargs: object) -> Any:
            given, structure = jax.tree.flatten((call_args, call_kwargs))
            if structure != treedef:
                raise ValueError(
                    "Executor.compile: the call differs in structure from the example; compile "
                    "again for these arguments."
                )
            for is_dynamic, x, expected in zip(is_array, given, leaves, strict=True):
                if not is_dynamic and (_is_array(x) or not _is_same(x, expected)):
                    raise ValueError(
                        "Executor.compile: non-array arguments are fixed at compile time; the "
                        f"example had {expected!r}, got {x!r}."
                    )
            return run([x for a, x in zip(is_array, given, strict=True) if a])

        return runner

    def _compile(
        self, op: Op, inputs: CallInputs, spec: CallSpec, request: Request, device: Device
    ) -> Callable[..., Any]:
        _check_platform(op, request.platform)
        treedef = jax.tree.structure(inputs)
        if symbolic.has_symbolic_sizes(leaves := jax.tree.leaves(inputs)):
            run = functools.partial(self._symbolic, op, spec, request, device)
        elif _is_chosen_before_tracing(op, leaves, request):
            # Chosen out here, where integer arrays may still be concrete and errors are short.
            choice = self._choose(Invocation(op, inputs, spec, device, request.platform), request)
            run = functools.partial(self._apply, op, spec, request, device, choice)
        else:
            local = functools.partial(self._apply, op, spec, request, device, None)
            run = _over_devices(op, local, spec, request)
        finish = request.finish or (lambda outputs: outputs)
        return jax.jit(lambda *leaves: finish(run(jax.tree.unflatten(treedef, leaves))))

    def _choose(self, inv: Invocation, request: Request) -> Choice:
        if recording.active() and not inv.op.auxiliary:
            recording.add(inv)
        return self.chooser.choose(inv, request.cfg)

    def _apply(
        self,
        op: Op,
        spec: CallSpec,
        request: Request,
        device: Device,
        choice: Choice | None,
        inputs: CallInputs,
    ) -> Any:
        request = dataclasses.replace(
            request,
            precision=getattr(jax.config, "jax_default_matmul_precision", None),
            deterministic=settings.deterministic(),
        )
        if op.differentiable_by_jax:
            return self._passes(op, spec, request, device, choice).value(inputs)
        choice = choice or self._choose(
            Invocation(op, inputs, spec, device, request.platform), request
        )
        return differentiable.apply(self._rule(op, spec, request, device, choice), inputs)

    def _rule(
        self, op: Op, spec: CallSpec, request: Request, device: Device, choice: Choice
    ) -> differentiable.DerivativeRule:
        def partial(inputs: CallInputs, letters: frozenset[str]) -> differentiable.DerivativeRule:
            return self._rule(op, op.partial_spec(inputs, spec, letters), request, device, choice)

        return differentiable.DerivativeRule(
            op=op,
            passes=self._passes(op, spec, request, device, choice),
            reselect=functools.partial(self._reselect, op, spec, request, device),
            xla=functools.partial(self._xla_passes, op, spec, request, device),
            partitionable=functools.partial(
                self._partitionable_passes, op, spec, request, device, choice
            ),
            partial=partial,
            device=None if _wanted_platform(request) == Platform.XLA else device,
        )

    def _symbolic(
        self, op: Op, spec: CallSpec, request: Request, device: Device, inputs: CallInputs
    ) -> Any:
        if request.mesh is not None or request.axis_name is not None:
            raise UnsupportedError(
                f"{op.name}: symbolic sizes cannot be split over a mesh; export with fixed sizes, "
                "or without mesh=, in_specs= and axis_name=."
            )
        platform = _wanted_platform(request)
        request = dataclasses.replace(request, platform=Platform.XLA.value)
        by_xla = functools.partial(self._apply, op, spec, request, device, None)
        return symbolic.run(op, inputs, spec, platform, by_xla)

    def _passes(
        self, op: Op, spec: CallSpec, request: Request, device: Device, choice: Choice | None
    ) -> differentiable.Passes:
        """The passes of a call by this choice, or by one that is made when its arrays are known."""

        def chosen(inputs: CallInputs) -> Choice:
            call = Invocation(op, inputs, spec, device, request.platform)
            return choice or self._choose(call, request)

        def value(inputs: CallInputs) -> PyTree:
            forward = chosen(inputs)
            return forward.run(inputs, spec, forward.params, device=device)[0]

        def with_residuals(inputs: CallInputs) -> tuple[PyTree, PyTree]:
            forward = chosen(inputs)
            implementation = forward.source.load()
            return implementation.run_with_residuals(inputs, spec, forward.params, device=device)

        def backward(inputs: CallInputs, saved: PyTree, d_outputs: PyTree) -> PyTree:
            forward = choice or (chosen(inputs) if op.backward_follows_forward else None)
            last = self._backward(op, inputs, spec, saved, d_outputs, request, device, forward)
            return last.run(inputs, saved, d_outputs, spec, last.params, device=device)

        as_called = functools.partial(_as_called, request)
        return differentiable.Passes(*map(as_called, (value, with_residuals, backward)))

    def _reselect(
        self, op: Op, spec: CallSpec, request: Request, expected: Device, device: Device | None
    ) -> differentiable.Passes:
        """The passes of a call of other shapes, or on another device than expected.

        JAX calls for them while it lowers and compiles a program, so nothing is measured.
        """
        passes = self._passes(op, spec, request, device or expected, None)

        def without_measuring(run: Callable[..., PyTree]) -> Callable[..., PyTree]:
            @functools.wraps(run)
            def guessing(*trees: PyTree) -> PyTree:
                with policy_override(self.chooser, allow_autotune=False):
                    return run(*trees)

            return guessing

        return differentiable.Passes(*map(without_measuring, passes))

    def _xla_passes(
        self, op: Op, spec: CallSpec, request: Request, device: Device
    ) -> differentiable.Passes:
        """The passes that forward mode differentiates."""
        platform = _wanted_platform(request)
        if platform not in (None, "auto", Platform.XLA):
            raise UnsupportedError(
                f"{op.name}: platform={platform!r} has no forward-mode derivative (jvp, jacfwd, "
                "hessian); platform='auto' and platform='xla' have."
            )
        request = dataclasses.replace(request, platform=Platform.XLA.value)
        return self._passes(op, spec, request, device, None)

    def _partitionable_passes(
        self, op: Op, spec: CallSpec, request: Request, device: Device, choice: Choice
    ) -> differentiable.Passes:
        """The passes that XLA can split over automatic axes where it cannot split kernels."""
        advice = (
            "Shard over explicit axes (jax.set_mesh), pass mesh= and in_specs=, or call inside "
            "jax.shard_map."
        )
        platform = _wanted_platform(request)
        if platform not in (None, "auto", Platform.XLA):
            raise UnsupportedError(
                f"{op.name}: XLA for TPUs cannot partition kernels over automatic mesh axes, so "
                f"that platform={platform!r} is not available here. {advice}"
            )
        if choice.source.platform != Platform.XLA:
            message = (
                f"{op.name}: XLA for TPUs cannot partition kernels over automatic mesh axes; plain "
                f"XLA operations are used instead. {advice}"
            )
            warnings.warn(message, PerformanceWarning, stacklevel=2)
        request = dataclasses.replace(request, platform=Platform.XLA.value)
        return self._passes(op, spec, request, device, None)

    def _backward(
        self,
        op: Op,
        inputs: CallInputs,
        spec: CallSpec,
        saved: PyTree,
        d_outputs: PyTree,
        request: Request,
        device: Device,
        forward: Choice | None,
    ) -> Choice:
        if forward is not None and op.backward_follows_forward:
            run = forward.source.load().backward
            if run is None:
                raise NotImplementedError(f"{op.name}: this implementation has no backward pass.")
            return Choice(forward.source, run, forward.params)
        inv = Invocation(op, inputs, spec, device, request.platform, "backward", (saved, d_outputs))
        return self._choose(inv, request)

    def _over_mesh(
        self,
        kernel: Kernel[Any, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        request: Request,
    ) -> Any:
        """A user's kernel under `shard_map`: specs for its positional arguments."""
        if not isinstance(request.in_specs, tuple) or request.out_specs is None:
            raise ValueError(f"{kernel.op_id}: mesh= needs in_specs= and out_specs=.")
        extra = {} if request.cfg is None else {"cfg": request.cfg}
        return jax.shard_map(
            lambda *shards: self(kernel, *shards, **kwargs, **extra),
            mesh=request.mesh,
            in_specs=request.in_specs,
            out_specs=request.out_specs,
            check_vma=False,
        )(*args)


def _as_called(request: Request, run: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`run` with the default precision of the call, and deterministic if the call was.

    Our code relies on broadcasting, which a caller may have forbidden in their own.
    """

    @functools.wraps(run)
    def running(*trees: PyTree) -> PyTree:
        deterministic = request.deterministic or settings.deterministic()
        with (
            jax.default_matmul_precision(request.precision),
            jax.numpy_rank_promotion("allow"),
            settings.override(deterministic=deterministic),
        ):
            return run(*trees)

    return running


def _request_of(kernel: Kernel[Any, Any], kwargs: dict[str, Any]) -> Request:
    """How a user's kernel is to be run, taken out of the keyword arguments of the call."""
    cfg = StoredConfig.of(kwargs.pop("cfg", None))
    try:
        hash(cfg)
    except TypeError:
        raise ValueError(
            f"{kernel.op_id}: cfg must be hashable, or a dict of what JSON can hold, got "
            f"{reprlib.repr(cfg)}."
        ) from None
    mesh, in_specs, out_specs = (kwargs.pop(name, None) for name in _SPECS)
    if mesh is None and (in_specs is not None or out_specs is not None):
        mesh = _mesh_around(str(kernel.op_id))
    return Request(cfg=cfg, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def _is_chosen_before_tracing(op: Op, leaves: list[Any], request: Request) -> bool:
    """Whether the arrays of a call are those of one device, of known sizes."""
    on_one_device = request.mesh is None and (request.axis_name is None or op.over_axis is None)
    return on_one_device and not symbolic.has_symbolic_sizes(leaves)


def _is_array(x: object) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape")


def _is_same(x: object, expected: object) -> bool:
    """Whether one constant stands for the other: 3 differs from 3.0, a NaN equals a NaN."""
    if x is expected:
        return True
    return type(x) is type(expected) and (x == expected or (x != x and expected != expected))


def _with_mesh(op: Op, leaves: list[Any], request: Request) -> Request:
    """The request with the mesh of the context, or with the mesh and specs of the types."""
    if request.mesh is not None or not op.operands:  # a user's kernel, which JAX splits by itself
        return request
    if request.in_specs is None and request.out_specs is None:
        if (found := sharded.from_types(leaves)) is None:
            return request
        return dataclasses.replace(request, mesh=found[0], in_specs=found[1])
    return dataclasses.replace(request, mesh=_mesh_around(op.name))


def _mesh_around(name: str) -> Mesh | AbstractMesh:
    if (mesh := surrounding_mesh()) is None:
        raise ValueError(
            f"{name}: in_specs= and out_specs= need a mesh: mesh=, or jax.set_mesh around the call."
        )
    return mesh


def _over_devices(
    op: Op, local: Callable[[CallInputs], Any], spec: CallSpec, request: Request
) -> Callable[[CallInputs], Any]:
    """The call over a mesh, or on the share that a device has already, from that of one device."""
    axis_name, mesh, run = request.axis_name, request.mesh, local
    if axis_name is not None:
        if (over_axis := op.over_axis) is not None:
            run = lambda inputs: over_axis(local, inputs, spec, axis_name)
        op = dataclasses.replace(op, shardable=op.shardable | op.sequence)
    if mesh is None:
        return run
    return lambda inputs: sharded.shard(op, run, inputs, mesh, request.in_specs, request.out_specs)


def _wanted_platform(request: Request) -> str | None:
    """The platform that the caller named, by `platform=` or in `cfg`."""
    if request.platform in (None, "auto") and isinstance(request.cfg, Config):
        return request.cfg.platform
    return request.platform


def _check_platform(op: Op, platform: str | None) -> None:
    known = ["auto", *(member.value for member in Platform)]
    if platform is not None and platform not in known:
        raise ValueError(
            f"{op.name}: platform must be one of {', '.join(known)}, got {platform!r}."
        )


_DEFAULT = Executor(ConfigSelectorChain(ConfigCache(), persistent=functools.cache(PersistentCache)))
_CURRENT: contextvars.ContextVar[Executor | CallCapture] = contextvars.ContextVar(
    "executor", default=_DEFAULT
)


def default_executor() -> Executor:
    """The executor that the functions of `ejkernel.modules` use."""
    return _DEFAULT


def current_executor() -> Executor | CallCapture:
    """The executor under which the functions of `ejkernel.modules` run here."""
    return _CURRENT.get()


@contextlib.contextmanager
def use(executor: Executor | CallCapture) -> Iterator[None]:
    """Let the functions of `ejkernel.modules` run under `executor` for a block."""
    token = _CURRENT.set(executor)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def run(op: Op, inputs: CallInputs, spec: CallSpec, request: Request) -> Any:
    """Run a call under the current executor."""
    return _CURRENT.get().run(op, inputs, spec, request)
