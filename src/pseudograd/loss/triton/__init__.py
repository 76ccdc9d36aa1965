"""The loss on GPUs: Triton kernels, their launches, and their PyTorch bindings."""
