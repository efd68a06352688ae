"""The exported training step: stock onnxruntime does what eager PyTorch and the Trainer do."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from plain_run import run
from safetensors.torch import load_file
from tiny import GatherElements, Tensors, batch, bert, gpt2, mlp
from tiny_families import LLAMA, T5, of
from torch import nn

import onward
from onward import OnwardError, TrainerOptions
from onward.graph.ops.optimizers import OPTIMIZERS
from onward.train.portable_runner import Training

pytestmark = pytest.mark.usefixtures("captures_kept")
ROOT = Path(__file__).parent.parent.parent
STEPS, LR = 20, 1e-2
# so large that Adam does not follow gradients that are rounding alone, such as of a key's bias
EPS = 1e-5
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
Draw = Callable[[int, int, int], Tensors]


def text(size: int, length: int, seed: int) -> Tensors:
    return batch(size, length, "right", ignored=seed % 2 == 0, seed=seed)


def classes(size: int, length: int, seed: int) -> Tensors:
    return {**batch(size, length, "left", seed=seed), "labels": torch.arange(seed, seed + size) % 3}


def pairs(size: int, length: int, seed: int) -> Tensors:
    return {**text(size, length, seed), "labels": batch(size, 5 + seed % 4, seed=seed)["labels"]}


def points(size: int, length: int, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size + 1, 8, generator=generator)
    return {"x": x, "target": torch.arange(size + 1) % 5}


def decayed(kind: type[Any], **more: Any) -> Optimizer:
    """Weight decay for matrices alone, and a learning rate of its own for the rest."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        more.update({} if kind is torch.optim.SGD else {"eps": EPS})
        return kind([{"params": matrices, "weight_decay": 0.1}, {"params": others}], lr=LR, **more)

    return make


