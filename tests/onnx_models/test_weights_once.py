"""A model's weights are in memory once, as the parameters; files are read and written a tensor at a
time, and keep their layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_files import Words, exported, words_file

import onward
from onward import TrainingSession, loss
from onward.errors import OnwardError
from onward.onnx_models import conversion, layout, light, skeleton

MEASURE = """
import json, sys
from pathlib import Path
import numpy as np
from onward import TrainingSession
import onward.onnx_models, onward.train

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(name + ":")) << 10

before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
session = TrainingSession(sys.argv[1])
opened = memory("VmHWM") - before
session.predict({"x": np.ones((2, 2048), np.float32)})
Path("/proc/self/clear_refs").write_text("5")
rest = memory("VmRSS") - before
session.predict({"x": np.ones((2, 2048), np.float32)})
predicted = memory("VmHWM") - before
Path("/proc/self/clear_refs").write_text("5")
session.export_onnx(sys.argv[2])
print(json.dumps([opened, rest, predicted, memory("VmHWM") - before]))
"""


def layers(count: int, width: int) -> onnx.ModelProto:
    """Products and biases."""
    nodes, held, draw = [], [], np.random.default_rng(0)
    x = "x"
    for i in range(count):
        w = draw.standard_normal((width, width)).astype(np.float32) / width
        held.append(numpy_helper.from_array(w, f"layer.{i}.weight"))
        held.append(numpy_helper.from_array(np.ones(width, np.float32), f"layer.{i}.bias"))
        nodes.append(helper.make_node("MatMul", [x, f"layer.{i}.weight"], [f"m{i}"]))
        nodes.append(helper.make_node("Add", [f"m{i}", f"layer.{i}.bias"], [f"y{i}"]))
        x = f"y{i}"
    ends = [helper.make_tensor_value_info(n, 1, ["B", width]) for n in ("x", x)]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def feeds(seed: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(seed).integers(0, 50, (4, 7))
    return {"ids": ids, "labels": np.roll(ids, 1, 1)}


def trained(path: Path) -> TrainingSession:
    session = TrainingSession(path, onward.optim.SGD(lr=0.1), loss.cross_entropy("logits"))
    session.step(feeds(0))
    return session


def save_beside(model: onnx.ModelProto, path: Path, location: str = "data.bin") -> None:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    onnx.save(copy, path, save_as_external_data=True, location=location, size_threshold=0)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("beside", [True, False])
def test_the_peak_is_little_more_than_the_weights(beside: bool, tmp_path: Path) -> None:
    model, path = layers(8, 2048), tmp_path / "model.onnx"
    if beside:
        save_beside(model, path)
    else:
        onnx.save(model, path)
    (tmp_path / "new").mkdir()
    command = [sys.executable, "-c", MEASURE, str(path), str(tmp_path / "new" / "model.onnx")]
    said = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    opened, *predicted, exported_too = json.loads(said)
    weights = 8 * 4 * (2048 * 2048 + 2048)
    assert 0.9 * weights < opened < 1.15 * weights + (8 << 20)
    # what a first prediction imports has its place, a second copy of the weights has none
    assert max(predicted) < 1.4 * weights + (8 << 20)
    if beside:  # a file with its weights inside is written as one message
        assert exported_too < 1.15 * weights + (48 << 20)


@pytest.mark.parametrize("location", ["data.bin", "sub.bin"])
def test_files_beside_keep_their_names_and_places(location: str, tmp_path: Path) -> None:
    path, new = tmp_path / "model.onnx", tmp_path / "new" / "other.onnx"
    save_beside(words_file(), path, location)
    new.parent.mkdir()
    session = TrainingSession(path, onward.optim.SGD(lr=0.1), loss.cross_entropy("logits"))
    session.export_onnx(tmp_path / "new" / "same.onnx")
    assert (new.parent / "same.onnx").read_bytes() == path.read_bytes(), "nothing is trained yet"
    assert (new.parent / location).read_bytes() == (tmp_path / location).read_bytes()
    with pytest.raises(OnwardError, match=rf"{location}' exists; fix: name a model in a new"):
        session.export_onnx(new)
    assert not new.exists()
    (new.parent / location).unlink()
    session.step(feeds(0))
    made = session.export_onnx(new)
    assert made.SerializeToString() == new.read_bytes() == path.read_bytes()
    assert sorted(p.name for p in new.parent.iterdir()) == sorted(["same.onnx", new.name, location])
    before, after = onnx.load(path), onnx.load(new)
    weights, changed = session.state_dict(), set()
    for a, b in zip(before.graph.initializer, after.graph.initializer, strict=True):
        if a.raw_data != b.raw_data:
            changed.add(a.name)
            np.testing.assert_array_equal(numpy_helper.to_array(b), weights[a.name])
    assert changed == set(weights)
    found: Any = onnxruntime.InferenceSession(new).run(None, {"ids": feeds(1)["ids"]})[0]
    predicted = session.predict({"ids": feeds(1)["ids"]})["logits"]
    np.testing.assert_allclose(predicted, found, rtol=1e-4, atol=1e-5)


def test_a_model_in_memory_is_the_file(tmp_path: Path) -> None:
    """Losses and the file are the same, whatever the weights lie in."""
    model, found = words_file(), []
    onnx.save(model, tmp_path / "one.onnx")
    save_beside(model, tmp_path / "two.onnx")
    for given in (model, tmp_path / "one.onnx", tmp_path / "two.onnx"):
        session = TrainingSession(given, onward.optim.SGD(lr=0.1), loss.cross_entropy("logits"))
        losses = [session.step(feeds(i)).loss for i in range(2)]
        whole = session.export_onnx()
        for tensor in whole.graph.initializer:
            tensor.ClearField("data_location")
        found.append((losses, whole.SerializeToString()))
    assert found[0] == found[1] == found[2]


def test_every_tensor_may_be_left_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that are small are left there too, and those of bodies and attributes."""
    model = words_file()
    body = onnx.parser.parse_graph(
        "b () => (float[8] p) <float[8] k = {1,2,3,4,5,6,7,8}> { p = Exp (k) }"
    )
    array = numpy_helper.from_array(np.arange(6, dtype=np.int64), "")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["whole"], value=array))
    array = numpy_helper.from_array(np.ones((3, 2), np.float32), "inner")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["weight"], value=array))
    held = numpy_helper.from_array(np.array(True), "always")
    held.data_location = TensorProto.DEFAULT  # said, though it goes without saying
    model.graph.initializer.append(held)
    node = helper.make_node("If", ["always"], ["chosen"], then_branch=body, else_branch=body)
    model.graph.node.append(node)
    for graph in (a.g for a in model.graph.node[-1].attribute):
        graph.initializer[0].CopyFrom(numpy_helper.from_array(np.arange(8, dtype=np.float32), "k"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    for part in (skeleton, light):
        monkeypatch.setattr(part, "LARGE", 1)
    session = TrainingSession(path, onward.optim.SGD(lr=0.1), loss.cross_entropy("logits"))
    left = session.source.given.graph.initializer
    assert all(t.data_location == TensorProto.EXTERNAL for t in left)
    assert session.export_onnx() == model
    assert session.export_onnx(tmp_path / "same.onnx") == model
    assert (tmp_path / "same.onnx").read_bytes() == path.read_bytes()
    given = TrainingSession(model, onward.optim.SGD(lr=0.1), loss.cross_entropy("logits"))
    assert session.step(feeds(0)).loss == given.step(feeds(0)).loss
    assert session.export_onnx().SerializeToString() == given.export_onnx().SerializeToString()


def test_weights_too_large_for_one_file_lie_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "LARGEST", 5000)
    monkeypatch.setattr(skeleton, "LARGE", 64)
    onnx.save(words_file(), tmp_path / "model.onnx")
    session = trained(tmp_path / "model.onnx")
    session.export_onnx(tmp_path / "new.onnx")
    assert (tmp_path / "new.onnx.data").stat().st_size > 5000
    made = onnx.load(tmp_path / "new.onnx")
    weights = session.state_dict()
    own = {t.name: t for t in made.graph.initializer if t.name in weights}
    assert own.keys() == weights.keys()
    for name, tensor in own.items():
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), weights[name])


