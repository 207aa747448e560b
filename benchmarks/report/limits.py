"""The limits of the hardware in words."""

from ejkernel.cli.report.limits import H200_TERABYTES as H200_TERABYTES
from ejkernel.cli.report.limits import H200_TFLOPS as H200_TFLOPS

H200_IN_WORDS = (
    f"The hardware limit is {H200_TFLOPS:.0f} TFLOP/s, the best rate of a dense bfloat16 matmul "
    f"measured on an H200 that was not yet hot (at its power limit: 640 to 660), and "
    f"{H200_TERABYTES} TB/s, the memory bandwidth in NVIDIA's data sheet."
)
