"""Register the functions `torch.compile` must not trace into; imported by `prepare_tracing`."""

import torch

from pseudograd.loss.modes import whole_functions

for function in whole_functions:
    torch.compiler.allow_in_graph(function)
