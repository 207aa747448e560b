"""The one table of ops: ours, loaded when asked for, and a user's own kernels."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ejkernel.ops.implementation import Implementation, Op, Pass, Source
from ejkernel.ops.platform import Backend, Platform

Registered = TypeVar("Registered", bound=Implementation | Callable[..., Any])


class KernelRegistry:
    """Every op by name, with its implementations in order of preference.

    >>> import ejkernel.modules
    >>> from ejkernel import kernel_registry
    >>> [s.platform.value for s in kernel_registry.list_implementations("mean_pooling")]
    ['triton', 'xla']
    """

    def __init__(self) -> None:
        self._ops: dict[str, Op | str] = {}
        self.registrations = 0  # how many implementations were added to ops

    def declare(self, name: str, module: str) -> None:
        """Make `name` known without loading it: `module.OP` is imported on first use."""
        self._ops.setdefault(name, module)

    def add(self, op: Op) -> None:
        """Put an op into the table; a name of ours cannot be taken over."""
        if isinstance(self._ops.get(op.name), str) or getattr(
            self._ops.get(op.name), "reference", None
        ):
            raise ValueError(f"kernel_registry: {op.name!r} is an operation of the package.")
        self._ops[op.name] = op

    def op(self, name: str) -> Op:
        """The op of this name.

        Raises:
            ValueError: if there is none.
        """
        entry = self._ops.get(name)
        if entry is None:
            raise ValueError(
                f"kernel_registry: no operation {name!r}; there are {', '.join(sorted(self._ops))}."
            )
        if isinstance(entry, str):
            entry = self._ops[name] = importlib.import_module(entry).OP
        return entry

    def list_algorithms(self) -> list[str]:
        """Names of all ops."""
        return sorted(self._ops)

    def list_implementations(self, algorithm: str) -> list[Source]:
        """Where the implementations of an op live, in order of preference."""
        return list(self.op(algorithm).sources)

    def get(
        self,
        algorithm: str,
        platform: Platform | str | None = None,
        backend: Backend | str | None = None,
    ) -> Implementation:
        """The first implementation for this platform and backend; None or "auto" matches any.

        Raises:
            ValueError: if there is none.
        """
        for source in self.op(algorithm).sources:
            if platform not in (None, "auto", source.platform):
                continue
            if backend in (None, Backend.ANY, source.backend) or source.backend is Backend.ANY:
                return source.load()
        raise ValueError(
            f"kernel_registry: {algorithm} has no implementation for platform={platform!r}, "
            f"backend={backend!r}; it has {self._listing(algorithm)}."
        )

    def register(
        self,
        algorithm: str,
        platform: Platform | str,
        backend: Backend | str,
        priority: int = 0,
        features: Iterable[str] = (),
    ) -> Callable[[Registered], Registered]:
        """Decorator: add an implementation to an op, and to the ops that are special cases of it.

        `scaled_dot_product_attention` is one of `flash_attention`, for example.

        Takes an `Implementation`, or a function `(inputs, spec, params) -> (outputs, residuals)`
        that becomes its forward. A higher priority is preferred; ours have 0.

        Args:
            algorithm: the name of the op.
            platform: how the implementation is written.
            backend: where it runs.
            priority: a higher one is preferred.
            features: for a function, the optional arguments that it supports; a call that uses any
                other goes to the next implementation. An `Implementation` lists its own.
        """
        op = self.op(algorithm)

        def add(implementation: Registered) -> Registered:
            op.sources.append(
                Source(
                    Platform(platform),
                    Backend(backend),
                    _complete(implementation, frozenset(features)),
                    priority,
                )
            )
            op.sources.sort(key=lambda source: -source.priority)
            op.revision += 1
            self.registrations += 1
            return implementation

        return add

    def _listing(self, algorithm: str) -> str:
        sources = self.op(algorithm).sources
        return ", ".join(f"{s.platform.value} ({s.backend.value})" for s in sources)


def _complete(
    implementation: Implementation | Callable[..., Any], features: frozenset[str]
) -> Implementation:
    """An implementation from the function that is its forward pass."""
    if isinstance(implementation, Implementation):
        if features:
            raise ValueError(
                "kernel_registry: features= is for a function; the passes of an Implementation "
                "list their own."
            )
        return implementation
    return Implementation(forward=Pass(run=implementation, features=features))


kernel_registry: KernelRegistry = KernelRegistry()
