"""Smoke-test an installed wheel in the current folder: ``python smoke.py core|[tune]|[all]``."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path


def command(*arguments: str) -> str:
    """Run the installed command ``pseudograd`` and return its output."""
    program = Path(sys.executable).with_name("pseudograd")
    words = [str(program), *arguments]
    return subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE).stdout


def in_your_program() -> None:
    """Compare the loss's gradients from the compiled kernels and from PyTorch operations."""
    import torch

    import pseudograd
    from pseudograd.loss import cpu

    logits, target = torch.randn(64, 10, requires_grad=True), torch.randint(10, (64,))
    gradients: list[torch.Tensor] = []
    for implementation in ("auto", "torch"):
        loss = pseudograd.tunable_cross_entropy(
            logits, target, k=0.5, implementation=implementation
        )
        gradients += torch.autograd.grad(loss, logits)
    torch.testing.assert_close(*gradients)
    assert pseudograd.__version__ in command("--version")
    print(f"the loss, {'with' if cpu.kernels() else 'without'} CPU kernels")


def any_network() -> None:
    """Run a small study of a network."""
    import torch

    import pseudograd

    x = torch.randn(200, 4)
    data = x, (x[:, 0] > 0).long()
    study = pseudograd.Study(
        lambda: torch.nn.Linear(4, 2), data, data, k=(0.5, 1), learning_rates=(0.1,), epochs=2,
        batch_size=50, validation=0.25, retrainings=2,
    )  # fmt: skip
    assert study.run(device="cpu", slots=1, progress=False)
    print(f"a study: {study.best}")


def on_your_data(format: str) -> None:
    """Tune on a table and predict."""
    import sklearn.datasets

    table = sklearn.datasets.load_iris(as_frame=True).frame
    file = f"iris.{format}"
    write = {"csv": table.to_csv, "parquet": table.to_parquet, "xlsx": table.to_excel}[format]
    write(file, index=False)
    command("tune", file, "--target", "target", "--out", format, "--epochs", "5")
    lines = command("predict", format, file).splitlines()
    assert len(lines) == 151, lines
    assert Path(format, "report.html").exists()
    print(f"tune and predict on a .{format} file")


def on_a_cluster() -> None:
    """Tune on a local Ray cluster."""
    command("tune", "iris.csv", "--target", "target", "--epochs", "2", "--ray", "local")
    print("tune on a cluster")


if __name__ == "__main__":
    in_your_program()
    if sys.argv[1] == "core":
        assert importlib.util.find_spec("pandas") is None, "core depends on pandas"
    if sys.argv[1] == "[tune]":
        any_network()
        on_your_data("csv")
    if sys.argv[1] == "[all]":
        on_your_data("parquet")
        on_your_data("xlsx")
        on_a_cluster()
