"""The figures of `ejkernel bench`: what each is, how it is measured, and its target.

Every measurement checks its result first and raises `WrongResultError` instead of reporting.
"""

import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.cli import fresh, measure
from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo

_HEADS, _HEAD_DIM = 8, 64


@dataclasses.dataclass(frozen=True)
class Figure:
    """One row of the table: `measure()` gives its value."""

    name: str
    what: str
    unit: Literal["s", "µs", "MB", "x"]
    better: Literal["lower", "higher"]
    bound: int | float
    measure: Callable[[], float]
    operation: str | None = None  # the following describe the call, where there is one
    dtype: str | None = "float32"
    mask: tuple[str, ...] | None = None  # no words: every pair is visible

    def holds(self, value: float) -> bool:
        return value <= self.bound if self.better == "lower" else value >= self.bound


def _arrays(length: int, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    draw = jax.random.normal(jax.random.key(seed), (3, 1, length, _HEADS, _HEAD_DIM))
    return draw[0], draw[1], draw[2]


def _causal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return flash_attention(query, key, value, causal=True)


def _windowed(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return flash_attention(query, key, value, causal=True, sliding_window=(256, 0))


def _plain(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def _with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Value and gradients for query, key and value, of a sum weighted so that no term is alike."""

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        out = function(query, key, value)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


def _check_rows(
    out: jax.Array, arrays: tuple[jax.Array, ...], allowed: Callable[[int, np.ndarray], np.ndarray]
):
    """Compare some rows of a result with attention written out in float64."""
    query, key, value = (np.asarray(x[0], np.float64) for x in arrays)
    length = query.shape[0]
    for row in np.linspace(0, length - 1, 33).astype(int):
        logits = np.einsum("nh,snh->ns", query[row], key) * query.shape[-1] ** -0.5
        logits = np.where(allowed(row, np.arange(length)), logits, -np.inf)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        expected = np.einsum("ns,snh->nh", weights / weights.sum(-1, keepdims=True), value)
        measure.check_close(out[0, row], expected, ulps=32)


def import_time() -> float:
    """Seconds that `import ejkernel.modules` takes once JAX is imported.

    With compiled bytecode, which pip writes when it installs a package, and here the first run.
    """
    with tempfile.TemporaryDirectory() as bytecode:
        variables = {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
        run = lambda: fresh.seconds("import jax", "import ejkernel.modules", **variables)
        return min(run() for _ in range(6))


def eager_overhead() -> float:
    """Microseconds of a warm eager call beyond the same computation under `jax.jit`."""
    arrays = _arrays(128)
    compiled = jax.jit(_causal)
    measure.check_close(_causal(*arrays), compiled(*arrays), ulps=32)
    eager, jitted = measure.interleaved(
        lambda: _causal(*arrays), lambda: compiled(*arrays), rounds=2000, warmup=50
    )
    return (eager - jitted) * 1e6


def first_call() -> float:
    """Seconds of the first call in a process, compilation included."""
    prepare = """
        import jax, ejkernel.modules
        query = jax.random.normal(jax.random.key(0), (1, 128, 8, 64)).block_until_ready()
    """
    call = "out = jax.block_until_ready(ejkernel.modules.flash_attention(query, query, query))"
    check = """
        plain = jax.nn.dot_product_attention(query, query, query)
        if not jax.numpy.allclose(out, plain, rtol=1e-5, atol=1e-5):
            raise SystemExit("the first call gave a wrong result")
    """
    return min(fresh.seconds(prepare, call, check) for _ in range(3))


def gradient_memory() -> float:
    """Growth of the temporary memory of a gradient when the sequence doubles."""
    ours, plain = jax.jit(_with_gradient(_causal)), jax.jit(_with_gradient(_plain))
    small = _arrays(512)
    for got, expected in zip(ours(*small)[1], plain(*small)[1], strict=True):
        measure.check_close(got, expected, ulps=128)

    def temporary(length: int) -> int:
        shape = jax.ShapeDtypeStruct((1, length, _HEADS, _HEAD_DIM), jnp.float32)
        return measure.memory(ours.lower(shape, shape, shape).compile()).temporary

    return temporary(8192) / temporary(4096)


def forward_speed() -> float:
    """How many times as fast as `jax.nn.dot_product_attention`."""
    arrays = _arrays(4096)
    ours, plain = jax.jit(_causal), jax.jit(_plain)
    _check_rows(ours(*arrays), arrays, lambda row, column: column <= row)
    mine, theirs = measure.interleaved(lambda: ours(*arrays), lambda: plain(*arrays), rounds=5)
    return theirs / mine


def gradient_speed() -> float:
    """The same for value and gradients."""
    arrays = _arrays(4096)
    ours, plain = jax.jit(_with_gradient(_causal)), jax.jit(_with_gradient(_plain))
    for got, expected in zip(ours(*arrays)[1], plain(*arrays)[1], strict=True):
        measure.check_close(got, expected, ulps=128)
    mine, theirs = measure.interleaved(lambda: ours(*arrays), lambda: plain(*arrays), rounds=5)
    return theirs / mine


def window_speed() -> float:
    """How many times as fast a window of 256 is as plain causal attention."""
    arrays = _arrays(8192)
    windowed, causal = jax.jit(_windowed), jax.jit(_causal)
    _check_rows(
        windowed(*arrays), arrays, lambda row, column: (column <= row) & (row - column <= 256)
    )
    mine, whole = measure.interleaved(lambda: windowed(*arrays), lambda: causal(*arrays), rounds=5)
    return whole / mine


def packed_speed() -> float:
    """How many times as fast eight packed documents are as one of the same total length."""
    arrays = _arrays(8192)
    document = np.arange(8192) // 1024

    @jax.jit
    def packed(
        query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        mask_info = MaskInfo.from_segments(segment_ids)
        return flash_attention(query, key, value, mask_info=mask_info, causal=True)

    causal, segment_ids = jax.jit(_causal), jnp.asarray(document)[None]
    _check_rows(
        packed(*arrays, segment_ids),
        arrays,
        lambda row, column: (column <= row) & (document == document[row]),
    )
    mine, whole = measure.interleaved(
        lambda: packed(*arrays, segment_ids), lambda: causal(*arrays), rounds=5
    )
    return whole / mine


_PREPARE_MASK = """
    import jax, jax.numpy as jnp, numpy as np
    from ejkernel.types import MaskInfo
    from ejkernel.types.block_map import block_map
    segment_ids = jnp.asarray(np.arange(131072) // 1000)[None].block_until_ready()
"""
_BUILD_MASK = """
    mask_info = MaskInfo.from_segments(segment_ids).apply_causal().apply_sliding_window((4096, 0))
    blocks = jax.jit(lambda mask: block_map(mask.rule, mask.q_len, mask.kv_len, 128, 128))
    result = jax.block_until_ready(blocks(mask_info))
"""
# Document d fills the tokens 1000 d to 1000 d + 999; what one sees is a triangle, and every block
# that holds a pair of it must be there, no other.
_CHECK_MASK = """
    first = np.arange(131072).reshape(1024, 128) // 1000 * 1000
    start, end = first[:, 0] // 128, np.arange(1024)
    column = np.arange(1024)
    expected = (column >= start[:, None]) & (column <= end[:, None])
    if not np.array_equal(np.asarray(result.state[0, 0]) > 0, expected):
        raise SystemExit("the block map is wrong")
"""


def mask_time() -> float:
    """Seconds to build a MaskInfo of 131072 tokens and its block map, compilation included."""
    return min(fresh.seconds(_PREPARE_MASK, _BUILD_MASK, _CHECK_MASK) for _ in range(3))


def mask_memory() -> float:
    """Megabytes that the mask, its block map and all that lies between them take."""
    return fresh.value(
        _PREPARE_MASK,
        _BUILD_MASK,
        _CHECK_MASK,
        """
        used = blocks.lower(mask_info).compile().memory_analysis()
        total = (used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes)
        """,
        "total / 1e6",
    )


_SHAPE = "batch 1, length 4096, 8 heads of 64, float32, causal"
FIGURES = (
    Figure(
        "import",
        "time of `import ejkernel.modules` after `import jax`",
        "s",
        "lower",
        0.15,
        import_time,
        dtype=None,
    ),
    Figure(
        "eager",
        "overhead of an eager `flash_attention` call over the same call under `jax.jit`",
        "µs",
        "lower",
        100,
        eager_overhead,
        operation="flash_attention",
        mask=("causal",),
    ),
    Figure(
        "first_call",
        "first `flash_attention` call in a process, compilation included; 1 x 128, 8 heads of 64",
        "s",
        "lower",
        3,
        first_call,
        operation="flash_attention",
        mask=(),
    ),
    Figure(
        "gradient_memory",
        "temporary memory of the `flash_attention` gradient, length 8192 relative to 4096",
        "x",
        "lower",
        2.2,
        gradient_memory,
        operation="flash_attention",
        mask=("causal",),
    ),
    Figure(
        "forward",
        f"`flash_attention` forward, speed-up over `jax.nn.dot_product_attention`; {_SHAPE}",
        "x",
        "higher",
        3,
        forward_speed,
        operation="flash_attention",
        mask=("causal",),
    ),
    Figure(
        "gradient",
        f"`flash_attention` forward + backward, the same comparison; {_SHAPE}",
        "x",
        "higher",
        4,
        gradient_speed,
        operation="flash_attention",
        mask=("causal",),
    ),
    Figure(
        "window",
        "`flash_attention`, sliding window 256 at length 8192, speed-up over causal attention",
        "x",
        "higher",
        6,
        window_speed,
        operation="flash_attention",
        mask=("causal", "sliding window"),
    ),
    Figure(
        "packed",
        "`flash_attention`, 8 packed documents of 1024, causal, speed-up over one of 8192",
        "x",
        "higher",
        4,
        packed_speed,
        operation="flash_attention",
        mask=("causal", "packed documents"),
    ),
    Figure(
        "mask_time",
        "`MaskInfo` of 131072 tokens (segments, causal, sliding window) and its block map: time",
        "s",
        "lower",
        1,
        mask_time,
        operation="MaskInfo",
        dtype=None,
        mask=("causal", "sliding window", "packed documents"),
    ),
    Figure(
        "mask_memory",
        "`MaskInfo` of 131072 tokens (segments, causal, sliding window) and its block map: memory",
        "MB",
        "lower",
        50,
        mask_memory,
        operation="MaskInfo",
        dtype=None,
        mask=("causal", "sliding window", "packed documents"),
    ),
)
