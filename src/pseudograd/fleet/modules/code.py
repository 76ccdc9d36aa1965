"""Descriptions that identify a training in a recipe: names, with hashes of the user's code.

A hash covers the code of own functions and classes, without comments and docstrings, and what this
code refers to: own functions and classes, numbers, lists, tensors, and the attributes that it reads
from objects and own modules.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import enum
import functools
import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pseudograd.fleet.randomness import seeded

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # differs in every process
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Not devices: a study may continue on another one.
_PLAIN = (bool, int, float, complex, str, bytes, range, slice, enum.Enum, np.generic, torch.dtype,
          type(None))  # fmt: skip
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has
_STDLIB = sysconfig.get_path("stdlib")


def describe(function: Any, *, with_uses: bool = True) -> str:
    """Return a function's name, with a hash of its code and what it uses; without for PyTorch's.

    Example:
        >>> describe(torch.optim.AdamW)
        'AdamW'
        >>> describe(lambda x: x + 1)
        '<lambda> ...'

    """
    if isinstance(function, functools.partial):
        named = (f"{name}={_text(value)}" for name, value in function.keywords.items())
        arguments = ", ".join((*map(_text, function.args), *named))
        return f"{describe(function.func, with_uses=with_uses)}({arguments})"
    kind = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    plain = _plain_variables(function)
    code = "" if _is_of_torch(kind) else source(kind) + f"{plain}" * inspect.isroutine(function)
    code += _Uses([function], plain).text if with_uses else ""
    name = kind.__qualname__.rpartition("<locals>.")[2]
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
    sizes = [(name, tuple(one.shape), str(one.dtype)) for name, one in module.state_dict().items()]
    kinds = {type(one) for one in module.modules()}
    sources = sorted(source(kind) for kind in kinds if not _is_of_torch(kind))
    described = f"{_layers(module)} {sizes} {sources}"
    inner = network
    while isinstance(inner, functools.partial):
        inner = inner.func
    factory = "" if inspect.isclass(inner) else describe(network, with_uses=False)
    frozen = [name for name, one in module.named_parameters() if not one.requires_grad]
    things, known = [*kinds, network], _plain_variables(inner)
    uses = _Uses(things, known, module.modules()).text
    if uses != _Uses(things, known, again.modules()).text:  # a module holds a clock, say
        uses = _Uses(things, known).text
    # Each is added only where there is one, so that other networks keep their hash.
    for more in (factory, frozen, _given_weights(module, network), uses):
        described += f" {more}" if more else ""
    parameters = sum(one.numel() for one in module.parameters())
    return f"{type(module).__name__}, {parameters:,} parameters, {_digest(described)}"


# --- networks ------------------------------------------------------------------------------------


def _checked_networks(network: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return two networks, after checking that the function returns a new one at every call."""
    with seeded(0):
        first = network()
    with seeded(0):
        second = network()
    if not isinstance(first, nn.Module):
        raise ValueError(f"network must return a torch.nn.Module, not {first!r}")
    parameters = [*_tensors(first).values(), *_tensors(second).values()]
    if any(isinstance(one, nn.UninitializedParameter) for one in parameters):
        raise ValueError(
            "network must have layers of known size: replace lazy ones, such as LazyLinear"
        )
    if not all(isinstance(value, Tensor) for value in first.state_dict().values()):
        raise ValueError(
            "network must keep its state in parameters and buffers, not in get_extra_state()"
        )
    if len({*map(id, parameters)}) < len(parameters):
        raise ValueError(
            "network must return a new module at every call, but returned the same weights or "
            "buffers twice: create all layers and buffers inside the function"
        )
    if _layers(first) != _layers(second):
        raise ValueError(
            "network must return the same layers and settings at every call, but they differ "
            "between two calls: do not depend on global state, such as a counter"
        )
    if _weights(first) != _weights(second):
        raise ValueError(
            "network must return the same weights for the same PyTorch seed, but they differ "
            "between two calls: draw initial weights with PyTorch on the CPU, and do not depend on "
            "global state"
        )
    return first, second


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers, also those that it does not save."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _weights(module: nn.Module) -> dict[str, str]:
    return {name: _tensor_text(one) for name, one in _tensors(module).items()}


