"""The training of any module, and its description for a recipe."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pseudograd.fleet.recipe import PRECISIONS, ModuleRecipe
from pseudograd.loss import RuleCrossEntropyLoss, tunable_cross_entropy
from pseudograd.rules import Rule
from pseudograd.words import raised, shown

Inputs = Tensor | tuple[Tensor, ...]
Augment = Callable[[Any], Any]
Schedule = Callable[[float], float]

# The learning rate's factor as a function of progress in [0, 1].
SCHEDULES: dict[str, Schedule] = {
    "constant": lambda _: 1.0,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    # Linear warm-up over the first fifth, then linear decay to 0.
    "one-cycle": lambda progress: progress / 0.2 if progress < 0.2 else (1 - progress) / 0.8,
}

_lock = RLock()  # PyTorch's default CPU generator is global


@dataclass(frozen=True)
class Training:
    """A network and its training settings, all that a search does not vary.

    Attributes:
        network: Returns a new, untrained module. Its initial weights may depend on PyTorch's
            random numbers, but on nothing else that changes.
        optimizer: A class of `torch.optim`, or a function ``(parameters, lr=..., ...)`` that
            returns an optimizer.
        optimizer_settings: Keyword arguments of the optimizer, except the learning rate.
        epochs: The maximum number of epochs.
        batch_size: Examples per step. An incomplete last batch of an epoch is dropped.
        schedule: The learning rate's factor as a function of progress in [0, 1], or one of
            "constant", "cosine", "linear" and "one-cycle".
        clip: The largest norm of a step's gradient over all parameters; None for no limit.
        patience: Stop after this many epochs without a lower error, and keep the best epoch; None
            to train for all epochs and keep the last.
        validation: The fraction of the training examples to validate on, such as 0.1 (with
            patience, as many again for early stopping); None for the paper's five folds.
        augment: A function of a batch of inputs, applied on the device in training.
        precision: "float32", "tf32", or "bf16" for autocast to bfloat16.
        label_smoothing: As for the loss.
        class_weights: A factor for each class, as for the loss.
        ignore_index: The label to ignore, as for the loss.
        compile: Whether to compile the network on a GPU.
        rule: A function that returns the rule for a value of k, which is then that rule's
            parameter, such as ``lambda gamma: functools.partial(pseudograd.rules.focal,
            gamma=gamma)``; None for the paper's rule. On a GPU, k is a tensor.

    """

    network: Callable[[], nn.Module]
    optimizer: Callable[..., Optimizer] = torch.optim.AdamW
    optimizer_settings: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 30
    batch_size: int = 128
    schedule: str | Schedule = "cosine"
    clip: float | None = None
    patience: int | None = None
    validation: float | None = None
    augment: Augment | None = None
    precision: str = "float32"
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None
    ignore_index: int = -100
    compile: bool = True
    rule: Callable[[Any], Rule] | None = None

    def recipe(self, data: str, data_hash: str = "") -> ModuleRecipe:
        """Return the description of this training on a data set."""
        for name, wanted in (
            ("network", "a function that returns a new module"),
            ("optimizer", "a class such as torch.optim.AdamW"),
        ):
            if not callable(getattr(self, name)):
                raise ValueError(f"{name} must be {wanted}, not {shown(getattr(self, name))}")
        if self.rule is not None and self.label_smoothing:
            raise ValueError("label_smoothing must be left out with a rule: it needs hard labels")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, not {self.precision!r}")
        return ModuleRecipe(
            network=describe_network(self.network),
            data=data,
            data_hash=data_hash,
            optimizer=self._optimizer_description(),
            epochs=self.epochs,
            batch_size=self.batch_size,
            schedule=self._schedule_description(),
            clip=self.clip,
            patience=self.patience,
            validation=self.validation,
            augment=describe(self.augment) if self.augment else "",
            precision=self.precision,
            label_smoothing=self.label_smoothing,
            class_weights=self.class_weights or (),
            ignore_index=self.ignore_index,
            rule=describe(self.rule) if self.rule else "tunable",
        )

    def _optimizer_description(self) -> str:
        settings = [f"{name}={value!r}" for name, value in sorted(self.optimizer_settings.items())]
        return f"{describe(self.optimizer)}({', '.join(settings)})"

    def _schedule_description(self) -> str:
        if isinstance(self.schedule, str):
            if self.schedule not in SCHEDULES:
                raise ValueError(
                    f"schedule must be a function of progress in [0, 1] or one of "
                    f"{tuple(SCHEDULES)}, not {self.schedule!r}"
                )
            return self.schedule
        self.factors(10)
        return describe(self.schedule)

    def factors(self, steps: int) -> list[float]:
        """Return the learning rate factor of each step."""
        schedule = SCHEDULES[self.schedule] if isinstance(self.schedule, str) else self.schedule
        try:
            values = [float(schedule((step + 0.5) / steps)) for step in range(steps)]
        except Exception as problem:
            raise ValueError(
                f"schedule must be a function of progress in [0, 1] that returns a factor of the "
                f"learning rate, or one of {tuple(SCHEDULES)}, but it fails ({raised(problem)})"
            ) from problem
        if not all(0 <= value < math.inf for value in values):
            raise ValueError("schedule must return finite numbers of at least 0 for [0, 1]")
        return values

    def module(self, seed: int) -> nn.Module:
        """Return a new network whose initial weights depend only on the seed."""
        with seeded(seed):
            return self.network()

    def logits(self, module: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        """Return the network's outputs for a batch."""
        device = inputs[0].device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.precision == "bf16"):
            return module(*inputs)

    def loss(self, logits: Tensor, labels: Tensor, k: float | Tensor) -> Tensor:
        """Return the loss of a batch."""
        weight = _on(logits.device, self.class_weights) if self.class_weights else None
        if self.rule is not None:
            criterion = RuleCrossEntropyLoss(self.rule(k), weight, ignore_index=self.ignore_index)
            return criterion.forward(logits, labels)
        return tunable_cross_entropy(
            logits,
            labels,
            k=k,
            weight=weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )

    def augmented(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return a batch of training inputs after augmentation."""
        if self.augment is None:
            return inputs
        changed = self.augment(inputs[0] if len(inputs) == 1 else inputs)
        return changed if isinstance(changed, tuple) else (changed,)


@functools.cache  # a captured graph cannot copy them from the host
def _on(device: torch.device, weights: tuple[float, ...]) -> Tensor:
    return torch.tensor(weights, device=device)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed PyTorch's default CPU generator inside the block, and restore its state afterwards."""
    with _lock:
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


# --- descriptions that identify a training -------------------------------------------------------


_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # differs in every process
_DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def describe(function: Callable[..., Any]) -> str:
    """Return a function's name, with a hash of its code unless it is part of PyTorch.

    Example:
        >>> describe(torch.optim.AdamW)
        'AdamW'
        >>> describe(lambda x: x + 1)
        '<lambda> ...'

    """
    if isinstance(function, functools.partial):
        named = (f"{name}={_text(value)}" for name, value in function.keywords.items())
        return f"{describe(function.func)}({', '.join((*map(_text, function.args), *named))})"
    kind = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    name = kind.__qualname__.removeprefix("<locals>.").rpartition("<locals>.")[2]
    if _is_of_torch(kind):
        return name
    return f"{name} {_digest(_source(kind) + _surroundings(function))}"


def describe_network(network: Callable[[], nn.Module]) -> str:
    """Return the class of a network, its number of parameters, and a hash of what defines it.

    The hash covers the layers and their settings, the code of the module's classes and of the
    function, frozen parameters, and weights that do not depend on the seed, such as pretrained
    ones. It does not cover functions that these call.

    Example:
        >>> describe_network(lambda: nn.Linear(4, 3))
        'Linear, 15 parameters, ...'

    """
    module = _checked_network(network)
    sizes = [
        (name, tuple(value.shape), str(value.dtype)) for name, value in module.state_dict().items()
    ]
    kinds = {type(one) for one in module.modules()}
    sources = sorted(_source(kind) for kind in kinds if not _is_of_torch(kind))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    described = f"{_layers(module)} {sizes} {sources}"
    # Each of these is added only where there is one, so that other networks keep their hash.
    frozen = [name for name, one in module.named_parameters() if not one.requires_grad]
    for more in (_factory(network), frozen, _given_weights(module, network)):
        described += f" {more}" if more else ""
    digest = _digest(described)
    return f"{type(module).__name__}, {parameters:,} parameters, {digest}"


def _checked_network(network: Callable[[], nn.Module]) -> nn.Module:
    """Return a network, after checking that the function returns a new one at every call."""
    try:
        with seeded(0):
            first = network()
        with seeded(0):
            second = network()
    except Exception as problem:
        raise ValueError(
            "network must be a function without arguments that returns a module, but fails when it "
            f"is called ({raised(problem)})"
        ) from problem
    if not isinstance(first, nn.Module):
        raise ValueError(f"network must return a torch.nn.Module, not {first!r}")
    if any(isinstance(one, nn.UninitializedParameter) for one in first.parameters()):
        raise ValueError(
            "network must have layers of known size: replace lazy ones, such as LazyLinear"
        )
    if any(parameter.device.type != "cpu" for parameter in first.parameters()):
        raise ValueError(
            "network must return a module on the CPU: the study moves it to the device"
        )
    one, other = _tensors(first), _tensors(second)
    shared = {id(tensor) for tensor in one.values()}
    if first is second or any(id(tensor) in shared for tensor in other.values()):
        raise ValueError(
            "network must return a new module at every call, but returned the same weights or "
            "buffers twice: create all layers and buffers inside the function"
        )
    if _layers(first) != _layers(second):
        raise ValueError(
            "network must return the same layers and settings at every call, but they differ "
            "between two calls: do not depend on global state, such as a counter"
        )
    if one.keys() != other.keys() or not all(_equal(one[name], other[name]) for name in one):
        raise ValueError(
            "network must return the same weights for the same PyTorch seed, but they differ "
            "between two calls: draw initial weights with PyTorch on the CPU, and do not depend on "
            "global state"
        )
    if not any(parameter.requires_grad for parameter in first.parameters()):
        raise ValueError("network must have parameters to train")
    return first


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers, also those that it does not save."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits; NaN equals NaN."""
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _factory(network: Callable[[], nn.Module]) -> str:
    """Return the description of a function that creates a network; "" for a class.

    The classes of a module are described with the module.
    """
    inner: Any = network
    while isinstance(inner, functools.partial):
        inner = inner.func
    return "" if inspect.isclass(inner) else describe(network)


def _given_weights(module: nn.Module, network: Callable[[], nn.Module]) -> str:
    """Return a hash of the weights that do not depend on the seed, such as pretrained ones.

    It is "" if they are only constants, such as biases of 0.
    """
    with seeded(1):
        other = network().state_dict()
    given = {
        name: value
        for name, value in module.state_dict().items()
        if name in other and _equal(value, other[name])
    }
    if not any(
        name in given and one.is_floating_point() and bool((one != one.flatten()[:1]).any())
        for name, one in module.named_parameters()
    ):
        return ""
    digest = hashlib.sha256()
    for name, value in given.items():
        digest.update(name.encode())
        digest.update(_bytes(value.cpu()).numpy().tobytes())
    return digest.hexdigest()


def _source(kind: Any) -> str:
    """Return the code of a function or class, normalized, without comments and docstrings."""
    try:
        if getattr(kind, "__name__", "") == "<lambda>":
            return _lambda_source(kind)
        text = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):
        return f"{getattr(kind, '__module__', None)}.{kind.__qualname__}"
    try:
        tree = ast.parse(text)
    except SyntaxError:  # such as a string with lines further left than the code
        return text
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)  # changes less between Python versions than ast.dump


