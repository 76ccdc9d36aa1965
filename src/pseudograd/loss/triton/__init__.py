"""The loss on GPUs: Triton kernels, their launches, and their PyTorch bindings."""

PARTS = 32  # the number of partial sums of the divisor of a mean
