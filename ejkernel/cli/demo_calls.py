"""The calls of `ejkernel demo`: each operation as models use it, and the same in plain JAX.

Plain JAX is what a JAX user would write without this package. It runs jitted, like ours, on the
same arrays. In float64 it is the truth that both are checked against.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import modules
from ejkernel.cli import demo_paged
from ejkernel.cli.baseline import Baseline, attend, normal, scan_tokens
from ejkernel.kernels import OPS
from ejkernel.types import MaskInfo

Arrays = dict[str, np.ndarray]


def _attention_arrays(tokens: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 64) -> Arrays:
    return {
        "query": normal(1, tokens, heads, head_dim, seed=0),
        "key": normal(1, tokens, kv_heads, head_dim, seed=1),
        "value": normal(1, tokens, kv_heads, head_dim, seed=2),
    }


def _packed_arrays(tokens: int) -> Arrays:
    """Six documents of uneven lengths in one row."""
    ends = np.array([0.06, 0.28, 0.36, 0.71, 0.83]) * tokens
    segment_ids = np.searchsorted(ends, np.arange(tokens), side="right")[None]
    return _attention_arrays(tokens) | {"segment_ids": segment_ids.astype(np.int32)}


def _flash(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array) -> jax.Array:
    mask_info = MaskInfo.from_segments(segment_ids)
    return modules.flash_attention(query, key, value, mask_info=mask_info, causal=True)


def _flash_plain(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return attend(query, key, value, mask=same[:, None], is_causal=True)


def _scaled_dot_product(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return modules.scaled_dot_product_attention(query, key, value, causal=True)


def _causal_plain(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return attend(query, key, value, is_causal=True)


def _ring(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return modules.ring_attention(query, key, value, causal=True)


_BLOCK = 64


def _block_sparse_arrays(tokens: int) -> Arrays:
    """The blocks of BigBird: the neighbours, one global block, and two at random."""
    blocks = tokens // _BLOCK
    row, column = np.arange(blocks)[:, None], np.arange(blocks)
    mask = (abs(row - column) <= 1) | (row == 0) | (column == 0)
    mask[row, np.random.default_rng(0).integers(blocks, size=(blocks, 2))] = True
    return _attention_arrays(tokens) | {"block_mask": mask}


def _block_sparse(
    query: jax.Array, key: jax.Array, value: jax.Array, block_mask: jax.Array
) -> jax.Array:
    return modules.blocksparse_attention(
        query, key, value, block_mask=block_mask, block_size=_BLOCK
    )


def _block_sparse_plain(
    query: jax.Array, key: jax.Array, value: jax.Array, block_mask: jax.Array
) -> jax.Array:
    mask = jnp.repeat(jnp.repeat(block_mask, _BLOCK, axis=0), _BLOCK, axis=1)
    return attend(query, key, value, mask=mask[None, None])


def _native_sparse_arrays(tokens: int) -> Arrays:
    """For each token its own block and three earlier ones at random; -1 where there are fewer."""
    blocks = tokens // _BLOCK
    own = np.arange(tokens)[:, None] // _BLOCK
    order = np.random.default_rng(0).random((tokens, blocks))
    order = np.where(np.arange(blocks) > own, 2.0, np.where(np.arange(blocks) == own, -1.0, order))
    chosen = np.argsort(order, axis=1)[:, :4]
    chosen = np.where(chosen > own, -1, chosen)
    chosen = chosen[None, :, None].astype(np.int32)
    return _attention_arrays(tokens, kv_heads=1) | {"block_indices": chosen}


def _native_sparse(
    query: jax.Array, key: jax.Array, value: jax.Array, block_indices: jax.Array
) -> jax.Array:
    return modules.native_sparse_attention(
        query, key, value, block_indices=block_indices, block_size=_BLOCK
    )


def _native_sparse_plain(
    query: jax.Array, key: jax.Array, value: jax.Array, block_indices: jax.Array
) -> jax.Array:
    tokens = query.shape[1]
    blocks = jnp.arange(tokens // _BLOCK)
    chosen = (block_indices[:, :, 0, :, None] == blocks).any(-2)  # [b, t, blocks]
    mask = jnp.repeat(chosen, _BLOCK, axis=-1)[:, None]
    return attend(query, key, value, mask=mask, is_causal=True)


def _linear_arrays(tokens: int) -> Arrays:
    return _attention_arrays(tokens, heads=2, kv_heads=2, head_dim=128)


def _log_sigmoid(x: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0.0, -x)


def _gla_arrays(tokens: int) -> Arrays:
    gate = _log_sigmoid(normal(1, tokens, 2, 128, seed=3) + 2.0)
    return _linear_arrays(tokens) | {"gate": gate}


def _gla(query: jax.Array, key: jax.Array, value: jax.Array, gate: jax.Array) -> jax.Array:
    return modules.gla_attention(query, key, value, gate)


def _gla_plain(query: jax.Array, key: jax.Array, value: jax.Array, gate: jax.Array) -> jax.Array:
    return scan_tokens(query, key, value, gate)[0]


_LAYER, _LAYERS = 8, 32


def _lightning(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return modules.lightning_attention(query, key, value, layer_idx=_LAYER, num_layers=_LAYERS)


def _lightning_plain(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    heads = key.shape[2]
    log_decay = -8 / heads * (1 - _LAYER / _LAYERS) * jnp.arange(heads)
    gate = jnp.broadcast_to(log_decay[:, None], (*key.shape[:3], 1))
    return scan_tokens(query, key, value, gate)[0]


def _recurrent_arrays(tokens: int) -> Arrays:
    """Decays that depend on the token and the head, as those of Mamba-2, and a state to go on."""
    gate = _log_sigmoid(normal(1, tokens, 2, seed=3) + 2.0)
    return _linear_arrays(tokens) | {"gate": gate, "state": normal(1, 2, 128, 128, seed=4)}


def _recurrent(
    query: jax.Array, key: jax.Array, value: jax.Array, gate: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return modules.recurrent_attention(query, key, value, gate, state=state)


def _recurrent_plain(
    query: jax.Array, key: jax.Array, value: jax.Array, gate: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return scan_tokens(query, key, value, gate[..., None], state)


def _expert_arrays(tokens: int) -> Arrays:
    """Rows sorted by expert, the experts unevenly loaded, one of them idle."""
    share = np.random.default_rng(0).dirichlet(np.ones(7))
    sizes = np.append(np.floor(share * tokens).astype(int), 0)
    sizes[0] += tokens - sizes.sum()
    return {
        "inputs": normal(tokens, 512),
        "weights": normal(8, 512, 512, seed=1) * np.float32(512**-0.5),
        "group_sizes": sizes.astype(np.int32),
    }


def _grouped_matmul(inputs: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return modules.grouped_matmul(inputs, weights, group_sizes=group_sizes)


def _ragged_dot(inputs: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(inputs, weights, group_sizes)


def _pooling_arrays(tokens: int) -> Arrays:
    """Eight sequences padded to the longest."""
    length = tokens // 8
    lengths = length * np.arange(1, 9)[:, None] // 8
    mask = np.arange(length) < lengths
    return {"x": normal(8, length, 768), "attention_mask": mask}


def _pooling_plain(x: jax.Array, attention_mask: jax.Array) -> jax.Array:
    weights = attention_mask[..., None].astype(x.dtype)
    return (x * weights).sum(axis=1) / weights.sum(axis=1)


_ATTENTION = "`jax.nn.dot_product_attention`"
_SCAN = "a `jax.lax.scan` over the tokens"
_HEADS, _LINEAR_HEADS = "4 heads of 64 on 2 key heads", "2 heads of 128"

_BASELINES: dict[str, Baseline] = demo_paged.BASELINES | {
    "blocksparse_attention": Baseline(
        2048,
        f"2048 tokens, {_HEADS}; blocks of 64: the neighbours, a global one, two at random",
        f"{_ATTENTION} with the block mask expanded to tokens",
        _block_sparse_arrays,
        _block_sparse,
        _block_sparse_plain,
    ),
    "flash_attention": Baseline(
        2048,
        f"six packed documents, 2048 tokens in all, causal, {_HEADS}",
        f"{_ATTENTION} with `is_causal` and a mask of the documents",
        _packed_arrays,
        _flash,
        _flash_plain,
    ),
    "gla_attention": Baseline(
        1024,
        f"1024 tokens, {_LINEAR_HEADS}, a gate for each row of the state",
        _SCAN,
        _gla_arrays,
        _gla,
        _gla_plain,
    ),
    "grouped_matmul": Baseline(
        2048,
        "2048 tokens of width 512 sorted by expert, 8 unevenly loaded experts of 512 x 512",
        "`jax.lax.ragged_dot`",
        _expert_arrays,
        _grouped_matmul,
        _ragged_dot,
    ),
    "lightning_attention": Baseline(
        1024,
        f"1024 tokens, {_LINEAR_HEADS}, the decays of layer {_LAYER} of {_LAYERS}",
        _SCAN,
        _linear_arrays,
        _lightning,
        _lightning_plain,
    ),
    "mean_pooling": Baseline(
        4096,
        "8 sequences padded to 512 tokens, 4096 tokens in all, width 768",
        "a masked sum in `jax.numpy`, divided by the number of valid tokens",
        _pooling_arrays,
        modules.mean_pooling,
        _pooling_plain,
    ),
    "native_sparse_attention": Baseline(
        2048,
        "2048 tokens, 4 heads of 64 on 1 key head, 4 selected blocks of 64 for each token",
        f"{_ATTENTION} with `is_causal` and the selected blocks expanded to a mask of tokens",
        _native_sparse_arrays,
        _native_sparse,
        _native_sparse_plain,
    ),
    "recurrent_attention": Baseline(
        1024,
        f"1024 tokens, {_LINEAR_HEADS}, a decay for each token and head, an initial state",
        _SCAN,
        _recurrent_arrays,
        _recurrent,
        _recurrent_plain,
    ),
    "ring_attention": Baseline(
        2048,
        f"2048 tokens, causal, {_HEADS}, a ring of one device",
        f"{_ATTENTION} with `is_causal`",
        _attention_arrays,
        _ring,
        _causal_plain,
    ),
    "scaled_dot_product_attention": Baseline(
        2048,
        f"2048 tokens, causal, {_HEADS}",
        f"{_ATTENTION} with `is_causal`",
        _attention_arrays,
        _scaled_dot_product,
        _causal_plain,
    ),
}
BASELINES = {name: _BASELINES[name] for name in OPS}
