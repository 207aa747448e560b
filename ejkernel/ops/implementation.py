"""What an op is, what one platform offers for it, and why that platform may refuse a call."""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from ejkernel import settings
from ejkernel.errors import UnsupportedError
from ejkernel.ops.config import Config
from ejkernel.ops.platform import Backend, Device, Platform

Direction = Literal["forward", "backward"]
Features = frozenset[str] | Literal["all"]
# The arrays of a call: the `Inputs` of an op, a NamedTuple; of a user's kernel its arrays in order.
CallInputs = tuple[Any, ...]
# The static arguments of a call: the `Spec` of an op, a frozen dataclass; of a user's kernel all
# arguments that are no arrays.
CallSpec = Hashable
# Every argument there is, and those to come: for implementations that are tested with all of them.
ALL_FEATURES: Final = "all"
_MOST_AT_FIRST_CALL = 3  # candidates that a first call compares with the heuristic


def _no_objection(inputs: CallInputs, spec: CallSpec, device: Device) -> str | None:
    return None


def _no_parameters(inputs: CallInputs, spec: CallSpec, device: Device) -> None:
    return None


def _all_splittable(inputs: CallInputs) -> frozenset[str]:
    return frozenset()


def _same_inputs(inputs: CallInputs, starts: Mapping[str, Any]) -> CallInputs:
    return inputs


def _same_spec(inputs: CallInputs, spec: CallSpec, letters: frozenset[str]) -> CallSpec:
    return spec


def _yields_to_none(inputs: CallInputs, spec: CallSpec, device: Device) -> frozenset[Platform]:
    return frozenset()


def yields_to_xla(inputs: CallInputs, spec: CallSpec, device: Device) -> frozenset[Platform]:
    """For kernels that have not run on their kind of device yet: `Pass.yields_to`.

    Such kernels run only where their platform is chosen by name.
    """
    return frozenset({Platform.XLA})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One direction of an op on one platform.

    Forward: `run(inputs, spec, params) -> (outputs, residuals)`.
    Backward: `run(inputs, residuals, d_outputs, spec, params) -> gradients`, shaped like inputs,
    None where there is none. A `run` that has a parameter `device` is given the device of the call.

    Attributes:
        run: computes the pass.
        features: the arguments and kinds of mask that it supports beyond the plain call; a call
            that uses any other is refused.
        why_not: the reason why it does not support a call, or None.
        heuristic: the parameters expected to be fastest.
        candidates: parameters worth timing in a search.
        first_call_candidates: parameters that a model expects to take at most 5 % longer than the
            heuristic's, the most promising first: a first call compares up to three of them with
            it. Without a model a first call compares nothing.
        nondeterministic: parameters that are faster still, but do not give the same bits in every
            run; `platform="auto"` uses them, a platform chosen by name does not.
        yields_to: platforms that are preferred to this one, whatever the order of the sources.
    """

    run: Callable[..., Any]
    features: Features
    why_not: Callable[[Any, Any, Device], str | None] = _no_objection
    heuristic: Callable[[Any, Any, Device], Any] = _no_parameters
    candidates: Callable[[Any, Any, Device], Sequence[Any]] | None = None
    first_call_candidates: Callable[[Any, Any, Device], Sequence[Any]] | None = None
    nondeterministic: Callable[[Any, Any, Device], Any] = _no_parameters
    yields_to: Callable[[Any, Any, Device], frozenset[Platform]] = _yields_to_none

    def __call__(self, *arguments: object, device: Device) -> Any:
        """`run(*arguments)`, with the device if `run` takes it."""
        return with_device(self.run, device)(*arguments)

    def refusal(self, inputs: CallInputs, spec: CallSpec, device: Device) -> str | None:
        """The reason why this pass does not support the call, or None."""
        used = features_used(inputs, spec)
        if self.features != ALL_FEATURES and (missing := used.difference(self.features)):
            return f"does not support {', '.join(sorted(missing))}"
        return self.why_not(inputs, spec, device)

    def guess(
        self, inputs: CallInputs, spec: CallSpec, device: Device, deterministic: bool = True
    ) -> Any:
        """The parameters expected to be fastest."""
        params = None if deterministic else self.nondeterministic(inputs, spec, device)
        return self.heuristic(inputs, spec, device) if params is None else params

    def choices(
        self, inputs: CallInputs, spec: CallSpec, device: Device, deterministic: bool = True
    ) -> list[Any]:
        """Every parameter set worth timing, the guess first."""
        others = self.candidates(inputs, spec, device) if self.candidates else ()
        guess = self.guess(inputs, spec, device, deterministic)
        return _distinct([guess, self.heuristic(inputs, spec, device), *others])

    def first_call_choices(
        self, inputs: CallInputs, spec: CallSpec, device: Device, deterministic: bool = True
    ) -> list[Any]:
        """What a first call compares: the guess and at most three others."""
        model = self.first_call_candidates
        others = model(inputs, spec, device) if model else ()
        found = _distinct([self.guess(inputs, spec, device, deterministic), *others])
        return found[: 1 + _MOST_AT_FIRST_CALL]


def _distinct(found: Sequence[Any]) -> list[Any]:
    return [params for i, params in enumerate(found) if params not in found[:i]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """An op on one platform: a forward, a backward, or both.

    `residuals` stands for the forward's `run` under differentiation where the two differ.
    """

    forward: Pass | None = None
    backward: Pass | None = None
    residuals: Callable[..., Any] | None = None

    def run_with_residuals(self, *arguments: object, device: Device) -> Any:
        """Outputs and residuals of the forward pass under differentiation."""
        if self.residuals is not None:
            return with_device(self.residuals, device)(*arguments)
        if self.forward is None:
            raise NotImplementedError("this implementation has no forward pass.")
        return self.forward(*arguments, device=device)


def with_device(run: Callable[..., Any], device: Device) -> Callable[..., Any]:
    """`run` with the device of the call, if it has a parameter for it."""
    return functools.partial(run, device=device) if _takes_device(run) else run


@functools.lru_cache(maxsize=1024)
def _takes_device(run: Callable[..., Any]) -> bool:
    return "device" in inspect.signature(run).parameters


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the implementation for one platform and backend lives; loaded when it may be used."""

    platform: Platform
    backend: Backend
    where: str | Implementation
    priority: int = 0

    def load(self) -> Implementation:
        """The implementation; its module is imported on first use."""
        if isinstance(self.where, Implementation):
            return self.where
        return importlib.import_module(self.where).IMPLEMENTATION

    def unavailable_on(self, device: Device) -> str | None:
        """Why it does not run on this device, or None; answered without loading the code."""
        if self.backend in (Backend.ANY, device.platform):
            return None
        if settings.interpret() and self.platform is not Platform.CUDA:
            return None
        return f"needs a {self.backend.value.upper()} and the device is a {device.platform.upper()}"


