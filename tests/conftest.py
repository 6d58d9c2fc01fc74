"""Settings of the whole test run; importing this file comes before any import of jax."""

from __future__ import annotations

import os

import hypothesis
import pytest

HOST_DEVICES = 8


def _ask_for_host_devices() -> None:
    """Split the CPU into several devices, for the tests on meshes; a count that the caller set stays."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={HOST_DEVICES}".strip()


_ask_for_host_devices()

# The first example of a test often compiles, so a deadline for one example says nothing.
hypothesis.settings.register_profile("house", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("house")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import jax

        if jax.default_backend() != "gpu":
            pytest.skip("needs a GPU")
