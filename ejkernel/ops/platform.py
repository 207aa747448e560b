"""Platforms (how a kernel is written), backends (where it runs), and the device of a call."""

import contextlib
import contextvars
import enum
import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax.core import Tracer


class Platform(enum.StrEnum):
    """The language of an implementation.

    >>> Platform("triton") is Platform.TRITON and Platform.TRITON == "triton"
    True
    """

    TRITON = "triton"
    PALLAS = "pallas"
    CUDA = "cuda"
    XLA = "xla"


class Backend(enum.StrEnum):
    """The kind of machine an implementation runs on; `ANY` is all of them.

    >>> Backend("gpu") is Backend.GPU
    True
    """

    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"
    ANY = "any"


class Device(NamedTuple):
    """What an implementation is judged against."""

    platform: str  # "cpu", "gpu", "tpu" or "unknown"
    kind: str  # e.g. "NVIDIA H200"
    compute_capability: tuple[int, int] | None
    fingerprint: str  # "kind|version of the driver"
    multiprocessors: int | None = None  # of a GPU
    shared_memory: int | None = None  # bytes that a block of a GPU may use


_PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


@runtime_checkable
class _JaxDevice(Protocol):
    """What is asked of a `jax.Device`."""

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...

    @property
    def client(self) -> Any: ...


class _Gpu(NamedTuple):
    """What is known of a GPU by its name, for a device that is described and not present."""

    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int


# Shared memory of a thread block and multiprocessors of the H100 SXM and the H200.
HOPPER_SHARED_MEMORY = 232_448
HOPPER_MULTIPROCESSORS = 132
_HOPPER = _Gpu((9, 0), HOPPER_MULTIPROCESSORS, HOPPER_SHARED_MEMORY)
_GPUS = {
    "A100": _Gpu((8, 0), 108, 166_912),
    "H100": _HOPPER,
    "H200": _HOPPER,
    "GH200": _HOPPER,
    "H20": _HOPPER._replace(multiprocessors=78),
    "B200": _Gpu((10, 0), 148, 232_448),
    "GB200": _Gpu((10, 0), 148, 232_448),
    "B300": _Gpu((10, 3), 148, 232_448),
    "GB300": _Gpu((10, 3), 148, 232_448),
}
_H100_PCIE = _HOPPER._replace(multiprocessors=114)

