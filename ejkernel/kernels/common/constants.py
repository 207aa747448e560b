"""Numbers that several kernels use."""

import math

# exp(x) = exp2(x * LOG2_E): GPUs and TPUs compute powers of two.
LOG2_E = math.log2(math.e)
