"""Reads a package's source, without importing it, for the names that kvtop relies on."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path


def missing(
    root: Path, methods: Mapping[str, Mapping[str, tuple[str, ...]]], names: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    """Yield one line for each thing that the source under `root` lacks.

    `methods` maps `package.module:Class` to methods to parameter names; `names` maps `package.module` to
    attributes and identifiers.
    """
    for place, wanted in methods.items():
        module, _, class_name = place.partition(":")
        tree = _parse(root, module)
        if tree is None:
            yield f"{module} is gone"
            continue
        found = next(
            (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == class_name), None
        )
        if found is None:
            yield f"{place} is gone"
            continue
        defined = {n.name: n for n in found.body if isinstance(n, ast.FunctionDef)}
        for method, parameters in wanted.items():
            if method not in defined:
                yield f"{place}.{method} is gone"
                continue
            has = _parameters(defined[method])
            yield from (f"{place}.{method} lost its parameter {p}" for p in parameters if p not in has)
    for module, identifiers in names.items():
        tree = _parse(root, module)
        seen = _identifiers(tree) if tree is not None else set()
        yield from (f"{module} no longer mentions {name}" for name in identifiers if name not in seen)


def overridden(root: Path, module: str, class_name: str) -> set[str]:
    """Return the public methods that a class defines in its own body."""
    tree = _parse(root, module)
    assert tree is not None, f"{module} is gone"
    found = _class(tree, class_name)
    assert found is not None, f"{module}:{class_name} is gone"
    return {n.name for n in found.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")}


def _class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    return next((n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name), None)


def _parse(root: Path, module: str) -> ast.Module | None:
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text("utf-8")) if path.is_file() else None


def _parameters(function: ast.FunctionDef) -> set[str]:
    arguments = function.args
    return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def _identifiers(tree: ast.Module) -> set[str]:
    seen: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name):
                seen.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                seen.add(name)
    return seen
