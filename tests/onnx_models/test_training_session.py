"""ONNX models that another tool wrote, trained by a session: beside the torch module that each came
from, and beside stock onnxruntime."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx_files import TRANSFORMERS, Logits, Pooled, Words, exported, padded_tokens
from torch import nn
from torch.nn import functional as F

import onward
from onward import TrainingSession, loss
from onward.errors import CaptureError, OnwardError
from onward.onnx_models import OnnxModule, OnnxSource

STEPS = 6


def words(opset: int = 17, **options: Any) -> tuple[nn.Module, onnx.ModelProto]:
    model = Words(**options)
    return model, exported(model, {"ids": torch.zeros(2, 5, dtype=torch.int64)}, ["logits"],
                           opset=opset)  # fmt: skip


def stepped(model: nn.Module, name: str) -> np.ndarray:
    """A parameter less its gradient, as a step of SGD with a rate of 1 leaves it."""
    parameter = model.get_parameter(name)
    assert parameter.grad is not None
    return (parameter - parameter.grad).detach().numpy()


def ids(seed: int, rows: int = 4, length: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, (rows, length))


def batches(count: int = STEPS) -> list[dict[str, np.ndarray]]:
    """Ids and the ids one further, of two lengths in turn."""
    found = [ids(i, length=7 if i % 2 else 9) for i in range(count)]
    return [{"ids": x, "labels": np.roll(x, 1, 1)} for x in found]


OPTIMIZERS = {
    "adamw": (lambda: onward.optim.AdamW(lr=1e-2), lambda ps: torch.optim.AdamW(ps, lr=1e-2)),
    "sgd": (lambda: onward.optim.SGD(lr=0.1, momentum=0.9),
            lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9)),
}  # fmt: skip


@pytest.mark.parametrize("opset", [13, 17, 20])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_module_it_came_from(name: str, opset: int) -> None:
    model, file = words(opset)
    ours, theirs = OPTIMIZERS[name]
    session = TrainingSession(file, ours(), loss.cross_entropy("logits"))
    optimizer = theirs(model.parameters())
    for batch in batches():
        result = session.step(batch, fetch=["logits"])
        logits = model(torch.from_numpy(batch["ids"]))
        expected = F.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(batch["labels"]).flatten()
        )
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert result.loss == pytest.approx(expected.item(), rel=1e-5)
        np.testing.assert_allclose(result.outputs["logits"], logits.detach(), rtol=1e-4, atol=1e-5)
        assert result.updated and not result.skipped
    weights = session.state_dict()
    np.testing.assert_allclose(
        weights["table.weight"], model.get_parameter("table.weight").detach(), atol=1e-5
    )


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_train_as_their_modules(name: str) -> None:
    """Every step, since a tied table, which such a file has twice, is one weight again; and by the
    same fused ops."""
    torch.manual_seed(0)
    model = TRANSFORMERS[name](0.0)
    tokens = padded_tokens()
    file = exported(Logits(model), tokens, ["logits"])
    session = TrainingSession(
        file, onward.optim.SGD(lr=0.1), loss.cross_entropy("logits", shift=name == "gpt2")
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    labels = tokens["ids"].masked_fill(tokens["mask"] == 0, -100)
    feeds = {**{n: x.numpy() for n, x in tokens.items()}, "labels": labels.numpy()}
    for _ in range(4):
        result = session.step(feeds)
        found = model(input_ids=tokens["ids"], attention_mask=tokens["mask"], labels=labels)
        optimizer.zero_grad()
        found.loss.backward()
        optimizer.step()
        assert result.loss == pytest.approx(found.loss.item(), rel=1e-5)
    ops = {launch.op for launch in session.trainer.plan.launches}
    fused = {"FlashAttention", "FlashAttentionGrad", "LinearCrossEntropyStep", "BiasActivation"}
    assert fused | {"AddLayerNormalization"} <= ops and "MatMul" not in ops
    stock = onnxruntime.InferenceSession(session.export_onnx().SerializeToString())
    given = {n: x.numpy() for n, x in tokens.items()}
    with torch.no_grad():
        expected = model(input_ids=tokens["ids"], attention_mask=tokens["mask"]).logits
    logits: Any = stock.run(None, given)[0]
    np.testing.assert_allclose(logits, expected, atol=1e-4)


LOSSES = {
    "cross_entropy": (
        loss.cross_entropy("y"), lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
        lambda shape: torch.randint(0, 50, shape[:-1]),
    ),
    "smoothed": (
        loss.cross_entropy("y", label_smoothing=0.1, ignore_index=3),
        lambda y, t: F.cross_entropy(
            y.flatten(0, 1), t.flatten(), label_smoothing=0.1, ignore_index=3
        ),
        lambda shape: torch.randint(0, 6, shape[:-1]),
    ),
    "shifted": (
        loss.cross_entropy("y", shift=True),
        lambda y, t: F.cross_entropy(y[:, :-1].flatten(0, 1), t[:, 1:].flatten()),
        lambda shape: torch.randint(0, 50, shape[:-1]),
    ),
    "mse": (loss.mse("y"), F.mse_loss, torch.randn),
    "l1": (loss.l1("y"), F.l1_loss, torch.randn),
    "bce_with_logits": (
        loss.bce_with_logits("y"), F.binary_cross_entropy_with_logits,
        lambda shape: torch.rand(shape).round(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("is_zero", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_and_its_gradient(name: str, is_zero: bool) -> None:
    """One step of SGD moves weights by the gradient. is_zero: of a head that gives zeros."""
    ours, theirs, targets = LOSSES[name]
    model = Words()
    if is_zero:
        for parameter in model.head.parameters():
            nn.init.zeros_(parameter)
    file = exported(model, {"ids": torch.zeros(2, 5, dtype=torch.int64)}, ["y"])
    session = TrainingSession(file, onward.optim.SGD(lr=1.0), ours)
    torch.manual_seed(1)
    x = torch.from_numpy(ids(0))
    target = targets((4, 7, 50))
    y = model(x) * 1.0
    expected = theirs(y, target)
    expected.backward()
    found = session.step({"ids": x.numpy(), "labels": target.numpy()})
    assert found.loss == pytest.approx(expected.item(), rel=1e-5)
    moved = session.state_dict()["head.bias"]
    np.testing.assert_allclose(moved, stepped(model, "head.bias"), atol=1e-6)


def test_every_loss_is_tried() -> None:
    made = {n for n in loss.__all__ if n.islower()}
    written = {"function"}  # test_written_loss.py
    assert made == {*LOSSES, "contrastive"} - {"smoothed", "shifted"} | written


def test_negatives_of_a_batch() -> None:
    model = Pooled()
    a, b = (torch.from_numpy(ids(i)) for i in (0, 1))
    file = exported(model, {"a": a, "b": b}, ["left", "right"])
    session = TrainingSession(
        file, onward.optim.SGD(lr=1.0), loss.contrastive("left", "right", temperature=0.1)
    )
    assert set(session.inputs) == {"a", "b"}
    left, right = (F.normalize(x, dim=-1) for x in model(a, b))
    expected = F.cross_entropy(left @ right.T / 0.1, torch.arange(4))
    expected.backward()
    assert session.step({"a": a.numpy(), "b": b.numpy()}).loss == pytest.approx(
        expected.item(), rel=1e-5
    )
    moved = session.state_dict()["left.bias"]
    np.testing.assert_allclose(moved, stepped(model, "left.bias"), atol=1e-6)


def test_negatives_beside_a_row_of_zeros() -> None:
    model = Pooled()
    a, b = (torch.from_numpy(ids(i)) for i in (0, 1))
    for parameter in model.left.parameters():
        nn.init.zeros_(parameter)
    file = exported(model, {"a": a, "b": b}, ["left", "right"])
    session = TrainingSession(file, onward.optim.SGD(lr=1e-12), loss.contrastive("left", "right"))
    left, right = (F.normalize(x, dim=-1) for x in model(a, b))
    F.cross_entropy(left @ right.T / 0.05, torch.arange(4)).backward()
    session.step({"a": a.numpy(), "b": b.numpy()})
    moved, gradient = session.state_dict()["left.weight"], model.left.weight.grad
    assert gradient is not None and gradient.abs().max() > 1e9
    np.testing.assert_allclose(moved, -1e-12 * gradient, rtol=1e-4, atol=1e-4)


def test_an_output_that_is_the_loss() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = Words()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.words(x).flatten(0, 1), labels.flatten())

    model, x = WithLoss(), torch.from_numpy(ids(0))
    file = exported(model, {"x": x, "labels": x}, ["loss"])
    session = TrainingSession(file, onward.optim.SGD(lr=0.1), "loss")
    expected = model(x, x.roll(1, 1)).item()
    assert session.step({"x": x.numpy(), "labels": x.roll(1, 1).numpy()}).loss == pytest.approx(
        expected, rel=1e-5
    )


# ---- predictions and files


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("length", [1, 7])
def test_predictions_are_those_of_onnxruntime(rows: int, length: int) -> None:
    """Also of sizes of 1, after training, of the file that was written."""
    _, file = words()
    session = TrainingSession(file, onward.optim.AdamW(lr=1e-2), loss.cross_entropy("logits"))
    for batch in batches(3):
        session.step(batch)
    stock = onnxruntime.InferenceSession(session.export_onnx().SerializeToString())
    x = ids(9, rows, length)
    expected: Any = stock.run(None, {"ids": x})[0]
    np.testing.assert_allclose(session.predict({"ids": x})["logits"], expected, atol=1e-5)
    labels = np.roll(x, 1, 1)
    assert np.isfinite(session.step({"ids": x, "labels": labels}).loss)


def test_a_file_keeps_all_but_its_weights(tmp_path: Path) -> None:
    _, file = words(opset=13)
    file.metadata_props.add(key="owner", value="somebody")
    file.doc_string, file.producer_name = "words", "a tool"
    path = tmp_path / "words.onnx"
    onnx.save(file, path)
    session = TrainingSession(path, onward.optim.AdamW(lr=1e-2), loss.cross_entropy("logits"))
    same = session.export_onnx()
    assert same == file, "nothing is trained yet"
    session.step(batches(1)[0])
    made = session.export_onnx(tmp_path / "trained.onnx")
    assert onnx.load(tmp_path / "trained.onnx") == made
    onnx.checker.check_model(made, full_check=True)
    weights = {t.name for t in made.graph.initializer}
    assert weights == {t.name for t in file.graph.initializer}
    changed = {
        a.name
        for a, b in zip(file.graph.initializer, made.graph.initializer, strict=True)
        if a.SerializeToString() != b.SerializeToString()
    }
    assert changed == set(session.state_dict())
    for graph in (made.graph, file.graph):
        del graph.initializer[:]
    assert made == file
    with pytest.raises(OnwardError, match="exists"):
        session.export_onnx(path)


def test_weights_in_constant_nodes_are_trained_and_written_back() -> None:
    _, file = words()
    moved = copy.deepcopy(file)
    for tensor in list(moved.graph.initializer):
        node = onnx.helper.make_node("Constant", [], [tensor.name], value=tensor)
        moved.graph.node.insert(0, node)
    del moved.graph.initializer[:]
    found = []
    for model in (file, moved):
        session = TrainingSession(model, onward.optim.SGD(lr=0.1), loss.cross_entropy("logits"))
        losses = [session.step(b).loss for b in batches(3)]
        out = onnxruntime.InferenceSession(session.export_onnx().SerializeToString())
        found.append((losses, out.run(None, {"ids": ids(0)})[0]))
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_what_a_model_may_be_given_as(tmp_path: Path) -> None:
    _, file = words()
    onnx.save(file, tmp_path / "words.onnx")
    onnx.save(
        copy.deepcopy(file), tmp_path / "apart.onnx", save_as_external_data=True,
        location="weights.bin", size_threshold=0,
    )  # fmt: skip
    ways = [
        file, str(tmp_path / "words.onnx"), tmp_path / "apart.onnx",
        ir.serde.deserialize_model(file),
    ]  # fmt: skip
    losses = []
    for way in ways:
        session = TrainingSession(way, onward.optim.SGD(lr=0.1), loss.cross_entropy("logits"))
        losses.append([session.step(b).loss for b in batches(2)])
    assert all(found == losses[0] for found in losses)


# ---- threads


@pytest.fixture
def switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


LINEAR = """
<ir_version: 10, opset_import: ["" : 18]>
m (float[B, 4] x) => (float[B, 3] y) <float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> {
    y = MatMul (x, w)
}
"""


@pytest.mark.usefixtures("switches")
def test_threads_predict_and_train_as_one_after_the_other() -> None:
    """Predictions are those of a moment between steps: all rows by one state of the weights."""
    session = TrainingSession(
        onnx.parser.parse_model(LINEAR), onward.optim.SGD(lr=0.1), loss.mse("y")
    )
    draw = np.random.default_rng(0)
    inputs = [draw.standard_normal((500, 4)).astype(np.float32) for _ in range(3)]
    labels = np.zeros((500, 3), np.float32)
    alone = TrainingSession(
        onnx.parser.parse_model(LINEAR), onward.optim.SGD(lr=0.1), loss.mse("y")
    )
    states = [alone.state_dict()["w"]]
    for _ in range(20):
        alone.step({"x": inputs[0], "labels": labels})
        states.append(alone.state_dict()["w"])

    def predicted(i: int) -> int:
        """How many predictions are of no state."""
        wrong = 0
        for _ in range(50):
            y = session.predict({"x": inputs[i]})["y"]
            wrong += not any(np.allclose(y, inputs[i] @ w, atol=1e-4) for w in states)
        return wrong

    def trained() -> int:
        for _ in range(20):
            session.step({"x": inputs[0], "labels": labels})
        return 0

    with ThreadPoolExecutor(4) as pool:
        runs = [*(pool.submit(predicted, i) for i in range(3)), pool.submit(trained)]
        assert [run.result(timeout=120) for run in runs] == [0, 0, 0, 0]
    np.testing.assert_array_equal(session.state_dict()["w"], states[-1])


# ---- what is trained


def test_only_what_is_named_is_trained() -> None:
    _, file = words()
    session = TrainingSession(
        file, onward.optim.SGD(lr=0.1), loss.cross_entropy("logits"), trainable=["head.*", "norm.*"]
    )
    before = session.state_dict()
    session.step(batches(1)[0])
    after = session.state_dict()
    changed = {n for n in before if not np.array_equal(before[n], after[n])}
    assert changed == {n for n in before if n.startswith(("head.", "norm."))}


def test_masks_and_single_numbers_are_not_trained() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = Words()
            self.register_buffer(
                "hidden", torch.full((1, 50), 0.0).index_fill(1, torch.tensor(3), -1e9)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.words(x) / 1.5 + self.hidden

    file = exported(Masked(), {"ids": torch.zeros(2, 5, dtype=torch.int64)}, ["logits"])
    session = TrainingSession(file, onward.optim.SGD(lr=0.1), loss.cross_entropy("logits"))
    assert not any("hidden" in name for name in session.state_dict())
    assert all(x.size > 1 for x in session.state_dict().values())
    session.step(batches(1)[0])


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """With options of the Trainer: accumulation, clipping, bf16."""
    _, file = words()
    options = {"seed": 1, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}

    def made() -> TrainingSession:
        return TrainingSession(
            file, onward.optim.AdamW(lr=1e-2), loss.cross_entropy("logits"), options=options
        )

    whole, first, second = made(), made(), made()
    expected = [whole.step(b) for b in batches(6)]
    for b in batches(6)[:3]:
        first.step(b)
    first.save(tmp_path)
    second.resume(tmp_path)
    found = [second.step(b) for b in batches(6)[3:]]
    assert [r.loss for r in found] == [r.loss for r in expected[3:]]
    assert [r.updated for r in expected] == [False, True] * 3
    assert expected[1].grad_norm is not None and expected[1].grad_norm > 0
    for name, array in whole.state_dict().items():
        np.testing.assert_array_equal(array, second.state_dict()[name])


def test_low_precision_and_other_arrays() -> None:
    _, file = words()
    session = TrainingSession(
        file, onward.optim.AdamW(lr=1e-2), loss.cross_entropy("logits"),
        options={"mixed_precision": "bf16"},
    )  # fmt: skip
    batch = batches(1)[0]
    losses = [session.step(batch).loss for _ in range(10)]
    assert losses[-1] < losses[0] - 0.2
    as_lists = {n: torch.from_numpy(x.astype(np.int32)) for n, x in batch.items()}
    assert session.evaluate(as_lists).loss == session.evaluate(batch).loss


def test_it_explains_itself() -> None:
    _, file = words()
    session = TrainingSession(file, onward.optim.AdamW(lr=1e-2), loss.cross_entropy("logits"))
    found = session.explain(batches(1)[0], batch_sizes=(1, 8))
    assert found.captured and found.memory is not None
    assert [x.nbytes is not None for x in found.sizes] == [True, True]


# ---- refused


def refused(**changes: Any) -> str:
    given: dict[str, Any] = {
        "model": words()[1], "optimizer": onward.optim.SGD(lr=0.1),
        "loss": loss.cross_entropy("logits"),
    } | changes  # fmt: skip
    feeds = given.pop("feeds", batches(1)[0])
    with pytest.raises((OnwardError, CaptureError)) as caught:
        TrainingSession(**given).step(feeds)
    text = str(caught.value)
    assert "\n" not in text.strip() or "fix:" in text
    return text


def test_bad_input_is_refused_in_one_line(tmp_path: Path) -> None:
    spoiled = tmp_path / "spoiled.onnx"
    spoiled.write_bytes(b"\x08\x07garbage")
    x = ids(0)
    cases = {
        "no such file": refused(model="missing.onnx"),
        "as ONNX": refused(model=spoiled),
        "the model is a int": refused(model=3),
        "the loss names the output 'logit'": refused(loss=loss.mse("logit")),
        "loss names the output 'l'": refused(loss="l"),
        "a loss is one number": refused(loss="logits"),
        "needs an optimizer": refused(optimizer=None),
        "no weight of the model is named 'tail.*'": refused(trainable=["tail.*"]),
        "is one string": refused(trainable="head"),
        "feeds lacks labels": refused(feeds={"ids": x}),
        "the model takes no 'mask'": refused(feeds={"ids": x, "labels": x, "mask": x}),
        "ids is of float64": refused(feeds={"ids": x * 1.0, "labels": x}),
        "is a str that is no array": refused(feeds={"ids": "text", "labels": x}),
        "feeds is a list": refused(feeds=[x]),
        "and the batch has": refused(feeds={"ids": x[0], "labels": x}),
    }
    for part, text in cases.items():
        assert part in text, (part, text)


def test_weights_of_other_names_or_shapes_change_nothing() -> None:
    _, file = words()
    session = TrainingSession(file, onward.optim.SGD(lr=0.1), loss.cross_entropy("logits"))
    before = session.state_dict()
    for weights in ({"head.bias": np.zeros(3)}, {"head.bias": np.zeros(50), "nobody": np.zeros(1)}):
        with pytest.raises(OnwardError):
            session.load_state_dict(weights)
    for name, array in session.state_dict().items():
        np.testing.assert_array_equal(array, before[name])
    session.load_state_dict({"head.bias": np.ones(50, np.float32)})
    assert session.state_dict()["head.bias"].sum() == 50
    assert io.BytesIO(session.export_onnx().SerializeToString()).getbuffer().nbytes > 1000


DROPPED = """
<ir_version: 10, opset_import: ["" : 18]>
m (float[B, 40] x) => (float loss, float[B, 40] out) <float ratio = {0.25}, bool on = {1}> {
    h = MatMul (x, w)
    out = Dropout (h, ratio, on)
    square = Mul (out, out)
    loss = ReduceMean <keepdims = 0> (square)
}
"""


def test_dropout_of_a_file_is_on_in_training_alone() -> None:
    """Masks differ from step to step and from sample to sample, and have the rate of the file."""
    model = onnx.parser.parse_model(DROPPED)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(40, dtype=np.float32), "w"))
    session = TrainingSession(model, onward.optim.SGD(lr=0.0), "loss")
    x = np.ones((200, 40), np.float32)
    assert session.evaluate({"x": x}).loss == pytest.approx(1.0)  # before any training as well
    first, second = (session.step({"x": x}, fetch=["out"]).outputs["out"] for _ in range(2))
    np.testing.assert_allclose(np.unique(first), [0.0, 4 / 3], rtol=1e-6)
    assert (first == 0).mean() == pytest.approx(0.25, abs=0.02)  # four standard deviations
    assert (first == second).mean() == pytest.approx(0.625, abs=0.03)
    assert (first[0] != first[1]).any()
    assert session.evaluate({"x": x}).loss == pytest.approx(1.0)
    np.testing.assert_allclose(session.predict({"x": x}, ["out"])["out"], x)


def test_named_weights_may_look_like_anything() -> None:
    """One number, numbers of a mask's size, and the transpose of another weight are weights of
    their own where the maker of the file says so."""
    text = """
    <ir_version: 10, opset_import: ["" : 18]>
    m (float[B, 2] x) => (float loss) {
        h = MatMul (x, a)
        g = MatMul (x, b)
        s = Mul (h, one)
        t = Add (s, large)
        u = Mul (t, g)
        loss = ReduceMean <keepdims = 0> (u)
    }
    """
    model = onnx.parser.parse_model(text)
    arrays = {"a": np.eye(2), "b": np.eye(2), "one": np.ones(1), "large": np.full(2, 2e4)}
    for name, array in arrays.items():
        tensor = onnx.numpy_helper.from_array(array.astype(np.float32), name)
        model.graph.initializer.append(tensor)
    assert set(OnnxModule(OnnxSource.of(model)).initializers) == {"a", "b"}
    module = OnnxModule(OnnxSource.of(model, named=arrays))
    assert set(module.initializers) == set(arrays)
    assert len(list(module.parameters())) == 4


def test_biases_of_a_new_model_that_an_exporter_stored_once_are_named() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    for name, parameter in layers.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    file = exported(layers, {"x": torch.zeros(2, 4)}, ["y"], sizes="B")
    if len(file.graph.initializer) != 3:
        pytest.skip("this exporter stores equal tensors twice")
    with pytest.warns(UserWarning, match=r"several nodes read a weight .*: 0.bias"):
        TrainingSession(file, onward.optim.SGD(lr=0.1), loss.mse("y"))
    with torch.no_grad():
        layers[2].get_parameter("bias").add_(0.1)
    file = exported(layers, {"x": torch.zeros(2, 4)}, ["y"], sizes="B")
    TrainingSession(file, onward.optim.SGD(lr=0.1), loss.mse("y"))  # a warning would be an error
