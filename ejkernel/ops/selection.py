"""From a call to its configuration: the first of eight places that knows one."""

import contextlib
import contextvars
import dataclasses
import reprlib
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax

from ejkernel import settings
from ejkernel.errors import CacheWarning, TuningWarning, UnsupportedError
from ejkernel.ops import cache as caches
from ejkernel.ops import policy as policies
from ejkernel.ops.cache import ConfigCache
from ejkernel.ops.config import Config
from ejkernel.ops.forking import renew_in_children
from ejkernel.ops.implementation import Choice, Op, Pass, Source
from ejkernel.ops.invocation import Invocation, Key
from ejkernel.ops.persistent import PersistentCache, ShippedTable
from ejkernel.ops.platform import device_fingerprint
from ejkernel.ops.policy import AutotunePolicy
from ejkernel.ops.tuner import Tuned, Tuner

Supported = list[tuple[Source, Pass]]
_PLAIN = (bool, int, float, str, list, tuple, dict)  # what a file can hold
# The chains that measure a call around this one.
_MEASURING: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(
    "measuring", default=frozenset()
)


class ConfigSelectorChain:
    """Chooses platform and parameters for a call.

    In this order: an explicit `cfg`, an overlay, the memory cache, the disk cache, the table that
    ships with the package, measurement, the heuristic; then a `RuntimeError`.

    Args:
        cache: configurations of this process.
        policy: what to do when nothing is known; None lets the environment, then the device decide.
        tuner: how to measure.
        persistent: the disk cache, or a function from an op's name to its disk cache.
        persist_autotune: whether measured configurations go to the disk cache.
        on_event: called as `on_event(name, **data)` for every decision.
    """

    def __init__(
        self,
        cache: ConfigCache,
        policy: AutotunePolicy | None = None,
        tuner: Tuner | None = None,
        persistent: PersistentCache | Callable[[str], PersistentCache] | None = None,
        persist_autotune: bool = True,
        on_event: Callable[..., None] | None = None,
    ) -> None:
        self.cache = cache
        self.policy = policy
        self.tuner: Tuner = tuner or Tuner()
        self.persistent = persistent
        self.persist_autotune = persist_autotune
        self.on_event = on_event
        self.renew_locks()
        renew_in_children(self)

    def renew_locks(self) -> None:
        """Forget who is measuring: in a forked child, nobody."""
        self._tuning = threading.Lock()

    def state(self) -> tuple[Hashable, ...]:
        """Changes whenever a later choice for the same call may come out differently."""
        return (
            self.cache.version,
            self.policy,
            policies.state(),
            caches.overlay_state(),
            settings.interpret(),
            settings.deterministic(),
        )

    def emit(self, event: str, **data: object) -> None:
        """Tell `on_event` about a decision."""
        if self.on_event is not None:
            self.on_event(event, **data)

    def choose(self, inv: Invocation, cfg: object = None) -> Choice:
        """The platform and parameters this call runs with; the reasons if there is none."""
        inv, params = self._explicit(inv, cfg)
        supported, reasons = inv.op.supporting(
            inv.direction, inv.inputs, inv.spec, inv.device, inv.platform
        )
        if not supported:
            raise inv.op.refuse(
                inv.direction, inv.inputs, inv.spec, inv.device, inv.platform, reasons
            )
        if params is not None:
            self.emit("override", key=inv.key, cfg=cfg)
            source, chosen = supported[0]
            return Choice(source, chosen, _filled(params, chosen, inv))
        return self._known(inv, supported) or self._found(inv, supported)

    def _explicit(self, inv: Invocation, cfg: object) -> tuple[Invocation, Any]:
        """The call with the platform that `cfg` asks for, and the parameters it holds, if any."""
        if cfg is None:
            return inv, None
        check_config(inv.op, cfg)
        if not isinstance(cfg, Config):
            return inv, cfg
        asked = [name for name in (inv.platform, cfg.platform) if name not in (None, "auto")]
        if len(set(asked)) > 1:
            raise ValueError(
                f"{inv.op.name}: platform={inv.platform!r} and cfg.platform={cfg.platform!r} "
                "differ; give one of them, or the same in both."
            )
        if cfg.backend not in ("any", inv.device.platform):
            supported, _ = inv.op.supporting(inv.direction, inv.inputs, inv.spec, inv.device, None)
            raise UnsupportedError(
                f"{inv.op.name}: cfg asks for the backend {cfg.backend!r} and the device is a "
                f"{inv.device.platform.upper()}. Platforms that support the call here: "
                f"{', '.join(source.platform for source, _ in supported) or 'none'}."
            )
        inv = dataclasses.replace(inv, platform=asked[0] if asked else None)
        return inv, cfg.params(inv.direction)

    def _known(self, inv: Invocation, supported: Supported) -> Choice | None:
        """What an overlay, a cache or the shipped table says, if it is still supported."""
        for level, look_up in (
            ("overlay", lambda: caches.current_overlay(inv.key)),
            ("memory", lambda: self.cache.get(inv.key)),
            ("persistent", lambda: self._from_disk(inv.key)),
            ("shipped", lambda: self._from_package(inv)),
        ):
            if (cfg := look_up()) is None:
                continue
            if (choice := _restored(cfg, inv, supported)) is None:
                continue
            if level in ("persistent", "shipped"):
                self.cache.record(inv.key, cfg)
            event = "overlay_hit" if level == "overlay" else "cache_hit"
            self.emit(event, key=inv.key, cfg=cfg, level=level)
            return choice
        return None

    def _found(self, inv: Invocation, supported: Supported) -> Choice:
        """By measuring, or the heuristic, as the policy says."""
        policy = policies.effective(self, inv.device)
        if policy.tunes and (choice := self._measured(inv, supported)):
            return choice
        if not policy.allow_heuristics:
            self.emit("error", key=inv.key)
            raise RuntimeError(
                f"{inv.op.name}: no configuration is known for this call and the policy allows "
                "neither measuring nor the heuristic: pass cfg=, tune the call with "
                "ejkernel.autotune, or allow one of them in AutotunePolicy."
            )
        source, chosen = supported[0]
        params = chosen.guess(inv.inputs, inv.spec, inv.device, _deterministic(inv))
        choice = Choice(source, chosen, params)
        self.emit("heuristics", key=inv.key, cfg=_stored(choice, inv))
        return choice

    def _measured(self, inv: Invocation, supported: Supported) -> Choice | None:
        """The fastest of what a first call compares; of a user's kernel, of all candidates."""
        own = inv.op.reference is None
        choices = _choices(inv, supported) if own else _first_call_choices(inv, *supported[0])
        here = inv.device.fingerprint == device_fingerprint()
        if len(choices) < 2 or not here or _several_processes():
            return None
        with self._alone():
            # Another thread may have measured the same call while this one waited.
            if choice := _restored(self.cache.get(inv.key), inv, supported):
                return choice
            measure = self.tuner.autotune if own else self.tuner.compare
            try:
                tuned = self._tuned(inv, choices, measure, self.cache.record)
            except Exception as error:  # such as no memory for the data: the call itself may run
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                warnings.warn(
                    f"{inv.op.identifier(inv.direction)}: its configurations cannot be measured "
                    f"({reason}); going on without.",
                    TuningWarning,
                    stacklevel=2,
                )
                self.emit("autotune_finish", key=inv.key, cfg=None)
                return None
        return tuned and tuned.best

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread measures at a time. Nested calls do not take the lock.

        The measurement runs in a thread of its own, with the context of the one that waits for it.
        """
        if id(self) in _MEASURING.get():
            yield
            return
        with self._tuning:
            token = _MEASURING.set(_MEASURING.get() | {id(self)})
            try:
                yield
            finally:
                _MEASURING.reset(token)

    def candidates(self, inv: Invocation) -> list[Choice]:
        """Every platform and parameter set that `tune` would measure for the call."""
        supported, _ = inv.op.supporting(
            inv.direction, inv.inputs, inv.spec, inv.device, inv.platform
        )
        return _choices(inv, supported)

    def tune(self, inv: Invocation, choices: list[Choice] | None = None) -> Tuned | None:
        """Measure every candidate of the call now and remember the winner.

        Raises:
            RuntimeError: there are several processes, which would not find the same winner.
        """
        if _several_processes():
            raise RuntimeError(
                f"{inv.op.name}: {jax.process_count()} processes would each choose a configuration "
                "of their own; tune in one process, save the result, and load it in all."
            )
        if choices is None:
            choices = self.candidates(inv)
        # What was compiled before was chosen otherwise: `put` tells that it is stale.
        return self._tuned(inv, choices, self.tuner.autotune, self.cache.put)

    def _tuned(
        self,
        inv: Invocation,
        choices: list[Choice],
        measure: Callable[[Invocation, list[Choice]], Tuned | None],
        remember: Callable[[Key, object], None],
    ) -> Tuned | None:
        self.emit("autotune_start", key=inv.key, candidates=len(choices))
        tuned = measure(inv, choices)
        if tuned is None:
            self.emit("autotune_finish", key=inv.key, cfg=None)
            return None
        cfg = _stored(tuned.best, inv)
        remember(inv.key, cfg)
        if self.persist_autotune and (disk := self._disk(inv.op.name)):
            disk.put(inv.key, cfg)
        self.emit("autotune_finish", key=inv.key, cfg=cfg, seconds=tuned.seconds)
        return tuned

    def _disk(self, name: str) -> PersistentCache | None:
        return self.persistent(name) if callable(self.persistent) else self.persistent

    def _from_disk(self, key: Key) -> Any:
        # Machines have caches of their own, and all processes must compile the same program.
        disk = None if _several_processes() else self._disk(_op_name(key))
        return None if disk is None else disk.get(key)

    def _from_package(self, inv: Invocation) -> Any:
        device, _, call = inv.key
        for name in (inv.op.name, *inv.op.tuned_as):
            key = (device, inv.op.identifier(inv.direction, name), call)
            if (cfg := ShippedTable.for_op(name).get(key)) is not None:
                return cfg
        return None


def _several_processes() -> bool:
    """Whether other processes run this program, too."""
    return jax.process_count() > 1


def check_config(op: Op, cfg: object) -> None:
    """Refuse a configuration of another class; a user's own kernel takes any."""
    if cfg is not None and issubclass(op.config, Config) and not isinstance(cfg, op.config):
        raise ValueError(
            f"{op.name}: cfg must be a {op.config.__name__}, got {type(cfg).__name__}."
        )


