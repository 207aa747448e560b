"""What happens when no configuration is known for a call."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Hashable, Iterator
from typing import Literal, Protocol, runtime_checkable

from ejkernel import settings
from ejkernel.ops.platform import Device

_Updates = tuple[tuple[str, object], ...]
# The selectors whose policies surrounding blocks change, and the fields; the innermost last.
_OVERRIDES: contextvars.ContextVar[tuple[tuple[int, _Updates], ...]] = contextvars.ContextVar(
    "policy_overrides", default=()
)


@dataclasses.dataclass(frozen=True)
class AutotunePolicy:
    """Whether an unknown call is measured, runs with the heuristic, or is refused.

    `cache_miss_fallback` says what is tried first; what is not allowed is not tried at all.
    """

    allow_autotune: bool = True
    allow_heuristics: bool = True
    cache_miss_fallback: Literal["autotune", "heuristics"] = "autotune"

    def __post_init__(self) -> None:
        if self.cache_miss_fallback not in ("autotune", "heuristics"):
            raise ValueError(
                "AutotunePolicy: cache_miss_fallback must be 'autotune' or 'heuristics', "
                f"got {self.cache_miss_fallback!r}."
            )

    @property
    def tunes(self) -> bool:
        """Whether an unknown call is measured first."""
        return self.allow_autotune and (
            self.cache_miss_fallback == "autotune" or not self.allow_heuristics
        )


@runtime_checkable
class HasPolicy(Protocol):
    """What a policy belongs to: a `ConfigSelectorChain`."""

    policy: AutotunePolicy | None


_MEASURE = AutotunePolicy()
_HEURISTIC = AutotunePolicy(allow_autotune=False)


def effective(selector: HasPolicy, device: Device) -> AutotunePolicy:
    """The selector's own policy, the environment's or the device's, with the overrides on top."""
    policy = _default(device) if selector.policy is None else selector.policy
    for owner, updates in _OVERRIDES.get():
        if owner == id(selector):
            policy = dataclasses.replace(policy, **dict(updates))
    return policy


def _default(device: Device) -> AutotunePolicy:
    wanted = settings.autotune_policy()
    if wanted is None:
        wanted = "heuristics" if device.platform == "cpu" else "autotune"
    return _MEASURE if wanted == "autotune" else _HEURISTIC


def state() -> tuple[Hashable, ...]:
    """Identity of everything outside a selector that decides its policy."""
    return _OVERRIDES.get(), settings.autotune_policy()


@contextlib.contextmanager
def policy_override(selector: HasPolicy, **updates: object) -> Iterator[None]:
    """Change fields of `selector`'s policy for a block; the others stay as they are.

    >>> from ejkernel.ops import ConfigCache, ConfigSelectorChain, policy_override
    >>> chain = ConfigSelectorChain(cache=ConfigCache())
    >>> with policy_override(chain, allow_autotune=False):
    ...     pass
    """
    dataclasses.replace(AutotunePolicy(), **updates)  # refuses what is no field or no value of it
    token = _OVERRIDES.set((*_OVERRIDES.get(), (id(selector), tuple(updates.items()))))
    try:
        yield
    finally:
        _OVERRIDES.reset(token)