def _given_weights(module: nn.Module, network: Callable[[], nn.Module]) -> str:
    """Return hashes of the weights that do not depend on the seed, such as pretrained ones.

    It is "" if they are only constants, such as biases of 0.
    """
    with seeded(1):
        other = _weights(network())
    given = {name: text for name, text in _weights(module).items() if other.get(name) == text}
    varied = {
        name for name, one in module.named_parameters() if bool((one != one.flatten()[:1]).any())
    }
    return f"{given}" if varied & given.keys() else ""


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
    parameters = inspect.signature(kind).parameters.values() if _is_of_torch(kind) else ()
    defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
    found = []
    for name, value in vars(module).items():
        hidden = _is_of_torch(kind) or (derived and isinstance(value, list | dict))
        if name in _OF_MODULES or (hidden and name.startswith("_")) or not _is_setting(value):
            continue
        if name not in defaults or _text(defaults[name]) != _text(value):
            found.append((name, _text(value)))
    return sorted(found)


def _is_setting(value: object) -> bool:
    kinds = (functools.partial, Tensor, np.ndarray)
    return _is_plain(value) or inspect.isroutine(value) or isinstance(value, kinds)


# --- code ----------------------------------------------------------------------------------------


def source(thing: Any) -> str:
    """Return the code of a function or class, normalized, without comments and docstrings."""
    thing = inspect.unwrap(thing)
    nodes: list[Any] = []
    with contextlib.suppress(OSError, TypeError, SyntaxError):
        nodes = _definitions(thing)
    if nodes:
        return "; ".join(map(ast.unparse, nodes))  # changes less between Pythons than ast.dump
    settings = getattr(thing, "__dict__", {}).items()
    plain = [(name, one) for name, one in settings if _is_plain(one) and name[0] != "_"]
    name = f"{getattr(thing, '__module__', None)}.{thing.__qualname__}"
    return f"{name} {plain}" if plain else name


def _definitions(thing: Any) -> list[Any]:
    """Return the syntax tree of a function or class; of all lambdas of a line if it is unclear."""
    try:
        lines, at = inspect.findsource(thing)
    except (OSError, TypeError):  # a notebook has the sources of functions, but not of classes
        methods = filter(None, map(_function, vars(thing).values()))
        lines, at = inspect.findsource(next(methods, thing))
    nodes = list(ast.walk(_parsed("".join(lines))))
    if inspect.isclass(thing):
        named = [n for n in nodes if isinstance(n, ast.ClassDef) and n.name == thing.__name__]
        return [n for n in named if _first_line(n) <= at + 1 <= (n.end_lineno or 0)][-1:]
    if thing.__name__ != "<lambda>":
        return [n for n in nodes if isinstance(n, _DEFINITIONS) and _first_line(n) == at + 1][:1]
    found = [n for n in nodes if isinstance(n, ast.Lambda) and n.lineno == at + 1]
    # Instructions that stand for no code have an empty range.
    places = ((line, x) for line, _, x, end in thing.__code__.co_positions() if x != end)
    place: Any = next(places, (0, 0))
    inside = [
        n for n in found if (n.lineno, n.col_offset) < place < (n.end_lineno, n.end_col_offset)
    ]
    return inside[-1:] or found  # the innermost


