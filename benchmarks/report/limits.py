"""What the hardware allows, with the source of each number."""

# An H200, bfloat16. Dense matmuls reached 710 to 790 TFLOP/s on a cool card and 640 to 660
# once it was at its power limit; the best of them is the limit that kernels are compared with.
# NVIDIA's data sheet has 989 TFLOP/s.
H200_TFLOPS = 790.0
# NVIDIA's data sheet for the H200. Plain reads reached 4.27 TB/s, which some kernels exceed.
H200_TERABYTES = 4.8

H200_IN_WORDS = (
    f"The hardware limit is {H200_TFLOPS:.0f} TFLOP/s, the best rate of a dense bfloat16 matmul "
    f"measured on an H200 that was not yet hot (at its power limit: 640 to 660), and "
    f"{H200_TERABYTES} TB/s, the memory bandwidth in NVIDIA's data sheet."
)