class Normed(nn.Module):
    """A model with running statistics, a frozen layer and a parameter that the loss ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 16).requires_grad_(False)
        self.norm = nn.BatchNorm1d(16)
        self.outer = nn.Linear(16, 5)
        self.unread = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.norm(self.frozen(x))))


class Constant(nn.Module):
    """A model with a tensor that no module registers, which becomes a constant of the files."""

    def __init__(self) -> None:
        super().__init__()
        self.table = [torch.linspace(0.0, 1.0, 128).view(8, 16)]
        self.outer = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(x @ self.table[0]))


def loss_fn(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(y, target)


ADAMW = decayed(torch.optim.AdamW)


@dataclass(frozen=True)
class Case:
    """A model that takes a dropout rate, its batches, and how it is trained."""

    make: Callable[[float], Any]
    draw: Draw
    optimizer: Optimizer = ADAMW
    clip: float | None = 1.0
    loss_fn: Any = None


CASES = {
    "GPT-2": Case(lambda p: gpt2(p, layers=1), text),
    "BERT, classifier": Case(
        lambda p: bert(p, layers=1, classes=3), classes,
        decayed(torch.optim.Adam, betas=(0.8, 0.95)), None,
    ),
    "Llama": Case(
        lambda p: of("Llama", "CausalLM", **LLAMA, attention_dropout=p)(), text,
        decayed(torch.optim.SGD, momentum=0.9, nesterov=True),
    ),
    "T5": Case(
        lambda p: of("T5", "ConditionalGeneration", **{**T5, "dropout_rate": p})(), pairs
    ),
    "MLP": Case(mlp, points, decayed(torch.optim.SGD), None, loss_fn),
    "norm": Case(lambda p: Normed(), points, loss_fn=loss_fn),
    "constant": Case(lambda p: Constant(), points, loss_fn=loss_fn),
}  # fmt: skip


def numpy(data: Tensors) -> dict[str, np.ndarray]:
    return {name: x.numpy() for name, x in data.items()}


def made(case: Case, dropout: float = 0.0, **options: Any) -> onward.Trainer:
    torch.manual_seed(0)
    model = case.make(dropout).train()
    average = {"gradient_accumulation_average": "micro_batches"}
    given = {"max_grad_norm": case.clip, **average, **options}
    return onward.Trainer(model, case.optimizer(model), case.loss_fn, options=given)


def check_files(folder: Path) -> None:
    """Assert that the files are whole and of the standard, and say nothing of this machine."""
    for path in sorted(folder.glob("*.onnx")):
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(str(path))
        assert {d.domain for d in model.opset_import} <= {"", "onward"}
        nodes = [*model.graph.node, *(n for f in model.functions for n in f.node)]
        assert {n.domain for n in nodes} <= {"", "onward"}
        assert not [n for n in nodes if n.op_type == "ScatterND" and "reduction" in str(n)]
        assert {n.op_type for n in nodes if n.domain} <= {f.name for f in model.functions}
    for path in folder.iterdir():
        content = path.read_bytes()
        assert b"site-packages" not in content and str(Path.home()).encode() + b"/" not in content
        assert str(ROOT).encode() not in content


def near(got: list[float], want: list[float]) -> None:
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=0)


# ---- the same numbers


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_steps_without_torch_are_eagers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    trainer = made(case)
    twin = copy.deepcopy(trainer.model)
    optimizer = case.optimizer(twin)
    folder = trainer.export_training(tmp_path / "step", batch=case.draw(4, 12, 1))
    check_files(folder)
    # sizes that the example has not, and rows that are one
    batches = [case.draw(1 + i % 4, 8 + i % 5, 3 + i) for i in range(STEPS)]
    want: list[float] = []
    for data in batches:
        optimizer.zero_grad()
        loss = eager_loss(case, twin, data)
        loss.backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), case.clip)
        optimizer.step()
        want.append(loss.item())
    want.append(eager_loss(case, twin.eval(), batches[-1]).item())
    losses, state = run(folder, [numpy(data) for data in batches])
    near(losses, want)
    check_weights(load_file(state), trainer.model, twin)


def eager_loss(case: Case, model: Any, data: Tensors) -> torch.Tensor:
    if case.loss_fn is None:
        return model(**data).loss
    return case.loss_fn(model(data["x"]), data["target"])


def check_weights(state: Tensors, before: nn.Module, after: nn.Module) -> None:
    """Assert that weights and buffers are the eager model's: their distance is a thousandth of
    their way."""
    start = dict(before.state_dict())
    for name, want in after.state_dict().items():
        got = state.get(f"param.{name}", state.get(f"buffer.{name}"))
        if got is None:  # tied, unread, or a table that the graph has as a constant
            continue
        way = float((want.double() - start[name].double()).norm())
        away = float((got.double() - want.double()).norm())
        assert away <= 1e-3 * way + 1e-6, (name, away, way)
    tied = [n for n, _ in after.named_parameters()]
    assert {n for n in tied if f"param.{n}" in state} >= {n for n in tied if n != "unread"}


@pytest.mark.parametrize(("name", "windows"), [("GPT-2", 1), ("MLP", 3)])
def test_dropout_is_the_trainers(name: str, windows: int, tmp_path: Path) -> None:
    case = CASES[name]
    trainer = made(case, dropout=0.2, gradient_accumulation_steps=windows)
    batches = [case.draw(3, 12, 4 + 4 * i) for i in range(STEPS + windows)]
    for data in batches[:windows]:
        trainer.train_step(data)
    folder = trainer.export_training(tmp_path / "step")
    check_files(folder)
    training = Training(folder)
    for data in batches[windows:]:
        want, got = trainer.train_step(data), training.step(numpy(data))
        near([float(got["loss"])], [float(want.loss)])
        if want.grad_norm is not None:
            np.testing.assert_allclose(got["grad_norm"], float(want.grad_norm), rtol=1e-4)
    near([float(training.evaluate(numpy(data))["loss"])], [float(trainer.eval_step(data).loss)])
    after = trainer.state_dict()["optimizer"]
    for key, want in after.items():
        slot, _, path = key.partition(".")
        got = training.state[f"{slot}.param.{path}"]
        assert np.linalg.norm(got - want.numpy()) <= 1e-3 * float(want.norm()) + 1e-9, key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_as_torchs(name: str, tmp_path: Path) -> None:
    model = mlp()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    muon = name == "Muon"  # it updates matrices alone
    optimizer = torch.optim.Muon(matrices, lr=LR) if muon else getattr(onward.optim, name)(lr=LR)
    trainer = onward.Trainer(model, optimizer, loss_fn)
    batches = [points(4, 0, i) for i in range(8)]
    for data in batches[:3]:
        trainer.train_step(data["x"], data["target"])
    training = Training(trainer.export_training(tmp_path / "step"))
    training.step(numpy(batches[3]), lr=LR / 2)
    for group in trainer.optimizer.param_groups:
        group["lr"] = LR / 2
    trainer.train_step(batches[3]["x"], batches[3]["target"])
    for data in batches[4:]:
        want = trainer.train_step(data["x"], data["target"])
        near([float(training.step(numpy(data))["loss"])], [float(want.loss)])


def test_a_step_that_is_not_finite_changes_counts_alone(tmp_path: Path) -> None:
    case = CASES["MLP"]
    trainer = made(case, dropout=0.5)
    training = Training(trainer.export_training(tmp_path / "step", batch=points(4, 0, 1)))
    for i in range(6):
        data = points(4, 0, i)
        if i in (1, 2):
            data["x"][0, 0] = torch.inf
        before = dict(training.state)
        want, got = trainer.train_step(data), training.step(numpy(data))
        assert bool(got["finite"]) == want.updated == (i not in (1, 2))
        changed = {n for n, x in training.state.items() if not np.array_equal(x, before[n])}
        assert (changed == {"window"}) == (i in (1, 2))
        np.testing.assert_allclose(got["loss"], float(want.loss), rtol=2e-5)


def test_onnxs_evaluator_computes_the_step(tmp_path: Path) -> None:
    case = CASES["MLP"]
    folder = made(case, dropout=0.3).export_training(tmp_path / "step", batch=points(4, 0, 1))
    training, data = Training(folder), numpy(points(3, 0, 2))
    about = training.about["graphs"]["train"]
    feeds = {**training.state, **{n: np.array(rate) for n, rate in training.rates.items()}}
    feeds |= {about["batch"][n]["input"]: x for n, x in data.items()} | {"seed": training.seed(0)}
    evaluator = ReferenceEvaluator(str(folder / "train.onnx"), new_ops=[GatherElements])
    names = [about["loss"], *about["state"].values()]
    want: Any = evaluator.run(names, {str(n): feeds[str(n)] for n in evaluator.input_names})
    got = training.step(data)
    np.testing.assert_allclose(got["loss"], want[0], rtol=1e-6)
    for name, array in zip(about["state"], want[1:], strict=True):
        np.testing.assert_allclose(training.state[name], array, rtol=1e-5, atol=1e-7)


# ---- the files


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "opset"), [("BERT, classifier", 18), ("GPT-2", 18), ("MLP", 20), ("norm", 19)]
)
def test_an_older_opset_computes_the_same(name: str, opset: int, tmp_path: Path) -> None:
    trainer, data = made(CASES[name]), CASES[name].draw(4, 12, 1)
    new = trainer.export_training(tmp_path / "new", batch=data)
    old = trainer.export_training(tmp_path / "old", batch=data, opset=opset)
    check_files(old)
    for path in old.glob("*.onnx"):
        model = onnx.load(str(path))
        versions = {d.domain: d.version for m in (model, *model.functions) for d in m.opset_import}
        assert versions[""] == opset
        for f in (*model.functions, model.graph):
            for node in f.node:
                assert node.domain or onnx.defs.get_schema(node.op_type, opset, "")
    steps = [float(Training(folder).step(numpy(data))["loss"]) for folder in (new, old)]
    near(steps[:1], steps[1:])


@pytest.mark.parametrize("opset", [17, 24, True, "18", 20.0, None])
def test_other_opsets_are_refused(opset: Any, tmp_path: Path) -> None:
    trainer = made(CASES["MLP"])
    for export in (trainer.export_onnx, trainer.export_training):
        with pytest.raises(OnwardError, match=r"opset=.* from 18 to 23"):
            export(tmp_path / "x", batch=points(4, 0, 1), opset=opset)
    assert not list(tmp_path.iterdir())


PROGRAM = """
import sys, torch, onward
from onward import TrainerOptions
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 5))
trainer = onward.Trainer(model, onward.optim.AdamW(), torch.nn.functional.cross_entropy,
    options=TrainerOptions(
        gradient_accumulation_steps=2, gradient_accumulation_average="micro_batches"))