@functools.lru_cache(16)
def _parsed(code: str) -> ast.Module:
    """Return the syntax tree of a file, without docstrings."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _first_line(node: Any) -> int:
    return int(min(one.lineno for one in (node, *node.decorator_list)))


def _function(member: Any) -> FunctionType | None:
    """Return the function in a method, a property or another wrapper of one."""
    for name in ("__func__", "fget", "func"):
        member = getattr(member, name, member)
    member = inspect.unwrap(member) if callable(member) else member
    return member if inspect.isfunction(member) else None


@functools.lru_cache(1024)
def _named(code: str, *operations: str) -> frozenset[str]:
    """Return the names in the operations of some code, also of functions inside it."""
    try:  # outside of its function, a nonlocal variable would be an error
        todo = [compile(code.replace("nonlocal ", "global "), "", "exec")]
    except SyntaxError:  # without a source
        return frozenset()
    for one in todo:
        todo += filter(inspect.iscode, one.co_consts)
    instructions = (each for one in todo for each in dis.get_instructions(one))
    found = {one.argval for one in instructions if one.opname in operations}
    return frozenset(name for name in found if not name.startswith("__"))  # such as __name__


def _attributes(code: str) -> frozenset[str]:
    return _named(code, "LOAD_ATTR", "LOAD_METHOD")


def _variables(thing: Any) -> dict[Any, Any]:
    """Return the global and enclosing variables that a function or class names, and defaults."""
    members = vars(thing).values() if inspect.isclass(thing) else [thing]
    functions = list(filter(None, map(_function, members)))
    scope = {**vars(sys.modules.get(thing.__module__, thing))}
    for function in functions:
        scope |= function.__globals__
        enclosing = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in enclosing:
            with contextlib.suppress(ValueError):  # not yet assigned
                scope[name] = cell.cell_contents
    code = source(thing)
    found: dict[Any, Any] = {
        name: scope[name] for name in _named(code, "LOAD_GLOBAL", "LOAD_NAME") & scope.keys()
    }
    for one in functions if inspect.isroutine(thing) else ():
        defaults = dict(enumerate(one.__defaults__ or ())) | (one.__kwdefaults__ or {})
        # Literals are part of the code.
        found |= {name: value for name, value in defaults.items() if f"={value!r}" not in code}
    return found


def _plain_variables(function: Any) -> list[tuple[str, str]]:
    """Return the numbers and strings that a function refers to."""
    found = _variables(function) if inspect.isroutine(function) and _function(function) else {}
    return sorted(
        (str(name), repr(value))
        for name, value in found.items()
        if _is_plain(value) and not isinstance(value, list | dict)
    )


def is_own(thing: Any) -> bool:
    """Return whether a function, class or module is the user's, not of an installed package."""
    name = getattr(thing, "__name__" if inspect.ismodule(thing) else "__module__", None) or ""
    if name == "__main__" or name.partition(".")[0] in ("", "torch", "pseudograd"):
        return name == "__main__"
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return False
    installed = {"site-packages", "dist-packages"} & {*Path(file).parts}
    return not installed and not Path(file).is_relative_to(_STDLIB)


def _is_of_torch(kind: Any) -> bool:
    return (getattr(kind, "__module__", None) or "").partition(".")[0] == "torch"


