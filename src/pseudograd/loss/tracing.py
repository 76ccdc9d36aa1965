"""Has `torch.compile` keep some functions whole. Imported by `prepare_tracing` alone."""

import torch

from pseudograd.loss.autograd import whole_functions

for function in whole_functions:
    torch.compiler.allow_in_graph(function)
