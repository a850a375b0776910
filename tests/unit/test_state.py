"""What modules keep: constants, and no state but the few objects that have to be a process's own."""

import ast
import enum
import functools
import importlib
import inspect
import os
import pkgutil
import re
import types
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath

import numpy as np

import emtau_dask
from emtau_dask.process import of_process

ALLOWED = {
    "process._OBJECTS": "tasks of all fits in a process share what it keeps: rows, a read budget, threads",
    "interrupts._SIGNALS": "a process has one main thread, in which signals are handled",
    "process._HOLDERS": "BLAS has one number of threads in a process, whoever asks for it",
}
"""The state that modules may have, and why."""
PACKAGE = Path(emtau_dask.__file__).parent
NAMES = sorted(module.name for module in pkgutil.walk_packages(emtau_dask.__path__, "emtau_dask."))
WRITES = {"add", "append", "clear", "discard", "extend", "insert"}
WRITES |= {"pop", "popitem", "remove", "setdefault", "update"}
PLAIN = (
    *(bool, int, float, complex, str, bytes, range, PurePath, re.Pattern, enum.Enum, type, typing.TypeVar),
    *(types.NoneType, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(types.MappingProxyType, types.GenericAlias, types.UnionType, np.dtype, np.generic, np.ufunc),
)
TABLES = (dict, list, set)
FOREIGN = {"typing", "logging", "numcodecs", "click", "pydantic", "numba", "llvmlite", "zarr"}
"""Packages whose objects at the top of a module declare something, and keep nothing of a fit."""


def assigned(path):
    """The names that a module's own statements assign, but ``__all__`` and the like."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for name in ast.walk(target) if target is not None else ():
                if isinstance(name, ast.Name) and not name.id.startswith("__"):
                    yield name.id


def written(tree):
    """The names whose contents some statement changes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield getattr(node.value, "id", None)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITES:
            yield getattr(node.func.value, "id", None)
        elif isinstance(node, ast.AugAssign):
            yield getattr(node.target, "id", None)
        elif isinstance(node, ast.Global):
            yield from node.names


def constant(value):
    """Whether a value cannot change; a cache without arguments is a constant that is made late."""
    if hasattr(value, "cache_info"):
        return not inspect.signature(value.__wrapped__).parameters
    if isinstance(value, (tuple, frozenset)):
        return all(map(constant, value))
    if is_dataclass(value) and not isinstance(value, type):
        frozen = value.__dataclass_params__.frozen
        return frozen and all(constant(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, functools.partial):
        return constant(value.func) and all(map(constant, value.args))
    return isinstance(value, PLAIN) or type(value).__module__.partition(".")[0] in FOREIGN


def state_of(name):
    """The names of a module that hold what can change."""
    module, path = importlib.import_module(name), Path(importlib.import_module(name).__file__)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    changed = set(written(tree))
    functions = {key for key, value in vars(module).items() if hasattr(value, "cache_info")}
    for key in {*assigned(path), *functions}:
        value = vars(module)[key]
        if getattr(value, "__module__", name) != name and hasattr(value, "cache_info"):
            continue
        if isinstance(value, TABLES):
            if not key.isupper() or key in changed:
                yield key
        elif not constant(value):
            yield key


def test_modules_keep_constants_only():
    kept = {f"{name.removeprefix('emtau_dask.')}.{key}" for name in NAMES for key in state_of(name)}
    assert kept - set(ALLOWED) == set()


def test_what_may_be_kept_is_there_and_little():
    assert len(ALLOWED) <= 4
    for name in ALLOWED:
        module, _, key = name.rpartition(".")
        assert key in state_of(f"emtau_dask.{module}"), name


class Kept:
    made = 0

    def __init__(self):
        Kept.made += 1


def test_a_process_has_one_object_of_a_kind():
    assert of_process(Kept) is of_process(Kept)
    assert Kept.made == 1


def test_a_forked_process_begins_with_none():
    mine, (reading, writing) = of_process(Kept), os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, b"other" if of_process(Kept) is not mine else b"same")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 10) == b"other"