def _lambda_source(function: Any) -> str:
    """Return the code of a lambda, without the rest of its line."""
    code = function.__code__
    lines, _ = inspect.findsource(function)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # such as a file that is being edited
        return inspect.getsource(function)
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Lambda) and node.lineno == code.co_firstlineno
    ]
    # Instructions that stand for no code have an empty range.
    places = [(line, start) for line, _, start, end in code.co_positions() if start != end]
    if places:  # which one, if a line has several
        inside = [node for node in found if _contains(node, places[0])]
        found = inside[-1:] or found  # the innermost
    return "; ".join(map(ast.unparse, found))


def _contains(node: ast.expr, place: tuple[int, int]) -> bool:
    end = node.end_lineno or 0, node.end_col_offset or 0
    return (node.lineno, node.col_offset) < place < end


def _layers(module: nn.Module) -> list[tuple[str, str, str, list[tuple[str, str]]]]:
    """Return every layer's name, class, extra_repr and settings.

    PyTorch's own extra_repr is left out: it gains arguments between versions.
    """
    return [
        (
            name,
            type(one).__qualname__,
            "" if _is_of_torch(type(one).extra_repr) else _ADDRESS.sub("", one.extra_repr()),
            _settings(one),
        )
        for name, one in module.named_modules()
    ]


