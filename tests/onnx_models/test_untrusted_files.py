"""ONNX files that a stranger may have made: each is refused in one line that names the file, in
bounded time and memory, and nothing outside of its folder is read or written; or it is legal, and
means what onnx says."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hostile_onnx_graphs
import numpy as np
import onnx
import pytest
from hostile_onnx_files import LEGAL, REFUSED, Make, W, a_file_beside, base
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from onward import TrainingSession
from onward.errors import OnwardError

SECONDS = 30.0  # generous: a refusal takes far below one
MEMORY = 400 << 20  # bytes beyond those of the file
LINUX = sys.platform == "linux"
assert "a_long_chain" in LEGAL, hostile_onnx_graphs.__doc__  # its rows are in the table


_OPENED: list[str] = []
_watching = False


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if _watching and event == "open" and isinstance(args[0], (str, bytes)):
        _OPENED.append(os.fsdecode(args[0]))


sys.addaudithook(_heard)


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Asserts that what runs within opens no file near the folder, and writes none."""
    global _watching
    before = {p: p.lstat().st_mtime_ns for p in folder.parent.rglob("*")}
    _OPENED.clear()
    _watching = True
    try:
        yield
    finally:
        _watching = False
    near = [p for p in _OPENED if p.startswith(str(folder.parent)) or p.startswith(("/dev", ".."))]
    assert all(Path(os.path.normpath(p)).is_relative_to(folder) for p in near), near
    assert {p: p.lstat().st_mtime_ns for p in folder.parent.rglob("*")} == before


def written(tmp_path: Path, make: Make) -> tuple[Path, int]:
    """The path of a model in a folder with a canary beside it, and the size of its file."""
    folder, outside = tmp_path / "model", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "canary.bin").write_bytes(W.tobytes())
    made = make(folder)
    path = folder / "model.onnx"
    if made is not None:
        path.write_bytes(made if isinstance(made, bytes) else made.SerializeToString())
    return path, path.stat().st_size


def peak(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return 0


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", REFUSED)
def test_each_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    make, said = REFUSED[name]
    path, size = written(tmp_path, make)
    if LINUX:
        Path("/proc/self/clear_refs").write_text("5")
    before, start = peak("VmRSS") if LINUX else 0, time.process_time()
    with watched(path.parent), pytest.raises(OnwardError) as caught:
        TrainingSession(path)
    assert time.process_time() - start < SECONDS
    if LINUX:
        assert peak("VmHWM") - before < MEMORY + 3 * min(size, 1 << 30)
    text = str(caught.value)
    assert text.isprintable() and len(text) <= 500 and str(path) in text, text
    assert said in text, text
    for word in ("KeyError", "RecursionError", "MemoryError", "struct.error", "Traceback"):
        assert word not in text


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LEGAL)
def test_what_is_legal_means_what_onnx_says(name: str, tmp_path: Path) -> None:
    path, _ = written(tmp_path, LEGAL[name])
    with watched(path.parent):
        session = TrainingSession(path)
    x = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    expected: Any = ReferenceEvaluator(onnx.load(path)).run(["y"], {"x": x})[0]  # type: ignore[index]
    found = session.predict({"x": x})["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_same_is_refused_of_a_message_in_memory() -> None:
    """A message has no folder, so that nothing outside of one can be read."""
    model = base()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    with pytest.raises(OnwardError, match=r"lie in another file; fix: give the path"):
        TrainingSession(model)
    for name in ("graph_future_ir", "graph_made_twice", "tensor_huge"):
        make, said = REFUSED[name]
        made = make(Path())
        with pytest.raises(OnwardError) as caught:
            TrainingSession(made)
        assert said in str(caught.value)


def test_links_that_a_user_names_are_followed(tmp_path: Path) -> None:
    path, _ = written(tmp_path, a_file_beside)
    (tmp_path / "linked").symlink_to(path.parent)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "m.onnx").symlink_to(path)
    TrainingSession(tmp_path / "linked" / "model.onnx")
    with pytest.raises(OnwardError, match="cannot be read: No such file"):
        TrainingSession(tmp_path / "alone" / "m.onnx")  # its data would lie beside the link