def test_weights_that_shared_a_place_get_one_each(tmp_path: Path) -> None:
    """Two weights that are equal in a file are not so after training."""
    model = layers(2, 8)
    for name in (0, 1):
        model.graph.initializer[2 * name].CopyFrom(
            numpy_helper.from_array(np.eye(8, dtype=np.float32), f"layer.{name}.weight")
        )
    save_beside(model, tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    second = model.graph.initializer[2]
    second.ClearField("external_data")
    second.external_data.extend(model.graph.initializer[0].external_data)
    second.external_data.add(key="checksum", value="stale")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    session = TrainingSession(tmp_path / "model.onnx", onward.optim.SGD(lr=0.5), loss.mse("y1"))
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    session.step({"x": x, "labels": np.zeros((4, 8), np.float32)})
    (tmp_path / "new").mkdir()
    session.export_onnx(tmp_path / "new" / "model.onnx")
    weights = session.state_dict()
    assert not np.array_equal(weights["layer.0.weight"], weights["layer.1.weight"])
    for tensor in onnx.load(tmp_path / "new" / "model.onnx").graph.initializer:
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), weights[tensor.name])


def test_nothing_that_exists_is_written_to(tmp_path: Path) -> None:
    """A link counts as what exists, wherever it leads."""
    (tmp_path / "given").mkdir()
    save_beside(words_file(), tmp_path / "given" / "model.onnx")
    session = trained(tmp_path / "given" / "model.onnx")
    with pytest.raises(OnwardError, match="exists"):
        session.export_onnx(tmp_path / "given" / "model.onnx")
    with pytest.raises(OnwardError, match="exists"):
        session.export_onnx(tmp_path / "given" / "second.onnx")  # of the same data.bin
    for name, target in (("model.onnx", "a"), ("data.bin", "b")):
        folder = tmp_path / f"linked_{target}"
        folder.mkdir()
        (folder / name).symlink_to(tmp_path / f"nowhere_{target}")
        with pytest.raises(OnwardError, match="exists"):
            session.export_onnx(folder / "model.onnx")
        assert len(list(folder.iterdir())) == 1 and not (tmp_path / f"nowhere_{target}").exists()
    with pytest.raises(OnwardError, match="cannot write"):
        session.export_onnx(tmp_path / "no" / "folder.onnx")


