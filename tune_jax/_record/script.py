"""The script that tunes a recorded function for its calls, as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from tune_jax._record.capture import Target
from tune_jax._record.writer import Shelf

# Stands at the top of a file once, however many scripts it holds.
FUTURE = "from __future__ import annotations\n"

_DEFAULT_SETTINGS = {
    "jax_default_matmul_precision": None,
    "jax_enable_x64": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
}

_MAIN = """\
def main():
    # Nothing here changes an object, so those that can only be told apart by which they are need no warning.
    warnings.filterwarnings("ignore", "argument .*, so calls are told apart by which object it is")
    tuned = tune_jax.tune(FUNCTION, hyperparams=HYPERPARAMS)
    for call in CALLS:
        args, kwargs = call()
        tuned.tune(*args, **leave_open(kwargs, HYPERPARAMS))
        print(tune_jax.tabulate(tuned))


if __name__ == "__main__":
    main()
"""


@dataclasses.dataclass
class RecordedCall:
    """A distinct call: its arguments as Python expressions, and how often it was made.

    Attributes:
      args: the arguments that are given by place.
      kwargs: those that are given by name.
      notes: what the expressions do not say.
      integers: the small integer arrays that the expressions call `integers_0` and so on.
      settings: JAX's settings that change what a function computes, where they are not the defaults.
      count: how often it was made. A jitted program makes its calls once, while it is traced.
    """

    args: tuple[str, ...]
    kwargs: Mapping[str, str]
    notes: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    count: int = 1


def changed_settings(settings: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Those of the caller's settings that are not JAX's defaults."""
    plain = {name: value if isinstance(value, bool | None) else str(value) for name, value in settings}
    return {name: value for name, value in plain.items() if value != _DEFAULT_SETTINGS[name]}


def write_script(name: str, target: Target, shelf: Shelf, calls: Sequence[RecordedCall]) -> str:
    """Write the script, without the import that must stand at the very top of a file."""
    blocks = [
        "\n".join(_title(name, shelf, calls)),
        "\n".join(_imports(shelf, calls)),
        *shelf.definitions.values(),
        f"FUNCTION = {target.expression}",
        "\n".join(_grid(target, calls)),
        *("\n".join(_call(index, call)) for index, call in enumerate(calls)),
        f"CALLS = [{', '.join(f'call_{index}' for index in range(len(calls)))}]",
        _MAIN,
    ]
    return "\n\n".join(blocks)


def _title(name: str, shelf: Shelf, calls: Sequence[RecordedCall]) -> Iterator[str]:
    many = f"{len(calls)} distinct call{'' if len(calls) == 1 else 's'}"
    yield f"# Tunes {' '.join(name.split())} for {many}, recorded with jax {jax.__version__}."
    yield "# Fill in HYPERPARAMS below and run this file; with nothing to choose, the function is only timed."
    if "Todo" in shelf.imports:
        yield "# TODO: some of it could not be recorded. Replace each Todo(...) with what it says."


def _imports(shelf: Shelf, calls: Sequence[RecordedCall]) -> Iterator[str]:
    if shelf.folders:
        yield "import sys\n"
        yield from (f"sys.path.append({folder!r})" for folder in shelf.folders)
        yield ""
    fixed = {"import jax", "import tune_jax", "import warnings", "from tune_jax.experimental.record import leave_open"}
    yield from sorted({*shelf.imports.values(), *fixed}, key=lambda line: (line.startswith("from"), line))
    settings: dict[str, Any] = {}
    for call in calls:
        settings = {**call.settings, **settings}
    yield from (f"\njax.config.update({name!r}, {value!r})" for name, value in settings.items())


def _grid(target: Target, calls: Sequence[RecordedCall]) -> Iterator[str]:
    names = _likely_names(target, calls)
    example = ", ".join(f'"{name}": [32, 64, 128]' for name in names[:2])
    yield f"# Parameters and choices, such as {{{example}}}; what is named here is left out of the calls below."
    yield f"# The function takes {target.signature}"
    yield f"HYPERPARAMS = {target.hyperparams}"


def _likely_names(target: Target, calls: Sequence[RecordedCall]) -> list[str]:
    """Parameters to name in the example: those that are numbers, or that no call gives."""
    given = {name: value for call in calls for name, value in call.kwargs.items()}
    numbers = [name for name, value in given.items() if value.isdigit()]
    return [*[name for name in target.parameters if name not in given], *numbers] or ["block_q", "block_k"]


def _call(index: int, call: RecordedCall) -> Iterator[str]:
    yield f"def call_{index}():"
    yield f"    # Made {'once' if call.count == 1 else f'{call.count} times'}."
    yield from (f"    # {' '.join(note.split())}" for note in call.notes)
    yield from (f"    integers_{number} = {text}" for number, text in enumerate(call.integers))
    yield "    args = (" + "".join(f"{text}, " for text in call.args).strip() + ")"
    yield "    kwargs = {" + ("" if call.kwargs else "}")
    if call.kwargs:
        yield from (f"        {name!r}: {text}," for name, text in call.kwargs.items())
        yield "    }"
    yield "    return args, kwargs"
