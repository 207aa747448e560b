"""Configurations: how an implementation cuts its work, as frozen values that are stored as JSON."""

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from ejkernel.ops.platform import Backend, Platform

_Self = TypeVar("_Self", bound="_Plain")


@dataclasses.dataclass(frozen=True)
class _Plain:
    """A dataclass that goes to plain values and comes back."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls: type[_Self], values: Mapping[str, Any]) -> _Self:
        """The inverse of `to_dict`; absent fields take their defaults."""
        names = [field.name for field in dataclasses.fields(cls)]
        if unknown := [str(name) for name in values if name not in names]:
            listed = ", ".join(unknown)
            listed = listed if len(listed) <= 100 else f"{listed[:100]}..."
            raise ValueError(f"{cls.__name__}: unknown field {listed}; it has {', '.join(names)}.")
        return cls(**values)

    def to_json(self) -> str:
        """The fields as one line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls: type[_Self], text: str) -> _Self:
        """The inverse of `to_json`."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"{cls.__name__}: the JSON must be an object of fields, got {text!r}.")
        return cls.from_dict(values)


# What a size may be at most: kernels count in 32 bits, a thread block has at most 32 warps.
_LARGEST = {"num_warps": 32, "num_stages": 64}
_LARGEST_SIZE = 2**31 - 1


def check_size(config: object, name: str, kind: str = "a positive int") -> None:
    """Refuse a field that is not an int of this kind, or larger than any kernel could use.

    Raises:
        ValueError: the field is another.
    """
    value, owner = getattr(config, name), type(config).__name__
    least = 0 if kind.startswith("0") else 1
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{owner}: {name} must be {kind}, got {reprlib.repr(value)}.")
    if value > (largest := _LARGEST.get(name, _LARGEST_SIZE)):
        raise ValueError(f"{owner}: {name} must be at most {largest}, got {reprlib.repr(value)}.")


@dataclasses.dataclass(frozen=True)
class _Params(_Plain):
    """Tile sizes; None leaves the choice to the implementation."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.type == bool | None:
                if not isinstance(value, bool):
                    raise ValueError(
                        f"{type(self).__name__}: {field.name} must be a bool or None, "
                        f"got {value!r}."
                    )
                continue
            check_size(self, field.name, "a positive int or None")

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set."""
        return {name: value for name, value in super().to_dict().items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FwdParams(_Params):
    """Tiles and launch parameters of a forward pass; None: the implementation's own choice.

    cuDNN reads none of them. The fields that nothing reads belong to the interface of the original
    package: configurations that set them load, and mean the same without them.

    Args:
        q_blocksize: queries of a tile; read by XLA, Triton, Mosaic GPU and Mosaic TPU.
        kv_blocksize: keys of a tile; read by the same.
        num_warps: warps of a thread block; read by Triton.
        num_stages: stages of the pipeline of key and value tiles; read by Triton and Mosaic GPU.
        blocksize_heads: query heads of a key head that a step computes; read by Mosaic TPU.
        mxu_width: columns that the matrix unit multiplies at once; read by Mosaic TPU.
        blocksize_m: read by no forward pass.
        blocksize_k: read by no forward pass.
        blocksize_n: read by no forward pass.
        blocksize_keys: read by nothing.
        num_key_splits: read by nothing; split-KV is chosen by the shape of the call.

    Raises:
        ValueError: a field is neither None nor a positive int, or larger than a kernel could use.

    >>> FwdParams(q_blocksize=128, kv_blocksize=256).to_dict()
    {'q_blocksize': 128, 'kv_blocksize': 256}
    """

    blocksize_m: int | None = None
    blocksize_k: int | None = None
    blocksize_n: int | None = None
    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    blocksize_heads: int | None = None
    blocksize_keys: int | None = None
    num_key_splits: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    mxu_width: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BwdParams(_Params):
    """Tiles and launch parameters of a backward pass; None: the implementation's own choice.

    cuDNN reads none of them.

    Args:
        q_blocksize: queries of a tile, of the kernel of dK and dV where dQ has one of its own; read
            by XLA, Triton, Mosaic GPU and Mosaic TPU.
        kv_blocksize: keys of the same tile; read by XLA, Triton and Mosaic TPU. Mosaic GPU reads it
            as keys of a tile of the kernel of dQ.
        blocksize_m: queries of a tile of the kernel of dQ; read by Triton.
        blocksize_n: keys of a tile of the kernel of dQ; read by Triton.
        blocksize_k: read by nothing; part of the interface of the original package.
        num_warps: warps of a thread block; read by Triton.
        num_stages: stages of the pipeline; read by Triton and Mosaic GPU.
        deterministic: with False, gradients may be added up in any order: faster where a kernel
            supports it, but not the same bits in every run. Read by Mosaic GPU, whose fused
            backward it allows.
        blocksize_heads: query heads of a key head that a step computes; read by Mosaic TPU.
        resident_queries: queries whose gradient stays in VMEM; read by Mosaic TPU.
        mxu_width: columns that the matrix unit multiplies at once; read by Mosaic TPU.

    Raises:
        ValueError: a field is neither None nor a positive int, or `deterministic` no bool.

    >>> BwdParams(q_blocksize=64).to_json()
    '{"q_blocksize": 64}'
    """

    blocksize_m: int | None = None
    blocksize_k: int | None = None
    blocksize_n: int | None = None
    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    deterministic: bool | None = None
    blocksize_heads: int | None = None
    resident_queries: int | None = None
    mxu_width: int | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "BwdParams":
        """The inverse of `to_dict`; also takes `ordered`, as `deterministic` was called before."""
        renamed = {"deterministic" if name == "ordered" else name: x for name, x in values.items()}
        return super().from_dict(renamed)


# Fields of TPU configurations, by the names under which they were stored before.
_TPU_FIELDS = {
    "fwd_params": {"blocksize_m": "mxu_width"},
    "bwd_params": {
        "blocksize_m": "resident_queries",
        "blocksize_k": "mxu_width",
        "blocksize_n": "blocksize_heads",
    },
}


@dataclasses.dataclass(frozen=True)
class Config(_Plain):
    """Base of every op's configuration class: which platform, and the op's own fields.

    A subclass is a frozen dataclass as well. Its fields `fwd_params` and `bwd_params`, if it has
    them, may be given as dictionaries. XLA runs anywhere: with it the backend is always `any`.

    Args:
        platform: `auto` or a value of `Platform`.
        backend: a value of `Backend`.

    Raises:
        ValueError: an unknown platform or backend, or parameters of another class.

    >>> @dataclasses.dataclass(frozen=True)
    ... class ScaleConfig(Config):
    ...     block: int = 128
    >>> ScaleConfig(64, platform="pallas").to_json()
    '{"platform": "pallas", "backend": "any", "block": 64}'
    """

    platform: str = dataclasses.field(default="auto", kw_only=True)
    backend: str = dataclasses.field(default="any", kw_only=True)

    def __post_init__(self) -> None:
        platform = self._member("platform", ("auto", *Platform))
        backend = self._member("backend", tuple(Backend))
        object.__setattr__(self, "platform", platform)
        object.__setattr__(self, "backend", "any" if platform == "xla" else backend)
        for name, kind in (("fwd_params", FwdParams), ("bwd_params", BwdParams)):
            value = getattr(self, name, None)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, kind.from_dict(value))
            elif not (value is None or isinstance(value, kind)):
                raise ValueError(
                    f"{type(self).__name__}: {name} must be a {kind.__name__}, "
                    f"got {reprlib.repr(value)}."
                )

    def _member(self, name: str, allowed: tuple[str, ...]) -> str:
        value = getattr(self, name)
        if value not in allowed:
            raise ValueError(
                f"{type(self).__name__}: {name} must be one of {', '.join(allowed)}, "
                f"got {reprlib.repr(value)}."
            )
        return str(value)

    @classmethod
    def from_dict(cls: type[_Self], values: Mapping[str, Any]) -> _Self:
        """The inverse of `to_dict`; also takes the former names of fields for TPUs."""
        values = dict(values)
        if values.get("backend") == "tpu":
            for name, fields in _TPU_FIELDS.items():
                if isinstance(values.get(name), Mapping):
                    values[name] = {fields.get(key, key): x for key, x in values[name].items()}
        return super().from_dict(values)  # pyright: ignore[reportAttributeAccessIssue]

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, of parameters only those that are set."""
        return {
            field.name: value.to_dict() if isinstance(value, _Params) else value
            for field in dataclasses.fields(self)
            for value in (getattr(self, field.name),)
        }

    def params(self, direction: Literal["forward", "backward"]) -> Any:
        """What the pass in this direction takes: its own parameters, else the configuration."""
        name = {"forward": "fwd_params", "backward": "bwd_params"}[direction]
        return getattr(self, name, self)
