"""Small kernels of the kind a user writes, for testing the framework."""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.ops import Kernel


@dataclasses.dataclass(frozen=True)
class ScaleConfig:
    block: int = 128


class Scale(Kernel[ScaleConfig, jax.Array]):
    """x * factor; counts in `ran` the blocks it was traced with."""

    version = "1"
    ran: list[int] = []  # noqa: RUF012

    def __init__(self, op_id="scale"):
        super().__init__(op_id)

    def run(self, x, *, factor=2.0, cfg):
        self.ran.append(cfg.block)
        return x * factor

    def heuristic_cfg(self, inv):
        return ScaleConfig()

    def candidate_cfgs(self, inv):
        return [ScaleConfig(64), ScaleConfig(128)]


class Cube(Kernel[ScaleConfig, jax.Array]):
    """weight * x ** 3 with a gradient of its own, which says so by being ten times too large."""

    def __init__(self):
        super().__init__("cube")

    def run(self, weight, x, *, cfg):
        return weight * x**3

    def heuristic_cfg(self, inv):
        return ScaleConfig()

    def fwd_with_residuals(self, weight, x, *, cfg):
        return weight * x**3, {"square": x**2}

    def vjp(self, residuals, y, dy, weight, x, *, cfg):
        return None, 10 * dy * 3 * weight * residuals["square"] + 0 * y


class Wrong(Scale):
    """Its candidates raise or lie, but for the heuristic one."""

    def __init__(self):
        super().__init__("wrong")

    def run(self, x, *, factor=2.0, cfg):
        if cfg.block == 64:
            raise RuntimeError("does not compile")
        return x * factor + (cfg.block == 32)

    def candidate_cfgs(self, inv):
        return [ScaleConfig(64), ScaleConfig(32), ScaleConfig(128)]


class Hopeless(Wrong):
    """No candidate runs while being tuned."""

    def __init__(self):
        Kernel.__init__(self, "hopeless")

    def run(self, x, *, factor=2.0, cfg):
        if cfg.block != 128 or x.shape == (3,):
            raise RuntimeError("does not compile")
        return jnp.asarray(x * factor)
