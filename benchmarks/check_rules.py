"""Check reweighting rules, gradients of soft targets and changes of k on a GPU.

    python -m benchmarks.check_rules --out benchmarks/results/check_rules_cuda.csv

The reference is float64 on the CPU: the rule in PyTorch operations, or `F.cross_entropy`. Errors
are the largest difference over the largest entry of the reference.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.environment import RESULTS, environment, write
from pseudograd import RuleCrossEntropyLoss, TunableCrossEntropyLoss, tunable_cross_entropy
from pseudograd.rules import focal, generalized_cross_entropy, log_of_power, power_of_log

RULES: tuple[tuple[Any, dict[str, float]], ...] = (
    (focal, {"gamma": 2.0}),
    (generalized_cross_entropy, {"q": 0.7}),
    (power_of_log, {"k": 0.5}),
    (log_of_power, {"k": 2.0}),
)
Check = tuple[str, float, float]  # the name of the check, the error, and the allowed error


def error(ours: Tensor, truth: Tensor) -> float:
    """Return the largest difference over the largest entry of the reference."""
    return float((ours.double().cpu() - truth).abs().max() / truth.abs().max())


def rules() -> Iterator[Check]:
    """Check reweighting rules, eagerly and compiled."""
    dtypes = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
    shapes = ((128, 10), (64, 1000), (16, 32000))
    for (dtype, allowed), shape, (rule, settings) in product(dtypes.items(), shapes, RULES):
        logits = (3 * torch.randn(shape)).to(dtype)
        target = torch.randint(shape[1], shape[:1])
        truth = rule(logits.double(), target, **settings) / len(logits)
        criterion = RuleCrossEntropyLoss(partial(rule, **settings))
        for how in ("eager", "compiled")[: 1 + (shape[1] == 1000)]:
            x = logits.cuda().requires_grad_()
            loss: Callable[..., Tensor] = criterion
            if how == "compiled":
                loss = torch.compile(criterion, fullgraph=True)
            loss(x, target.cuda()).backward()
            assert x.grad is not None
            yield f"{rule.factor.__name__} {dtype} {shape} {how}", error(x.grad, truth), allowed


def soft_targets() -> Iterator[Check]:
    """Check the gradients of logits and of soft targets at k = 1."""
    shapes = ((64, 10), (32, 1000), (8, 40000))
    for shape, reduction, smoothing, weighted in product(
        shapes, ("mean", "sum", "none"), (0.0, 0.1), (False, True)
    ):
        logits, target = torch.randn(shape), torch.rand(shape).softmax(1)
        weight = torch.rand(shape[1]) if weighted else None

        def gradients(
            loss: Callable[..., Tensor],
            device: str,
            dtype: torch.dtype,
            inputs: tuple[Tensor, Tensor] = (logits, target),
            weight: Tensor | None = weight,
            settings: tuple[str, float] = (reduction, smoothing),
        ) -> list[Tensor]:
            z, q = (tensor.to(device, dtype).requires_grad_() for tensor in inputs)
            w = None if weight is None else weight.to(device, dtype)
            value = loss(z, q, weight=w, reduction=settings[0], label_smoothing=settings[1])
            return list(torch.autograd.grad(value.sum(), (z, q)))

        ours = gradients(tunable_cross_entropy, "cuda", torch.float32)
        truth = gradients(F.cross_entropy, "cpu", torch.float64)
        for name, mine, theirs in zip(("logits", "target"), ours, truth, strict=True):
            case = f"{shape} {reduction} smoothing {smoothing} weighted {weighted}"
            yield f"soft target, {name}: {case}", error(mine, theirs), 2e-5


def changes_of_k() -> Iterator[Check]:
    """Check that a compiled module whose k changes is correct and has at most two graphs."""
    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        graphs.append(graph)
        return compile_fx(graph, inputs)

    torch._dynamo.reset()
    criterion = TunableCrossEntropyLoss(k=1.0)
    compiled = torch.compile(criterion, fullgraph=True, backend=counting)
    logits, target = torch.randn(256, 100), torch.randint(100, (256,))
    for k in (1, 2, 3, 0.5, 0.25, 4, 7, 0.1, 1.5, 5, 6, 8):
        criterion.k = k
        x, truth = logits.cuda().requires_grad_(), logits.double().requires_grad_()
        compiled(x, target.cuda()).backward()
        tunable_cross_entropy(truth, target, k=float(k)).backward()
        assert x.grad is not None
        assert truth.grad is not None
        yield f"k changed to {k}, compiled", error(x.grad, truth.grad), 1e-4
    yield "graphs of a module whose k changes", len(graphs), 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULTS / "check_rules_cuda.csv")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    facts = environment("cuda")
    rows = []
    for check, found, allowed in (*rules(), *soft_targets(), *changes_of_k()):
        rows.append({"check": check, "found": found, "allowed": allowed,
                     "wrong": int(not found <= allowed), **facts})  # fmt: skip
        print(f"{check}: {found:.2g}", flush=True)
    write(rows, arguments.out)
    print(f"{len(rows)} checks, {sum(int(str(row['wrong'])) for row in rows)} wrong")


if __name__ == "__main__":
    main()