_TARGET: contextvars.ContextVar[Device | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def target_device(
    kind: str, cores: int | None = None, compute_capability: tuple[int, int] | None = None
) -> Iterator[None]:
    """Choose implementations for a device that this machine need not have, for a block.

    For programs that are exported, or lowered for another machine.

    Args:
        kind: the name of the device, as `jax.Device.device_kind` has it.
        cores: the number of multiprocessors of a GPU; needed where its name is not known.
        compute_capability: that of a GPU, such as `(8, 9)`; needed where its name is not known.

    Raises:
        ValueError: `cores` or `compute_capability` are given for a device that is no GPU.

    >>> from ejkernel.ops import target_device
    >>> with target_device("TPU v5e"):
    ...     pass
    """
    device = _describe_abstract(kind, None, None)
    if cores is not None or compute_capability is not None:
        if device.platform != "gpu":
            raise ValueError(
                "target_device: cores= and compute_capability= are for GPUs, got the kind "
                f"{kind!r}."
            )
        device = device._replace(
            multiprocessors=cores or device.multiprocessors,
            compute_capability=compute_capability or device.compute_capability,
        )
    token = _TARGET.set(device)
    try:
        yield
    finally:
        _TARGET.reset(token)


def target() -> Device | None:
    """The device of the surrounding `target_device`."""
    return _TARGET.get()


def device_of(leaves: Iterable[object]) -> Device:
    """The device that a call on these arrays will run on.

    That of the concrete arrays; under a trace that of the mesh the traced ones belong to or of
    `target_device`, which may be a machine that is not present; else the default device. A concrete
    array among traced ones is a constant of the program and goes wherever the program goes: a known
    mesh comes first.
    """
    concrete = None
    traced = False
    for leaf in map(_unwrapped, leaves):
        if isinstance(leaf, (Tracer, jax.ShapeDtypeStruct)):
            traced = True
            sharding = getattr(jax.typeof(leaf), "sharding", None)
            if device := _mesh_device(getattr(sharding, "mesh", None)):
                return device
        elif concrete is None and isinstance(leaf, jax.Array):
            concrete = leaf
    if concrete is not None and not traced:
        return describe(next(iter(concrete.devices())))
    if device := target():
        return device
    if device := _mesh_device(jax.sharding.get_abstract_mesh()):
        return device
    return describe(default_device() if concrete is None else next(iter(concrete.devices())))


def _unwrapped(leaf: object) -> object:
    """The array behind the tracers of an eager `grad` or `vmap`, which hide its device."""
    while isinstance(leaf, Tracer):
        inner = getattr(leaf, "primal", None)
        inner = getattr(leaf, "val", None) if inner is None else inner
        if not isinstance(inner, jax.Array):
            return leaf
        leaf = inner
    return leaf


def device_fingerprint() -> str:
    """Name of the default device and version of its driver: the first part of every cache key.

    Returns:
        `"kind|platform_version"`, one line.

    >>> kind, version = device_fingerprint().split("|")
    """
    return describe(default_device()).fingerprint


def get_device_platform() -> str:
    """`"cpu"`, `"gpu"`, `"tpu"` or `"unknown"`: the platform of the default device.

    >>> get_device_platform() in ("cpu", "gpu", "tpu", "unknown")
    True
    """
    return describe(default_device()).platform


def default_device() -> jax.Device:
    """The device of JAX on which arrays are put where nothing else is said."""
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return chosen or jax.local_devices()[0]


def _mesh_device(mesh: object) -> Device | None:
    abstract = getattr(mesh, "abstract_device", None)
    if abstract is None:
        return None
    platform = getattr(abstract, "platform", None)
    return _describe_abstract(abstract.device_kind, platform, abstract.num_cores)


def backend_of(platform: str) -> str:
    """`"cpu"`, `"gpu"`, `"tpu"` or `"unknown"`, from JAX's name of a platform."""
    return _PLATFORMS.get(platform, "unknown")


@functools.cache
def describe(device: _JaxDevice) -> Device:
    """A device of this machine, or of a topology that programs are compiled for."""
    if getattr(device, "client", None) is None:
        return _describe_abstract(device.device_kind, device.platform, None)
    kind = device.device_kind
    capability = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    version = " ".join(str(device.client.platform_version).split())
    known = _known_gpu(kind)
    return Device(
        platform=backend_of(device.platform),
        kind=kind,
        compute_capability=(int(capability[1]), int(capability[2])) if capability else None,
        fingerprint=f"{kind}|{version}",
        multiprocessors=getattr(device, "core_count", known and known.multiprocessors),
        shared_memory=getattr(
            device, "shared_memory_per_block_optin", known and known.shared_memory
        ),
    )


@functools.cache
def _describe_abstract(kind: str, platform: str | None, cores: int | None) -> Device:
    """A device known by name; the one of this machine, where it has such a device."""
    if platform is None:
        platform = "tpu" if kind.startswith("TPU") else "cpu" if kind == "cpu" else "gpu"
    try:
        here = jax.local_devices(backend=platform)
    except RuntimeError:  # this machine has no such backend
        here = []
    for device in here:
        if device.device_kind == kind:
            return describe(device)
    known = _known_gpu(kind)
    backend = backend_of(platform)
    return Device(
        platform=backend,
        kind=kind,
        compute_capability=known and known.compute_capability,
        fingerprint=f"{kind}|absent",
        multiprocessors=(cores or (known and known.multiprocessors)) if backend == "gpu" else None,
        shared_memory=known and known.shared_memory,
    )


def _known_gpu(kind: str) -> _Gpu | None:
    words = re.split(r"[ -]", kind)
    if "H100" in words and "PCIe" in words:
        return _H100_PCIE
    return next((_GPUS[word] for word in words if word in _GPUS), None)
