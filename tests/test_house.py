"""The house rules: who may import whom, what importing does, which names are public, how large things get.

The tables come first; edit them when a room is added. A room is a module of `tune_jax`, or a folder of them.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import graphlib
import importlib
import json
import pathlib
import statistics
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

PUBLIC_NAMES = {
    "CONFIG",
    "Failure",
    "ProgramResults",
    "Results",
    "TuneError",
    "TunedCall",
    "TunedFunction",
    "logger",
    "record",
    "tabulate",
    "to_df",
    "tune",
    "tune_all",
    "tune_logger",
}

# What each room may import besides the standard library, the members of its own folder and LEAVES.
# The longest name that fits a module decides. `jax.profiler` allows that module of jax and no other.
LEAVES = {"_records", "_errors", "_config", "_failure", "_warn"}
ROOMS = {
    "": "_tune _function _program _record _session _results _report",
    "_tune": "jax _jax _function _space",
    "_function": "jax _jax _alone _binding _call _entry _hoist _leaves _lookup _primitive _results _shardings",
    "_entry": "jax _jax _binding _call _leaves _primitive _shardings",
    "_binding": "jax _jax _call _closures _leaves _outline _space",
    "_hoist": "jax _jax _call _closures _leaves _outline _traced",
    "_call": "jax _jax _leaves _placement _traced",
    "_traced": "jax numpy _jax _leaves",
    "_closures": "jax numpy _jax",
    "_leaves": "jax numpy _content _jax",
    "_content": "jax numpy _closures _jax _visible",
    "_visible": "",
    "_placement": "jax numpy _jax",
    "_shardings": "jax _jax _call",
    "_alone": "jax _jax _call _key _outline _placement",
    "_primitive": "jax _jax _call _hoist _leaves _lookup _outline _recording _sharing _wrap",
    "_program": "_alone _jax _key _lookup _progress _recording _results _survey",
    "_survey": "jax numpy _jax _outline _primitive _recording _wrap",
    "_recording": "jax _jax _call",
    "_key": "jax _jax _call _digest _leaves _placement _sharing",
    "_sharing": "_call _content _jax _leaves _outline _recording _traced",
    "_digest": "jax numpy _closures",
    "_agree": "",
    "_coordinator": "jax _agree _jax",
    "_together": "_agree _call _jax _key _results _session _shardings _sharing _space",
    "_lookup": "jax _alone _build _call _coordinator _inputs _key _outline _placement _recording _results _session "
    "_shardings _sharing _together",
    "_session": "_build _call _inputs _jax _key _measure _outline _progress _rank _recording _results _shardings",
    "_outline": "jax _jax _call _recording _space _wrap",
    "_space": "numpy",
    "_wrap": "jax numpy _jax _call _placement",
    "_inputs": "jax ml_dtypes numpy _jax _call _leaves",
    "_build": "jax _jax",
    "_build.programs": "jax _jax _call _outline _wrap",
    "_measure": "",
    "_measure.profiler": "jax _jax",
    "_measure.xplane": "jax.profiler",
    "_measure.rounds": "_rank",
    "_rank": "numpy",
    "_results": "numpy _rank",
    "_results.codec": "numpy ml_dtypes",
    "_results.frame": "pandas",
    "_results.table": "tabulate",
    "_report": "_results",
    "_progress": "tqdm",
    "_record": "jax numpy _jax _function _inputs _leaves _space",
    "experimental": "_record",
    "_jax": "jax",
}

# What moves between versions of jax is touched in one place.
GUARDED = {
    "jax._src",
    "jax.core",
    "jax.experimental.serialize_executable",
    "jax.extend",
    "jax.interpreters",
    "jaxlib",
}
GUARD = "_jax"

# Checked over tune_jax/; `kernels/` counts for broad excepts and for the share of tests only.
LIMITS = {
    "longest file": 300,
    "longest function": 60,
    "median function": 7,
    "90th percentile function": 25,
    "% of functions over 40": 3,
    "% of functions nested": 10,
    "broad excepts": 3,
}
TEST_LINES_PER_LINE = 1.1

MODULES_THAT_MAY_PRINT = {"_cli"}
OPTIONAL_PACKAGES = {"pandas", "IPython", "matplotlib", "xprof", "tensorboard_plugin_profile"}


# Modules and what they name


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed module; `name` is dotted, from the top package down."""

    name: str
    is_package: bool
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def package(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def room(self) -> str:
        return self.name.removeprefix("tune_jax").removeprefix(".")


def _read_modules(folder: str, package: str) -> dict[str, Module]:
    modules = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT / folder).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join([package, *(parts[:-1] if is_package else parts)])
        modules[name] = Module(name, is_package, path.read_text())
    return modules


LIBRARY = _read_modules("tune_jax", "tune_jax")
KERNELS = _read_modules("kernels", "tune_jax.kernels")


