"""What the hardware allows, by device and unit, with the source of each number."""

# An H200, bfloat16. Dense matmuls reached 710 to 790 TFLOP/s on a cool card and 640 to 660
# once it was at its power limit; the best of them is the limit that kernels are compared with.
H200_TFLOPS = 790.0
H200_DATA_SHEET_TFLOPS = 989.0  # dense bfloat16, NVIDIA's data sheet
# NVIDIA's data sheet for the H200. Plain reads reached 4.27 TB/s, which some kernels exceed.
H200_TERABYTES = 4.8

LIMITS = {"NVIDIA H200": {"TFLOP/s": H200_TFLOPS, "TB/s": H200_TERABYTES}}
IN_WORDS = {"TFLOP/s": "measured matmul peak", "TB/s": "memory bandwidth of the data sheet"}
H200_IN_WORDS = (
    f"The limit of TFLOP/s is the measured matmul peak, {H200_TFLOPS:.0f}: the highest rate of a "
    "dense bfloat16 matmul on an H200 before power throttling (640 to 660 at its power limit; "
    f"NVIDIA's data sheet states {H200_DATA_SHEET_TFLOPS:.0f}). The limit of TB/s is the memory "
    f"bandwidth in NVIDIA's data sheet, {H200_TERABYTES}."
)
