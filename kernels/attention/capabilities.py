"""The table of what each backend can do, for the docs, from the rows that decide it."""

from __future__ import annotations

from .backends import BACKENDS, Backend, listed
from .features import FEATURES


def capability_table() -> str:
    """The table in Markdown: a column a backend, a row a device, dtype, feature and hyperparameter.

    Example:
        >>> print(capability_table().splitlines()[0])
        | | `cudnn` | `pallas_tpu` | `pallas_triton` | `xla` |
    """
    backends = sorted(BACKENDS, key=lambda backend: backend.name)
    rows = {
        "": [f"`{backend.name}`" for backend in backends],
        "---": ["---" for _ in backends],
        "runs on": [_devices(backend) for backend in backends],
        "dtypes": [listed(backend.dtypes) for backend in backends],
    }
    for feature in FEATURES:
        rows[feature] = [_yes_or_no(feature not in backend.lacks) for backend in backends]
    rows["hyperparameters"] = [_tiles(backend) for backend in backends]
    return "\n".join(f"| {' | '.join([head, *cells])} |".replace("|  |", "| |") for head, cells in rows.items())


def _devices(backend: Backend) -> str:
    if not backend.platforms:
        return "everything"
    least = f" of compute capability {backend.capability} or later" if backend.capability is not None else ""
    interpreted = "; if named, interpreted on CPUs" if backend.is_interpreted_on_cpu else ""
    return f"{listed([platform.upper() for platform in backend.platforms])}s{least}{interpreted}"


def _tiles(backend: Backend) -> str:
    return ", ".join(f"`{name}`" for name in backend.tiles) or "none"


def _yes_or_no(holds: bool) -> str:
    return "yes" if holds else "no"
