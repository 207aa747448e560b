"""What is compiled and compared: kernels of ours and their peers, at the same tiles.

Arrays are large enough that the compiler leaves them in main memory, as it does in a model.
"""

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from tpu_pages import PAGES
from tpu_parts import PEERS, Part, Subject, array

HEADS, LENGTH, WIDTH = 64, 8192, 128  # of attention
ROWS, DEPTH, COLUMNS, EXPERTS = 32768, 4096, 8192, 8  # of grouped matmul


def _inputs(causal: bool) -> Any:
    from ejkernel.kernels.flash_attention.inputs import Inputs
    from ejkernel.types.rules import Band, Everything

    x = array(1, LENGTH, HEADS, WIDTH)
    return Inputs(x, x, x, mask=Band(None, 0) if causal else Everything())


def _flash(block_q: int, block_k: int, causal: bool) -> Any:
    from ejkernel.kernels.flash_attention import pallas_tpu
    from ejkernel.kernels.flash_attention.inputs import Spec
    from ejkernel.ops import FwdParams
    from ejkernel.ops.platform import device_of

    params = FwdParams(q_blocksize=block_q, kv_blocksize=block_k, blocksize_heads=1)
    spec = Spec(softmax_scale=WIDTH**-0.5)
    run = lambda x: pallas_tpu.run_forward(x, spec, params, device_of(jax.tree.leaves(x)))
    return run, _inputs(causal)


def _flash_backward(causal: bool) -> Any:
    from ejkernel.kernels.flash_attention import pallas_tpu
    from ejkernel.kernels.flash_attention.inputs import Outputs, Spec
    from ejkernel.ops import BwdParams
    from ejkernel.ops.platform import device_of

    params = BwdParams(
        q_blocksize=512, kv_blocksize=512, resident_queries=LENGTH, blocksize_heads=1
    )
    spec, inputs = Spec(softmax_scale=WIDTH**-0.5), _inputs(causal)
    outputs = Outputs(inputs.query, array(1, HEADS, LENGTH, dtype=jnp.float32))
    run = lambda x: pallas_tpu.run_backward(*x, spec, params, device_of(jax.tree.leaves(x)))
    return run, (inputs, outputs, outputs)


def _jax_flash(block_q: int, block_k: int, causal: bool) -> Any:
    peer = importlib.import_module(PEERS + "flash_attention")
    sizes = peer.BlockSizes(block_q=block_q, block_k_major=block_k, block_k=block_k, block_b=1)
    run = functools.partial(
        peer.flash_attention, causal=causal, sm_scale=WIDTH**-0.5, block_sizes=sizes
    )
    return lambda x: run(*x), (array(1, HEADS, LENGTH, WIDTH),) * 3


def _splash(package: str, block_q: int, block_k: int, causal: bool, backward: bool = False) -> Any:
    peer = importlib.import_module(package + "splash_attention_kernel")
    masks = importlib.import_module(package + "splash_attention_mask")
    one = (masks.CausalMask if causal else masks.FullMask)((LENGTH, LENGTH))
    sizes = peer.BlockSizes(
        block_q=block_q,
        block_kv=block_k,
        block_kv_compute=block_k,
        block_q_dkv=block_q,
        block_kv_dkv=block_k,
        block_kv_dkv_compute=block_k,
        use_fused_bwd_kernel=True,
    )
    run = peer.make_splash_mha(
        mask=masks.MultiHeadMask([one] * HEADS), head_shards=1, q_seq_shards=1, block_sizes=sizes
    )
    arrays = (array(HEADS, LENGTH, WIDTH),) * 3
    if not backward:
        return lambda x: run(*x), arrays
    return jax.grad(lambda x: run(*x).astype(jnp.float32).sum()), arrays


def _tokamax(block_q: int, block_k: int, causal: bool) -> Any:
    package = "tokamax._src.ops.experimental.tpu.splash_attention."
    peer = importlib.import_module(package + "splash_attention_kernel")
    masks = importlib.import_module(package + "splash_attention_mask")
    mask = (masks.CausalMask if causal else masks.FullMask)((LENGTH, LENGTH))
    config = peer.SplashConfig(block_q=block_q, block_kv=block_k, block_kv_compute=block_k)
    run = peer.make_splash_mha_single_device(mask, config=config)
    return lambda x: run(*x), (array(HEADS, LENGTH, WIDTH),) * 3


def _sizes() -> jax.ShapeDtypeStruct:
    return array(EXPERTS, dtype=jnp.int32)


def _grouped(depth: int, block_k: int, transposed: bool = False) -> Any:
    from ejkernel.kernels.grouped_matmul import pallas_tpu
    from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
    from ejkernel.kernels.grouped_matmul.inputs import Inputs, Spec, TransposedInputs
    from ejkernel.ops.platform import device_of

    params = GroupedMatmulConfig(block_m=512, block_n=512, block_k=block_k)
    matrix = (COLUMNS, depth) if transposed else (depth, COLUMNS)
    kind = TransposedInputs if transposed else Inputs
    inputs = kind(array(ROWS, depth), array(EXPERTS, *matrix), group_sizes=_sizes())
    spec = Spec(transpose_rhs=transposed)
    run = lambda x: pallas_tpu.run_forward(x, spec, params, device_of(jax.tree.leaves(x)))
    return run, inputs


