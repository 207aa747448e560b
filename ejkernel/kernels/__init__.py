"""One folder per operation; `OPS` is the list."""

from ejkernel.ops.registry import kernel_registry

OPS = (
    "blocksparse_attention",
    "flash_attention",
    "gla_attention",
    "grouped_matmul",
    "lightning_attention",
    "mean_pooling",
    "native_sparse_attention",
    "page_attention",
    "ragged_page_attention_v2",
    "ragged_page_attention_v3",
    "ragged_page_attention_v3_update",
    "recurrent_attention",
    "ring_attention",
    "scaled_dot_product_attention",
)

for _name in OPS:
    kernel_registry.declare(_name, f"ejkernel.kernels.{_name}")
