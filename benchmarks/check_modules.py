"""Check on a GPU that CUDA graphs train as a plain loop does; one line of a CSV file per check.

    python -m benchmarks.check_modules --out benchmarks/results/check_modules_cuda.csv

Training by CUDA graphs is compared with the loop of `fleet.modules.loop` on the same GPU, with
deterministic kernels and without compilation; a trial alone is compared with the same trial among
others; and networks that cannot be captured must fall back to the loop. The file is written after
each case. A case that fails is recorded, and the others go on.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.environment import RESULTS, environment, write
from benchmarks.networks import CNN, GRU, Transformer
from pseudograd.fleet import Outcome
from pseudograd.fleet.modules import worker
from pseudograd.fleet.modules.examples import Examples
from pseudograd.fleet.modules.fleet import ModuleFleet
from pseudograd.fleet.modules.loop import train
from pseudograd.fleet.modules.training import Training
from pseudograd.fleet.ramp import Ramp
from pseudograd.fleet.trial import Split, Trial
from pseudograd.words import first_line

DEVICE = torch.device("cuda", 0)
Check = dict[str, object]


def data(shape: tuple[int, ...], examples: int = 600) -> Examples:
    """Return a learnable problem: ten patterns in noise."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (examples,), generator=generator)
    patterns = torch.rand(10, *shape, generator=generator)
    x = 0.3 * patterns[y] + 0.7 * torch.rand(examples, *shape, generator=generator)
    return Examples.of((x[:500], y[:500]), (x[500:], y[500:]))


def flipped(x: Tensor) -> Tensor:
    return torch.where(torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5, x.flip(3), x)


class Tokens(nn.Module):
    """A network with two inputs and a label for each position of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 32)
        self.rnn = nn.GRU(33, 64, batch_first=True)
        self.head = nn.Linear(64, 12)

    def forward(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(torch.cat((self.embed(tokens), numbers), 2))[0])
        return out.transpose(1, 2)


class Wandering(nn.Module):
    """A network with data-dependent control flow, which cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        out: Tensor = self.layer(x if float(x.mean()) > 0.4 else -x)
        return out


def tokens() -> Examples:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(12, (600, 9), generator=generator)
    y = x.roll(1, 1)
    y[:, 0] = -100
    inputs = x, torch.rand(600, 9, 1, generator=generator)
    return Examples.of(
        (tuple(one[:500] for one in inputs), y[:500]), (tuple(one[500:] for one in inputs), y[500:])
    )


class Reading(torch.utils.data.Dataset[Any]):
    """Examples that change slightly each time they are read."""

    def __init__(self, examples: Examples, start: int, end: int) -> None:
        self.examples, self.start, self.end = examples, start, end

    def __len__(self) -> int:
        return self.end - self.start

    def __getitem__(self, at: int) -> Any:
        x = self.examples.inputs[0][self.start + at]
        return x + 1e-7 * torch.rand(()), self.examples.labels[self.start + at]


def cases() -> Iterator[tuple[str, Training, Examples]]:
    images, rows = data((3, 32, 32)), data((28, 28))
    common: dict[str, Any] = {"epochs": 4, "batch_size": 64, "compile": False}
    momentum = {"momentum": 0.9, "nesterov": True}
    yield "CNN, SGD", Training(CNN, torch.optim.SGD, momentum, **common), images
    yield "CNN, augmented", Training(CNN, augment=flipped, **common), images
    yield "CNN, share held out", Training(CNN, validation=0.2, **common), images
    yield "CNN, patience", Training(CNN, patience=2, **common), images
    yield "CNN, clipped", Training(CNN, clip=0.5, **common), images
    weights = tuple(1.0 + at / 10 for at in range(10))
    smooth: dict[str, Any] = {"label_smoothing": 0.1, "class_weights": weights}
    yield "CNN, smoothed, weighted", Training(CNN, **smooth, **common), images
    yield "CNN, bf16", Training(CNN, precision="bf16", **common), images
    yield "CNN, tf32", Training(CNN, precision="tf32", **common), images
    yield "GRU, Adam", Training(GRU, torch.optim.Adam, **common), rows
    yield "GRU, RMSprop", Training(GRU, torch.optim.RMSprop, {"momentum": 0.5}, **common), rows
    decay = {"weight_decay": 0.05}
    yield "transformer, AdamW", Training(Transformer, torch.optim.AdamW, decay, **common), rows
    yield "tokens", Training(Tokens, schedule="one-cycle", **common), tokens()
    read = Examples.of(Reading(images, 0, 500), Reading(images, 500, 600))
    yield "CNN, data that changes", Training(CNN, **common), read
    with mock.patch.object(worker, "fits", return_value=False):
        yield "CNN, data streamed from the host", Training(CNN, **common), images


def trials(training: Training, examples: Examples) -> list[Trial]:
    recipe = training.recipe("data", examples.sha256[:16])
    ks: tuple[float | Ramp, ...] = (1.0, 0.5, 2.0, Ramp(0.5, 2.0))
    found = [Trial(recipe, k, 0.003, Split(0, at), seed=at) for at, k in enumerate(ks)]
    return [*found, replace(found[0], seed=9), replace(found[1], seed=10)]


