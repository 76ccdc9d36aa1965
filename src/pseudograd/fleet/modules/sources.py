"""The code of functions and classes, and what it uses: helpers, numbers and tensors."""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import dis
import enum
import functools
import hashlib
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has
_DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_STDLIB = sysconfig.get_path("stdlib")
_MOST = 1 << 26  # bytes of a tensor that are hashed; larger ones are sampled


def source(kind: Any) -> str:
    """Return the code of a function or class, normalized, without comments and docstrings.

    Without a source, such as in an interactive session, it is the bytecode, which differs between
    versions of Python.
    """
    try:
        if getattr(kind, "__name__", "") == "<lambda>":
            return _lambda_source(kind)
        text = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):
        if isinstance(kind, CodeType):
            return _bytecode(kind)
        return f"{getattr(kind, '__module__', None)}.{kind.__qualname__}{_compiled(kind)}"
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


def _settings(kind: type, code: str) -> set[str]:
    """Return the attributes of a class that its code computes from names, or does not show."""
    shown = {name for name, value in vars(kind).items() if f"= {value!r}" in code}
    others = {name for name in vars(kind) if not name.startswith("__")} - shown
    found: list[ast.ClassDef] = []
    with contextlib.suppress(SyntaxError):
        found = [one for one in ast.parse(code).body if isinstance(one, ast.ClassDef)]
    has_source = bool(found)  # otherwise there is only a name
    computed = {name for one in found for part in one.body for name in _computed_in(part)}
    if not issubclass(kind, nn.Module):
        return others | computed
    # A module may count its calls in an attribute.
    methods = (one for value in vars(kind).values() for one in _functions(value))
    stored = {name for one in methods for name in _stored(one.__code__)}
    return (computed if has_source else others) - stored


def _computed_in(node: ast.stmt) -> Iterator[str]:
    """Yield the names that an assignment computes from others, built-in ones excepted."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return
    used = {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}
    if used - {*vars(builtins)}:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for one in (one for target in targets for one in ast.walk(target)):
            if isinstance(one, ast.Name):
                yield one.id


def _stored(code: CodeType) -> Iterator[str]:
    """Yield the attributes that a function sets."""
    for inner in _codes(code):
        for one in dis.get_instructions(inner):
            if one.opname == "STORE_ATTR":
                yield one.argval


def _compiled(kind: Any) -> str:
    """Return the bytecode of an own function, or the code of an own class's methods; else ""."""
    if not is_own(kind):
        return ""
    if inspect.isclass(kind):  # a notebook has the sources of methods, but not of classes
        members = [(name, one) for name, value in vars(kind).items() for one in _functions(value)]
        return f" {sorted((name, source(one)) for name, one in members)}"
    return f" {_bytecode(kind.__code__)}"


