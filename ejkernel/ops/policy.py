"""What happens when no configuration is known for a call."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Hashable, Iterator
from typing import Literal, Protocol, runtime_checkable

from ejkernel import settings
from ejkernel.ops.platform import Device

_OVERRIDES: contextvars.ContextVar[tuple[tuple[int, "AutotunePolicy"], ...]] = (
    contextvars.ContextVar("policy_overrides", default=())
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
        return self.allow_autotune and self.cache_miss_fallback == "autotune"


@runtime_checkable
class HasPolicy(Protocol):
    """What a policy belongs to: a `ConfigSelectorChain`."""

    policy: AutotunePolicy | None


_MEASURE = AutotunePolicy()
_HEURISTIC = AutotunePolicy(allow_autotune=False, cache_miss_fallback="heuristics")


def effective(selector: HasPolicy, device: Device) -> AutotunePolicy:
    """The policy in force: override, the selector's own, the environment's, the device's."""
    for owner, policy in reversed(_OVERRIDES.get()):
        if owner == id(selector):
            return policy
    if selector.policy is not None:
        return selector.policy
    wanted = settings.autotune_policy()
    if wanted is None:
        wanted = "heuristics" if device.platform == "cpu" else "autotune"
    return _MEASURE if wanted == "autotune" else _HEURISTIC


def state() -> tuple[Hashable, ...]:
    """Identity of everything outside a selector that decides its policy."""
    return _OVERRIDES.get(), settings.autotune_policy()


@contextlib.contextmanager
def policy_override(selector: HasPolicy, **updates: object) -> Iterator[None]:
    """Change fields of `selector`'s policy for a block.

    >>> from ejkernel.ops import ConfigCache, ConfigSelectorChain, policy_override
    >>> chain = ConfigSelectorChain(cache=ConfigCache())
    >>> with policy_override(chain, allow_autotune=False):
    ...     pass
    """
    policy = dataclasses.replace(selector.policy or AutotunePolicy(), **updates)
    token = _OVERRIDES.set((*_OVERRIDES.get(), (id(selector), policy)))
    try:
        yield
    finally:
        _OVERRIDES.reset(token)
