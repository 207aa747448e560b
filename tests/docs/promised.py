"""What the promised documents take for granted, and what they get wrong."""

import jax
from docs.documents import Refusal

from ejkernel.errors import UnsupportedError

TYPES, MODULES, INDEX = "000_*.txt", "001_*.txt", "002_*.txt"
XLA_UTILS, SPLASH_INFO = "003_*.txt", "004_*.txt"

PAGED = """
    query = jnp.ones((2, 1, 4, 32))
    key_cache = value_cache = jnp.ones((8, 16, 4, 32))
    context_lens = jnp.array([20, 8])
    block_tables = jnp.array([[0, 1], [2, 3]])
"""
PRELUDES = {
    TYPES: {
        "": """
            import jax
            import jax.numpy as jnp
            from ejkernel.types import MaskInfo
            input_ids = jnp.arange(12).reshape(2, 6)
            attention_mask = jnp.array([[1, 1, 1, 0], [1, 1, 0, 0]])
            existing_mask_info = MaskInfo.from_segments(jnp.array([[1, 1, 2]]))
        """,
        "Causal Masking": """
            current_position, current_idx = 300, 160
            mask_info = MaskInfo.from_attention_mask(jnp.ones((3, 512), bool))
        """,
        "Token Type IDs": "mask_info = MaskInfo.from_segments(jnp.zeros((1, 6), int))",
        "KV Length Limiting": """
            mask_info = MaskInfo.from_attention_mask(jnp.ones((3, 512), bool))
        """,
        "Conversion and Materialization": """
            mask_info = MaskInfo.from_segments(jnp.array([[1, 1, 2, 2, -1]])).apply_causal()
        """,
        "Visualization": """
            mask_info = MaskInfo.from_segments(jnp.repeat(jnp.array([[1, 2]]), 64, axis=1))
        """,
        "3. Chain Transformations": "segment_ids = jnp.zeros((1, 512), int)",
        "4. Reuse MaskInfo": """
            x = jnp.ones((1, 512, 8))
            ids = segment_ids
            layers = [lambda x, mask_info: x * mask_info.q_attention_mask[..., None]] * 2
        """,
    },
    MODULES: {
        "": """
            import jax
            import jax.numpy as jnp
            query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 512, 4, 32))
            attention_bias = jax.random.normal(jax.random.key(1), (4, 512, 512))
            cu_seqlens_q = cu_seqlens_k = jnp.array([0, 128, 300, 512])
            segment_ids = jnp.repeat(jnp.array([[0, 1, 2, -1]]), 128, axis=1)
            mask = jnp.arange(512)[None] < 400
        """,
        "NativeSparseAttention": """
            block_indices = jnp.broadcast_to(jnp.arange(2), (1, 512, 4, 2))
            cu_seqlens = cu_seqlens_q
        """,
        "PageAttention": PAGED,
        "RaggedPageAttention (v2 and v3)": """
            query = jnp.ones((5, 4, 32))
            key_pages, value_pages = key_cache, value_cache
            cu_q, cu_k = jnp.array([0, 2, 5]), jnp.array([0, 20, 28])
            page_indices = block_tables
        """,
        "ScaledDotProductAttention": """
            query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 512, 4, 32))
        """,
        "BlockSparseAttention": "block_mask = jnp.tril(jnp.ones((8, 8), bool))",
        "GLAttention (Gated Linear Attention)": "gate_values = jnp.full((1, 512, 4, 32), -0.1)",
        "LightningAttention": "decay_factor = 0.9",
        "RecurrentAttention": "previous_state = jnp.zeros((1, 4, 32, 32))",
        "GroupedMatmul": """
            inputs, weights = jnp.ones((16, 8)), jnp.ones((4, 8, 6))
            group_ids = jnp.arange(16) % 4
        """,
        "MeanPooling": """
            hidden_states = jnp.ones((2, 6, 8))
            attention_mask = jnp.array([[1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0]])
        """,
        "Distributed Execution": """
            query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 128, 4, 32))
        """,
        "2. Use MaskInfo for complex masking": """
            segment_ids = jnp.repeat(jnp.array([[0, 1], [2, -1]]), 64, axis=1)
            attention_mask = jnp.arange(128) < jnp.array([[100], [128]])
        """,
    },
    INDEX: {"Inference with KV Cache": PAGED},
}

