"""Functions, classes and what wraps them as expressions: imported where another process can, else by their source."""

from __future__ import annotations

import builtins
import collections
import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Mapping
from typing import Any

from tune_jax._function import TunedFunction, TunedMethod
from tune_jax._jax import custom_derivative, is_jitted, jit_donations, jit_statics
from tune_jax._record.imports import count_hops, find_wrapped_path, import_folder
from tune_jax._record.sources import make_factory, names_read, read_class, read_function
from tune_jax._record.writer import Kind, Writer, as_name
from tune_jax._space import Space

_MISSING = object()


def is_recorder(value: Any) -> bool:
    """Whether a value is `record`, or a partial of it."""
    while isinstance(value, functools.partial):
        value = value.func
    return getattr(value, "__name__", "") == "record" and getattr(value, "__module__", "").startswith("tune_jax.")


def write_grid(writer: Writer, space: Any) -> str:
    """What a tuned function was given as its hyperparameters."""
    if not isinstance(space, Space):
        return writer.write(space)
    grids = [{name: list(choices) for name, choices in grid} for grid in space.grids]
    return writer.write(grids[0] if len(grids) == 1 else grids)


def write_method(writer: Writer, owner: type, name: str, function: Any) -> str:
    """A function that is looked up in the class it was defined in."""
    hops = count_hops(vars(owner).get(name), function)
    kind = writer.write(owner)
    if hops is None or kind.startswith("Todo"):
        return writer.write(function)
    if find_wrapped_path(owner) is None:
        # The class is written without its recorders.
        hops -= sum(_is_recorded(step) for step in _steps(vars(owner)[name], hops))
    return f"{kind}.{name}{'.__wrapped__' * hops}"


def _steps(found: Any, hops: int) -> list[Any]:
    steps = []
    for _ in range(hops):
        steps.append(found)
        found = found.__wrapped__
    return steps


def _is_recorded(value: Any) -> bool:
    return getattr(type(value), "__name__", "") == "Recorded" and type(value).__module__.startswith("tune_jax.")


def _can_be_imported(value: Any) -> bool:
    if isinstance(value, types.MethodType) or (not callable(value) and not isinstance(value, type)):
        return False
    return not _is_recorded(value) and find_wrapped_path(value) is not None


def _write_import(writer: Writer, value: Any) -> str:
    module, name, hops = find_wrapped_path(value) or ("", "", 0)
    if module == "builtins":
        return name
    head, *rest = name.split(".")
    wanted = head if rest else writer.name_for(value, head)
    alias = f"wrapped_{head}" if hops and not rest else wanted
    alias = writer.shelf.add_import(alias, f"from {module} import {head} as {{}}", import_folder(module) or "")
    found = ".".join([alias, *rest]) + ".__wrapped__" * hops
    return writer.shelf.define(wanted, lambda own: f"{own} = {found}") if hops and not rest else found


def _write_recorded(writer: Writer, value: Any) -> str:
    return writer.write(value.__wrapped__)


def _is_tuned(value: Any) -> bool:
    return isinstance(value, TunedFunction | TunedMethod)


def _write_tuned(writer: Writer, value: Any) -> str:
    if isinstance(value, TunedMethod):
        return f"{writer.write(value.__func__)}.__get__({writer.write(value.__self__)})"
    function, space = value._tunable.function, value._tunable.space
    return f"{writer.shelf.use('tune_jax')}.tune({writer.write(function)}, hyperparams={write_grid(writer, space)})"


def _is_method(value: Any) -> bool:
    return isinstance(value, types.MethodType)


def _write_method(writer: Writer, value: types.MethodType) -> str:
    instance, name = writer.write(value.__self__), value.__name__
    if getattr(type(value.__self__), name, None) is value.__func__ or isinstance(value.__self__, type):
        return f"{instance}.{name}"
    return f"{writer.write(value.__func__)}.__get__({instance})"


def _is_partial(value: Any) -> bool:
    return type(value) is functools.partial


def _write_partial(writer: Writer, value: functools.partial[Any]) -> str:
    parts = [writer.write(value.func), *map(writer.write, value.args)]
    if value.keywords:
        parts.append(writer.keywords(value.keywords))
    return f"{writer.shelf.use('functools')}.partial({', '.join(parts)})"


def _write_jitted(writer: Writer, value: Any) -> str:
    names = {"static_argnames": jit_statics(value), "donate_argnames": jit_donations(value)}
    options = {name: tuple(sorted(given)) for name, given in names.items() if given}
    parts = [writer.write(value.__wrapped__), *([writer.keywords(options)] if options else [])]
    return f"{writer.shelf.use('jax')}.jit({', '.join(parts)})"


def _has_rules(value: Any) -> bool:
    return custom_derivative(value) is not None


def _write_custom(writer: Writer, value: Any) -> str:
    """A function with its own derivative. Its rules may call it, so they are set when both are there."""
    kind, rules = custom_derivative(value) or ("", ())
    inner = writer.write(value.__wrapped__)
    numbers = f", nondiff_argnums={tuple(value.nondiff_argnums)}" if value.nondiff_argnums else ""
    made = f"{writer.shelf.use('jax')}.{kind}({inner}{numbers})"
    name = writer.shelf.define(as_name(f"{kind}_{value.__name__}"), lambda own: f"{own} = {made}")
    with writer.named(value, name):
        setting = f"{name}.def{kind.removeprefix('custom_')}"
        written = ", ".join(writer.write(getattr(value, rule)) for rule in rules)
    writer.shelf.define(setting, lambda _: f"{setting}({written})")
    return name


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType)


