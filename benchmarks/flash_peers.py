"""What others offer for a case of `flash_gpu.py`, in one form: whatever of it is installed.

A peer in JAX is a function of query, key, value and bias. One in torch runs on the same arrays.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from programs import torch_seconds_of

Attention = Callable[..., jax.Array]


def in_jax(case: Any, scale: float) -> dict[str, Attention]:
    """Peers in JAX that have a way to say the case; that of tokamax also with tuning."""
    found: dict[str, Attention] = {}
    causal, window = bool(case.options.get("causal")), case.options.get("sliding_window")
    cap = case.options.get("logits_soft_cap")
    if cap is None:
        found["jax cudnn"] = (
            functools.partial(_packed, case=case, scale=scale)
            if case.cuts
            else lambda q, k, v, bias: jax.nn.dot_product_attention(
                q,
                k,
                v,
                bias=bias,
                is_causal=causal,
                local_window_size=window,
                implementation="cudnn",
            )
        )
    try:
        import tokamax  # type: ignore[import-not-found]
    except ImportError:
        return found

    def tokamax_attention(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
        return tokamax.dot_product_attention(
            q,
            k,
            v,
            bias=bias,
            mask=_same_document(case) if case.cuts else None,  # it has no other word for documents
            is_causal=causal,
            local_window_size=window,
            logits_soft_cap=cap,
        )

    found["tokamax"] = tokamax_attention
    # Another function, so that what was compiled before tuning is not used again.
    found["tokamax tuned"] = lambda q, k, v, bias: tokamax_attention(q, k, v, bias)
    return found


def lowered(name: str, run: Callable, *args: Any) -> Any:
    """The program of a peer, after it has looked for its best configuration if its name says so."""
    if name != "tokamax tuned":
        return run.lower(*args)  # type: ignore[attr-defined]
    import tokamax  # type: ignore[import-not-found]

    with tokamax.autotune(run, *args, progress_bar=False):
        return run.lower(*args)  # type: ignore[attr-defined]


def _packed(q: Any, k: Any, v: Any, bias: Any, *, case: Any, scale: float) -> jax.Array:
    """Documents by offsets, which JAX has for cuDNN but does not show."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    lengths = jnp.array([np.diff(case.cuts)], jnp.int32)
    offsets = jnp.array([[*case.cuts[:-1], -1]], jnp.int32)
    kind = cudnn.MaskType.CAUSAL if case.options.get("causal") else cudnn.MaskType.NO_MASK
    return cudnn.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=scale,
        mask_type=kind,
    )


def _same_document(case: Any) -> jax.Array:
    ids = jnp.searchsorted(jnp.array(case.cuts), jnp.arange(case.length), side="right")
    return (ids[:, None] == ids)[None, None]


class Torch:
    """Torch's attentions on copies of the inputs: their output, and how long they take."""

    def __init__(self, case: Any, inputs: Any, d_out: Any, backward: bool):
        import torch  # type: ignore[import-not-found]

        self._torch, self._backward = torch, backward
        move = lambda x: torch.from_dlpack(x).transpose(1, 2)
        self._tensors = [move(x).contiguous().requires_grad_(backward) for x in inputs[:3]]
        self._d_out = move(d_out)
        self.calls = dict(self._found(case, inputs.bias))

    def _found(self, case: Any, bias: Any) -> Any:
        torch, tensors = self._torch, self._tensors
        grouped, length = case.heads != case.kv_heads, case.length
        causal, window = case.options.get("causal"), case.options.get("sliding_window")
        cap = case.options.get("logits_soft_cap")
        if not case.cuts and window is None and cap is None:
            added = None if bias is None else torch.from_dlpack(bias)
            yield (
                "torch sdpa",
                lambda: torch.nn.functional.scaled_dot_product_attention(
                    *tensors, attn_mask=added, is_causal=bool(causal), enable_gqa=grouped
                ),
            )
        if bias is not None:
            return
        from torch.nn.attention import flex_attention as flex  # type: ignore[import-not-found]

        cuts = torch.tensor(case.cuts or (0,), dtype=torch.int32, device="cuda")
        ids = torch.searchsorted(cuts, torch.arange(length, device="cuda"), right=True)
        reach = length if window is None else window[0]

        def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (ids[q] == ids[k]) & (k <= q) & (q - k <= reach)

        blocks = flex.create_block_mask(visible, None, None, length, length) if causal else None
        bounded = (lambda x, b, h, q, k: cap * torch.tanh(x / cap)) if cap else None
        compiled = torch.compile(flex.flex_attention)
        yield (
            "torch flex",
            lambda: compiled(*tensors, score_mod=bounded, block_mask=blocks, enable_gqa=grouped),
        )

    def result(self, call: Callable) -> list[jax.Array]:
        """Output and, with `backward`, gradients of query, key and value."""
        out = call()
        rest = self._torch.autograd.grad(out, self._tensors, self._d_out) if self._backward else ()
        return [jnp.from_dlpack(x.detach().transpose(1, 2).contiguous()) for x in (out, *rest)]

    def seconds(self, call: Callable) -> float:
        """Of one call among many."""

        def run() -> None:
            out = call()
            if self._backward:
                self._torch.autograd.grad(out, self._tensors, self._d_out)

        return torch_seconds_of(run)