def outcomes(fleet: ModuleFleet, wanted: list[Trial]) -> dict[Trial, Outcome]:
    return {outcome.trial: outcome for outcome in fleet.run(list(wanted))}


def check(what: str, case: str, worst: float, allowed: float) -> Check:
    good = worst <= allowed
    print(f"{'ok ' if good else 'BAD'} {case}: {what}: {worst:.3g} ({allowed:g})", flush=True)
    return {"case": case, "check": what, "worst": worst, "allowed": allowed, "ok": good}


def compared(name: str, training: Training, examples: Examples) -> Iterator[Check]:
    """Compare graphs with the loop, and trials alone with trials in company."""
    wanted = trials(training, examples)
    fleet = ModuleFleet(training, examples, DEVICE, slots=3)
    together = outcomes(fleet, wanted)
    captured = not any("step by step" in note for note in fleet.notes)
    yield check("captured" + "".join(f"; {n}" for n in fleet.notes), name, 1 - captured, 0)
    alone = outcomes(ModuleFleet(training, examples, DEVICE, slots=1), wanted)
    if examples.source is None:  # otherwise its examples change each time
        differ = sum(together[trial] != alone[trial] for trial in wanted)
        yield check("alone and in company differ", name, differ, 0)
    for trial in wanted[:4]:
        plain = train(training, examples, trial, DEVICE)
        assert plain is not None
        one = together[trial]
        # The examples of a source differ at every reading.
        close = 0.2 if examples.source else 0.08 if "bf16" in name else 0.02
        apart = abs(one.cross_entropy - plain.cross_entropy) / plain.cross_entropy
        yield check("cross-entropy against the plain loop", name, apart, close)
    final = replace(wanted[0], split=Split(0, 0, retrain=True))
    keeping = ModuleFleet(training, examples, DEVICE, keep_parameters=True)
    kept = outcomes(keeping, [final])[final]
    assert kept.state is not None


def wandering(name: str) -> Iterator[Check]:
    """Check that a network that cannot be captured trains step by step."""
    training = Training(Wandering, epochs=2, batch_size=64)
    examples = data((28, 28))
    fleet = ModuleFleet(training, examples, DEVICE)
    found = outcomes(fleet, trials(training, examples))
    said = [note for note in fleet.notes if "step by step" in note]
    print("   ", fleet.notes, flush=True)
    yield check("trained step by step, and said so", name, 1 - len(said), 0)
    yield check("missing outcomes", name, 6 - len(found), 0)


def compiled(name: str) -> Iterator[Check]:
    """Check that a compiled network trains, without deterministic kernels."""
    torch.use_deterministic_algorithms(False)
    training = Training(Transformer, epochs=2, batch_size=64)
    fleet = ModuleFleet(training, data((28, 28)), DEVICE, slots=3)
    found = outcomes(fleet, trials(training, data((28, 28))))
    print("   ", fleet.notes, flush=True)
    yield check("missing outcomes", name, 6 - len(found), 0)


OTHERS = {"transformer, compiled": compiled, "control flow": wandering}


def checks(name: str) -> Iterator[Check]:
    """Yield the checks of a case."""
    if name in OTHERS:
        yield from OTHERS[name](name)
        return
    for at, training, examples in cases():
        if at == name:  # a patch of the case lasts until the next one
            yield from compared(name, training, examples)


def checked(name: str) -> list[Check]:
    """Return the checks of a case, the last one with the reason if it fails."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    began = time.monotonic()
    found: list[Check] = []
    try:
        found.extend(checks(name))
    except Exception as problem:
        traceback.print_exc()
        found.append(failed(name, problem))
    print(f"    {name}: {time.monotonic() - began:.1f} s", flush=True)
    return found


def failed(name: str, problem: BaseException) -> Check:
    reason = f"failed: {first_line(problem)[:200]}"
    return {"case": name, "check": reason, "worst": "", "allowed": "", "ok": False}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "check_modules_cuda.csv")
    parser.add_argument("--workers", type=int, default=3, help="cases checked at once")
    options = parser.parse_args()
    names = [*(name for name, *_ in cases()), *reversed(OTHERS)]
    about = environment("cuda")
    found: dict[str, list[Check]] = {}
    rows: list[dict[str, object]] = []
    # Each case has a process of its own, in which a failure of the GPU stays.
    pool = ProcessPoolExecutor(
        options.workers, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    )
    with pool:
        running = {pool.submit(checked, name): name for name in reversed(names)}
        for future in as_completed(running):
            name, problem = running[future], future.exception()
            found[name] = [failed(name, problem)] if problem else future.result()
            rows = [{**row, **about} for name in names for row in found.get(name, ())]
            write(rows, options.out, quiet=True)
    wrong = sum(not row["ok"] for row in rows)
    print(f"{len(rows)} checks, {wrong} wrong, written to {options.out}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