class _Uses:
    """What the code of functions, classes and objects refers to.

    Args:
        things: These. Their own code is described elsewhere, unlike that of a class's bases.
        known: Variables that are described elsewhere, too, with their values.
        modules: Modules, which may hold objects that their code reads.

    Attributes:
        text: The description; "" if there is nothing.

    """

    def __init__(
        self, things: list[Any], known: Iterable[tuple[str, str]], modules: Iterable[nn.Module] = ()
    ) -> None:
        self._given = {*map(id, things)}
        self._found: set[str] = set()
        self._seen: dict[Any, Any] = {}  # keeps the objects, so that no other gets their id
        self._read: frozenset[str] = frozenset()  # attributes, by any code
        for thing in things:
            self._follow("", thing)
        for module in modules:
            for name, value in sorted(vars(module).items()) if is_own(type(module)) else ():
                if not (name in _OF_MODULES or isinstance(value, nn.Module) or _is_setting(value)):
                    self._follow(f"{type(module).__qualname__}.{name}", value, self._read)
        found = self._found - {f"{name} {text}" for name, text in known}
        self.text = f"{sorted(found)}" if found else ""

    def _follow(self, name: str, value: Any, read: frozenset[str] = frozenset()) -> None:
        """Note a value, of which some code reads these attributes, and what it refers to."""
        if _is_plain(value):
            self._found.add(f"{name} {value!r}")
        elif isinstance(value, Tensor | np.ndarray):
            self._found.add(f"{name} {_tensor_text(value)}")
        elif isinstance(value, set | frozenset):  # without positions, which change
            for one in value:
                self._follow(name, one, read)
        elif isinstance(value, list | tuple):
            for at, one in enumerate(value):
                self._follow(f"{name}[{at}]", one, read)
        elif isinstance(value, dict):  # many a dict of other values is a cache
            for key, one in value.items():
                if callable(one) or _is_plain(one):
                    self._follow(f"{name}[{key}]", one, read)
        elif isinstance(value, functools.partial):
            for one in (value.func, *value.args, *value.keywords.values()):
                if name or not _is_plain(one):  # those of a function to describe are in its name
                    self._follow(name, one, read)
        elif inspect.isclass(value) or inspect.isroutine(value):
            self._follow_code(name, value)
        elif isinstance(value, nn.Module):
            self._found.add(f"{name} {_layers(value)} {_weights(value)}")
            self._follow(name, [type(one) for one in value.modules()])
        elif is_own(value) or not inspect.ismodule(value):
            self._follow_object(name, value, read)

    def _follow_code(self, name: str, value: Any) -> None:
        called = getattr(value, "__name__", name)
        if name and called != name.rpartition(".")[2]:
            self._found.add(f"{name} {called}")
        if inspect.ismethod(value):
            self._follow(name, value.__self__, _attributes(source(value)))
        for one in value.__mro__ if inspect.isclass(value) else [_function(value)]:
            if one is None or not is_own(one) or id(one) in self._seen:
                continue
            self._seen[id(one)] = one
            code = source(one)
            if id(one) not in self._given:
                self._found.add(code)
            read = _attributes(code)
            self._read |= read
            for variable, inner in sorted(_variables(one).items(), key=str):
                self._follow(f"{variable}", inner, read)

    def _follow_object(self, name: str, value: Any, read: frozenset[str]) -> None:
        """Note the attributes that code reads; all of a callable one from an installed package."""
        kind = type(value)
        self._follow_code("", kind)
        read = read.union(*(_attributes(source(one)) for one in kind.__mro__ if is_own(one)))
        takes_all = callable(value) and not is_own(kind)
        for one, inner in getattr(value, "__dict__", {}).items():
            if (one in read or takes_all) and (id(value), one) not in self._seen:
                self._seen[id(value), one] = value
                self._follow(f"{name}.{one}", inner, read)


# --- values --------------------------------------------------------------------------------------


def _is_plain(value: object) -> bool:
    """Return whether a value's repr is the same in every process, unlike a function's."""
    if isinstance(value, dict):
        return _is_plain([*value.keys(), *value.values()])
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _text(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return _tensor_text(value)
    if inspect.isclass(value) or not callable(value):
        return _ADDRESS.sub("", repr(value))
    return describe(value)


def _tensor_text(value: Tensor | np.ndarray[Any, Any]) -> str:
    """Return the shape and type of a tensor or array, with a hash of its values."""
    kind = f"{tuple(value.shape)} {value.dtype}"
    try:
        flat = torch.as_tensor(value).detach().cpu().contiguous().flatten()
        data = flat.view(torch.uint8).numpy().tobytes()
        return f"{kind} {hashlib.sha256(data).hexdigest()[:16]}"
    except (TypeError, ValueError, RuntimeError):  # such as texts, or a sparse tensor
        return kind


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