def _write_function(writer: Writer, value: types.FunctionType) -> str:
    text, name = read_function(value), value.__code__.co_name
    if text is None:
        return _write_missing(writer, value)
    if name == "<lambda>":
        name = writer.name_for(value, "function")
        text = f"{name} = {text}"
    cells = _read_cells(value)
    parameters = inspect.signature(value, follow_wrapped=False).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    placed = _place(writer, value, name, text, cells, {**defaults, **value.__globals__, **cells})
    if not hasattr(value, "__wrapped__"):
        return placed
    # Without the signature of what it wraps, it would be called otherwise.
    return f"{writer.shelf.use('functools')}.wraps({writer.write(value.__wrapped__)})({placed})"


def _is_wrapper(value: Any) -> bool:
    return callable(value) and not isinstance(value, type) and hasattr(value, "__wrapped__")


def _write_wrapped(writer: Writer, value: Any) -> str:
    """What an unknown object wraps: a cache or another library's jit, which a tuned function needs none of."""
    inner = writer.write(value.__wrapped__)
    comment = f"# The {type(value).__name__} around it is left out."
    return writer.shelf.define(f"inside_{as_name(inner)}", lambda own: f"{comment}\n{own} = {inner}")


def _is_class(value: Any) -> bool:
    return isinstance(value, type)


def _write_class(writer: Writer, value: type) -> str:
    scope = dict(vars(sys.modules.get(value.__module__, builtins)))
    functions = [inspect.unwrap(part) for part in vars(value).values() if callable(part)]
    cells: dict[str, Any] = {}
    for function in filter(_is_function, functions):
        cells |= {name: held for name, held in _read_cells(function).items() if name != "__class__"}
    bases = {base.__name__: base for base in value.__bases__}
    text = read_class(value, lambda callee: is_recorder(_look_up(scope | cells, callee)))
    if text is None and hasattr(value, "_fields"):
        made = f"{writer.write(collections.namedtuple)}({value.__name__!r}, {value._fields!r})"
        return writer.shelf.define(value.__name__, lambda own: f"{own} = {made}")
    if text is None:
        return writer.todo(f"the class {value.__qualname__}")
    return _place(writer, value, value.__name__, text, cells, {**bases, **scope, **cells})


def _look_up(scope: Mapping[str, Any], dotted: str) -> Any:
    """What a decorator's text stands for; one of which only the name is left is taken at its word."""
    head, *rest = dotted.split(".")
    if head not in scope:
        return types.SimpleNamespace(__name__=dotted.rpartition(".")[2], __module__="tune_jax.")
    return functools.reduce(lambda value, name: getattr(value, name, None), rest, scope[head])


def _read_cells(function: types.FunctionType) -> dict[str, Any]:
    held = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    return held


def _place(writer: Writer, value: Any, name: str, text: str, cells: Mapping[str, Any], scope: Mapping[str, Any]) -> str:
    """Put a definition on the shelf after those of the names that it reads.

    What a closure holds, and names that mean something else elsewhere in the script, become the parameters of a
    function around it.
    """
    with writer.named(value, as_name(name)):
        read = names_read(make_factory(name, text, cells, "make") if cells else text)
        needed = [key for key in dict.fromkeys([*cells, *read]) if count_hops(scope.get(key), value) is None]
        # `functools.wraps` gives a function the module of another.
        module = getattr(value, "__globals__", {}).get("__name__") or value.__module__
        written = {key: _write_needed(writer, key, scope, "" if key in cells else module) for key in needed}
    inside = {
        key: expression
        for key, expression in written.items()
        if key in cells or not (key == expression or writer.shelf.try_define(key, f"{key} = {expression}"))
    }
    return writer.shelf.define(as_name(name), lambda own: _definition(own, name, text, inside))


def _write_needed(writer: Writer, key: str, scope: Mapping[str, Any], module: str) -> str:
    """What a name stands for; from the module of what reads it, where that can be imported and no better place is."""
    if key not in scope:
        # Nothing keeps the local variables that the body of a local class has read.
        return key if hasattr(builtins, key) else writer.todo(f"the name {key}")
    value, folder = scope[key], import_folder(module)
    is_better_known = isinstance(value, types.ModuleType) or _is_recorded(value) or _can_be_imported(value)
    is_there = folder is not None and vars(sys.modules[module]).get(key, _MISSING) is value
    if is_better_known or not is_there:
        return writer.write_as(key, value)
    return writer.shelf.add_import(key, f"from {module} import {key} as {{}}", folder or "")


def _definition(own: str, name: str, text: str, inside: Mapping[str, str]) -> str:
    if not inside and own == name:
        return text
    given = ", ".join(inside.values())
    return f"{make_factory(name, text, inside, f'make_{own}')}\n\n{own} = make_{own}({given})"


def _is_builtin(value: Any) -> bool:
    return isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType | types.WrapperDescriptorType)


def _write_missing(writer: Writer, value: Any) -> str:
    what = f"{getattr(value, '__qualname__', value)}, a function without source"
    name = as_name(getattr(value, "__name__", "function"))
    todo = writer.todo(what)
    lines = f"# TODO: {what}, could not be recorded: import or define it here.\n"
    return writer.shelf.define(name, lambda own: textwrap.dedent(f"{lines}{own} = {todo}"))


KINDS: list[Kind] = [
    (_is_recorded, _write_recorded),
    (_can_be_imported, _write_import),
    (_is_tuned, _write_tuned),
    (_is_method, _write_method),
    (_is_partial, _write_partial),
    (is_jitted, _write_jitted),
    (_has_rules, _write_custom),
    (_is_function, _write_function),
    (_is_class, _write_class),
    (_is_wrapper, _write_wrapped),
    (_is_builtin, _write_missing),
]
