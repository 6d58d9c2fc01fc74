"""The wheel holds the tree, and an editable install points at it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD_FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in")
INSTALLED_AS = {"tune_jax": "tune_jax", "kernels": "tune_jax/kernels"}
DATA_PATTERNS = ("*.py", "py.typed", "tuned/*.json")
OLDEST_SETUPTOOLS = 77  # the first that knows SPDX licence expressions
SMALL_TREE = (
    "tune_jax/__init__.py",
    "tune_jax/py.typed",
    "tune_jax/_measure/__init__.py",
    "tune_jax/_measure/xplane.py",
    "kernels/__init__.py",
    "kernels/attention/__init__.py",
    "kernels/attention/mosaic_gpu/__init__.py",
    "kernels/attention/mosaic_gpu/forward.py",
    "kernels/attention/tuned/h200.json",
)


def _installed_setuptools() -> int:
    if importlib.util.find_spec("setuptools") is None:
        return 0
    return int(importlib.metadata.version("setuptools").split(".")[0])


needs_setuptools = pytest.mark.skipif(
    _installed_setuptools() < OLDEST_SETUPTOOLS, reason=f"builds with setuptools >= {OLDEST_SETUPTOOLS}"
)


def _run_python(*arguments: str, cwd: pathlib.Path) -> str:
    run = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def _build(hook: str, tree: pathlib.Path, folder: pathlib.Path) -> zipfile.ZipFile:
    """Build a wheel of `tree` by the named hook of setuptools, with no network and no frontend."""
    folder.mkdir()
    _run_python("-c", f"from setuptools.build_meta import {hook} as h; h({str(folder)!r})", cwd=tree)
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


def _copy_build_files(tree: pathlib.Path) -> None:
    tree.mkdir()
    for name in BUILD_FILES:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree)


def _copy_tree(tree: pathlib.Path) -> pathlib.Path:
    """A copy without leftovers: setuptools would ship modules that an earlier build left in `build/`."""
    _copy_build_files(tree)
    for folder in INSTALLED_AS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


def _small_tree(tree: pathlib.Path) -> pathlib.Path:
    _copy_build_files(tree)
    for name in SMALL_TREE:
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tree


def _expected_files(tree: pathlib.Path) -> set[str]:
    return {
        f"{installed}/{path.relative_to(tree / folder)}"
        for folder, installed in INSTALLED_AS.items()
        for pattern in DATA_PATTERNS
        for path in (tree / folder).rglob(pattern)
    }


def _package_files(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    return _build("build_wheel", _copy_tree(folder / "tree"), folder / "dist")


@needs_setuptools
def test_wheel_holds_every_file_of_the_tree_and_no_other(wheel):
    assert _package_files(wheel) == _expected_files(ROOT)


@needs_setuptools
def test_wheel_installs_no_top_level_kernels(wheel):
    assert {name.split("/")[0] for name in _package_files(wheel)} == {"tune_jax"}


@needs_setuptools
def test_wheel_carries_the_licence_and_its_spdx_name(wheel):
    names = wheel.namelist()
    metadata = wheel.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@needs_setuptools
def test_packages_and_tables_added_later_are_shipped(tmp_path):
    wheel = _build("build_wheel", _small_tree(tmp_path / "tree"), tmp_path / "dist")
    shipped = {name.replace("kernels/", "tune_jax/kernels/", 1) for name in SMALL_TREE}
    assert _package_files(wheel) == shipped


IMPORT_AFTER_EDITABLE = """
import importlib, importlib.util, json, pathlib, site, sys
tree, site_folder = map(pathlib.Path, sys.argv[1:])
site.addsitedir(str(site_folder))
import tune_jax.kernels.attention.mosaic_gpu.forward as forward, tune_jax._measure.xplane as xplane
(tree / "kernels" / "grouped").mkdir()
(tree / "kernels" / "grouped" / "__init__.py").touch()
(tree / "tune_jax" / "_added.py").touch()
importlib.invalidate_caches()
import tune_jax.kernels.grouped as grouped, tune_jax._added as added
print(json.dumps({
    "files": [module.__file__ for module in (forward, xplane, grouped, added)],
    "top_level_kernels": importlib.util.find_spec("kernels") is not None,
}))
"""


@needs_setuptools
def test_editable_install_points_at_both_folders_and_sees_new_files(tmp_path):
    tree = _small_tree(tmp_path / "tree")
    site_folder = tmp_path / "site"
    _build("build_editable", tree, tmp_path / "dist").extractall(site_folder)
    answer = _run_python("-I", "-S", "-c", IMPORT_AFTER_EDITABLE, str(tree), str(site_folder), cwd=tmp_path)
    seen = json.loads(answer)
    assert [pathlib.Path(name).relative_to(tree).as_posix() for name in seen["files"]] == [
        "kernels/attention/mosaic_gpu/forward.py",
        "tune_jax/_measure/xplane.py",
        "kernels/grouped/__init__.py",
        "tune_jax/_added.py",
    ]
    assert not seen["top_level_kernels"]


def test_every_folder_with_modules_is_a_package():
    modules = [path for folder in INSTALLED_AS for path in (ROOT / folder).rglob("*.py")]
    bare = {path.parent for path in modules if not (path.parent / "__init__.py").exists()}
    assert bare == set()


def test_kernel_folders_do_not_hide_the_functions_they_hold():
    import tune_jax.kernels

    folders = {path.name for path in (ROOT / "kernels").iterdir() if path.is_dir()}
    assert folders.isdisjoint(tune_jax.kernels.__all__)
    for name in tune_jax.kernels.__all__:
        assert callable(getattr(tune_jax.kernels, name)), name


def test_installed_version_is_the_one_of_pyproject():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert importlib.metadata.version("tune-jax") == declared
