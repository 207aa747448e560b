"""One folder per operation; `OPS` is the list."""

from ejkernel.ops.registry import kernel_registry

OPS = (
    "flash_attention",
    "native_sparse_attention",
    "scaled_dot_product_attention",
)

for _name in OPS:
    kernel_registry.declare(_name, f"ejkernel.kernels.{_name}")
