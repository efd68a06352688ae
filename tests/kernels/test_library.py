"""The native library is taken only where it was built of the sources beside it."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onward.errors import OnwardError
from onward.kernels.native import library as native

built = pytest.mark.skipif(not native.library(), reason="no native library on this machine")


@built
def test_a_library_of_other_sources_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    build: Callable[[str], None],
) -> None:
    monkeypatch.delenv("ONWARD_NATIVE_FOLDER", raising=False)
    build("")
    assert native.library() is not None
    monkeypatch.setattr(native, "sources_digest", lambda: "0" * 64)
    build("")
    with caplog.at_level(logging.WARNING, "onward"):
        assert native.library() is None
    assert "built from other sources; fix: reinstall" in caplog.text


@built
def test_builds_of_another_folder_are_taken_where_they_are_named(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[str], None], tmp_path: Path
) -> None:
    (plain,) = (native.files()[level] for level in native.usable() if level == "plain")
    shutil.copy(plain, tmp_path / plain.name)
    monkeypatch.setenv("ONWARD_NATIVE_FOLDER", str(tmp_path))
    build("")
    found = native.library()
    assert found is not None and found.path == tmp_path / plain.name
    assert native.built() == native.usable() == ["plain"]
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    (tmp_path / plain.name).unlink()
    build("")
    with pytest.raises(OnwardError, match=r"ONWARD_NATIVE_FOLDER=.* cannot be loaded .*fix: "):
        native.library()


def test_the_digest_follows_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    for name in ("a.cpp", "b.h"):
        (tmp_path / "src" / name).write_text("one")
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    seen = {native.sources_digest()}
    (tmp_path / "src" / "b.h").write_text("two")
    seen.add(native.sources_digest())
    (tmp_path / "src" / "c.cpp").write_text("")
    seen.add(native.sources_digest())
    assert len(seen) == 3


ANOTHER_RUNTIME = """
import ctypes, sys, torch
ctypes.CDLL(sys.argv[1]).omp_get_max_threads()
from onward.kernels.native.library import about, openmp_runtimes
assert len(openmp_runtimes()) == 2, openmp_runtimes()
print(about())
"""


@built
def test_another_package_s_runtime_does_not_cost_the_kernels(tmp_path: Path) -> None:
    """A second OpenMP runtime, such as scikit-learn's, which transformers imports where it is
    installed, leaves the native kernels usable."""
    runtime = native.openmp_runtimes()[0]
    copy = tmp_path / "libgomp-0123.so"
    shutil.copy(runtime, copy)
    command = [sys.executable, "-c", ANOTHER_RUNTIME, str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.startswith("none"), done.stdout


@built
def test_kernels_on_another_runtime_than_torch_s_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[str], None]
) -> None:
    monkeypatch.setattr(native, "openmp_runtimes", lambda: ["libgomp.so.1", "libomp.so"])
    build("")
    assert native.library() is not None
    assert torch.get_num_threads() == 1, "asked and put back"
    monkeypatch.setattr(native, "shares_threads", lambda: False)
    monkeypatch.delenv("ONWARD_NATIVE_FOLDER", raising=False)  # a folder asked for is an error then
    build("")
    assert native.library() is None
    assert "2 OpenMP runtimes" in native.about()


def test_tests_choose_kernels_by_the_fixture() -> None:
    """The library is chosen once in a process: the variable alone would change nothing."""
    tests = Path(__file__).parents[1]
    alone = [
        str(path.relative_to(tests))
        for path in sorted(tests.rglob("test_*.py"))
        if re.search(r'setenv\(\s*"ONWARD_NATIVE"', text := path.read_text(encoding="utf-8"))
        and "cache_clear()" not in text
        and "build(" not in text
    ]
    assert alone == []