# What comes back, where the text says it.
CHECKS = {
    TYPES: {
        "Accessing Mask Properties": """
            import numpy as np
            assert (mask_info.batch_size, mask_info.q_len, mask_info.kv_len) == (1, 5, 5)
            assert mask_info.shape == (1, 5, 5)
            rows = ["11000", "11000", "00110", "00110", "00000"]
            expected = np.array([[letter == "1" for letter in row] for row in rows])
            assert np.array_equal(mask_info.attention_mask[0, 0], expected)
            assert np.array_equal(mask_info.bias[0, 0], np.where(expected, 0.0, -np.inf))
            assert mask_info.create_bias(dtype=jnp.float16).dtype == jnp.float16
            assert mask_info.q_lens.tolist() == [4]
            assert mask_info.cu_seqlens_q.tolist() == [0, 4]
            assert mask_info.q_attention_mask.tolist() == [[1, 1, 1, 1, 0]]
            assert mask_info.q_position_ids.tolist() == [[0, 1, 0, 1, -1]]
        """,
        "Sliding Window": """
            assert decode_mask.attention_mask.shape[-2:] == (1, 512)
            assert prefill_mask.attention_mask.shape[-2:] == (512, 256)
        """,
        "KV Length Limiting": "assert limited.shape == (3, 1, 256)",
        "Conversion and Materialization": """
            assert attention_mask.sum() == 6  # two causal triangles, not two squares
            assert cu_q.tolist() == cu_kv.tolist() == [0, 4]
        """,
        "Distributed Sharding": """
            from jax.sharding import PartitionSpec
            spec = getattr(shardings.q_segment_ids, "spec", shardings.q_segment_ids)
            assert "fsdp" not in str(spec)
        """,
        "Visualization": """
            drawn = mask_info.visualize(return_str=True).splitlines()
            assert drawn[0] == (
                "Attention mask (batch=0, head=0) block=(32x32) mask_shape=(1, 1, 128, 128)"
            )
            assert drawn[-2:] == [
                "Legend mask: full='██'/##, partial='░░'/.., empty='  '",
                "Legend seg: left=Q block ID, top=KV block ID, PAD=-1, MIX=??",
            ]
        """,
        "JAX Pytree Support": """
            x = jnp.ones((1, 5, 3))
            pytree = MaskInfo.from_segments(jnp.array([[1, 1, 2, 2, -1]]))
            assert process(pytree, x).sum() == vmapped(pytree, x).sum() == 4 * 3
        """,
        "4. Reuse MaskInfo": "assert output.shape == x.shape",
    },
    MODULES: {
        "Distributed Execution": """
            import numpy as np
            whole = flash_attention(query, key, value)
            np.testing.assert_allclose(output, whole, rtol=1e-5, atol=1e-6)
        """,
    },
    INDEX: {
        "Basic Attention": """
            assert output.shape == (2, 128, 8, 64)
            assert jnp.abs(output - 1).max() <= 32 * jnp.finfo(output.dtype).eps
        """,
    },
}

_A_LIST_HAS_NO_RESHAPE = Refusal(
    AttributeError,
    "'list' object has no attribute 'reshape'",
    instead="""
        import numpy
        mesh = Mesh(numpy.array(devices).reshape(2, 4), axis_names=("dp", "tp"))
    """,
)


def _elsewhere(platform: str, backend: str) -> Refusal:
    """A platform off its hardware: the error names it, the reason and what supports the call."""
    return Refusal(
        UnsupportedError, f"{platform}.*xla", unless=lambda: jax.default_backend() == backend
    )


# Statements that cannot run: `jax.devices()` is a list, a mask of 6 (or 10) tokens fits no
# sequence of 128, and a platform needs its hardware.
REFUSALS = {
    TYPES: {"devices.reshape(2, 4)": _A_LIST_HAS_NO_RESHAPE},
    MODULES: {
        "flash_attention(query, key, value, platform='triton')": _elsewhere("triton", "gpu"),
        "devices.reshape(2, 4)": _A_LIST_HAS_NO_RESHAPE,
        "cfg=config": _elsewhere("gpu.*CPU", "gpu"),
    },
    INDEX: {
        "flash_attention(q, k, v, mask_info=mask_info)": Refusal(
            ValueError, r"flash_attention.*\b(6|10)\b.*\b128\b"
        ),
        "devices.reshape(2, 4)": _A_LIST_HAS_NO_RESHAPE,
        "platform='triton'": _elsewhere("triton", "gpu"),
        "platform='pallas'": _elsewhere("pallas", "tpu"),
    },
}
