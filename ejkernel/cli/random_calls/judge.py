"""One call on one platform, compared with its reference."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import settings
from ejkernel.cli import oracle, subjects
from ejkernel.cli.oracle import Dtype, Truth
from ejkernel.cli.outcome import Outcome, crash, outcome_of
from ejkernel.cli.random_calls import arrays
from ejkernel.ops import executor
from ejkernel.ops.executor import Request
from ejkernel.ops.implementation import Direction
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.platform import device_of

AUTO = "auto"
# Of thousands of calls a few exceed the allowed error by chance. Less than four times the allowed
# error is wrong only if it is exceeded with other random numbers as well.
_BORDERLINE, _DRAWS = 4.0, 3


def compare(
    operation: str,
    platform: str,
    dtype: Dtype,
    make: Callable[[], Mapping[str, Any]],
    small_blocks: bool = False,
    gradients: bool = True,
) -> Outcome:
    """Values and gradients of a call on a platform, compared with the float64 reference.

    Args:
        operation: the name of the public function.
        platform: "xla", "pallas", "triton", "cuda", or "auto" for the best that supports the call.
        dtype: of the floating-point arrays.
        make: gives the keyword arguments, made with the functions of `arrays`.
        small_blocks: use the configuration with small blocks that the tests of the operation use.
        gradients: whether gradients are compared, too.
    """
    return Comparison(operation, dtype, make, small_blocks, gradients).compare(platform)


class Comparison:
    """A call and its reference; the arguments are those of `compare`."""

    def __init__(
        self,
        operation: str,
        dtype: Dtype,
        make: Callable[[], Mapping[str, Any]],
        small_blocks: bool = False,
        gradients: bool = True,
    ) -> None:
        self._subject, self._make = subjects.one(operation), make
        self._dtype: Dtype = dtype
        self._gradients = gradients
        configs = importlib.import_module(f"ejkernel.kernels.{operation}.workloads").CONFIGS
        self._cfg = configs[0] if small_blocks and configs else None
        self._truths: dict[int, Truth] = {}

    @functools.cached_property
    def refused(self) -> Outcome | None:
        """The error with which the function refuses the call, which is legal; None: it does not."""
        try:
            self.call  # noqa: B018
        except Exception as error:
            return crash(error)
        return None

    @functools.cached_property
    def call(self) -> Invocation:
        """The call on the device, with NaN in memory that must not be read."""
        return self._on_device(0)

    def _on_device(self, draw: int) -> Invocation:
        drawn = self._drawn(draw, nan_filled=True)
        with oracle.on_the_host():
            inputs = oracle.with_dtype(drawn.inputs, self._dtype)
        inputs = oracle.moved(inputs)
        return dataclasses.replace(drawn, inputs=inputs, device=device_of(jax.tree.leaves(inputs)))

    def _drawn(self, draw: int, nan_filled: bool) -> Invocation:
        with oracle.on_the_host(), arrays.drawn_again(draw, nan_filled):
            return self._subject.invocation(dict(self._make()))

    def _truth(self, draw: int) -> Truth:
        """What the definition gives for one draw of the numbers; all platforms share it."""
        truth = Truth(
            lambda seed: self._drawn(draw + _DRAWS * seed, nan_filled=False), stored_residuals=True
        )
        return self._truths.setdefault(draw, truth)

    def platforms(self) -> list[str]:
        """Those that have an implementation for the device, and the choice between them."""
        sources = self.call.op.sources
        names = [x.platform.value for x in sources if not x.unavailable_on(self.call.device)]
        on_cpu = self.call.device.platform == "cpu"
        return [*dict.fromkeys(names), *([] if on_cpu else [AUTO])]

    def label(self, platform: str) -> str:
        """The implementation in words that runs a call on this platform."""
        supported, _ = self._supporting("forward", platform)
        named = [x for x in self.call.op.sources if x.platform.value == platform]
        sources = [source for source, _ in supported] or named
        return AUTO if platform == AUTO else subjects.label(sources[0])

    def compare(self, platform: str) -> Outcome:
        """What becomes of the call on this platform; a pass that it lacks is not compared."""
        if self.refused is not None:
            return self.refused
        supported, reasons = self._supporting("forward", platform)
        if not supported:
            return Outcome("unsupported", "; ".join(reasons.values()))
        call, request = self.call, Request(platform=platform, cfg=self._cfg)
        run = lambda inputs: executor.run(call.op, inputs, call.spec, request)
        both = self._gradients and bool(self._supporting("backward", platform)[0])
        program = jax.jit(oracle.with_gradients(run) if both else lambda x: (run(x), None))
        outcome = self._outcome(program, 0)
        for draw in range(1, _DRAWS):
            if outcome.verdict == "wrong" and outcome.excess < _BORDERLINE:
                outcome = self._outcome(program, draw)
        return outcome

    def _outcome(self, program: Callable[[Any], tuple[Any, Any]], draw: int) -> Outcome:
        inputs = self._on_device(draw).inputs if draw else self.call.inputs

        def results() -> tuple[Any, Any]:
            outputs, gradients = program(inputs)
            return self._restored(outputs, inputs, draw), gradients

        with settings.override(autotune_policy=settings.autotune_policy() or "heuristics"):
            return outcome_of(results, self._truth(draw), self._dtype)

    def _supporting(self, direction: Direction, platform: str) -> tuple[list, dict[str, str]]:
        call = self.call
        return call.op.supporting(direction, call.inputs, call.spec, call.device, platform)

    def _restored(self, outputs: Any, nan_filled: Any, draw: int) -> Any:
        """The outputs; NaN that a cache has kept from the inputs is what the truth has there."""
        if not set(outputs._fields) & set(nan_filled._fields):
            return outputs
        clean = self._drawn(draw, nan_filled=False).inputs
        changes = {}
        for name, x in zip(outputs._fields, outputs, strict=True):
            if hasattr(nan_filled, name) and jnp.issubdtype(x.dtype, jnp.floating):
                given, before, x = (
                    np.asarray(one, np.float32)
                    for one in (getattr(clean, name), getattr(nan_filled, name), x)
                )
                changes[name] = np.where(np.isnan(before) & np.isnan(x), given, x)
        return outputs._replace(**changes)