batch = (torch.ones(4, 8), torch.tensor([0, 1, 2, 3]))
trainer.export_training(sys.argv[1], batch=batch)
trainer.export_onnx(sys.argv[1] + ".onnx", batch=batch)
"""


def test_files_are_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []
    for i in range(2):
        folder = tmp_path / str(i)
        folder.mkdir()
        command = [sys.executable, "-c", PROGRAM, str(folder / "step")]
        world = {**os.environ, "PYTHONHASHSEED": str(i), "PYTHONPATH": str(ROOT / "src")}
        world["OMP_NUM_THREADS"] = "1"
        started.append(subprocess.Popen(command, cwd=folder, env=world))
    assert [process.wait() for process in started] == [0, 0]
    first, second = (sorted(p for p in (tmp_path / n).rglob("*") if p.is_file()) for n in "01")
    assert [p.name for p in first] == [p.name for p in second] and len(first) == 7
    for one, other in zip(first, second, strict=True):
        content = one.read_bytes()
        assert content == other.read_bytes(), one.name
        assert str(tmp_path).encode() not in content
    check_files(tmp_path / "0" / "step")


@pytest.mark.parametrize("exported", ["forward", "step"])
def test_large_files_keep_their_tensors_beside_them(
    exported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.graph.file.LARGEST", 300)
    trainer = made(CASES["constant"])
    data, moved = points(4, 0, 1), tmp_path / "moved"
    if exported == "forward":
        (tmp_path / "files").mkdir()
        trainer.export_onnx(tmp_path / "files" / "forward.onnx", batch=data)
        names = ["forward.onnx", "forward.onnx.data"]
    else:
        trainer.export_training(tmp_path / "files", batch=data)
        names = ["eval.onnx", "eval.onnx.data", "train.onnx", "train.onnx.data"]
    (tmp_path / "files").rename(moved)
    assert sorted(p.name for p in moved.iterdir() if ".onnx" in p.name) == names
    for path in moved.glob("*.onnx"):
        onnx.checker.check_model(str(path), full_check=True)
        held = onnx.load(str(path), load_external_data=False).graph.initializer
        places = {e.value for t in held for e in t.external_data if e.key == "location"}
        assert places == {f"{path.name}.data"}
    if exported == "forward":
        session = ort.InferenceSession(str(moved / "forward.onnx"))
        [got] = session.run(None, {"x": data["x"].numpy()})
        want = trainer.model.eval()(data["x"]).detach()
        np.testing.assert_allclose(np.asarray(got), want.numpy(), rtol=1e-5, atol=1e-6)
    else:
        want = float(trainer.train_step(data).loss)
        near([float(Training(moved).step(numpy(data))["loss"])], [want])


def test_a_tied_weight_is_state_once_and_weights_go_back(tmp_path: Path) -> None:
    trainer = made(CASES["GPT-2"])
    data = text(4, 12, 1)
    training = Training(trainer.export_training(tmp_path / "step", batch=data))
    assert sum(x.shape == (97, 32) for n, x in training.state.items() if n[:6] == "param.") == 1
    training.step(numpy(data))
    training.save(tmp_path / "later.safetensors")
    again = Training(tmp_path / "step", state=tmp_path / "later.safetensors")
    assert list(again.state) and again.state.keys() == training.state.keys()
    for name, x in training.state.items():
        assert again.state[name].dtype == x.dtype and np.array_equal(again.state[name], x), name
    weights = {
        name.removeprefix("param."): x
        for name, x in load_file(tmp_path / "later.safetensors").items()
        if name.startswith("param.")
    }
    twin = gpt2(0.0, layers=1)
    assert not twin.load_state_dict(weights, strict=False).unexpected_keys
    want = again.evaluate(numpy(data), outputs=["logits"])
    near([twin.eval()(**data).loss.item()], [float(want["loss"])])
    assert want["logits"].shape == (4, 12, 97)


def test_the_loop_of_the_page_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "export.md").read_text()
    [program] = [b for b in re.findall(r"```python\n(.*?)```", page, re.S) if "import onnx" in b]
    trainer, batches = made(CASES["MLP"]), [points(4, 0, i) for i in range(5)]
    trainer.export_training(tmp_path / "step", batch=batches[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "step"))
    of_another_test = sys.modules.pop("run", None)
    try:
        exec(program, {"batches": [numpy(data) for data in batches]})
    finally:
        del sys.modules["run"]
        if of_another_test is not None:
            sys.modules["run"] = of_another_test
    losses = [float(line) for line in capsys.readouterr().out.split()]
    near(losses, [float(trainer.train_step(data).loss) for data in batches])


def test_the_runner_refuses_sizes_that_the_files_are_not_for(tmp_path: Path) -> None:
    trainer = made(CASES["BERT, classifier"])
    training = Training(trainer.export_training(tmp_path / "step", batch=classes(4, 12, 1)))
    assert training.about["conditions"] == ["T <= 64"]
    for data, said in (
        (classes(2, 65, 1), "with T <= 64"),
        ({**classes(3, 9, 1), "labels": torch.zeros(2)}, "labels has the shape"),
        ({**classes(3, 9, 1), "labels": torch.zeros(3, 1)}, "labels has the shape"),
    ):
        with pytest.raises(ValueError, match=said):
            training.step(numpy(data))
    training.step(numpy(classes(1, 64, 1)))


# ---- all or nothing


def test_nothing_is_left_of_an_export_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, data = made(CASES["MLP"]), points(4, 0, 1)
    folder = trainer.export_training(tmp_path / "step", batch=data)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(OnwardError, match="is there already; fix: another folder, or overwrite"):
        trainer.export_training(folder, batch=data)

    def half(*given: Any, **more: Any) -> Any:
        yield b"half"
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("onward.train.training_export.tensor_chunks", half)
        for name in ("step", "other"):
            with pytest.raises(OSError, match="disk full"):
                trainer.export_training(tmp_path / name, batch=data, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["step"]
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    trainer.train_step(data)
    trainer.export_training(folder, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["step"]
    assert (folder / "state.safetensors").read_bytes() != before["state.safetensors"]


def test_a_folder_of_others_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    trainer, data = made(CASES["MLP"]), points(4, 0, 1)
    with pytest.raises(OnwardError, match="is no export of a training step"):
        trainer.export_training(tmp_path / "mine", batch=data, overwrite=True)
    with pytest.raises(OnwardError, match="is not a folder"):
        trainer.export_training(tmp_path / "no" / "where", batch=data)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2 if x.max() > 100 else self.inner(x)


class Numpy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.from_numpy(np.sin(x.detach().numpy()))


def with_region() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Numpy(), nn.Linear(8, 5))


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "branch": (Branching, {}, "branches on the numbers of a batch"),
    "region": (with_region, {}, "parts of it run in eager PyTorch"),
    "bf16": (mlp, {"mixed_precision": "bf16"}, "a step in bfloat16 cannot be exported"),
    "fp16": (mlp, {"mixed_precision": "fp16"}, "a step in float16 cannot be exported"),
    "bf16 moments": (mlp, {"optimizer_state": "bf16"}, "is bfloat16, which cannot be exported"),
    "frozen": (lambda: mlp().requires_grad_(False), {}, "finds nothing to train"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::onward.EagerWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exported_is_refused(name: str, tmp_path: Path) -> None:
    make, options, said = REFUSED[name]
    model = make()
    trainer = onward.Trainer(
        model, torch.optim.AdamW(model.parameters()), loss_fn, options=TrainerOptions(**options)
    )
    with pytest.raises(OnwardError, match=said):
        trainer.export_training(tmp_path / "step", batch=tuple(points(4, 0, 1).values()))
    assert not list(tmp_path.iterdir())


def test_an_open_window_and_a_trainer_without_a_batch_are_refused(tmp_path: Path) -> None:
    trainer = made(CASES["MLP"], gradient_accumulation_steps=2)
    with pytest.raises(OnwardError, match="export_training needs an example batch"):
        trainer.export_training(tmp_path / "step")
    trainer.train_step(points(4, 0, 1))
    with pytest.raises(OnwardError, match="within an accumulation window"):
        trainer.export_training(tmp_path / "step")
    assert not list(tmp_path.iterdir())


def test_windows_by_labels_are_refused(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "gradient_accumulation_average": "labels"}
    trainer = made(CASES["MLP"], **options)
    with pytest.raises(OnwardError, match="no windows whose loss is a mean over their labels"):
        trainer.export_training(tmp_path / "step", batch=tuple(points(4, 0, 1).values()))
    assert not list(tmp_path.iterdir())
