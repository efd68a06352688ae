"""What is in the package besides its Python sources."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Writes into each object, and each library, the flags that it was compiled with.
COMPILER = """#!{python}
import sys, pathlib
args = sys.argv[1:]
out = pathlib.Path(args[args.index("-o") + 1])
if "-c" in args:
    flags = " ".join(a for a in args if a.startswith("-m"))
    with open(r"{log}", "a") as log:
        log.write(f"{{out}}\\n")
    out.write_text(f"{{pathlib.Path(args[args.index('-c') + 1]).name}}: {{flags}}\\n")
else:
    out.write_text("".join(pathlib.Path(a).read_text() for a in args if a.endswith(".o")))
"""


def test_files_that_are_not_python_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks setuptools what it would copy."""
    dist = pytest.importorskip("setuptools.dist")
    monkeypatch.chdir(ROOT)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "Typing :: Typed" in project["classifiers"]
    distribution = dist.Distribution({"src_root": str(ROOT)})
    distribution.parse_config_files()
    command = distribution.get_command_obj("build_py")
    command.ensure_finalized()
    copied = {package: {Path(name).name for name in names} for package, _, _, names in (
        command.data_files
    )}  # fmt: skip
    assert copied["onward"] == {"py.typed"}
    sources = {path.name for path in ROOT.glob("src/onward/kernels/native/src/*")}
    assert copied["onward.kernels.native.src"] == sources


def test_a_source_distribution_has_what_is_read_at_run_time(tmp_path: Path) -> None:
    """The native kernels' sources: built of, read by signatures.py, compared by their digest."""
    pytest.importorskip("setuptools")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)],
        cwd=ROOT, check=True,
    )  # fmt: skip
    listed = set((tmp_path / "onward.egg-info" / "SOURCES.txt").read_text().splitlines())
    sources = ROOT.glob("src/onward/kernels/native/src/*")
    assert {str(path.relative_to(ROOT)) for path in sources} <= listed


def test_levels_that_compile_side_by_side_do_not_share_an_object(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    log, compiler = tmp_path / "objects.txt", tmp_path / "c++"
    compiler.write_text(COMPILER.format(python=sys.executable, log=log))
    compiler.chmod(0o755)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--force", "--parallel", "3",
         "--build-temp", str(tmp_path / "temp"), "--build-lib", str(tmp_path / "lib")],
        cwd=ROOT, check=True, env=os.environ | {"CC": str(compiler), "CXX": str(compiler)},
    )  # fmt: skip
    objects = log.read_text().split()
    assert len(objects) == len(set(objects)), "two levels wrote the same object"
    sources = sorted(path.name for path in ROOT.glob("src/onward/kernels/native/src/*.cpp"))
    libraries = {path.name.partition(".")[0]: path for path in (tmp_path / "lib").rglob("*.so")}
    assert "plain" in libraries
    flags = {"plain": "", "avx2": "-march=x86-64-v3", "avx512": "-march=x86-64-v4"}
    for level, path in libraries.items():
        lines = path.read_text().splitlines()
        assert sorted(line.partition(":")[0] for line in lines) == sources
        assert all(flags[level] in line for line in lines)
        assert level != "plain" or not any("-march" in line for line in lines)
