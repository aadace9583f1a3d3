"""Whether transformers is what its own files say, or was patched: a patched oracle judges itself."""

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import nn

from harness.errors import Code, HarnessError

_HOLDERS = ("fget", "__func__", "func", "_torchdynamo_inline")
"""Where properties, class methods, cached properties and scripted functions keep the function they were made of."""
_LIBRARIES = tuple(package.__path__[0] for package in (torch, transformers))


def check_is_unpatched(model: nn.Module) -> None:
    """Refuse a model whose classes, or the functions beside them, were replaced after transformers was imported.

    Libraries of kernels replace them for the whole process (`apply_..._to_llama()`), and so for the oracle too. A
    module of one model may be replaced at will.

    Raises:
        HarnessError: ORACLE_PATCHED.
    """
    for name in sorted({type(module).__module__ for module in model.modules()}):
        if not name.startswith("transformers.models."):
            continue
        for path, found in _replaced(sys.modules[name]):
            raise HarnessError(
                Code.ORACLE_PATCHED,
                "transformers was patched in this process, so that it cannot say what is right",
                where=f"{name}.{path}",
                expected=f"what {name} defines",
                actual=f"{found.__module__}.{getattr(found, '__qualname__', '?')}",
                hint="patch the one model that is checked, model.model.layers[0].mlp = ..., not the library",
            )


def _replaced(file: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield functions, classes and methods of a file whose code is another package's."""
    for names in _defined(file.__name__):
        found: Any = file
        for name in names:
            found = inspect.getattr_static(found, name, None)
        for wrapped in _HOLDERS:
            found = getattr(found, wrapped, None) or found
        if not _is_of_the_library(found):
            yield ".".join(names), found


def _is_of_the_library(found: Any) -> bool:
    """Whether a function or a class was written by transformers; decorators may be torch's."""
    code = getattr(found, "__code__", None)
    if code is not None:  # a wrapper bears the name of what it wraps
        return str(code.co_filename).startswith(_LIBRARIES)
    return str(getattr(found, "__module__", "transformers")).startswith("transformers.")


@cache
def _defined(file: str) -> tuple[tuple[str, ...], ...]:
    """Return the names of functions and classes that a file's source defines, and of their methods."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[file]))
    except OSError:
        return ()  # without sources
    names = list[tuple[str, ...]]()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append((node.name,))
        if isinstance(node, ast.ClassDef):
            names += [(node.name, item.name) for item in node.body if isinstance(item, ast.FunctionDef)]
    return tuple(names)
