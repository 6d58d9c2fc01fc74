"""What the benchmarks share: fresh processes, reports as JSON, and who ran where."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]


def run_worker(
    script: str, arguments: Sequence[str], environment: Mapping[str, str], *, timeout_s: float
) -> dict[str, Any]:
    """Run a benchmark's script as a worker in a process of its own and return the JSON object that it writes.

    Raises:
      RuntimeError: it failed, or took too long; with the last lines that it printed.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        answer = pathlib.Path(folder, "answer.json")
        command = [sys.executable, script, *arguments, "--worker-out", str(answer)]
        # An empty folder as the working directory: nothing in it can be imported instead of an installed package.
        code, printed = _run(command, environment, folder, timeout_s)
        if code or not answer.exists():
            last = "\n".join(printed.splitlines()[-25:])
            raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{last}")
        return json.loads(answer.read_text())


def _run(command: Sequence[str], environment: Mapping[str, str], folder: str, timeout_s: float) -> tuple[Any, str]:
    log = pathlib.Path(folder, "log")
    # Into a file, not a pipe: what a process printed before it was stopped is then still there.
    with log.open("w") as stream:
        try:
            code: Any = subprocess.run(
                command, env=dict(environment), cwd=folder, stdout=stream, stderr=stream, timeout=timeout_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"no answer in {timeout_s:g} s"
    return code, log.read_text(errors="replace")


def cold_environment() -> dict[str, str]:
    """This process's environment with every cache of compiled programs turned off."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    return environment | {"JAX_ENABLE_COMPILATION_CACHE": "false", "CUDA_CACHE_DISABLE": "1"}


def describe_host() -> dict[str, Any]:
    """Versions and cores; does not import jax, which would take the accelerator's memory from the workers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"python": platform.python_version(), "jax": importlib.metadata.version("jax"), "cores": cores}


def write_report(path: str | None, report: Mapping[str, Any]) -> None:
    """Write the full numbers as JSON where a file was asked for."""
    if path is not None:
        pathlib.Path(path).write_text(json.dumps(report, indent=2, default=str) + "\n")


def verdict(ratio: float, limit: float) -> str:
    """Say whether a ratio is within its limit."""
    return f"{ratio:.4f} (at most {limit:g}: {'met' if ratio <= limit else 'MISSED'})"
