"""Descriptions that identify a training in a recipe: names, with hashes of code and settings."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pseudograd.fleet.modules.seeds import seeded
from pseudograd.fleet.modules.sources import (
    OF_MODULES,
    as_bytes,
    is_of_torch,
    is_plain,
    is_setting,
    plain_values,
    source,
    tensor_text,
    used,
)
from pseudograd.words import raised

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # differs in every process


def describe(function: Callable[..., Any]) -> str:
    """Return a function's name, with a hash of its code and what it uses; without for PyTorch's.

    Example:
        >>> describe(torch.optim.AdamW)
        'AdamW'
        >>> describe(lambda x: x + 1)
        '<lambda> ...'

    """
    return _described(function, used)


def _described(function: Callable[..., Any], more: Callable[..., str]) -> str:
    """Return the description of a function, with a hash of its code and ``more`` about it."""
    if isinstance(function, functools.partial):
        named = (f"{name}={_text(value)}" for name, value in function.keywords.items())
        arguments = ", ".join((*map(_text, function.args), *named))
        return f"{_described(function.func, more)}({arguments})"
    kind = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    name = kind.__qualname__.removeprefix("<locals>.").rpartition("<locals>.")[2]
    code = "" if is_of_torch(kind) else source(kind) + _surroundings(function)
    code += more([function], plain_values(_around(function)))
    return f"{name} {_digest(code)}" if code else name


def describe_network(network: Callable[[], nn.Module]) -> str:
    """Return the class of a network, its number of parameters, and a hash of what defines it.

    The hash covers the layers and their settings, the code of the module's classes and of the
    function and of what they use, frozen parameters, and weights that do not depend on the seed,
    such as pretrained ones.

    Example:
        >>> describe_network(lambda: nn.Linear(4, 3))
        'Linear, 15 parameters, ...'

    """
    module, again = _checked_networks(network)
    sizes = [
        (name, tuple(value.shape), str(value.dtype)) for name, value in module.state_dict().items()
    ]
    kinds = {type(one) for one in module.modules()}
    sources = sorted(source(kind) for kind in kinds if not is_of_torch(kind))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    described = f"{_layers(module)} {sizes} {sources}"
    # Each of these is added only where there is one, so that other networks keep their hash.
    frozen = [name for name, one in module.named_parameters() if not one.requires_grad]
    known = plain_values(_around(_inner(network)))
    uses = used([*kinds, network], known, module.modules())
    if uses != used([*kinds, network], known, again.modules()):  # one holds a clock, or the like
        uses = used([*kinds, network], known)
    for more in (_factory(network), frozen, _given_weights(module, network), uses):
        described += f" {more}" if more else ""
    digest = _digest(described)
    return f"{type(module).__name__}, {parameters:,} parameters, {digest}"


def _checked_networks(network: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return two networks, after checking that the function returns a new one at every call."""
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
    if any(not isinstance(value, Tensor) for value in first.state_dict().values()):
        raise ValueError(
            "network must keep its state in parameters and buffers, not in get_extra_state()"
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
    return first, second


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers, also those that it does not save."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits; NaN equals NaN."""
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.equal(as_bytes(one), as_bytes(other))


def _factory(network: Callable[[], nn.Module]) -> str:
    """Return the description of a function that creates a network; "" for a class.

    The classes of a module are described with the module.
    """
    return "" if inspect.isclass(_inner(network)) else _described(network, lambda *_: "")


def _inner(function: Any) -> Any:
    """Return the function or class that a partial function calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


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
        digest.update(as_bytes(value.cpu()).numpy().tobytes())
    return digest.hexdigest()


def _layers(module: nn.Module) -> list[tuple[str, str, str, list[tuple[str, str]]]]:
    """Return every layer's name, class, extra_repr and settings.

    PyTorch's own extra_repr is left out: it gains arguments between versions.
    """
    return [
        (
            name,
            type(one).__qualname__,
            "" if is_of_torch(type(one).extra_repr) else _ADDRESS.sub("", one.extra_repr()),
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
    derived = any(is_of_torch(base) and base is not nn.Module for base in kind.__mro__)
    defaults = _defaults(kind) if is_of_torch(kind) else {}
    found = []
    for name, value in vars(module).items():
        hidden = is_of_torch(kind) or (derived and not is_plain(value))
        if name in OF_MODULES or (hidden and name.startswith("_")):
            continue
        if not is_setting(value):
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
    return f"{plain_values(_around(function))}" if _is_python(function) else ""


def _around(function: Any) -> dict[Any, Any]:
    """Return what is in a function's closure, globals and defaults."""
    if not _is_python(function):
        return {}
    found = inspect.getclosurevars(inspect.unwrap(function))
    defaults = dict(enumerate(getattr(function, "__defaults__", None) or ()))
    by_keyword = getattr(function, "__kwdefaults__", None) or {}
    return {**found.globals, **found.nonlocals, **defaults, **by_keyword}


def _is_python(function: Any) -> bool:
    inner = inspect.unwrap(function)
    return inspect.isfunction(inner) or inspect.ismethod(inner)


def _is_described(value: object) -> bool:
    return inspect.isroutine(value) or isinstance(value, functools.partial | Tensor | np.ndarray)


def _text(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return tensor_text(value)
    return describe(value) if _is_described(value) else repr(value)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