def _choices(inv: Invocation, supported: Supported) -> list[Choice]:
    """Everything worth timing; a user's variant for a platform stands in for its general form."""
    return [
        Choice(source, chosen, params)
        for source, chosen in (supported[:1] if inv.op.backward_follows_forward else supported)
        for params in chosen.choices(inv.inputs, inv.spec, inv.device, _deterministic(inv))
    ]


def _first_call_choices(inv: Invocation, source: Source, chosen: Pass) -> list[Choice]:
    """The heuristic of the preferred platform and what its model expects to be close."""
    found = chosen.first_call_choices(inv.inputs, inv.spec, inv.device, _deterministic(inv))
    return [Choice(source, chosen, params) for params in found]


def _deterministic(inv: Invocation) -> bool:
    """Whether every run must give the same bits, as it does for a platform that has a name."""
    return inv.platform not in (None, "auto") or settings.deterministic()


def _op_name(key: Key) -> str:
    return key[1].partition("@")[0].removesuffix(".backward")


def _filled(params: object, chosen: Pass, inv: Invocation) -> Any:
    """`params` with the fields left open taken from the heuristic."""
    guess = chosen.heuristic(inv.inputs, inv.spec, inv.device)
    if not dataclasses.is_dataclass(guess) or isinstance(guess, type):
        return params
    if type(guess) is not type(params):
        return params
    given = {
        field.name: value
        for field in dataclasses.fields(guess)
        if (value := getattr(params, field.name)) is not None
    }
    return dataclasses.replace(guess, **given)


