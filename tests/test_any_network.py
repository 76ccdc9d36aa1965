"""docs/any-network.md: its script for CIFAR-10 does what it says, on a few made-up images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pseudograd.data
from documents import Document

DOCUMENT = Document("any-network.md")


def test_the_script_for_cifar_10(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = DOCUMENT.blocks("A ResNet on CIFAR-10")
    # The same program, but shorter.
    for long, short in {
        "epochs=15": "epochs=1, retrainings=1",
        "k=(0.25, 0.5, 1, 2, 4)": "k=(0.5, 1)",
        "learning_rates=(0.2, 0.4, 0.8)": "learning_rates=(0.2,)",
        "validation=0.1": "validation=0.5",
        "batch_size=512": "batch_size=4",
        "512": "16",
        "256": "8",
        "128": "8",
        "64": "4",
        "study.run()": "study.run(device='cpu', slots=1)",
    }.items():
        assert long in code
        code = code.replace(long, short)

    def few(name: str) -> Any:
        assert name == "cifar10"
        x = torch.randint(256, (16, 3, 32, 32), dtype=torch.uint8)
        return (x[:8], torch.arange(8) % 4), (x[8:], torch.arange(8) % 4)

    monkeypatch.setattr(pseudograd.data, "images", few)
    monkeypatch.chdir(tmp_path)
    names = DOCUMENT.execute([code])
    said = capsys.readouterr().out
    assert "does k matter" in said
    assert (tmp_path / "runs" / "resnet" / "report.html").exists()
    assert names["study"].finished
    # Images are shifted by at most four pixels and otherwise unchanged.
    x = torch.arange(3 * 32 * 32.0).reshape(1, 3, 32, 32)
    changed = names["augment"](x.repeat(64, 1, 1, 1))
    assert changed.shape == (64, 3, 32, 32)
    middle = x[0, 0, 16, 16]
    places = (changed[:, 0] == middle).nonzero()[:, 1:]
    assert len({tuple(place) for place in places.tolist()}) > 20
    assert ((places - 16).abs() <= 5).all()