def _prefixes(dotted: str) -> Iterator[str]:
    """`a.b.c` -> `a.b.c`, `a.b`, `a`."""
    while dotted:
        yield dotted
        dotted = dotted.rpartition(".")[0]


def _is_under(dotted: str, names: Iterable[str]) -> bool:
    return not set(names).isdisjoint(_prefixes(dotted))


def _from_base(module: Module, node: ast.ImportFrom) -> str:
    """The absolute name of what a `from` import draws from."""
    if not node.level:
        return node.module or ""
    parts = module.package.split(".")
    kept = parts[: len(parts) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _bindings(module: Module) -> Iterator[tuple[str, str]]:
    """Each imported thing, wherever the import stands: its local name, and its full dotted name."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or "", alias.name
        elif isinstance(node, ast.ImportFrom):
            base = _from_base(module, node)
            for alias in node.names:
                yield alias.asname or alias.name, f"{base}.{alias.name}"


def _imports(module: Module) -> set[str]:
    return {dotted for _, dotted in _bindings(module) if not dotted.startswith("__future__")}


def _attribute_path(node: ast.expr) -> list[str]:
    """`a.b.c` as its names, or nothing where it does not start at a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _uses(module: Module) -> set[str]:
    """Dotted names that the module imports or reaches through what it imports."""
    local = {name: dotted for name, dotted in _bindings(module) if name}
    paths = [_attribute_path(node) for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)]
    reached = {".".join([local.get(path[0], path[0]), *path[1:]]) for path in paths if path}
    roots = {dotted.split(".")[0] for dotted in _imports(module)}
    return _imports(module) | {dotted for dotted in reached if dotted.split(".")[0] in roots}


def _target_room(dotted: str, known: Iterable[str]) -> str | None:
    """The module of the library that an import loads, or None where it is not of the library."""
    return next((name for name in _prefixes(dotted) if name in known), None)


# Who may import whom


def _row(room: str) -> str | None:
    """The words of the row that fits a room, None where there is none; leaves import leaves only."""
    fits = (name for name in (*_prefixes(room), *([] if room else [""])) if name in ROOMS)
    return "" if room in LEAVES else next((ROOMS[name] for name in fits), None)


def _is_allowed(module: Module, dotted: str, known: Iterable[str]) -> bool:
    if dotted.split(".")[0] in sys.stdlib_module_names:
        return True
    allowed = LEAVES | set((_row(module.room) or "").split())
    target = _target_room(dotted, known)
    if target is None:
        return _is_under(dotted, allowed)
    room = target.removeprefix("tune_jax").removeprefix(".")
    same_folder = "." in module.room or module.is_package
    return _is_under(room, allowed) or (same_folder and room.split(".")[0] == module.room.split(".")[0])


def _forbidden_imports(module: Module, known: Iterable[str]) -> set[str]:
    return {dotted for dotted in _imports(module) if not _is_allowed(module, dotted, known)}


def _library(name: str, text: str, *, is_package: bool = False) -> Module:
    return Module(f"tune_jax.{name}", is_package, text)


@pytest.mark.parametrize("name", LIBRARY)
def test_module_imports_only_what_its_room_may(name):
    assert _forbidden_imports(LIBRARY[name], LIBRARY) == set()


@pytest.mark.parametrize("name", LIBRARY)
def test_module_has_a_row_in_the_table(name):
    assert _row(LIBRARY[name].room) is not None


def test_every_row_has_its_room():
    assert set(ROOMS) <= {module.room for module in LIBRARY.values()}


@pytest.mark.parametrize("name", LIBRARY)
def test_only_one_room_touches_what_moves_between_versions_of_jax(name):
    module = LIBRARY[name]
    touched = {dotted for dotted in _uses(module) if _is_under(dotted, GUARDED)}
    assert _is_under(module.room, [GUARD]) or touched == set()


def test_the_tuner_never_imports_kernels():
    users = {m.name for m in LIBRARY.values() for dotted in _imports(m) if dotted.startswith("tune_jax.kernels")}
    assert users == set()


def test_kernels_never_import_the_tuner():
    tuner = {
        (module.name, dotted)
        for module in KERNELS.values()
        for dotted in _imports(module)
        if _is_under(dotted, ["tune_jax"]) and not _is_under(dotted, ["tune_jax.kernels"])
    }
    assert tuner == set()


def test_kernels_are_not_imported_by_their_folder_name():
    users = {
        m.name for m in [*LIBRARY.values(), *KERNELS.values()] if any(_is_under(i, ["kernels"]) for i in _imports(m))
    }
    assert users == set()


def _module_graph(modules: dict[str, Module]) -> dict[str, set[str]]:
    return {
        name: {target for dotted in _imports(module) if (target := _target_room(dotted, modules))} - {name}
        for name, module in modules.items()
    }


