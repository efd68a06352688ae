"""What is in a release: the source distribution, the wheels' names, a package without kernels."""

from __future__ import annotations

import email
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_a_source_distribution_has_all_that_is_tracked(tmp_path: Path) -> None:
    """Docs, tests and examples as well; git is the oracle."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip("not a checkout")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)],
        cwd=ROOT, check=True,
    )  # fmt: skip
    listed = set((tmp_path / "onward.egg-info" / "SOURCES.txt").read_text().splitlines())
    wanted = {name for name in tracked.stdout.split("\0") if name and (ROOT / name).exists()}
    assert wanted - listed == set()
    assert {name for name in listed if re.search(r"\.(so|pyc|pyo)$|__pycache__", name)} == set()


def tree(folder: Path) -> Path:
    """A copy of the package's settings with one small module of C++; its folder of kernels."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    native = folder / "src" / "onward" / "kernels" / "native"
    (native / "src").mkdir(parents=True)
    for package in (native, native.parent, native.parent.parent):
        (package / "__init__.py").touch()
    (native.parent.parent / "py.typed").touch()
    (native / "src" / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    return native


def wheel(folder: Path, **variables: str) -> Path:
    """The wheel that setup.py makes of a `tree`."""
    tree(folder)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(folder / "dist")],
        cwd=folder, check=True, capture_output=True, env=os.environ | variables,
    )  # fmt: skip
    (made,) = (folder / "dist").glob("*.whl")
    return made


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are compiled on Linux alone")
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_one_wheel_serves_every_python_of_a_platform(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77.0.3")
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    first, second = (wheel(path, SOURCE_DATE_EPOCH="1750000000") for path in paths)
    assert re.fullmatch(r"onward-[\d.]+-cp311-abi3-linux_\w+\.whl", first.name)
    with zipfile.ZipFile(first) as archive:
        names = set(archive.namelist())
        levels = {Path(name).name for name in names if name.endswith(".so")}
        metadata = next(name for name in names if name.endswith("METADATA"))
        told = email.message_from_bytes(archive.read(metadata))
    wanted = {"plain"} if platform.machine() != "x86_64" else {"plain", "avx2", "avx512"}
    assert levels == {f"{level}.abi3.so" for level in wanted}
    assert "onward/py.typed" in names and told["Name"] == "onward"
    assert first.read_bytes() == second.read_bytes(), "of two folders, two wheels"


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are compiled on Linux alone")
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_build_in_place_leaves_one_library_of_a_level(tmp_path: Path) -> None:
    """Checkouts have libraries by the names that one Python's builds had."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    native = tree(tmp_path)
    (native / "plain.cpython-311-x86_64-linux-gnu.so").write_text("of before")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--levels", "plain"],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    assert [path.name for path in native.glob("*.so")] == ["plain.abi3.so"]


def test_without_kernels_one_wheel_serves_every_platform(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77.0.3")
    made = wheel(tmp_path, ONWARD_NATIVE="0")
    assert made.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(made) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are compiled on Linux alone")
def test_a_release_is_not_made_without_its_kernels(tmp_path: Path) -> None:
    """Elsewhere a compiler that fails costs the kernels and nothing else."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    compiler = {"CC": str(broken), "CXX": str(broken)}
    for name in "ab":
        (tmp_path / name).mkdir()
    with zipfile.ZipFile(wheel(tmp_path / "a", **compiler)) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
    with pytest.raises(subprocess.CalledProcessError):
        wheel(tmp_path / "b", **compiler, CIBUILDWHEEL="1")


def test_a_package_without_kernels_trains_where_linux_is_not(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "src" / "onward", tmp_path / "onward",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(HERE / "without_kernels.py")],
        capture_output=True, text=True, cwd=tmp_path, timeout=300,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "ONWARD_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    *told, losses = done.stdout.splitlines()
    (native,) = [line for line in told if line.startswith("native build")]
    assert "there are none for this system yet; installed: nothing" in native
    ours, eager = json.loads(losses)
    assert ours == pytest.approx(eager, rel=1e-5) and eager[-1] < eager[0]
    assert done.stderr.count("native CPU kernels are not available") == 1


def test_wheels_are_built_for_each_python_that_is_promised() -> None:
    """By cibuildwheel's own reading of pyproject.toml, where it is installed."""
    settings: dict[str, Any] = PROJECT["tool"]["cibuildwheel"]
    promised = [
        found[1].replace(".", "")
        for line in PROJECT["project"]["classifiers"]
        if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line))
    ]
    assert settings["build"] == [f"cp{version}-*" for version in promised]
    assert settings["linux"]["archs"] == ["x86_64", "aarch64"]
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    program = shutil.which("cibuildwheel", path=beside)
    if program is None:
        return
    done = subprocess.run(
        [program, "--print-build-identifiers", "--platform", "linux"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert set(done.stdout.split()) == {
        f"cp{version}-manylinux_{arch}" for version in promised for arch in ("x86_64", "aarch64")
    }