def _bytecode(code: CodeType) -> str:
    constants = [
        _bytecode(one)
        if isinstance(one, CodeType)
        # The order of a set of strings differs in every process.
        else repr(sorted(map(repr, one)) if isinstance(one, frozenset) else one)
        for one in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


# --- what code uses ------------------------------------------------------------------------------


def used(things: list[Any], known: list[tuple[str, str]], modules: Iterable[nn.Module] = ()) -> str:
    """Return a description of what the code of functions and classes uses; "" if nothing.

    That is the code of functions and classes that are not part of installed packages, base classes,
    numbers, strings, lists, tensors and attributes of objects, in globals, closures and defaults,
    and whatever these use in turn. Dicts count only if they are plain or hold functions: others are
    often caches.

    Args:
        things: Functions, classes, partial functions or objects. Their own code is not part of the
            result, unlike that of a class's bases.
        known: Names and reprs that are described already.
        modules: Modules whose attributes are used by their code, such as a configuration.

    """
    uses = _Uses(things, {*known})
    for thing in things:
        uses.start(thing)
    for module in modules:
        uses.start_module(module)
    return f"{sorted(uses.found)}" if uses.found else ""


class _Uses:
    """What functions and classes use, as a set of texts."""

    def __init__(self, given: list[Any], known: set[tuple[str, str]]) -> None:
        self.given, self.known, self.found = {*map(id, given)}, known, set[str]()
        self.seen: dict[Any, Any] = {}  # keeps the objects, so that no other gets their id

    def start(self, thing: Any) -> None:
        """Follow something whose own code is described already."""
        if isinstance(thing, functools.partial):
            self.start(thing.func)
            for at, value in [*enumerate(thing.args), *thing.keywords.items()]:
                if not is_plain(value):  # described with the function
                    self._note(f"{at}", value, ())
        elif inspect.isclass(thing):
            self._follow_class(thing)
        elif inspect.isroutine(thing):
            for function in _functions(thing):
                self._follow(function, described=True)
            if isinstance(thing, MethodType):
                self._note("self", thing.__self__, _names(thing.__func__.__code__))
        else:
            self.given.add(id(type(thing)))
            self._follow_class(type(thing))
            self._note("", thing, ())

    def start_module(self, module: nn.Module) -> None:
        """Follow objects that a module holds, after the code of its class."""
        if not is_own(type(module)):
            return
        functions = [one for one in self.seen.values() if isinstance(one, FunctionType)]
        names = tuple(name for one in functions for name in _names(one.__code__))
        for name, value in sorted(vars(module).items()):
            if not (name in OF_MODULES or isinstance(value, nn.Module) or is_setting(value)):
                self._note(f"{type(module).__qualname__}.{name}", value, names)

    def _follow_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if not is_own(base) or id(base) in self.seen:
                continue
            self.seen[id(base)] = base
            code = source(base)
            if id(base) not in self.given:
                self.found.add(code)
            settings = _settings(base, code)
            for name, value in vars(base).items():
                if name in settings and (is_plain(value) or is_plain_collection(value)):
                    self._note(f"{base.__qualname__}.{name}", value, ())
                for function in _functions(value):
                    self._follow(function, described=True)  # with the class

    def _follow(self, function: FunctionType, described: bool = False) -> None:
        if not is_own(function) or id(function) in self.seen:
            return
        self.seen[id(function)] = function
        if not described:
            self.found.add(source(function))
        if hasattr(function, "__wrapped__"):  # whose code the source is
            self.found.add(source(function.__code__))
        names = _names(function.__code__)
        for name, value in sorted(_references(function).items()):
            self._note(name, value, names)

    def _note(self, name: str, value: Any, names: tuple[str, ...]) -> None:
        text = self._text(name, value, names)
        if text and (name, text) not in self.known:
            self.found.add(f"{name} {text}")

    def _text(self, name: str, value: Any, names: tuple[str, ...]) -> str:
        """Return a description of a value; code that it stands for goes to `found`."""
        if is_plain(value) or is_plain_collection(value) or isinstance(value, torch.dtype):
            return repr(value)
        if isinstance(value, Tensor | np.ndarray):
            return tensor_text(value)
        if id(value) in self.seen:
            return ""
        if inspect.isclass(value) or inspect.isroutine(value):
            if inspect.isclass(value):
                self._follow_class(value)
            for function in _functions(value):
                self._follow(function)
            called = getattr(value, "__name__", name)
            return "" if called == name.rpartition(".")[2] else called
        if isinstance(value, set | frozenset) and all(map(is_plain, value)):
            return repr(sorted(map(repr, value)))
        if isinstance(value, list | tuple) or _is_registry(value):
            self.seen[id(value)] = value
            named = value.items() if isinstance(value, dict) else (("", one) for one in value)
            texts = [self._text(f"{key}", one, names) for key, one in named]
            return repr(texts) if any(texts) else ""
        if isinstance(value, functools.partial):
            parts = (value.func, *value.args, *value.keywords.items())
            return repr([self._text("", one, names) for one in parts])
        return self._object_text(name, value, names)

    def _object_text(self, name: str, value: Any, names: tuple[str, ...]) -> str:
        """Describe attributes that code names; all of them if the object is called."""
        if isinstance(value, ModuleType):
            if is_own(value):
                found = {one: inner for one, inner in vars(value).items() if one in names}
                self._note_all(value.__name__, value, found, names)
            return ""
        kind = type(value)
        if is_own(kind):
            self._follow_class(kind)
            methods = (one for member in vars(kind).values() for one in _functions(member))
            names += tuple(
                used
                for one in methods
                if not one.__name__.startswith("__") or one.__name__ in _CALLED
                for used in _names(one.__code__)
            )
        elif not (callable(value) or isinstance(value, SimpleNamespace | argparse.Namespace)):
            return ""
        attributes = {
            one: inner
            for one, inner in getattr(value, "__dict__", {}).items()
            if not (one in OF_MODULES or one.startswith("__")) and (callable(value) or one in names)
        }
        if isinstance(value, nn.Module):
            attributes |= dict(value.named_children())
            attributes |= dict(value.named_parameters(recurse=False))
            attributes |= dict(value.named_buffers(recurse=False))
        self._note_all(name, value, attributes, names)
        return ""

    def _note_all(
        self, name: str, of: Any, attributes: dict[str, Any], names: tuple[str, ...]
    ) -> None:
        for one, inner in sorted(attributes.items()):
            if (id(of), one) not in self.seen:
                self.seen[id(of), one] = of
                self._note(f"{name}.{one}", inner, names)


_CALLED = ("__call__", "__getitem__")  # others, such as __init__, name all attributes


def _is_registry(value: Any) -> bool:
    return isinstance(value, dict) and all(
        inspect.isroutine(one) or inspect.isclass(one) or is_plain(one) for one in value.values()
    )


def _references(function: FunctionType) -> dict[str, Any]:
    """Return what a function has in globals, closure and defaults, also in functions inside it."""
    loaded = {
        one.argval
        for code in _codes(function.__code__)
        for one in dis.get_instructions(code)
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    found = {name: value for name, value in function.__globals__.items() if name in loaded}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not yet assigned
            found[name] = cell.cell_contents
    found.pop("__class__", None)  # of `super`
    defaults = dict(enumerate(function.__defaults__ or ())) | (function.__kwdefaults__ or {})
    code = source(function) if defaults else ""
    # Literals are part of the code.
    return found | {f"{at}": one for at, one in defaults.items() if f"={one!r}" not in code}


def _functions(member: Any) -> Iterator[FunctionType]:
    """Yield the functions in a function, a method, a property, or a wrapper of one."""
    if isinstance(member, FunctionType):
        yield member
    for name in ("__wrapped__", "__func__", "fget", "func"):
        if isinstance(member, _WRAPPERS) and hasattr(member, name):
            yield from _functions(getattr(member, name))


_WRAPPERS: tuple[Any, ...] = (
    FunctionType,
    MethodType,
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    type(functools.cache(len)),
)


def _names(code: CodeType) -> tuple[str, ...]:
    return tuple(name for one in _codes(code) for name in one.co_names)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, and those of the functions inside it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


def is_own(thing: Any) -> bool:
    """Return whether a function, class or module is the user's, not of an installed package."""
    if isinstance(thing, FunctionType):  # a wrapper has the name of what it wraps
        name = thing.__globals__.get("__name__")
    else:
        name = getattr(thing, "__name__" if inspect.ismodule(thing) else "__module__", None)
    if not isinstance(name, str) or name.partition(".")[0] in ("torch", "pseudograd"):
        return False
    if name == "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return False
    installed = {"site-packages", "dist-packages"} & {*Path(file).parts}
    return not installed and not Path(file).is_relative_to(_STDLIB)


# --- values --------------------------------------------------------------------------------------


def plain_values(values: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """Return the numbers, strings and tuples of them among values, with their names."""
    return sorted((str(name), repr(value)) for name, value in values.items() if is_plain(value))


_PLAIN = (bool, int, float, complex, str, bytes, range, enum.Enum, np.generic, type(None))


def is_plain(value: object) -> bool:
    """Return whether a value's repr is the same in every process, unlike a function's."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    if isinstance(value, slice):
        return is_plain((value.start, value.stop, value.step))
    return isinstance(value, _PLAIN)


def is_plain_collection(value: object) -> bool:
    """Return whether a value is a list, tuple or dict of plain values or such collections."""
    if isinstance(value, dict):
        return is_plain_collection([*value.keys(), *value.values()])
    if isinstance(value, list | tuple):
        return all(is_plain(one) or is_plain_collection(one) for one in value)
    return False


def is_setting(value: object) -> bool:
    """Return whether a module's attribute with this value is described with its layer."""
    if is_plain(value) or is_plain_collection(value) or inspect.isroutine(value):
        return True
    return isinstance(value, functools.partial | Tensor | np.ndarray)


def is_of_torch(kind: Any) -> bool:
    """Return whether a function or class is part of PyTorch."""
    return (getattr(kind, "__module__", None) or "").partition(".")[0] == "torch"


def tensor_text(value: Tensor | np.ndarray[Any, Any]) -> str:
    """Return the shape and type of a tensor or array, with a hash of its values."""
    kind = f"{tuple(value.shape)} {value.dtype}"
    try:
        flat = torch.as_tensor(value).flatten()
        some = flat[:: -(-max(1, flat.nbytes) // _MOST)]
        digest = hashlib.sha256(as_bytes(some.cpu()).numpy().tobytes())
        return f"{kind} {digest.hexdigest()[:16]}"
    except (TypeError, RuntimeError, NotImplementedError):  # strings, sparse tensors
        return kind


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)
