"""The loss on GPUs: Triton kernels, how they are launched, and PyTorch's view of them."""
