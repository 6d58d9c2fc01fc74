"""The list of packages; everything else about the distribution is in pyproject.toml.

`kernels/` is installed as `tune_jax.kernels`, and `packages.find` of pyproject.toml cannot find what is in a
folder that is installed under another name.
"""

from __future__ import annotations

from setuptools import find_packages, setup

ROOTS = {"tune_jax": "tune_jax", "tune_jax.kernels": "kernels"}

setup(
    package_dir=ROOTS,
    packages=[
        package
        for name, folder in ROOTS.items()
        for package in [name, *(f"{name}.{found}" for found in find_packages(folder))]
    ],
)
