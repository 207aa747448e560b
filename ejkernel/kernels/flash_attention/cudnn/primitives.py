"""Attention by cuDNN: the operations that JAX has for it, forward and backward each alone.

JAX shows its users no backward pass that stands alone; this file knows the private ones.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax

from ejkernel.ops.platform import Device

Setting = float | bool | int | None  # a static argument of an operation


def call_forward(*operands: jax.Array, **settings: Setting) -> tuple[jax.Array, jax.Array]:
    """Output [b, t, n, v] and log-sum-exp [b or documents, n, t], of the rows in use.

    Args:
        operands: query [b, t, n, h], key [b, s, k, h], value [b, s, k, v], bias, lengths of queries
            and keys ([b]; of packed documents [b, m]), where documents begin in the memory of
            queries and keys [b, m + 1], pages of keys and values; empty where there is none.
        settings: `scale`, `causal`, `padded` (there are lengths, but no documents), `window` (keys
            that a query sees, its own included, or None), `has_bias`.
    """
    out, lse = _bind("fwd", operands, settings, is_training=True)
    return out, lse


def call_backward(*operands: jax.Array, **settings: Setting) -> list[jax.Array]:
    """Gradients of query, key, value and bias, if there is one, where they are in use.

    The operands are those of the forward pass, its log-sum-exp and output, and `d_out`.
    """
    return list(_bind("bwd", operands, settings))


def _bind(
    name: str, operands: Sequence[jax.Array], settings: dict[str, Setting], **more: Setting
) -> Any:
    private = _private()
    kinds = private.MaskType
    masks = {
        (False, False): kinds.NO_MASK,
        (True, False): kinds.CAUSAL,
        (False, True): kinds.PADDING,
        (True, True): kinds.PADDING_CAUSAL,
    }
    return getattr(private, f"_dot_product_attention_{name}_p").bind(
        *operands,
        scale=settings["scale"],
        seed=42,
        dropout_rate=0.0,
        variadic_args=(settings["has_bias"], settings["has_bias"]),
        mask_type=masks[bool(settings["causal"]), bool(settings["padded"])],
        layout=private.AttentionLayout.BTNH.value,
        sliding_window_length=settings["window"],
        **dict.fromkeys(_unused(name)),
        **more,
    )


_KNOWN = {
    "scale",
    "seed",
    "dropout_rate",
    "variadic_args",
    "mask_type",
    "layout",
    "sliding_window_length",
    "is_training",
}


def _private() -> Any:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


@functools.cache
def _unused(name: str) -> tuple[str, ...]:
    """Static arguments that a later JAX has added and that None switches off."""
    lowering = getattr(_private(), f"_dot_product_attention_{name}_cuda_lowering")
    parameters = list(inspect.signature(lowering).parameters.values())[1:]
    operands = 10 if name == "fwd" else 13
    rest = [x.name for x in parameters[operands:] if x.kind is not x.VAR_POSITIONAL]
    unused = tuple(x for x in rest if x.startswith("score_mod"))
    expected = _KNOWN if name == "fwd" else _KNOWN - {"is_training"}
    if set(rest) - set(unused) != expected:
        raise AttributeError(f"its arguments are {', '.join(rest)}")
    return unused


@functools.cache
def _why_not_jax() -> str | None:
    try:
        private = _private()
        for name in ("fwd", "bwd"):
            _unused(name)
            getattr(private, f"_dot_product_attention_{name}_p")
        for kind in ("NO_MASK", "CAUSAL", "PADDING", "PADDING_CAUSAL"):
            getattr(private.MaskType, kind)
        getattr(private.AttentionLayout, "BTNH")  # noqa: B009
    except (ImportError, AttributeError) as error:
        return f"does not know cuDNN in JAX {jax.__version__}: {error}"
    return None


def why_missing(device: Device) -> str | None:
    """What keeps this JAX from using cuDNN on the device, or None."""
    if reason := _why_not_jax():
        return reason
    if device.compute_capability is not None and device.compute_capability < (8, 0):
        return f"needs compute capability 8.0 (Ampere), and {device.kind} has less"
    # A program for a device that is elsewhere is compiled without it.
    if not device.fingerprint.endswith("|absent") and version() is None:
        return "needs cuDNN, which JAX does not find here"
    return None


@functools.cache
def version() -> int | None:
    """The version of cuDNN here, such as 91200; None where there is none."""
    versions = getattr(_private(), "cuda_versions", None)
    try:
        return None if versions is None else versions.cudnn_get_version()
    except RuntimeError:  # built for CUDA, but its libraries are not here
        return None