class Choice(NamedTuple):
    """The platform and the parameters that one pass of a call runs with."""

    source: Source
    run: Pass
    params: Any  # the configuration or its part for the pass; its class is the op's affair


@dataclasses.dataclass(eq=False, kw_only=True)
class Op:
    """A public operation: its name, its implementations in order of preference, its axis letters.

    Attributes:
        name: the name of the public function, of its folder and of its tuned tables.
        sources: the implementations in order of preference.
        config: the class of its configurations.
        outputs: the NamedTuple of its results.
        version: part of every cache key; grows when old measurements no longer hold.
        reference: the module of its definition; None for a user's kernel.
        differentiable_by_jax: whether JAX differentiates and batches the forward pass itself.
        backward_follows_forward: whether the backward pass runs on the platform and with the
            parameters of the forward pass, instead of a choice of its own.
        shardable: letters of the axes that a mesh may split.
        sequence: letters of the axes that `axis_name=` splits.
        over_axis: `over_axis(run, inputs, spec, axis_name)` gives the outputs of one device, which
            has its shards of these axes; `run(inputs)` is a call on one device. None: the
            implementations exchange what they need.
        unsplittable: `unsplittable(inputs)` gives the letters of `shardable` that this call cannot
            split.
        share: `share(inputs, starts)` gives the inputs of one device, which knows by letter the
            index at which its shard begins.
        contracted: letters of `shardable` that no output has; the results of the shards are
            summed.
        partial_spec: `partial_spec(inputs, spec, letters)` gives the static arguments with which
            shards compute results that are summed over these letters: wide enough for a sum.
        replicated: fields of `Inputs` that a mesh splits along batch and heads only.
        bucketed: letters of the axes whose exact size does not matter for tuning.
        later_inputs: fields of `Inputs` younger than tuned tables that exist: where such a field
            is None, keys are those of calls that did not have it.
        rarely_used_outputs: outputs that most callers drop; backward passes are tuned as if their
            gradient were 0.
        grouped_axes: `{"k": "n"}` where each key head belongs to a group of query heads (GQA).
        operands: the arrays that `in_specs` describe, in their order.
        sharding_hints: by letter, what the error adds when a mesh would split it.
        tuning_inputs: `tuning_inputs(inputs, drawn, spec)` gives the data to tune on: `drawn`, the
            random arrays, with lengths and indices that are in range.
        tuned_as: ops whose tuned tables also apply to this one, a special case of them.
        auxiliary: whether its calls are steps of another op's call: they are run, but neither
            recorded nor captured.
        revision: grows with every implementation that is registered.
    """

    name: str
    sources: list[Source]
    config: type[Any] = Config
    outputs: type[Any] = tuple
    version: str = "1"
    reference: str | None = None
    differentiable_by_jax: bool = False
    backward_follows_forward: bool = False
    shardable: frozenset[str] = frozenset()
    sequence: frozenset[str] = frozenset()
    over_axis: Callable[[Callable[[Any], Any], Any, Any, str], Any] | None = None
    unsplittable: Callable[[Any], frozenset[str]] = _all_splittable
    share: Callable[[Any, Mapping[str, Any]], Any] = _same_inputs
    contracted: frozenset[str] = frozenset()
    partial_spec: Callable[[Any, Any, frozenset[str]], Any] = _same_spec
    replicated: frozenset[str] = frozenset()
    bucketed: frozenset[str] = frozenset()
    later_inputs: frozenset[str] = frozenset()
    rarely_used_outputs: frozenset[str] = frozenset()
    grouped_axes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    operands: tuple[str, ...] = ()
    sharding_hints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tuning_inputs: Callable[..., Any] | None = None
    tuned_as: tuple[str, ...] = ()
    auxiliary: bool = False
    revision: int = 0

    def renamed(self, name: str, **changes: object) -> "Op":
        """The same op under another name, for a special case of it."""
        other = dataclasses.replace(self, name=name, tuned_as=(), **changes)
        if issubclass(other.config, self.config) and other.version == self.version:
            other.tuned_as = tuple(x for x in (self.name, *self.tuned_as) if x != name)
        return other

    def identifier(self, direction: Direction, name: str | None = None) -> str:
        """The name of one direction of this version, or of `name`'s, in caches and tuned tables."""
        name = name or self.name
        return f"{name}{'' if direction == 'forward' else '.backward'}@v{self.version}"

    def supporting(
        self,
        direction: Direction,
        inputs: CallInputs,
        spec: CallSpec,
        device: Device,
        platform: str | None,
    ) -> tuple[list[tuple[Source, Pass]], dict[str, str]]:
        """The passes that support the call, in order of preference; why the others do not."""
        supported, reasons = [], {}
        for source in self.sources:
            label = f"{source.platform.value} ({source.backend.value})"
            if platform not in (None, "auto", source.platform.value):
                continue
            if reason := source.unavailable_on(device):
                reasons[label] = reason
                continue
            chosen: Pass | None = getattr(source.load(), direction)
            if chosen is None:
                reasons[label] = f"has no {direction} pass"
            elif reason := chosen.refusal(inputs, spec, device):
                reasons[label] = reason
            else:
                supported.append((source, chosen))
        return _in_order(supported, inputs, spec, device), reasons

    def refuse(
        self,
        direction: Direction,
        inputs: CallInputs,
        spec: CallSpec,
        device: Device,
        platform: str | None,
        reasons: Mapping[str, str],
    ) -> UnsupportedError:
        """The error for a call that no platform, or not the requested one, supports."""
        said = "; ".join(f"{label} {reason}" for label, reason in reasons.items())
        if platform in (None, "auto"):
            return UnsupportedError(
                f"{self.name}: no platform supports the {direction} pass: {said}."
            )
        supported, _ = self.supporting(direction, inputs, spec, device, None)
        others = (
            ", ".join(dict.fromkeys(source.platform.value for source, _ in supported)) or "none"
        )
        said = said or f"there is no {platform} implementation"
        return UnsupportedError(
            f"{self.name}: platform={platform!r} does not support this call: {said}. "
            f"Platforms that support it: {others}."
        )


def features_used(inputs: CallInputs, spec: CallSpec) -> frozenset[str]:
    """What a call uses beyond the plain one: fields away from their defaults, kinds of mask."""
    used: set[str] = set()
    defaults = getattr(inputs, "_field_defaults", {})
    for name in defaults:
        value = getattr(inputs, name)
        if hasattr(value, "features"):
            used |= value.features()
        elif value is not None:
            used.add(name)
    if dataclasses.is_dataclass(spec):
        for field in dataclasses.fields(spec):
            given = getattr(spec, field.name)
            if field.default is not dataclasses.MISSING and given != field.default:
                used.add(field.name)
    return frozenset(used)


def _in_order(
    supported: list[tuple[Source, Pass]], inputs: CallInputs, spec: CallSpec, device: Device
) -> list[tuple[Source, Pass]]:
    """In the order of the sources, except that a pass follows those that it yields to."""
    ordered = list(supported)
    for one in supported:
        before = one[1].yields_to(inputs, spec, device)
        last = max((i for i, (x, _) in enumerate(ordered) if x.platform in before), default=-1)
        if (at := ordered.index(one)) < last:
            ordered.insert(last, ordered.pop(at))
    return ordered
