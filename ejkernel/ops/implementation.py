"""What an op is, what one platform offers for it, and why that platform may refuse a call."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ejkernel import settings
from ejkernel.errors import UnsupportedError
from ejkernel.ops.config import Config
from ejkernel.ops.platform import Backend, Device, Platform

Direction = Literal["forward", "backward"]


def _no_objection(inputs: Any, spec: Any, device: Device) -> str | None:
    return None


def _no_parameters(inputs: Any, spec: Any, device: Device) -> Any:
    return None


def _behind_none(inputs: Any, spec: Any, device: Device) -> frozenset[Platform]:
    return frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One direction of an op on one platform.

    Forward: `run(inputs, spec, params) -> (outputs, residuals)`.
    Backward: `run(inputs, residuals, d_outputs, spec, params) -> gradients`, shaped like inputs,
    None where there is none.
    """

    run: Callable[..., Any]
    features: frozenset[str] | None = None  # what it takes beyond the plain call; None: everything
    why_not: Callable[[Any, Any, Device], str | None] = _no_objection
    heuristic: Callable[[Any, Any, Device], Any] = _no_parameters
    candidates: Callable[[Any, Any, Device], Sequence[Any]] | None = None
    # Faster still, but not the same bits in every run: what `auto` takes, and no platform by name.
    unordered: Callable[[Any, Any, Device], Any] = _no_parameters
    # Platforms that go before this one, whatever the order of the sources, if they can serve.
    behind: Callable[[Any, Any, Device], frozenset[Platform]] = _behind_none

    def refusal(self, inputs: Any, spec: Any, device: Device) -> str | None:
        """The reason this pass cannot take the call, or None."""
        if self.features is not None and (missing := features_used(inputs, spec) - self.features):
            return f"does not support {', '.join(sorted(missing))}"
        return self.why_not(inputs, spec, device)

    def guess(self, inputs: Any, spec: Any, device: Device, ordered: bool = True) -> Any:
        """The parameters expected to be fastest."""
        unordered = None if ordered else self.unordered(inputs, spec, device)
        return self.heuristic(inputs, spec, device) if unordered is None else unordered

    def choices(self, inputs: Any, spec: Any, device: Device, ordered: bool = True) -> list[Any]:
        """Every parameter set worth timing, the guess first."""
        others = self.candidates(inputs, spec, device) if self.candidates else ()
        found = [self.guess(inputs, spec, device, ordered)]
        for params in (self.heuristic(inputs, spec, device), *others):
            if params not in found:
                found.append(params)
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """An op on one platform: a forward, a backward, or both.

    `residuals` stands for the forward's `run` under differentiation where the two differ.
    """

    forward: Pass | None = None
    backward: Pass | None = None
    residuals: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the implementation for one platform and backend lives; loaded when it may be used."""

    platform: Platform
    backend: Backend
    where: str | Implementation
    priority: int = 0

    def load(self) -> Implementation:
        if isinstance(self.where, Implementation):
            return self.where
        return importlib.import_module(self.where).IMPLEMENTATION

    def elsewhere(self, device: Device) -> str | None:
        """Why this device is not the one it needs, answered without loading the code."""
        if self.backend in (Backend.ANY, device.platform):
            return None
        if settings.interpret() and self.platform is not Platform.CUDA:
            return None
        return f"needs a {self.backend.value.upper()} and the device is a {device.platform.upper()}"


class Choice(NamedTuple):
    """The platform and the parameters that one pass of a call runs with."""

    source: Source
    run: Pass
    params: Any


@dataclasses.dataclass(eq=False, kw_only=True)
class Op:
    """A public operation: its name, its implementations in order of preference, its axis letters.

    `shardable`: letters that a mesh may split. `reduced`: those of them that no output has, so that
    the parts that the shards compute are summed. `groups`: `{"k": "n"}` when each key head serves a
    group of query heads. `bucketed`: letters whose exact size does not matter for tuning.
    `whole`: fields of which every shard gets all but its batch rows and heads. `quiet`: outputs
    that most callers drop, so that backward passes are tuned as if they had no gradient.
    `sample(inputs, drawn, spec)`: mends the data drawn for tuning. `operands`: what `in_specs` say.
    """

    name: str
    sources: list[Source]
    config: type[Any] = Config
    outputs: type[Any] = tuple
    version: str = "1"
    reference: str | None = None
    native: bool = False  # forward is differentiable and batchable as it stands
    paired: bool = False  # backward runs where and with what the forward ran
    shardable: frozenset[str] = frozenset()
    reduced: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    bucketed: frozenset[str] = frozenset()
    quiet: frozenset[str] = frozenset()
    groups: Mapping[str, str] = dataclasses.field(default_factory=dict)
    operands: tuple[str, ...] = ()
    hint: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sample: Callable[..., Any] | None = None
    kin: tuple[str, ...] = ()  # ops whose tuned tables serve it too: it is a case of them
    edition: int = 0  # grows with every implementation that is added

    def renamed(self, name: str, **changes: Any) -> "Op":
        """The same op under another name, for a special case of it."""
        other = dataclasses.replace(self, name=name, kin=(), **changes)
        if issubclass(other.config, self.config) and other.version == self.version:
            other.kin = tuple(x for x in (self.name, *self.kin) if x != name)
        return other

    def identifier(self, direction: Direction, name: str | None = None) -> str:
        """How caches and tuned tables call one direction of this version, or of its kin's."""
        name = name or self.name
        return f"{name}{'' if direction == 'forward' else '.backward'}@v{self.version}"

    def serving(
        self, direction: Direction, inputs: Any, spec: Any, device: Device, platform: str | None
    ) -> tuple[list[tuple[Source, Pass]], dict[str, str]]:
        """The passes that can take the call, in order of preference, and why the others cannot."""
        able, reasons = [], {}
        for source in self.sources:
            label = f"{source.platform.value} ({source.backend.value})"
            if platform not in (None, "auto", source.platform.value):
                continue
            if reason := source.elsewhere(device):
                reasons[label] = reason
                continue
            chosen: Pass | None = getattr(source.load(), direction)
            if chosen is None:
                reasons[label] = f"has no {direction} pass"
            elif reason := chosen.refusal(inputs, spec, device):
                reasons[label] = reason
            else:
                able.append((source, chosen))
        return _in_order(able, inputs, spec, device), reasons

    def refuse(
        self,
        direction: Direction,
        inputs: Any,
        spec: Any,
        device: Device,
        platform: str | None,
        reasons: Mapping[str, str],
    ) -> UnsupportedError:
        """The error for a call that nobody, or not the platform asked for, can serve."""
        said = "; ".join(f"{label} {reason}" for label, reason in reasons.items())
        if platform in (None, "auto"):
            return UnsupportedError(
                f"{self.name}: no platform can serve the {direction} pass: {said}."
            )
        able, _ = self.serving(direction, inputs, spec, device, None)
        others = ", ".join(dict.fromkeys(source.platform.value for source, _ in able)) or "none"
        said = said or f"there is no {platform} implementation"
        return UnsupportedError(
            f"{self.name}: platform={platform!r} cannot serve this call: {said}. "
            f"Platforms that can: {others}."
        )


def features_used(inputs: Any, spec: Any) -> frozenset[str]:
    """All that goes beyond the plain call: fields away from their defaults, kinds of mask."""
    used = set()
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
    able: list[tuple[Source, Pass]], inputs: Any, spec: Any, device: Device
) -> list[tuple[Source, Pass]]:
    """In the order of the sources, but for passes that stand back behind others."""
    ordered = list(able)
    for one in able:
        before = one[1].behind(inputs, spec, device)
        last = max((i for i, (x, _) in enumerate(ordered) if x.platform in before), default=-1)
        if (at := ordered.index(one)) < last:
            ordered.insert(last, ordered.pop(at))
    return ordered
