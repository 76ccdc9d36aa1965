"""Any `torch.nn.Module`: one CUDA graph per trial on a GPU, one process per core on a CPU."""
