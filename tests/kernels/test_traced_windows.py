"""Windows that are known only when the program runs: layers under a scan, each with its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.triton_testing import H200

from ejkernel import settings
from ejkernel.kernels.common.sampling import visible
from ejkernel.kernels.flash_attention import cudnn
from ejkernel.kernels.flash_attention import pallas_tpu as flash_tpu
from ejkernel.kernels.flash_attention import xla as flash_xla
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.kernels.ragged_page_attention_v3 import pallas_tpu as paged_tpu
from ejkernel.kernels.ragged_page_attention_v3 import triton as paged_triton
from ejkernel.modules import (
    blocksparse_attention,
    flash_attention,
    native_sparse_attention,
    page_attention,
    ragged_page_attention_v2,
    ragged_page_attention_v3,
    ragged_page_attention_v3_update,
    ring_attention,
    scaled_dot_product_attention,
)
from ejkernel.ops import default_executor
from ejkernel.ops.platform import Device
from ejkernel.types.rules import Band

LENGTH = 24


def draw(i, *shape):
    return jax.random.normal(jax.random.key(i), shape)


Q = draw(1, 2, LENGTH, 4, 8)
K, V = (draw(i, 2, LENGTH, 2, 8) for i in (2, 3))
OPS = [
    flash_attention,
    scaled_dot_product_attention,
    ring_attention,
    blocksparse_attention,
]


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def with_gradients(function, *arrays):
    """The result and the gradients of a sum of it with different weights."""
    weighted = lambda out: (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum()
    loss = lambda *arrays: (weighted(out := function(*arrays)), out)
    argnums = tuple(range(len(arrays)))
    (_, out), gradients = jax.value_and_grad(loss, argnums, has_aux=True)(*arrays)
    return out, *gradients


def assert_equal_calls(function, window, *arrays):
    """`function(window, *arrays)` is the same whether the window is static or traced."""
    static = with_gradients(lambda *x: function(window, *x), *arrays)
    traced = jax.jit(lambda w, *x: with_gradients(lambda *y: function(w, *y), *x))(window, *arrays)
    for got, expected in zip(traced, static, strict=True):
        close(got, expected)
    wider = function(LENGTH, *arrays)
    assert not np.allclose(traced[0], wider, atol=1e-3)  # the window does hide something


@pytest.mark.parametrize("window", [3, (5, 0)], ids=["number", "pair"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_a_traced_window_is_a_window(op, window):
    attend = lambda window, *x: op(*x, causal=True, sliding_window=window)
    assert_equal_calls(attend, window, Q, K, V)


def test_a_pair_may_be_one_array_and_one_side_may_be_static():
    expected = flash_attention(Q, K, V, sliding_window=(5, 2))
    attend = lambda window: flash_attention(Q, K, V, sliding_window=window)
    close(jax.jit(attend)(jnp.array([5, 2])), expected)
    close(jax.jit(lambda left: attend((left, 2)))(5), expected)
    close(attend(np.array([5, 2])), expected)


@pytest.mark.parametrize("dtype", [jnp.uint32, jnp.uint8, jnp.int16, jnp.int32])
def test_a_window_of_any_integer_dtype(dtype):
    attend = jax.jit(lambda window: flash_attention(Q, K, V, sliding_window=window))
    close(attend(jnp.array(3, dtype)), flash_attention(Q, K, V, sliding_window=3))
    widest = jnp.array(jnp.iinfo(dtype).max, dtype)
    close(attend(widest), flash_attention(Q, K, V))


def test_layers_of_a_scan_have_windows_of_their_own():
    windows = jnp.array([(LENGTH, 0), (4, 0), (1, 0)])

    def network(x, attend):
        return jax.lax.scan(lambda x, window: (x + attend(x, window), None), x, windows)[0]

    def unrolled(x):
        for left, right in windows.tolist():
            x = x + flash_attention(x, x, x, causal=True, sliding_window=(left, right))
        return x

    scanned = lambda x: network(
        x, lambda x, window: flash_attention(x, x, x, causal=True, sliding_window=window)
    )
    for got, expected in zip(with_gradients(scanned, Q), with_gradients(unrolled, Q), strict=True):
        close(got, expected)


def test_windows_of_a_vmap():
    windows = jnp.array([1, 4, 9])
    attend = lambda window, q: flash_attention(q, K, V, causal=True, sliding_window=window)
    together = jax.vmap(attend, in_axes=(0, None))(windows, Q)
    for window, out in zip(windows.tolist(), together, strict=True):
        close(out, attend(window, Q))


def test_packed_sequences():
    ends = jnp.array([0, 9, LENGTH])
    attend = lambda window, *x: flash_attention(
        *x, cum_seqlens_q=ends, causal=True, sliding_window=window
    )
    assert_equal_calls(attend, (3, 0), Q[:1], K[:1], V[:1])


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
def test_a_ring():
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("sp",))
    attend = lambda window: ring_attention(
        Q, K, V, causal=True, sliding_window=window, axis_name="sp", mesh=mesh
    )
    close(jax.jit(attend)((7, 0)), flash_attention(Q, K, V, causal=True, sliding_window=(7, 0)))


@pytest.mark.tpu
def test_the_tpu_kernels():
    arrays = [draw(i, 1, 200, 1, 16) for i in range(3)]
    spec, device = Spec(softmax_scale=0.25), Device("tpu", "TPU v5 lite", None, "")

    def run(platform, low):
        passes = platform.IMPLEMENTATION
        inputs = Inputs(*arrays, mask=Band(None, 0) & Band(low, 0))
        params = passes.forward.guess(inputs, spec, device)
        outputs, residuals = passes.forward(inputs, spec, params, device=device)
        params = passes.backward.guess(inputs, spec, device)
        d_outputs = jax.tree.map(jnp.sin, outputs)
        gradients = passes.backward(inputs, residuals, d_outputs, spec, params, device=device)
        return outputs, gradients.query, gradients.key, gradients.value

    expected = jax.tree.leaves(run(flash_xla, -70))
    with settings.override(interpret=jax.default_backend() != "tpu"):
        found = jax.tree.leaves(jax.jit(lambda low: run(flash_tpu, low))(jnp.array([-70])))
    for got, known in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, known, rtol=1e-3, atol=1e-3)


# Paged attention and native sparse attention: the newest `w` keys

PAGES = draw(4, 14, 4, 2, 8)
VALUES = draw(5, 14, 4, 2, 8)
COMBINED = jnp.stack([PAGES, VALUES], axis=3).reshape(14, 4, 4, 8)
TABLE = np.array([[3, 7, 1], [5, 0, 13], [2, 9, 4]])
CU_Q, CU_K, LENGTHS = np.array([0, 2, 5, 6]), np.array([0, 9, 20, 32]), np.array([9, 11, 12])
RAGGED = draw(6, 6, 4, 8)
NEW = draw(7, 6, 2, 8)

NEWEST = {
    "page_attention": (
        lambda w, *x: page_attention(*x, LENGTHS, TABLE, sliding_window=w),
        (draw(8, 3, 2, 4, 8), PAGES, VALUES),
    ),
    "ragged_page_attention_v2": (
        lambda w, *x: ragged_page_attention_v2(
            *x, LENGTHS, TABLE, CU_Q, np.array([3]), sliding_window=w
        ),
        (RAGGED, COMBINED),
    ),
    "ragged_page_attention_v3": (
        lambda w, *x: ragged_page_attention_v3(*x, CU_Q, CU_K, TABLE, sliding_window=w),
        (RAGGED, PAGES, VALUES),
    ),
    "ragged_page_attention_v3_update": (
        lambda w, *x: ragged_page_attention_v3_update(*x, CU_Q, CU_K, TABLE, sliding_window=w)[0],
        (RAGGED, NEW, NEW, PAGES, VALUES),
    ),
    "native_sparse_attention": (
        lambda w, *x: native_sparse_attention(*x, block_size=4, block_counts=2, sliding_window=w),
        (Q, K, V),
    ),
}


@pytest.mark.parametrize("name", NEWEST)
def test_the_newest_keys(name):
    attend, arrays = NEWEST[name]
    out = attend(3, *arrays)
    close(jax.jit(attend)(3, *arrays), out)
    assert not np.allclose(attend(LENGTH, *arrays), out, atol=1e-3)


@pytest.mark.parametrize("name", ["ragged_page_attention_v3", "native_sparse_attention"])
def test_gradients_of_the_newest_keys(name):
    attend, arrays = NEWEST[name]
    assert_equal_calls(attend, 3, *arrays)


@pytest.mark.parametrize("name", ["page_attention", "native_sparse_attention"])
def test_the_newest_keys_of_a_vmap(name):
    attend, arrays = NEWEST[name]
    together = jax.vmap(lambda w: attend(w, *arrays))(jnp.array([2, 5]))
    for window, out in zip((2, 5), together, strict=True):
        close(out, attend(window, *arrays))


@pytest.mark.parametrize("kernel", [paged_triton, paged_tpu])
def test_kernels_over_pages_refuse_it(kernel):
    call = lambda w: default_executor().invocation(
        page_attention, *NEWEST["page_attention"][1], LENGTHS, TABLE, sliding_window=w
    )
    static, traced = call(3), jax.eval_shape(lambda w: _refusal(kernel, call(w)), 3)
    assert "traced_window" not in (_refusal(kernel, static).reason or "")
    assert traced.reason == "does not support traced_window"


@jax.tree_util.register_static
class _Refusal:
    def __init__(self, reason):
        self.reason = reason


def _refusal(kernel, call):
    return _Refusal(kernel.IMPLEMENTATION.forward.refusal(call.inputs, call.spec, H200))


# What is known stays static


@pytest.mark.parametrize("window", [3, np.int64(3), jnp.array(3), np.array(3)], ids=repr)
def test_a_window_that_is_known_is_static(window):
    call = default_executor().invocation(flash_attention, Q, K, V, sliding_window=window)
    assert call.inputs.mask.describe() == ("band", -3, 3, None)
    attend, arrays = NEWEST["ragged_page_attention_v3"]
    call = default_executor().invocation(lambda: attend(window, *arrays))
    assert (call.spec.sliding_window, call.inputs.traced_window) == (3, None)


@pytest.mark.usefixtures("as_a_user_calls")
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_windows_that_are_refused(op):
    name = op.__name__
    with pytest.raises(ValueError, match=f"^{name}: sliding_window must not be negative, got -1"):
        op(Q, K, V, sliding_window=-1)
    with pytest.raises(ValueError, match=f"^{name}: sliding_window must be an int or a pair"):
        jax.jit(lambda w: op(Q, K, V, sliding_window=w))(2.0)
    with pytest.raises(ValueError, match=f"^{name}: sliding_window must be an int or a pair"):
        jax.jit(lambda w: op(Q, K, V, sliding_window=w))(jnp.array([1, 2, 3]))


@pytest.mark.usefixtures("as_a_user_calls")
@pytest.mark.parametrize("name", NEWEST)
def test_lengths_that_are_refused(name):
    attend, arrays = NEWEST[name]
    with pytest.raises(ValueError, match=f"^{name}: sliding_window must be positive, got 0"):
        attend(0, *arrays)
    for wrong in (2.0, (1, 2)):
        with pytest.raises(ValueError, match=f"^{name}: sliding_window must be an int, got"):
            jax.jit(lambda w: attend(w, *arrays))(wrong)


def test_cudnn_says_that_it_needs_a_number():
    def reason(window):
        call = default_executor().invocation(
            flash_attention, Q, K, V, causal=True, sliding_window=(window, 0)
        )
        return _Refusal(cudnn._read(call.inputs))

    found = jax.eval_shape(reason, 3).reason
    assert found == "needs causal offsets and windows that are numbers, not arrays"


def test_a_window_that_is_unknown_hides_nothing_while_tuning():
    zero = jnp.zeros(1, jnp.int32)
    tuned = lambda rule: visible(jax.eval_shape(lambda: rule), rule).dense(8, 8).reshape(8, 8)
    causal = Band(None, 0).dense(8, 8)[0]
    assert tuned(Band(zero, zero)).all()
    np.testing.assert_array_equal(tuned(Band(zero, 0)), causal)
    np.testing.assert_array_equal(tuned(Band(None, zero)), causal)


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
def test_over_a_mesh():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
    spec = jax.P("dp", None, "tp")
    split = {"mesh": mesh, "in_specs": (spec,) * 3}
    attend = jax.jit(lambda w: flash_attention(Q, K, V, causal=True, sliding_window=w, **split))
    close(attend(3), flash_attention(Q, K, V, causal=True, sliding_window=3))
    query, keys, values = NEWEST["page_attention"][1]
    query, lengths, table = query[:2], LENGTHS[:2], TABLE[:2]
    cache = jax.P(None, None, "tp")
    read = lambda w, **kw: page_attention(
        query, keys, values, lengths, table, sliding_window=w, **kw
    )
    over_mesh = jax.jit(lambda w: read(w, mesh=mesh, in_specs=(spec, cache, cache)))
    close(over_mesh(3), read(3))
