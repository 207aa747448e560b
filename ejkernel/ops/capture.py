"""The call that a function would make, without running it."""

from collections.abc import Callable
from typing import Any

import jax

from ejkernel.ops.implementation import CallInputs, CallSpec, Op
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.platform import device_of


class CapturedCall(BaseException):
    """Carries a call out of the function that would have made it."""

    def __init__(self, invocation: Invocation) -> None:
        super().__init__()
        self.invocation = invocation


def several_devices(name: str) -> ValueError:
    """The error for a call over a mesh, whose configuration is one for the arrays of a device."""
    return ValueError(
        f"{name}: the configuration of a call over a mesh is that of the arrays of one device: "
        "give arrays of their shapes, without mesh=, in_specs= and out_specs=."
    )


class CallCapture:
    """Stands for an executor: raises the first call as a `CapturedCall`.

    Args:
        run_auxiliary: runs auxiliary calls, whose results the function may need before.
    """

    def __init__(self, run_auxiliary: Callable[..., Any]) -> None:
        self._run_auxiliary = run_auxiliary

    def run(self, op: Op, inputs: CallInputs, spec: CallSpec, request: Any) -> Any:
        """Raise the call; `request` is a `Request` of the executor."""
        if op.auxiliary:
            return self._run_auxiliary(op, inputs, spec, request)
        if not (request.mesh is request.in_specs is request.out_specs is None):
            raise several_devices(op.name)
        device = device_of(jax.tree.leaves(inputs))
        raise CapturedCall(Invocation(op, inputs, spec, device, request.platform))
