"""What a run's result depends on, as one hash: the code a function reaches, the values it sees, the environment.

Code is compared as syntax without docstrings, so an edited comment recomputes nothing. Of this package the modules
that the function reaches count, through the imports between them; of the reader's own code, the functions and
classes by source and the global values by content; of everything else, the installed version.
"""

from __future__ import annotations

import ast
import dataclasses
import dis
import functools
import importlib.metadata
import inspect
import json
import platform
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import _store, settings

PACKAGE = __package__
FOLDER = Path(__file__).parent
LIBRARIES = ("numpy", "scipy", "torch", "transformers", "tokenizers", "opacus", "dp-accounting")
CODE = (types.FunctionType, type, types.ModuleType, types.MethodType, functools.partial)
INSTALLED = tuple({sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")})


# ------------------------------------------------------------------------------------------------ source as syntax


def normalized(source: str) -> str:
    """The syntax tree of the source, without docstrings, comments and layout."""
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:]
    return ast.dump(tree)


def _imports(tree: ast.AST) -> Iterator[str]:
    """Every module that the tree may import, by its full name; relative names are those of this package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(part for part in (PACKAGE if node.level else "", node.module or "") if part)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


@functools.lru_cache(maxsize=256)
def _package_module(path: Path, stamp: int) -> tuple[str, tuple[str, ...]]:
    """A module of this package: the digest of its syntax, and the modules it imports."""
    source = path.read_text(encoding="utf-8")
    return _store.digest(normalized(source)), tuple(sorted(set(_imports(ast.parse(source)))))


def _package_file(name: str) -> Path | None:
    """The file of `memorization.x`, or None for any other name."""
    head, _, tail = name.partition(".")
    path = FOLDER / f"{tail or '__init__'}.py"
    return path if head == PACKAGE and path.is_file() else None


# ------------------------------------------------------------------------------------------------------- tracing


class _Trace:
    """Walks from a function to everything that its result depends on, and notes a line for each."""

    def __init__(self) -> None:
        self.lines: set[str] = set()
        self.modules: set[str] = set()  # full names, this package's and others'
        self._met: dict[int, Any] = {}  # by id; the values keep the ids from being used again

    def module(self, name: str) -> None:
        """A module by name; this package's are followed through their imports."""
        if name in self.modules:
            return
        path = _package_file(name)
        if path is None:
            self.modules.add(name.partition(".")[0])
            return
        self.modules.add(name)
        digest, imported = _package_module(path, path.stat().st_mtime_ns)
        self.lines.add(f"module {name} {digest}")
        for other in imported:
            self.module(other)

    def value(self, where: str, value: Any) -> None:
        """A value that the function can see under the name `where`."""
        if isinstance(value, CODE):
            if id(value) in self._met:
                return
            self._met[id(value)] = value
        if isinstance(value, types.ModuleType):
            self._module_object(value)
        elif isinstance(value, functools.partial):
            self.value(where, value.func)
            self.value(f"{where} arguments", [*value.args, value.keywords])
        elif isinstance(value, types.MethodType):
            self.value(where, value.__func__)
            self.value(f"{where}.__self__", value.__self__)
        elif isinstance(value, (types.FunctionType, type)):
            self._definition(value)
        elif callable(value) and hasattr(value, "__wrapped__"):  # lru_cache and its like
            self.value(where, value.__wrapped__)
        elif isinstance(value, (types.BuiltinFunctionType, np.ufunc)):
            self.lines.add(f"name {value.__name__}")
        elif getattr(value, "__module__", "") == "typing":
            self.lines.add(f"name {value!r}")
        elif isinstance(value, (dict, list, tuple)) and _holds_code(value):
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                self.value(f"{where}[{key!r}]", part)
        else:
            self.value(type(value).__qualname__, type(value))  # its methods may be the reader's
            self.lines.add(f"value {where} {content(where, value)}")

    def _module_object(self, module: types.ModuleType) -> None:
        path = getattr(module, "__file__", None)
        if module.__name__ == PACKAGE:  # any part of it may be reached by attribute
            for file in sorted(FOLDER.glob("*.py")):
                self.module(PACKAGE if file.stem == "__init__" else f"{PACKAGE}.{file.stem}")
        elif _package_file(module.__name__) or path is None or _is_installed(path):
            self.module(module.__name__)
        else:
            source = Path(path).read_text(encoding="utf-8") if path.endswith(".py") else _store.file_digest(Path(path))
            self.lines.add(f"file {module.__name__} {_store.digest(source)}")
            for name in _imports(ast.parse(source)):
                if _package_file(name):
                    self.module(name)

    def _definition(self, definition: types.FunctionType | type) -> None:
        """A function or class: by module if it is installed or this package's, else by source and what it sees."""
        module, is_function = definition.__module__, isinstance(definition, types.FunctionType)
        if module != "__main__" and (_package_file(module) or _is_installed(_file_of(definition))):
            self.module(module)
            self.lines.add(f"name {module}.{definition.__qualname__}")
            if is_function:
                self._closure(definition)
            return
        try:
            if definition.__name__ == "<lambda>":  # its source is the whole line, with the line's other lambdas
                raise OSError
            source = normalized(inspect.getsource(definition))
            for name in _imports(ast.parse(textwrap.dedent(inspect.getsource(definition)))):
                if _package_file(name):
                    self.module(name)
        except (OSError, TypeError, SyntaxError):  # typed into an interpreter without a record
            source = _bytecode(definition.__code__) if is_function else ""
        self.lines.add(f"source {definition.__qualname__} {_store.digest(source)}")
        if is_function:
            self._sees(definition)
            return
        for base in definition.__mro__[1:-1]:
            self.value(base.__name__, base)
        for member in vars(definition).values():
            member = getattr(member, "__func__", getattr(member, "fget", member))  # static, class method, property
            if isinstance(member, types.FunctionType):
                self._sees(member)

    def _sees(self, function: types.FunctionType) -> None:
        """Globals, closure and defaults of a function of the reader's."""
        for name in sorted(_global_names(function.__code__)):
            if name in function.__globals__:
                self.value(name, function.__globals__[name])
        self._closure(function)
        for name, default in enumerate([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]):
            self.value(f"{function.__qualname__} default {name}", default)

    def _closure(self, function: types.FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                self.value(name, cell.cell_contents)


def _file_of(definition: types.FunctionType | type) -> str:
    """Where a definition comes from: its module's file, else what its code says ("<stdin>", say); "" for C code."""
    if file := getattr(sys.modules.get(definition.__module__), "__file__", None):
        return file
    functions = [definition] if isinstance(definition, types.FunctionType) else vars(definition).values()
    return next((part.__code__.co_filename for part in functions if isinstance(part, types.FunctionType)), "")


def _holds_code(container: dict | list | tuple) -> bool:
    return any(isinstance(part, CODE) for part in (container.values() if isinstance(container, dict) else container))


def _is_installed(path: str) -> bool:
    """Whether a file belongs to the Python library or an installed package (whose version is what counts)."""
    return not path or path.startswith((*INSTALLED, "<frozen")) or "site-packages" in path or "dist-packages" in path


def _global_names(code: types.CodeType) -> set[str]:
    """The names that the code, and code nested in it, looks up outside of itself."""
    found = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _global_names(constant)
    return found


def _bytecode(code: types.CodeType) -> str:
    constants = [_bytecode(part) if isinstance(part, types.CodeType) else repr(part) for part in code.co_consts]
    return repr((code.co_code, code.co_names, constants))


# -------------------------------------------------------------------------------------------------------- values


def content(where: str, value: Any) -> str:
    """A digest of a value by content.

    Raises:
        ValueError: the value is of a kind that has no content to compare.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes, complex, Path, np.dtype)):
        return _store.digest(type(value).__name__, repr(value))
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype != object:
            return _store.digest("array", str(value.dtype), str(value.shape), np.ascontiguousarray(value).tobytes())
    elif isinstance(value, dict):
        items = [content(where, part) for pair in value.items() for part in pair]
        return _store.digest("dict", *items)
    elif isinstance(value, (list, tuple)):
        return _store.digest(type(value).__name__, *(content(where, part) for part in value))
    elif isinstance(value, (set, frozenset)):
        return _store.digest("set", *sorted(content(where, part) for part in value))
    elif isinstance(getattr(value, "fingerprint", None), str):
        return _store.digest("fingerprint", value.fingerprint)
    elif dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _store.digest(type(value).__qualname__, content(where, fields))
    elif (torch := sys.modules.get("torch")) is not None:
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            return _store.digest("tensor", str(value.dtype), str(tuple(value.shape)), flat.numpy().tobytes())
        if isinstance(value, torch.nn.Module):
            return _store.digest(type(value).__qualname__, content(where, dict(value.state_dict())))
        if isinstance(value, (torch.dtype, torch.device)):
            return _store.digest("torch", str(value))
        if hasattr(value, "backend_tokenizer"):
            return _store.digest("tokenizer", value.backend_tokenizer.to_str())
    raise ValueError(
        f"the function uses {where}, a {type(value).__name__}, which the run cache cannot compare by content; make it "
        f"inside the function, from the configuration"
    )


def plain(where: str, value: Any) -> Any:
    """A configuration as plain JSON values: numpy scalars become Python's, tuples become lists.

    Raises:
        ValueError: something that JSON does not have, or a key that is not a string.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(f"{where}[{place}]", part) for place, part in enumerate(value)]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(f"{where} must have strings as keys, got {list(value)!r}")
        return {key: plain(f"{where}[{key!r}]", part) for key, part in value.items()}
    raise ValueError(f"{where} must be numbers, strings, lists and dictionaries, got a {type(value).__name__}")


# --------------------------------------------------------------------------------------------------- environment


def of_function(function: Callable, sources: Iterable[types.ModuleType | str | Path] = ()) -> tuple[str, dict]:
    """The hash of all that the function's results depend on beside the configuration, and its provenance.

    Args:
        function: the function to run.
        sources: further modules or files that count, where the function reaches them in a way not to be seen.

    Returns:
        The hash (hex), and a dictionary of JSON values to keep with a result: function, versions, scale, device and
        corpus (the last two where the function reaches torch or `corpora`).
    """
    trace = _Trace()
    trace.value("function", function)
    for source in sources:
        if isinstance(source, types.ModuleType):
            trace.value(source.__name__, source)
        else:
            trace.lines.add(f"file {_store.file_digest(Path(source))}")
    note: dict[str, Any] = {
        "function": name_of(function),
        "versions": {"python": platform.python_version(), **_versions(trace.modules)},
        "scale": settings.scale(),
        "model": settings.model_name(),
    }
    if "torch" in trace.modules:
        note["device"] = settings.device()
    if f"{PACKAGE}.corpora" in trace.modules:
        from . import corpora

        active = corpora.load_corpus()
        note["corpus"] = {"name": active.name, "sha256": active.sha256}
    return _store.digest(json.dumps(note, sort_keys=True), *sorted(trace.lines)), note


def name_of(function: Callable) -> str:
    """The full name of a function, or of the one inside a partial."""
    inner = function.func if isinstance(function, functools.partial) else function
    return f"{inner.__module__}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"


def _versions(modules: set[str]) -> dict[str, str]:
    found = {}
    for library in LIBRARIES:
        if library.replace("-", "_") in modules:
            found[library] = importlib.metadata.version(library)
    return found