def _folder_graph(modules: dict[str, Module], depth: int) -> dict[str, set[str]]:
    """The same graph with modules taken together by the first `depth` parts of their names."""
    graph: dict[str, set[str]] = {}
    for name, targets in _module_graph(modules).items():
        folder = _cut(name, depth)
        graph.setdefault(folder, set()).update({_cut(target, depth) for target in targets} - {folder})
    return graph


def _cut(dotted: str, depth: int) -> str:
    return ".".join(dotted.split(".")[:depth])


def _assert_no_cycle(graph: dict[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"imports go in a circle: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("modules", [LIBRARY, KERNELS], ids=["tune_jax", "kernels"])
def test_no_cycle_by_module(modules):
    _assert_no_cycle(_module_graph(modules))


@pytest.mark.parametrize(("modules", "depth"), [(LIBRARY, 2), (KERNELS, 3)], ids=["tune_jax", "kernels"])
def test_no_cycle_by_folder(modules, depth):
    _assert_no_cycle(_folder_graph(modules, depth))


# The checks above, on made-up modules: a check that sees nothing would pass on everything


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("_space", "import jax", {"jax"}),
        ("_space", "def f():\n    import jax.numpy as jnp", {"jax.numpy"}),
        ("_space", "from . import _tune", {"tune_jax._tune"}),
        ("_space", "from ._tune import tune", {"tune_jax._tune.tune"}),
        ("_space", "from tune_jax import CONFIG", {"tune_jax.CONFIG"}),
        ("_space", "import itertools, numpy as np\nfrom ._errors import TuneError", set()),
        ("_measure.xplane", "import jax", {"jax"}),
        ("_measure.xplane", "from jax.profiler import ProfileData", set()),
        ("_measure.xplane", "from .._records import LaunchTime\nfrom . import profiler", set()),
        ("_measure.xplane", "from .._rank import rank", {"tune_jax._rank.rank"}),
        ("_unknown", "import numpy", {"numpy"}),
        ("_records", "import jax", {"jax"}),
    ],
)
def test_forbidden_imports_are_seen(name, text, expected):
    known = {f"tune_jax.{room}".removesuffix(".") for room in [*ROOMS, *LEAVES]}
    assert _forbidden_imports(_library(name, text), known) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import jax\njax.core.eval_context()", "jax.core.eval_context"),
        ("import jax.extend as je\nje.core.Primitive", "jax.extend.core.Primitive"),
        ("from jax import core", "jax.core"),
        ("from jax.experimental import serialize_executable as s", "jax.experimental.serialize_executable"),
    ],
)
def test_guarded_names_are_seen_through_aliases_and_attributes(text, expected):
    assert expected in _uses(_library("_call", text))
    assert _is_under(expected, GUARDED)


def test_cycles_are_seen_by_module_and_by_folder():
    parts = {
        "_a": _library("_a", "def f():\n    from . import _b"),
        "_b": _library("_b", "from ._a import f"),
    }
    modules = {module.name: module for module in parts.values()}
    with pytest.raises(pytest.fail.Exception, match="in a circle"):
        _assert_no_cycle(_module_graph(modules))
    apart = [
        _library("_x.one", "from .._y import one"),
        _library("_y.one", ""),
        _library("_y.two", "from .._x import one"),
        _library("_x", "", is_package=True),
        _library("_y", "", is_package=True),
    ]
    folders = {module.name: module for module in apart}
    _assert_no_cycle(_module_graph(folders))
    with pytest.raises(pytest.fail.Exception, match="in a circle"):
        _assert_no_cycle(_folder_graph(folders, 2))


# What importing does, and what it offers


IMPORT_PROBE = """
import json, logging, os, signal, sys, threading
import jax

def state():
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "handlers": sum(len(getattr(logger, "handlers", [])) for logger in loggers),
        "environment": dict(os.environ),
        "jax_config": {name: repr(value) for name, value in jax.config.values.items()},
        "sigint": repr(signal.getsignal(signal.SIGINT)),
        "streams": [id(sys.stdout), id(sys.stderr)],
    }

before = state()
import tune_jax, tune_jax.kernels
after = state()
from jax._src import xla_bridge
print(json.dumps({
    "changed": [name for name in before if before[name] != after[name]],
    "backend_started": xla_bridge.backends_are_initialized(),
    "modules": sorted({name.split(".")[0] for name in sys.modules}),
}))
"""


@pytest.fixture(scope="module")
def after_import(tmp_path_factory) -> dict[str, object]:
    """What a fresh process tells of itself after importing the package with warnings as errors."""
    folder = tmp_path_factory.mktemp("elsewhere")  # so that the installed package is the one found
    command = [sys.executable, "-W", "error", "-c", IMPORT_PROBE]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_import_starts_no_thread_adds_no_handler_and_sets_nothing(after_import):
    assert after_import["changed"] == []