@pytest.mark.parametrize("largest", [1 << 30, 100], ids=["one file", "data beside"])
def test_a_single_file_appears_whole_or_not_at_all(
    largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk is full, nothing is left, and a second try succeeds."""
    monkeypatch.setattr("onward.training_session.session.LARGEST", largest)
    session, path = TrainingSession(words_file()), tmp_path / "words.onnx"
    saves = onnx.save

    def full(model: onnx.ModelProto, target: Path, **options: Any) -> None:
        saves(model, target, **options)
        target.write_bytes(target.read_bytes()[:100])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(onnx, "save", full)
        with pytest.raises(OnwardError, match=r"cannot write .*words.onnx': No space left"):
            session.export_onnx(path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OnwardError, match=r"cannot write .*: its folder is not there; fix: create"):
        session.export_onnx(tmp_path / "no" / "words.onnx")
    if largest == 100:
        (tmp_path / "words.onnx.data").write_text("mine")
        with pytest.raises(OnwardError, match=r"words.onnx.data' exists"):
            session.export_onnx(path)
        (tmp_path / "words.onnx.data").unlink()
    session.export_onnx(path)
    assert len(list(tmp_path.iterdir())) == (2 if largest == 100 else 1)
    weights = session.state_dict()
    for tensor in onnx.load(path).graph.initializer:
        if tensor.name in weights:
            np.testing.assert_array_equal(numpy_helper.to_array(tensor), weights[tensor.name])


def test_a_folder_of_weights_is_made_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "given" / "sub").mkdir(parents=True)
    save_beside(words_file(), tmp_path / "given" / "model.onnx")
    model = onnx.load(tmp_path / "given" / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        next(e for e in tensor.external_data if e.key == "location").value = "sub/data.bin"
    (tmp_path / "given" / "model.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "given" / "data.bin").rename(tmp_path / "given" / "sub" / "data.bin")
    session = trained(tmp_path / "given" / "model.onnx")
    (tmp_path / "new").mkdir()
    session.export_onnx(tmp_path / "new" / "model.onnx")
    assert (tmp_path / "new" / "sub" / "data.bin").is_file()
    for name in ("linked", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "linked" / "sub").symlink_to("../elsewhere")
    with pytest.raises(OnwardError, match="is no folder"):
        session.export_onnx(tmp_path / "linked" / "model.onnx")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_files_that_have_changed_are_not_mixed_with_what_was_read(tmp_path: Path) -> None:
    save_beside(words_file(), tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    extra = numpy_helper.from_array(np.arange(9, dtype=np.int64), "unused")
    model.graph.initializer.append(extra)
    (tmp_path / "data.bin").unlink()
    save_beside(model, tmp_path / "model.onnx")
    session = trained(tmp_path / "model.onnx")
    os.utime(tmp_path / "data.bin", (1, 1))
    (tmp_path / "new").mkdir()
    with pytest.raises(OnwardError, match="has changed since it was opened"):
        session.export_onnx(tmp_path / "new" / "model.onnx")
    assert not list((tmp_path / "new").iterdir())


# ---- onnx's converter


def test_an_ordinary_model_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a process")

    monkeypatch.setattr(subprocess, "run", started)
    for opset in (13, 17):
        file = exported(Words(), {"ids": torch.zeros(2, 5, dtype=torch.int64)}, ["y"], opset=opset)
        TrainingSession(file)


def old(tmp_path: Path) -> Path:
    """A model of opset 11, whose weights are beside it."""
    text = """<ir_version: 8, opset_import: ["" : 11]>
    m (float[B, 8] x) => (float[B, 4] y) { u = Unsqueeze <axes = [0]> (x) r = MatMul (u, w)
        y = Squeeze <axes = [0]> (r) }"""
    model = onnx.parser.parse_model(text)
    w = np.arange(32, dtype=np.float32).reshape(8, 4)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    save_beside(model, tmp_path / "old.onnx")
    return tmp_path / "old.onnx"


def test_an_old_model_is_converted_without_its_weights(tmp_path: Path) -> None:
    session = TrainingSession(old(tmp_path))
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    expected: Any = onnxruntime.InferenceSession(old(tmp_path)).run(None, {"x": x})[0]
    np.testing.assert_allclose(session.predict({"x": x})["y"], expected, rtol=1e-5)
    assert session.inputs == {"x": "f32[B,8]"}


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os; os.abort()", "it ends with -6"),
        ("import time; time.sleep(60)", "takes more than"),
        ("import sys; sys.stderr.write('a\\nb' * 999); sys.exit(3)", "a ba b"),
        ("import sys; sys.stdout.write('no model')", "gives no model"),
    ],
)
def test_a_converter_that_dies_is_a_refusal(
    program: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "child.py").write_text(program)
    monkeypatch.setattr(conversion, "CHILD", tmp_path / "child.py")
    if "sleep" in program:
        monkeypatch.setattr(conversion, "SECONDS", 2)
    path = old(tmp_path)
    with pytest.raises(OnwardError) as caught:
        TrainingSession(path)
    text = str(caught.value)
    assert said in text and text.isprintable() and len(text) <= 500, text


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory")
def test_the_converter_has_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = conversion.CHILD.read_text().replace(
        "made = version_converter", "bytearray(3 << 30); made = version_converter"
    )
    (tmp_path / "child.py").write_text(text)
    monkeypatch.setattr(conversion, "CHILD", tmp_path / "child.py")
    with pytest.raises(OnwardError, match="converter: MemoryError"):
        TrainingSession(old(tmp_path))
