"""The search over k and the learning rate for any `torch.nn.Module`."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pseudograd.extras import needed_for
from pseudograd.fleet import OwnRecipe, Recipe, Trial, never
from pseudograd.fleet.devices import all_devices, check_device
from pseudograd.fleet.modules.checks import check_training
from pseudograd.fleet.modules.examples import Examples
from pseudograd.fleet.modules.fleet import ModuleFleet
from pseudograd.fleet.modules.training import Augment, OtherRule, Schedule, Training
from pseudograd.fleet.ramp import Ramp, as_k
from pseudograd.fleet.recipe import are_numbers
from pseudograd.fleet.trial import Deadline
from pseudograd.rules import tunable
from pseudograd.search import study as search
from pseudograd.search.checkpoints import Checkpoints
from pseudograd.search.comparison import best_stopped
from pseudograd.search.networks import (
    ModuleEnsemble,
    assess_networks,
    can_assess,
    final_groups,
    read_found,
    trained,
    write_found,
)
from pseudograd.search.protocol import DEEP_KS, NetworkProtocol, OwnProtocol, Protocol
from pseudograd.search.study import Progress, Runner
from pseudograd.words import counted, fraction, joined, renamed, shown


class Study(search.Study):
    """A search for the best k and learning rate of your network, kept in a folder.

    Every pair of k and learning rate is trained and validated; then networks of the best pair and
    of k = 1 are trained on all training examples and compared on the test set. Pairs are selected
    by the unweighted error, whatever the class weights. Creating the same study again resumes it;
    with other k or learning rates, it keeps finished trainings and runs only the new ones.

    Args:
        network: A function that returns a new, untrained module; its outputs are logits, without a
            softmax, or an object or a dict with ``logits``.
        train: A pair of inputs and labels (tensors or arrays), or a map-style Dataset of such
            pairs; inputs are a tuple if the network takes several arguments. uint8 images are
            divided by 255.
        test: The test set, in the same form.
        k: The values to try, including 1; a string like "0.5→2" is a k that changes linearly.
        rule: A rule to train with instead of the paper's: a function of logits, labels and a
            parameter, as in `pseudograd.rules`. Its first parameter then takes the place of k; on a
            GPU, it is a tensor. To set others, pass a `functools.partial`.
        baseline: The value of k that the choice is compared with instead of 1; with a rule it must
            be given, such as 0 for `pseudograd.rules.generalized_cross_entropy`.
        learning_rates: The rates to start from; while the best rate of a k is the lowest or highest
            one, the search tries one beyond it. By default, a short sweep finds them.
        extensions: How many such rates the search may add for each k; 0 for none.
        folder: Where to keep the study; None keeps it in memory.
        epochs: The maximum number of epochs.
        batch_size: Examples per step. An incomplete last batch of an epoch is dropped.
        optimizer: A class of `torch.optim`, or a function ``(parameters, lr=..., ...)`` that
            returns an optimizer.
        schedule: "constant", "cosine", "linear", "one-cycle", or a function that returns the
            factor of the learning rate for a progress in [0, 1].
        clip: The norm to clip the gradient of all parameters to; None for no clipping.
        patience: Stop after this many epochs without a lower validation error, and keep the best
            epoch; None keeps the last.
        validation: A validation set in the same form as ``train``, which is then trained on as a
            whole; or the fraction of the training examples to validate on, such as 0.1 (with
            patience, the same fraction again for early stopping); None for the paper's five folds.
        repetitions: The number of networks per pair, each trained on another split, or with a
            validation set from another seed; by default 5, or 1 if ``validation`` is given.
        retrainings: The number of final networks with the chosen k, and with k = 1, to compare.
        augment: A function of a batch of inputs, or of inputs and labels that returns both (as
            Mixup does), applied on the device during training. The labels that it returns are class
            indices or, without a rule, probabilities (N, classes, ...).
        precision: "float32", "tf32", or "bf16" for autocast to bfloat16.
        label_smoothing: As for the loss; not with a rule.
        class_weights: A factor for each class, as for the loss.
        ignore_index: The label to ignore, as for the loss.
        compile: Whether to compile the network on a GPU.
        num_workers: As for a DataLoader: how many processes read a Dataset that is read again in
            every epoch, for each network that is being trained.
        classes: The names of the classes.
        name: A name for the data.
        seed: The random seed of the folds, the initial weights, the order of the examples, dropout
            and augmentation.
        optimizer_settings: Keyword arguments of the optimizer, such as ``weight_decay=0.05``.

    Example:
        >>> x = torch.randn(300, 8)
        >>> y = (x[:, 0] * x[:, 1] > 0).long()
        >>> study = Study(
        ...     lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)),
        ...     (x[:200], y[:200]), (x[200:], y[200:]), k=(0.5, 1), learning_rates=(0.01, 0.03),
        ...     epochs=3, batch_size=50, validation=0.25, retrainings=2,
        ... )
        >>> study.run(device="cpu", slots=1, progress=False)
        True
        >>> study.best.k in (0.5, 1), study.comparison.error.mean < 1
        (True, True)
        >>> study.model()(x[:5]).shape
        torch.Size([5, 2])
        >>> log_probabilities = study.ensemble()(x[:5])  # of the mean over two networks
        >>> log_probabilities.exp().sum(1).allclose(torch.ones(5))
        True

    """

    def __init__(
        self,
        network: Callable[[], nn.Module],
        train: Any,
        test: Any,
        *,
        k: Sequence[float | str | Ramp] = DEEP_KS,
        rule: Callable[..., Tensor] | None = None,
        baseline: float | None = None,
        learning_rates: Sequence[float] = (),
        extensions: int = 12,
        folder: str | Path | None = None,
        epochs: int = 30,
        batch_size: int = 128,
        optimizer: Callable[..., Optimizer] = torch.optim.AdamW,
        schedule: str | Schedule = "cosine",
        clip: float | None = None,
        patience: int | None = None,
        validation: Any = None,
        repetitions: int | None = None,
        retrainings: int = 5,
        augment: Augment | None = None,
        precision: str = "float32",
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | None = None,
        ignore_index: int = -100,
        compile: bool = True,
        num_workers: int = 0,
        classes: Sequence[str | int] | None = None,
        name: str = "data",
        seed: int = 0,
        **optimizer_settings: Any,
    ) -> None:
        weights = () if class_weights is None else class_weights
        plain = 1 if baseline is None else baseline
        _check_several(plain, k=k, learning_rates=learning_rates, class_weights=weights)
        if isinstance(network, nn.Module):
            raise TypeError(
                "network must be a function that returns a new module, not a module: pass the "
                "class, or lambda: Net(...)"
            )
        _check_names(optimizer_settings, optimizer)
        other = None if rule is None or rule is tunable else OtherRule(rule)
        parameter = other.parameter if other else "k"
        if other and baseline is None:
            raise ValueError(
                f"baseline must be given with a rule: the value of {parameter} that the choice is "
                "compared with"
            )
        with needed_for("a study"):  # needed at the end; check before anything is trained
            import safetensors  # noqa: F401
            import scipy  # noqa: F401
        self.training = Training(
            network,
            optimizer,
            optimizer_settings,
            epochs,
            batch_size,
            schedule,
            clip,
            patience,
            float(validation) if are_numbers(validation) else None,
            augment,
            precision,
            label_smoothing,
            _numbers(weights) or None,
            ignore_index,
            compile,
            other,
        )
        recipe = self.training.recipe(name)  # checks the settings before the data are read
        own = None if are_numbers(validation) else validation
        self.examples = Examples.of(train, test, name, ignore_index, own, num_workers)
        recipe = dataclasses.replace(
            recipe,
            data_hash=self.examples.sha256[:16],
            validation=self.examples.validation_size or recipe.validation,
        )
        protocol = _protocol(
            NetworkProtocol,
            recipe,
            k,
            learning_rates,
            most_extensions=extensions,
            repetitions=(5 if validation is None else 1) if repetitions is None else repetitions,
            retrainings=retrainings,
            seed=seed,
            baseline=plain,
            parameter=parameter,
        )
        ks = (protocol.baseline, *protocol.ks) if other else (1.0,)
        outputs = check_training(self.training, self.examples, ks)
        self.classes: list[str | int] = list(range(outputs) if classes is None else classes)
        if len(self.classes) != outputs:
            raise ValueError(
                f"network must have an output for each of the {len(self.classes)} classes, not "
                f"{outputs}"
            )
        super().__init__(folder, protocol, _facts(self.examples, self.classes))
        self.checkpoints = Checkpoints(None if self.folder is None else self.folder / "networks")
        self.notes: list[str] = list(self.examples.notes)
        if not can_assess(self.examples, self.classes):
            self.notes.append(
                "the test set has too many probabilities to compare ensembles: use fewer examples"
            )
        self._assessment: dict[str, Any] = {}

    @classmethod
    def own_training(
        cls,
        description: str,
        *,
        k: Sequence[float | str | Ramp] = DEEP_KS,
        learning_rates: Sequence[float],
        extensions: int = 12,
        folder: str | Path | None = None,
        repetitions: int = 5,
        retrainings: int = 5,
        seed: int = 0,
        parameter: str = "k",
        baseline: float = 1,
    ) -> search.Study:
        """Return a study of your own training loop: loop over its trials, and report their errors.

        The result is a `pseudograd.search.Study`, the base class of this one: it has `best`,
        `comparison`, `result`, `summary()` and `report()`, but no `model()` or `ensemble()`, for it
        holds no networks. While the best rate of a k is the lowest or highest one, the search tries
        one beyond it, unless rates tie.

        Args:
            description: A description of the training. Change it when you change the training.
            k: The values to try, including the baseline.
            learning_rates: The rates to start from.
            extensions: How many rates the search may add for each k; 0 for none.
            folder: Where to keep the study, shared by all processes that run trials; None keeps it
                in memory.
            repetitions: The number of networks per pair.
            retrainings: The number of final networks with the chosen k, and with k = 1, to compare.
            seed: The random seed of the folds.
            parameter: The name of what you call k, if that is the parameter of another loss.
            baseline: The value of k that the choice is compared with.

        Example:
            >>> study = Study.own_training("a formula", k=(0.5, 1), learning_rates=(0.1, 0.2, 0.4))
            >>> for trial in study:
            ...     study.tell(trial, error=0.1 * trial.k + (trial.learning_rate - 0.2) ** 2)
            >>> study.best.k, study.best.learning_rate
            (0.5, 0.2)

        """
        _check_several(baseline, k=k, learning_rates=learning_rates)
        learning_rates = tuple(learning_rates)
        if not learning_rates:
            raise ValueError("learning_rates must be at least one number, not ()")
        protocol = _protocol(
            OwnProtocol,
            OwnRecipe(description),
            k,
            learning_rates,
            most_extensions=extensions,
            repetitions=repetitions,
            retrainings=retrainings,
            seed=seed,
            parameter=parameter,
            baseline=baseline,
        )
        return search.Study(folder, protocol)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> search.Study:
        """Open the study in a folder to read its results; to resume it, create it again.

        The result is a `pseudograd.search.Study`, the base class of this one, with `best`,
        `comparison`, `result`, `summary()` and `report()`. It cannot build your network; to get the
        trained one, create the study again, or pass the network function to
        `pseudograd.search.networks.load_network`.

        Example:
            >>> import tempfile
            >>> folder = tempfile.mkdtemp()
            >>> study = Study.own_training(
            ...     "a formula", k=(0.5, 1), learning_rates=(0.1, 0.2, 0.4), folder=folder
            ... )
            >>> for trial in study:
            ...     study.tell(trial, error=0.1 * trial.k + (trial.learning_rate - 0.2) ** 2)
            >>> Study.open(folder).comparison.error.mean < 0
            True

        """
        return search.Study.open(folder)

    # --- running -----------------------------------------------------------------------------

    def run(
        self,
        runner: Runner | None = None,
        *,
        device: str | torch.device | Sequence[str | torch.device] | None = None,
        slots: int | None = None,
        ray: str | None = None,
        time_limit: float | None = None,
        progress: bool = True,
        **session: Any,
    ) -> bool:
        """Train until the study is finished; call again to resume.

        Args:
            runner: Trains trials instead of a `ModuleFleet`.
            device: Where to train, such as "cuda:1"; by default all GPUs, or the CPU.
            slots: How many trials to train at once on each GPU, or processes on a CPU.
            ray: The address of a Ray cluster to train on; "auto" finds the one on this machine.
            time_limit: Stop after this many seconds; unfinished trials are dropped.
            progress: Whether to show a progress bar on standard error.
            session: Further arguments of `pseudograd.search.Study.run`: stop, command, devices,
                share, watch.

        Returns:
            Whether the study is finished.

        """
        used = _devices(device)
        if time_limit is not None and not (are_numbers(time_limit) and time_limit >= 0):
            raise ValueError(f"time_limit must be a number of seconds, not {time_limit!r}")
        limit = Deadline(time_limit)
        stop = session.pop("stop", never)
        session.setdefault("command", shlex.join(Path(sys.argv[0]).parts[-1:]))
        watching = [session.pop("watch", lambda _: None)]

        def show(progress: Progress) -> None:
            for watch in watching:
                watch(progress)

        with contextlib.ExitStack() as stack:
            if runner is None and ray is not None:
                from pseudograd.search.cluster import ModuleRunner

                runner = stack.enter_context(
                    ModuleRunner(self.training, self.examples, address=ray)
                )
                used = ("ray",)
            fleet = None
            if runner is None:
                fleet = stack.enter_context(
                    ModuleFleet(self.training, self.examples, used, slots, keep_parameters=True)
                )
                runner = fleet.run
            if progress:
                from pseudograd.search.display import Display

                display = stack.enter_context(Display(self.protocol, self.ledger))
                display.tell(self._begun())
                for note in self.notes:
                    display.tell(note)
                if fleet is not None:
                    fleet.tell = display.tell
                watching.append(display.show)
            training = self.checkpoints.keeping(runner, lambda outcome: outcome.state)
            try:
                finished = super().run(
                    training,
                    stop=lambda: stop() or limit(),
                    watch=show,
                    **{"devices": used, **session},
                )
            except KeyboardInterrupt:
                where = "in memory" if self.folder is None else f"in {self.folder}"
                raise KeyboardInterrupt(
                    f"stopped by Ctrl-C; {counted(len(self.ledger), 'trial')} kept {where}: call "
                    "run() again to resume"
                ) from None
            if fleet is not None:
                self.notes = list(dict.fromkeys((*self.notes, *fleet.notes)))
            if finished:
                self._finish(training, torch.device(used[0] if used[0] != "ray" else "cpu"))
        return finished

    def _begun(self) -> str:
        """Return the message at the start of a run."""
        if not self.ledger:
            return f"training {self.protocol.plan()}"
        done = f"{counted(len(self.ledger), 'trial')} done before"
        return done if self.finished else f"training {self.protocol.plan()}; {done}"

    def _finish(self, training: Runner, device: torch.device) -> None:
        """Retrain networks whose weights are lost, and assess all final networks."""
        if not self.protocol.retrainings:
            return
        groups = final_groups(self)
        if groups["chosen"] == groups["plain"]:
            del groups["chosen"]  # the baseline was chosen
        wanted = dict.fromkeys(trial for group in groups.values() for trial in group)
        if not self.checkpoints.complete(wanted, training) and self._known():
            return
        kept = {"model": self._kept(None)}
        if "chosen" in groups:
            kept["plain"] = self._kept(self.protocol.baseline)
        self._assessment = assess_networks(
            self.training, self.examples, self.classes, groups, kept, self.checkpoints, device
        )
        write_found(self, self._assessment)

    def _known(self) -> bool:
        """Return whether a readable assessment of the networks exists."""
        try:
            return read_found(self) is not None
        except (OSError, ValueError):
            return False

    # --- what was found ----------------------------------------------------------------------

    @property
    def assessment(self) -> dict[str, Any]:
        """The assessment of the model and the ensembles on the test set; {} before the end."""
        if not self._assessment and self.finished:
            self._assessment = read_found(self) or {}
        return self._assessment

    def _kept(self, k: float | str | Ramp | None) -> Trial:
        comparison = self.comparison
        plain = self.protocol.baseline
        there = {comparison.chosen[0].trial.k: comparison.chosen, plain: comparison.plain}
        wanted = as_k(k)
        if wanted is not None and wanted not in there:
            raise ValueError(f"k must be {joined(map(fraction, there), 'or')}, not {k}")
        return best_stopped(comparison.chosen if wanted is None else there[wanted]).trial

    def model(self, k: float | str | Ramp | None = None) -> nn.Module:
        """Return the trained network, on the CPU and in evaluation mode.

        Args:
            k: The baseline, usually 1, for the network that the choice was compared with.

        """
        return trained(self.training, self.checkpoints, self._kept(k))

    def ensemble(self, which: str = "chosen") -> ModuleEnsemble:
        """Return a module that averages the probabilities of the final networks, as logarithms.

        Args:
            which: "chosen" for networks of the chosen k, "plain" for those of k = 1, "mixed" for
                one network each of the best k and others.

        """
        groups = final_groups(self)
        if which not in groups:
            raise ValueError(f"which must be one of {', '.join(groups)}, not {which!r}")
        networks: Iterable[nn.Module] = (
            trained(self.training, self.checkpoints, trial) for trial in groups[which]
        )
        return ModuleEnsemble(list(networks)).eval()

    def summary(self) -> str:
        """Return a summary of the study in a few lines; before its end, the best pairs so far."""
        from pseudograd.report.summary import so_far, summary

        return so_far(self) or summary(
            self.result, self.assessment or None, compared_before=self.compared_before
        )


def _facts(examples: Examples, classes: list[str | int]) -> dict[str, Any]:
    """Return the facts about the data that are kept with a study."""
    facts = {
        "name": examples.name,
        "sha256": examples.sha256,
        "train_size": examples.train_size,
        "test_size": examples.test_size,
        "features": sum(torch.Size(shape).numel() for shape in examples.shapes),
        "shapes": [list(shape) for shape in examples.shapes],
        "classes": len(classes),
        "labels": classes,
        "pixels": None,
        "target": "label",
    }
    if examples.labels.dim() > 1:
        facts["positions"] = examples.labels[0].numel()
    return facts


def _devices(
    device: str | torch.device | Sequence[str | torch.device] | None,
) -> tuple[str, ...]:
    if device is None:
        return all_devices()
    several = [device] if isinstance(device, str | torch.device) else device
    try:
        return tuple(check_device(one) for one in several)
    except ValueError as problem:
        raise ValueError(f"device {device!r} {problem}") from problem


def _check_several(baseline: float, **arguments: Any) -> None:
    for name, values in arguments.items():
        if isinstance(values, Mapping):
            raise ValueError(f"{name} must be a sequence, such as [*{name}.values()], not a dict")
        if isinstance(values, str) or not isinstance(values, Iterable):
            pair = (0.5 if values == baseline else values, baseline)
            example = pair if name == "k" else [values]
            raise ValueError(f"{name} must be several values, such as {example}, not {values!r}")


def _check_names(settings: Mapping[str, Any], optimizer: Callable[..., Any]) -> None:
    """Raise if an argument that is left for the optimizer looks like a misspelt one of `Study`."""
    if "lr" in settings:
        raise ValueError("lr must be left out: the search varies it, so give learning_rates")
    if "capturable" in settings:
        raise ValueError("capturable must be left out: the study sets it where it is needed")
    try:
        theirs = inspect.signature(optimizer).parameters
    except (TypeError, ValueError):  # not a function: `Training` says so
        return
    ours = inspect.signature(Study.__init__).parameters
    for name in settings.keys() - theirs.keys():
        if name in inspect.signature(Study.run).parameters:
            raise TypeError(f"{name} belongs to run({name}=...)")
        if meant := difflib.get_close_matches(name, ours, 1, 0.8):
            raise TypeError(f"a study has no argument {name!r}: did you mean {meant[0]!r}?")


def _numbers(class_weights: Iterable[Any]) -> tuple[float, ...]:
    try:
        return tuple(float(weight) for weight in class_weights)
    except (TypeError, ValueError) as problem:
        raise ValueError(
            f"class_weights must be finite numbers of at least 0, not {shown(class_weights)}"
        ) from problem


def _protocol(
    kind: type[Protocol],
    recipe: Recipe,
    k: Sequence[float | str | Ramp],
    learning_rates: Sequence[float],
    **settings: Any,
) -> Protocol:
    with renamed(ks="k", most_extensions="extensions"):
        return kind(
            recipe, ks=tuple(map(as_k, k)), learning_rates=tuple(learning_rates), **settings
        )
