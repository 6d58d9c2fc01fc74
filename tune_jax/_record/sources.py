"""The source text of functions and classes, cut out of their files, and the names that it needs."""

from __future__ import annotations
import __future__

import ast
import dis
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def read_function(function: types.FunctionType) -> str | None:
    """The text of a function without its decorators, or of a lambda; None where there is no source."""
    lines = _read_lines(function)
    nodes = ast.walk(_parse(lines)) if lines else ()
    fits = [node for node in nodes if _is_node_of(function.__code__, node)]
    if not fits:
        return None
    node = min(fits, key=_extent)
    if isinstance(node, ast.Lambda):
        return ast.unparse(node)
    assert isinstance(node, _FUNCTIONS)
    node.decorator_list = []
    return _cut(lines, node)


def read_class(kind: type, is_dropped: Callable[[str], bool]) -> str | None:
    """The text of a class; decorators of it or its methods for whose text `is_dropped` is true are left out."""
    node = _find_class(kind)
    if node is None:
        return None
    for part in ast.walk(node):
        if isinstance(part, (*_FUNCTIONS, ast.ClassDef)):
            part.decorator_list = [one for one in part.decorator_list if not is_dropped(_callee(one))]
    return ast.unparse(node)


def _find_class(kind: type) -> ast.ClassDef | None:
    """The definition of a class, found by a method of it: `inspect` cannot find one that a notebook defines."""
    methods = (inspect.unwrap(part) for part in vars(kind).values() if callable(part))
    for method in filter(inspect.isfunction, methods):
        for node in ast.walk(_parse(_read_lines(method))):
            if isinstance(node, ast.ClassDef) and node.name == kind.__name__ and _is_around(node, method.__code__):
                return node
    try:
        found = _parse([textwrap.dedent(inspect.getsource(kind))]).body
    except (OSError, TypeError, IndexError):
        return None
    return found[0] if found and isinstance(found[0], ast.ClassDef) else None


def _is_around(node: ast.ClassDef, code: types.CodeType) -> bool:
    return any(_is_node_of(code, part) for part in node.body)


def names_read(text: str) -> list[str]:
    """The global names that a definition reads but does not set, when it is executed or called; not in annotations.

    Raises SyntaxError where the text cannot stand on its own.
    """
    # Scripts have the same import, so that no annotation needs to be found.
    code = compile(text, "<recorded>", "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
    operations = list(_operations(code))
    kept = {name for operation, name in operations if operation in ("STORE_NAME", "STORE_GLOBAL")}
    read = dict.fromkeys(name for operation, name in operations if operation in ("LOAD_GLOBAL", "LOAD_NAME"))
    return [name for name in read if name not in kept and not name.startswith("__")]


def make_factory(name: str, text: str, parameters: Iterable[str], maker: str) -> str:
    """A function, named `maker`, that defines what `text` does inside of these parameters and returns its `name`."""
    head, tail = f"def {maker}({', '.join(parameters)}):\n", f"\n    return {name}"
    plain = head + textwrap.indent(text, "    ") + tail
    tree = ast.parse(f"{head}    pass{tail}")
    tree.body[0].body[:1] = ast.parse(text).body  # type: ignore[attr-defined]
    # Indenting changes what strings of several lines say.
    return plain if ast.dump(_parse([plain])) == ast.dump(tree) else ast.unparse(tree)


def _operations(code: types.CodeType) -> Iterator[tuple[str, Any]]:
    yield from ((part.opname, part.argval) for part in dis.get_instructions(code))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _operations(constant)


def _read_lines(function: types.FunctionType) -> list[str]:
    try:
        return inspect.findsource(function)[0]
    except (OSError, TypeError, IndexError):
        return []


def _parse(lines: Iterable[str]) -> ast.Module:
    try:
        return ast.parse("".join(lines))
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def _is_node_of(code: types.CodeType, node: ast.AST) -> bool:
    if isinstance(node, _FUNCTIONS):
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        return node.name == code.co_name and first == code.co_firstlineno
    if not isinstance(node, ast.Lambda) or code.co_name != "<lambda>" or node.lineno != code.co_firstlineno:
        return False
    return _argument_names(node.args) == _parameter_names(code) and _holds(node.body, code)


def _argument_names(arguments: ast.arguments) -> list[str]:
    rest = [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *rest)]


def _parameter_names(code: types.CodeType) -> list[str]:
    flags = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + flags])


def _holds(body: ast.expr, code: types.CodeType) -> bool:
    """Whether the code's instructions stand where the body of a lambda does: a line can have several lambdas."""
    ends = (body.end_lineno or 0, body.end_col_offset or 0)
    places = [place for place in code.co_positions() if None not in place and place[2:] != (0, 0)]
    last = max(((place[1] or 0, place[3] or 0) for place in places), default=ends)
    return last == ends


def _extent(node: Any) -> tuple[int, int]:
    return (node.end_lineno - node.lineno, node.end_col_offset - node.col_offset)


def _cut(lines: list[str], node: Any) -> str:
    """The lines of a definition as they stand, unless taking away their indentation changes what they say."""
    text = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
    parsed = _parse([text]).body
    same = len(parsed) == 1 and ast.dump(parsed[0]) == ast.dump(node)
    return text.rstrip() if same else ast.unparse(node)


def _callee(decorator: ast.expr) -> str:
    while isinstance(decorator, ast.Call):
        decorator = decorator.func
    return ast.unparse(decorator)
