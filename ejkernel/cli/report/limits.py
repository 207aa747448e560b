"""What the hardware allows, by device and unit, with the source of each number."""

# An H200, bfloat16. Dense matmuls reached 710 to 790 TFLOP/s on a cool card and 640 to 660
# once it was at its power limit; the best of them is the limit that kernels are compared with.
# NVIDIA's data sheet has 989 TFLOP/s.
H200_TFLOPS = 790.0
# NVIDIA's data sheet for the H200. Plain reads reached 4.27 TB/s, which some kernels exceed.
H200_TERABYTES = 4.8

LIMITS = {"NVIDIA H200": {"TFLOP/s": H200_TFLOPS, "TB/s": H200_TERABYTES}}
IN_WORDS = {"TFLOP/s": "dense matmul, bfloat16", "TB/s": "memory bandwidth"}