def _restored(cfg: object, inv: Invocation, supported: Supported) -> Choice | None:
    """A stored configuration as a choice; None when it is not supported here any more."""
    if cfg is None:
        return None
    try:
        cfg = _rebuilt(cfg, inv, supported)
    except (TypeError, ValueError) as error:
        warnings.warn(
            f"{inv.op.name}: a stored configuration is not usable: {error}",
            CacheWarning,
            stacklevel=2,
        )
        return None
    if not isinstance(cfg, Config):
        source, chosen = supported[0]
        return Choice(source, chosen, cfg)
    for source, chosen in supported:
        if source.platform == cfg.platform and source.backend == cfg.backend:
            return Choice(source, chosen, _filled(cfg.params(inv.direction), chosen, inv))
    return None


def _rebuilt(stored: object, inv: Invocation, supported: Supported) -> Any:
    """A configuration from a cache in its class; a user's kernel has that of its heuristic."""
    if issubclass(inv.op.config, Config):
        known = inv.op.config
        rebuilt = known.from_dict(stored) if isinstance(stored, dict) else stored
    else:
        guess = supported[0][1].heuristic(inv.inputs, inv.spec, inv.device)
        if not dataclasses.is_dataclass(guess) or isinstance(guess, type):
            return stored
        known = type(guess)
        rebuilt = known(**stored) if isinstance(stored, dict) else stored
        if not isinstance(stored, _PLAIN):  # a class of its own, which only a program can store
            return rebuilt
    if not isinstance(rebuilt, known):
        got = reprlib.repr(stored) if isinstance(stored, _PLAIN) else type(stored).__name__
        raise TypeError(f"it must be a {known.__name__}, got {got}.")
    return rebuilt


def _stored(choice: Choice, inv: Invocation) -> Any:
    """The choice in the form in which caches hold it."""
    params = choice.params
    if not issubclass(inv.op.config, Config):
        return params
    where = {"platform": choice.source.platform.value, "backend": choice.source.backend.value}
    if isinstance(params, Config):
        return dataclasses.replace(params, **where)
    if params is None:  # it has nothing to configure
        return inv.op.config(**where)
    field = "fwd_params" if inv.direction == "forward" else "bwd_params"
    return inv.op.config(**{field: params}, **where)