def _settings(module: nn.Module) -> list[tuple[str, str]]:
    """Return a module's numbers, strings, lists and dicts of them, and functions.

    Private attributes of PyTorch's modules and arguments left at their default are left out,
    since new versions of PyTorch add some.
    """
    kind = type(module)
    derived = any(_is_of_torch(base) and base is not nn.Module for base in kind.__mro__)
    defaults = _defaults(kind) if _is_of_torch(kind) else {}
    found = []
    for name, value in vars(module).items():
        hidden = _is_of_torch(kind) or (derived and not _is_plain(value))
        if name in _OF_MODULES or (hidden and name.startswith("_")):
            continue
        if not (_is_plain(value) or _is_plain_collection(value) or _is_function(value)):
            continue
        if name not in defaults or _text(defaults[name]) != _text(value):
            found.append((name, _text(value)))
    return sorted(found)


def _defaults(kind: type) -> dict[str, Any]:
    """Return the defaults of a class's arguments."""
    parameters = inspect.signature(kind).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def _surroundings(function: Any) -> str:
    """Return the numbers and strings in a function's closure, globals and defaults."""
    try:
        found = inspect.getclosurevars(inspect.unwrap(function))
    except TypeError:
        return ""
    defaults = dict(enumerate(getattr(function, "__defaults__", None) or ()))
    by_keyword = getattr(function, "__kwdefaults__", None) or {}
    around: dict[Any, Any] = {**found.globals, **found.nonlocals, **defaults, **by_keyword}
    return f"{_plain_values(around)}"


def _plain_values(values: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """Return the numbers, strings and tuples of them among values, with their names."""
    return sorted((str(name), repr(value)) for name, value in values.items() if _is_plain(value))


def _is_plain(value: object) -> bool:
    """Return whether a value's repr is the same in every process, unlike a function's."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | None)


def _is_plain_collection(value: object) -> bool:
    """Return whether a value is a list, tuple or dict of plain values or such collections."""
    if isinstance(value, dict):
        return _is_plain_collection([*value.keys(), *value.values()])
    if isinstance(value, list | tuple):
        return all(_is_plain(one) or _is_plain_collection(one) for one in value)
    return False


def _is_function(value: object) -> bool:
    return inspect.isroutine(value) or isinstance(value, functools.partial)


def _text(value: Any) -> str:
    return describe(value) if _is_function(value) else repr(value)


def _is_of_torch(kind: Any) -> bool:
    return (getattr(kind, "__module__", None) or "").partition(".")[0] == "torch"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
