"""Training of any `torch.nn.Module`: a CUDA graph per slot on GPUs, a process per core on CPUs."""
