"""A random call as choices: each has a simplest value, and any combination is a legal call."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from ejkernel.cli.oracle import Dtype
from ejkernel.cli.random_calls import arrays
from ejkernel.kernels.blocksparse_attention import masks
from ejkernel.types import MaskInfo

# Tiny, odd, and around the sizes of blocks.
LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 47, 64, 65, 100, 127, 128, 129, 190)
DIMS = (1, 3, 8, 16, 17, 24, 32, 40, 60, 64, 72, 80, 96, 128, 130, 192)

Chosen = TypeVar("Chosen")
_HERE = "ejkernel.cli.random_calls"
_MASKS = "ejkernel.kernels.blocksparse_attention.masks"
# Modules of the names that arguments consist of.
_FROM = {
    **{name: f"{_HERE}.arrays" for name, _ in inspect.getmembers(arrays, inspect.isfunction)},
    **dict.fromkeys(("CausalMask", "ChunkedCausalMask", "FullMask", "LocalMask"), _MASKS),
    "MaskInfo": "ejkernel.types",
    "compare": _HERE,
}
_NAMESPACE = {
    "jnp": jnp,
    "np": np,
    "MaskInfo": MaskInfo,
    **{name: getattr(arrays, name) for name in _FROM if hasattr(arrays, name)},
    **{name: getattr(masks, name) for name in _FROM if hasattr(masks, name)},
}


def one_of(simplest: Chosen, *others: Chosen) -> Chosen:
    """A choice between these; one that is listed twice is drawn twice as often."""
    return dataclasses.field(default=simplest, metadata={"options": (simplest, *others)})


def size_of(simplest: Chosen, *others: Chosen) -> Chosen:
    """A choice between sizes; every number from 1 up is legal, too."""
    options = (simplest, *others)
    return dataclasses.field(default=simplest, metadata={"options": options, "halved": True})


def made(function: str, *positional: object, **options: object) -> str:
    """The call of a function of `arrays`; what has its default is left out."""
    defaults = _defaults(function)
    given = [f"{name}={x!r}" for name, x in options.items() if x != defaults[name]]
    return f"{function}({', '.join([*map(str, positional), *given])})"


@functools.cache
def _defaults(function: str) -> dict[str, Any]:
    parameters = inspect.signature(getattr(arrays, function)).parameters
    return {name: x.default for name, x in parameters.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """What a call is made from; `arguments` makes it. The defaults are the simplest call."""

    operation: str
    dtype: Dtype = one_of("float32", "float32", "bfloat16", "float16")
    small_blocks: bool = one_of(False, True)  # the configuration that tests have several blocks in
    seed: int = one_of(0, *range(10, 1000, 10))  # of the arrays

    def arguments(self) -> dict[str, str]:
        """The keyword arguments as Python expressions."""
        raise NotImplementedError

    @property
    def differentiable(self) -> bool:
        """Whether gradients are conditioned well enough to be compared."""
        return True

    def values(self) -> dict[str, Any]:
        """The keyword arguments, freshly drawn."""
        return eval(_as_dict(self.arguments()), dict(_NAMESPACE))

    def program(self, platform: str) -> str:
        """A program that compares the call with its reference."""
        options = ", small_blocks=True" if self.small_blocks else ""
        options += "" if self.differentiable else ", gradients=False"
        where = f"{self.operation!r}, {platform!r}, {self.dtype!r}"
        call = f"print(compare({where}, lambda: {_as_dict(self.arguments())}{options}))"
        return "\n".join([*_imports(call), "", call])

    def simpler(self, field: dataclasses.Field) -> Iterator["Choices"]:
        """The same call with simpler values of one choice, the simplest first."""
        value = getattr(self, field.name)
        for other in _simpler_values(value, field.default, "halved" in field.metadata):
            yield dataclasses.replace(self, **{field.name: other})

    def extreme(self, kind: str) -> float:
        """The size of numbers that are tiny, ordinary or huge for the dtype."""
        tiny, huge = (1e-3, 30.0) if self.dtype == "float16" else (1e-12, 1e8)
        return {"tiny": tiny, "ordinary": 1.0, "huge": huge}[kind]

    def rng(self, number: int = 0) -> np.random.Generator:
        """Random numbers for what is written out: lengths and bounds."""
        return np.random.default_rng([self.seed, number])

    def cumulative(self, documents: int, length: int, tail: bool, number: int = 0) -> list[int]:
        """`[0, l1, l1 + l2, ...]`, some documents perhaps empty; with a tail some tokens are of
        none.
        """
        rng = self.rng(number)
        end = int(rng.integers(0, length + 1)) if tail else length
        return [0, *map(int, np.sort(rng.integers(0, end + 1, documents - 1))), end]


Drawn = TypeVar("Drawn", bound=Choices)


def fields_of(kind: type[Choices] | Choices) -> list[dataclasses.Field]:
    """What is chosen: features first, then sizes."""
    fields = [x for x in dataclasses.fields(kind) if "options" in x.metadata]
    return sorted(fields, key=lambda x: "halved" in x.metadata)


def drawn(kind: type[Drawn], operation: str, rng: np.random.Generator) -> Drawn:
    """Choices of this kind, each drawn from its options."""
    return kind(
        operation=operation,
        **{
            field.name: options[int(rng.integers(len(options)))]
            for field in dataclasses.fields(kind)
            if (options := field.metadata.get("options"))
        },
    )


def _simpler_values(value: Any, simplest: Any, halved: bool) -> Iterator[Any]:
    if value != simplest:
        yield simplest
    if halved and isinstance(value, int):
        smaller = (1, value // 2, value * 3 // 4, value * 7 // 8, value - 1)
        yield from dict.fromkeys(x for x in smaller if 0 < x < value)


def _as_dict(arguments: Mapping[str, str]) -> str:
    return "dict(\n" + "".join(f"    {name}={x},\n" for name, x in arguments.items()) + ")"


def _imports(call: str) -> list[str]:
    """The imports of the names that a program uses."""
    used = set(re.findall(r"[A-Za-z_]\w*", call))
    modules: dict[str, list[str]] = {}
    for name in sorted(used & _FROM.keys()):
        modules.setdefault(_FROM[name], []).append(name)
    numeric = {"jnp": "import jax.numpy as jnp", "np": "import numpy as np"}
    lines = [line for name, line in numeric.items() if name in used]
    return lines + [f"from {x} import {', '.join(names)}" for x, names in sorted(modules.items())]