def _grouped_gradient() -> Any:
    from ejkernel.kernels.grouped_matmul import pallas_tpu
    from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
    from ejkernel.kernels.grouped_matmul.inputs import Inputs, Outputs, Spec
    from ejkernel.ops.platform import device_of

    params = GroupedMatmulConfig(block_m=512, block_n=512, block_k=512)
    weights = array(EXPERTS, DEPTH, COLUMNS)
    inputs = Inputs(array(ROWS, DEPTH), weights, group_sizes=_sizes())
    run = lambda x: (
        pallas_tpu.run_backward(
            x[0], (), Outputs(x[1]), Spec(), params, device_of(jax.tree.leaves(x))
        ).weights
    )
    return run, (inputs, array(ROWS, COLUMNS))


def _megablox(depth: int, transposed: bool = False) -> Any:
    peer = importlib.import_module(PEERS + "megablox.gmm")
    matrix = (COLUMNS, depth) if transposed else (depth, COLUMNS)
    run = functools.partial(
        peer.gmm,
        preferred_element_type=jnp.bfloat16,
        tiling=(512, 512, 512),
        transpose_rhs=transposed,
    )
    return lambda x: run(*x), (array(ROWS, depth), array(EXPERTS, *matrix), _sizes())


def _megablox_gradient() -> Any:
    peer = importlib.import_module(PEERS + "megablox.gmm")
    run = functools.partial(peer.tgmm, preferred_element_type=jnp.bfloat16, tiling=(512, 512, 512))
    return lambda x: run(*x), (array(DEPTH, ROWS), array(ROWS, COLUMNS), _sizes())


_SPLASH = PEERS + "splash_attention."
_FULL = {"full": Part({0: 1})}
_PARTIAL = {"partial": Part({0: 1})}


def _attention(block_q: int, block_k: int) -> dict[str, Subject]:
    """Without a mask, forward; the only block that uses the matrix unit is the full tile."""
    full = {"full": Part({0: 1}, block_q * block_k / 512**2)}
    name = f"flash_{block_q}x{block_k}"
    return {
        f"{name}.ours": Subject(lambda: _flash(block_q, block_k, False), full),
        f"{name}.jax_flash": Subject(lambda: _jax_flash(block_q, block_k, False), full),
        f"{name}.jax_splash": Subject(lambda: _splash(_SPLASH, block_q, block_k, False), full),
    }


SUBJECTS: dict[str, Subject] = {
    **_attention(512, 512),
    **_attention(512, 1024),
    **_attention(1024, 1024),
    "flash_causal.ours": Subject(
        lambda: _flash(512, 512, True), {"full": Part({0: 1}), "partial": Part({1: 1})}
    ),
    "flash_causal.jax_flash": Subject(lambda: _jax_flash(512, 512, True), _PARTIAL),
    "flash_causal.jax_splash": Subject(lambda: _splash(_SPLASH, 512, 512, True), _PARTIAL),
    "flash_backward.ours": Subject(lambda: _flash_backward(False), _FULL),
    "flash_backward.jax_splash": Subject(
        lambda: _splash(_SPLASH, 512, 512, False, backward=True), _FULL, "dkv"
    ),
    "grouped_512.ours": Subject(lambda: _grouped(512, 512), _FULL),
    # It sets its sums to zero before the first product, which is all there is 512 deep.
    "grouped_512.megablox": Subject(lambda: _megablox(512), {"full": Part({0: 1}, ends=1)}),
    # Ours holds the whole depth and loops over it; the last of eight rounds writes the result.
    "grouped_4096.ours": Subject(
        lambda: _grouped(DEPTH, DEPTH), {"full": Part({0: 7, 1: 1}, units=8)}
    ),
    # Eight steps of the grid, of which the last masks and writes the result.
    "grouped_4096.megablox": Subject(
        lambda: _megablox(DEPTH), {"full": Part({1: 7, 0: 1}, units=8, steps=8, ends=1)}
    ),
    "grouped_gradient.ours": Subject(_grouped_gradient, _FULL),
    "grouped_gradient.megablox": Subject(_megablox_gradient, _FULL),
}
SUBJECTS |= PAGES
if importlib.util.find_spec("tokamax"):
    SUBJECTS |= {
        "flash_512x512.tokamax": Subject(lambda: _tokamax(512, 512, False), _FULL),
        "flash_512x1024.tokamax": Subject(
            lambda: _tokamax(512, 1024, False), {"full": Part({0: 1}, 2)}
        ),
        "flash_1024x1024.tokamax": Subject(
            lambda: _tokamax(1024, 1024, False), {"full": Part({0: 1}, 4)}
        ),
        "flash_causal.tokamax": Subject(
            lambda: _tokamax(512, 512, True), {"full": Part({0: 1}), "partial": Part({1: 1})}
        ),
    }
