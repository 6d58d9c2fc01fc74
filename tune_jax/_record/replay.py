"""What a recorded script is made of besides the user's own code: stand-ins for what was there when it was recorded."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tune_jax._inputs import make_value
from tune_jax._jax import as_weak

_logger = logging.getLogger("tune_jax")


def random_array(
    shape: tuple[int, ...],
    dtype: Any,
    *,
    seed: int = 0,
    weak_type: bool = False,
    mesh: Mapping[str, int] | None = None,
    spec: tuple[Any, ...] = (),
) -> Any:
    """Make an array of a shape and dtype like one whose values were not recorded, with the data that `tune` makes up.

    It is laid out as `spec` over a mesh of these axis sizes where there are devices enough, else it lies on one.

    Example:
      >>> import jax.numpy as jnp
      >>> random_array((2, 3), jnp.bfloat16).dtype
      dtype(bfloat16)
    """
    value = make_value(jax.ShapeDtypeStruct(shape, dtype), seed=seed)
    if weak_type:
        value = as_weak(value)
    return value if mesh is None else _spread(value, mesh, spec)


def _spread(value: Any, mesh: Mapping[str, int], spec: tuple[Any, ...]) -> Any:
    devices, needed = jax.devices(), math.prod(mesh.values())
    if len(devices) < needed:
        _logger.warning("a mesh %s needs %d devices, and %d are here, so arrays lie on one", mesh, needed, len(devices))
        return value
    grid = jax.sharding.Mesh(np.array(devices[:needed]).reshape(tuple(mesh.values())), tuple(mesh))
    return jax.device_put(value, jax.sharding.NamedSharding(grid, jax.sharding.PartitionSpec(*spec)))


def rebuild(
    made: Any,
    *,
    attributes: Mapping[str, Any] | None = None,
    items: Iterable[Any] = (),
    entries: Mapping[Any, Any] | None = None,
) -> Any:
    """Give an object back what it had: its attributes, a list's items, a dict's entries.

    Example:
      >>> import types
      >>> rebuild(types.SimpleNamespace(), attributes={"width": 3}).width
      3
    """
    for name, value in (attributes or {}).items():
        object.__setattr__(made, name, value)  # works for frozen dataclasses too
    for item in items:
        made.append(item)
    for key, value in (entries or {}).items():
        made[key] = value
    return made


def ensure_pytree(kind: type, data_fields: Sequence[str], meta_fields: Sequence[str]) -> None:
    """Register a dataclass as a pytree, unless it is one.

    Example:
      >>> import dataclasses
      >>> State = dataclasses.make_dataclass("State", ["w", "mode"])
      >>> ensure_pytree(State, ["w"], ["mode"])
      >>> jax.tree.leaves(State(1.0, "train"))
      [1.0]
    """
    with contextlib.suppress(ValueError):
        jax.tree_util.register_dataclass(kind, data_fields=list(data_fields), meta_fields=list(meta_fields))


class Todo:
    """Stands for what could not be recorded; whatever uses it is told what to fill in.

    Example:
      >>> table = Todo("table, a sqlite3.Connection")
      >>> table.execute("select 1")
      Traceback (most recent call last):
      ...
      NotImplementedError: TODO: fill in table, a sqlite3.Connection, which could not be recorded
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._error()

    def __getattr__(self, name: str) -> Any:
        # What looks for protocols, JAX's own among them, must find none, so that a Todo that nothing uses does no harm.
        raise AttributeError(name) if name.startswith("_") else self._error()

    def _refuse(self, *others: Any) -> Any:
        raise self._error()

    # Python looks these up in the class.
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __floordiv__ = __mod__ = __neg__ = __lt__ = __gt__ = _refuse
    __getitem__ = __iter__ = __len__ = __bool__ = __enter__ = __index__ = __float__ = _refuse

    def _error(self) -> NotImplementedError:
        return NotImplementedError(f"TODO: fill in {self._what}, which could not be recorded")


def leave_open(kwargs: Mapping[str, Any], hyperparams: Any) -> dict[str, Any]:
    """Leave out of a call's arguments what is to be tuned, since a value that is given leaves nothing to choose.

    Example:
      >>> leave_open({"x": 1, "block": 64}, {"block": [32, 64]})
      {'x': 1}
    """
    grids = hyperparams if isinstance(hyperparams, list | tuple) else [hyperparams]
    names = {name for grid in grids if isinstance(grid, Mapping) for name in grid}
    return {name: value for name, value in kwargs.items() if name not in names}