def test_import_starts_no_backend(after_import):
    assert after_import["backend_started"] is False


def test_import_loads_no_optional_package(after_import):
    assert OPTIONAL_PACKAGES.isdisjoint(after_import["modules"])


def test_public_names_are_these():
    tune_jax = importlib.import_module("tune_jax")
    assert set(tune_jax.__all__) == PUBLIC_NAMES
    assert all(hasattr(tune_jax, name) for name in PUBLIC_NAMES)


def test_nothing_else_is_visible_at_the_top():
    tune_jax = importlib.import_module("tune_jax")
    visible = {
        name
        for name, value in vars(tune_jax).items()
        if not name.startswith("_") and name != "annotations" and not isinstance(value, types.ModuleType)
    }
    assert visible <= PUBLIC_NAMES


def _print_calls(module: Module) -> list[int]:
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


@pytest.mark.parametrize("name", [*LIBRARY, *KERNELS])
def test_the_library_never_prints(name):
    module = (LIBRARY | KERNELS)[name]
    assert module.room in MODULES_THAT_MAY_PRINT or _print_calls(module) == []


@pytest.mark.parametrize("name", [*LIBRARY, *KERNELS])
def test_annotations_are_lazy_where_there_are_any(name):
    module = (LIBRARY | KERNELS)[name]
    defines = any(isinstance(node, (ast.ClassDef, *DEFINITIONS)) for node in ast.walk(module.tree))
    assert not defines or any(dotted.startswith("__future__") for _, dotted in _bindings(module))


# How large things get


@dataclasses.dataclass(frozen=True)
class Function:
    name: str
    lines: int
    is_nested: bool


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _code_lines(module: Module) -> set[int]:
    """Lines that are neither blank nor a comment nor part of a docstring."""
    owners = [n for n in ast.walk(module.tree) if isinstance(n, (ast.Module, ast.ClassDef, *DEFINITIONS))]
    docstrings = [owner.body[0] for owner in owners if owner.body and _is_docstring(owner.body[0])]
    quoted = {line for node in docstrings for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = enumerate(module.text.splitlines(), 1)
    return {i for i, line in lines if line.strip() and not line.strip().startswith("#")} - quoted


def _is_stub(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body = [part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    is_empty = all(isinstance(part, ast.Pass) for part in body)
    return is_empty or any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)


def _functions(module: Module) -> list[Function]:
    code, found = _code_lines(module), []
    stack: list[tuple[ast.AST, bool]] = [(module.tree, False)]
    while stack:
        parent, is_inside = stack.pop()
        for node in ast.iter_child_nodes(parent):
            is_function = isinstance(node, DEFINITIONS)
            stack.append((node, is_inside or is_function))
            if is_function and not _is_stub(node):
                lines = len(code.intersection(range(node.lineno, (node.end_lineno or 0) + 1)))
                found.append(Function(f"{module.name}.{node.name}", lines, is_inside))
    return found


def _is_broad(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or ast.unparse(handler.type) in ("Exception", "BaseException")


def _broad_excepts(module: Module) -> int:
    handlers = [node for node in ast.walk(module.tree) if isinstance(node, ast.ExceptHandler)]
    return sum(map(_is_broad, handlers))


@functools.cache
def _sizes() -> dict[str, float]:
    functions = [function for module in LIBRARY.values() for function in _functions(module)]
    lines = sorted(function.lines for function in functions)
    return {
        "longest file": max(len(module.text.splitlines()) for module in LIBRARY.values()),
        "longest function": lines[-1],
        "median function": statistics.median(lines),
        "90th percentile function": lines[min(len(lines) - 1, int(0.9 * len(lines)))],
        "% of functions over 40": 100 * sum(n > 40 for n in lines) / len(lines),
        "% of functions nested": round(100 * sum(f.is_nested for f in functions) / len(functions)),
        "broad excepts": sum(map(_broad_excepts, [*LIBRARY.values(), *KERNELS.values()])),
    }


def _largest() -> str:
    files = sorted(((len(m.text.splitlines()), m.name) for m in LIBRARY.values()), reverse=True)[:3]
    functions = sorted(((f.lines, f.name) for m in LIBRARY.values() for f in _functions(m)), reverse=True)[:5]
    return f"largest files {files}; largest functions {functions}"


@pytest.mark.parametrize("what", LIMITS)
def test_sizes_stay_within_the_limits(what):
    assert _sizes()[what] <= LIMITS[what], _largest()


def test_there_is_more_test_than_code():
    tests = sum(len(_code_lines(module)) for module in _read_modules("tests", "tests").values())
    code = sum(len(_code_lines(module)) for module in [*LIBRARY.values(), *KERNELS.values()])
    assert tests >= TEST_LINES_PER_LINE * code
