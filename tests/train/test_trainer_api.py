"""The face of Trainer: optimizers, batches, what it returns, what it refuses, exports."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from tiny import VOCABULARY, batch, bert, gpt2, mlp, tokens
from torch import nn

import onward
from onward import OnwardError, TrainerOptions
from onward.rewrite import FORWARD, STEP

pytestmark = pytest.mark.usefixtures("captures_kept")

loss_fn = nn.functional.cross_entropy
X, Y = torch.randn(6, 8), torch.arange(6) % 5


# ---- optimizers


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (onward.optim.AdamW(lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3),
         lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)),
        (onward.optim.AdamW(), torch.optim.AdamW),
        (onward.optim.Adam(), torch.optim.Adam),
        (onward.optim.Adam(lr=0.02, weight_decay=0.3),
         lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.3)),
        (onward.optim.SGD(lr=0.2), lambda p: torch.optim.SGD(p, lr=0.2)),
        (onward.optim.SGD(lr=0.2, momentum=0.9, weight_decay=0.1, nesterov=True),
         lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, weight_decay=0.1, nesterov=True)),
    ],
)  # fmt: skip
def test_description_is_torchs_optimizer(ours: Any, theirs: Any) -> None:
    """A described optimizer gives bitwise the numbers of a Trainer with torch's instance, and near
    torch's own."""
    one, two, plain = mlp(), mlp(), mlp()
    described = onward.Trainer(one, ours, loss_fn=loss_fn)
    given = onward.Trainer(two, theirs(two.parameters()), loss_fn=loss_fn)
    optimizer = theirs(plain.parameters())
    for _ in range(3):
        described.train_step(X, Y)
        given.train_step(X, Y)
        optimizer.zero_grad()
        loss_fn(plain(X), Y).backward()
        optimizer.step()
    for p, q, r in zip(one.parameters(), two.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
        torch.testing.assert_close(p, r, rtol=1e-5, atol=1e-6)


REFUSED: dict[str, Any] = {
    "ASGD": lambda m: torch.optim.ASGD(m.parameters()),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "differentiable": lambda m: torch.optim.SGD(m.parameters(), differentiable=True),
    "str": lambda m: "adamw",
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_without_a_graph_are_refused_by_name_if_strict(name: str) -> None:
    """`test_own_steps.py` trains with them."""
    model = mlp()
    optimizer = REFUSED[name](model)
    step = getattr(optimizer, "step", None)
    with pytest.raises(OnwardError, match=name):
        onward.Trainer(model, optimizer, loss_fn=loss_fn, options={"strict": True})
    assert getattr(optimizer, "step", None) == step, "left as it was"


def test_subclass_with_rules_of_its_own_is_refused_if_strict() -> None:
    class Mine(torch.optim.AdamW):
        pass

    model = mlp()
    with pytest.raises(OnwardError, match="Mine has no update in a graph"):
        onward.Trainer(model, Mine(model.parameters()), loss_fn=loss_fn, options={"strict": True})


def test_a_setting_of_one_group_is_refused_with_its_number() -> None:
    model = mlp()
    groups = [
        {"params": model.inner.parameters()},
        {"params": model.outer.parameters(), "differentiable": True},
    ]
    with pytest.raises(OnwardError, match="differentiable=True in parameter group 1"):
        options = TrainerOptions(strict=True)
        onward.Trainer(model, torch.optim.Adam(groups), loss_fn=loss_fn, options=options)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(OnwardError, match="requires_grad_"):
        onward.Trainer(mlp().requires_grad_(False), onward.optim.AdamW(), loss_fn=loss_fn)


# ---- options


@pytest.mark.parametrize(
    "bad",
    [
        {"gradient_accumulation_steps": 0},
        {"gradient_accumulation_steps": -1},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": -1.0},
        {"max_grad_norm": math.nan},
        *({"memory_budget": b} for b in (0, 1, -1, 0.0, -0.5, 1.5, 2e9, math.nan, True, "1")),
    ],
)
def test_options_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(OnwardError, match=next(iter(bad))):
        TrainerOptions(**bad)


def test_options_cannot_be_changed_later() -> None:
    options = TrainerOptions()
    with pytest.raises(AttributeError):
        options.seed = 1  # type: ignore[misc]


# ---- batches


@pytest.mark.parametrize("name", ["model", "optimizer", "options", "device", "memory"])
def test_what_a_trainer_was_made_with_stays(name: str) -> None:
    """Setting one of these would silently have no effect, so it raises; another loss function does
    have one."""
    model = mlp()
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.1), loss_fn)
    held = getattr(trainer, name)
    with pytest.raises(AttributeError, match=rf"^{name} cannot be changed .* another Trainer$"):
        setattr(trainer, name, copy.deepcopy(held))
    assert getattr(trainer, name) is held
    trainer.loss_fn = lambda out, y: 2 * loss_fn(out, y)
    want = 2 * loss_fn(model(X), Y).item()
    assert float(trainer.train_step(X, Y).loss) == pytest.approx(want, rel=1e-6)


def test_spellings_of_a_batch_are_one() -> None:
    model, data = gpt2(), batch()
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.0))
    found, start = set(), trainer.state_dict()
    for call in (
        lambda: trainer.train_step(data),
        lambda: trainer.train_step(**data),  # pyright: ignore[reportArgumentType]
        lambda: trainer.train_step(data["input_ids"], labels=data["labels"]),
    ):
        trainer.load_state_dict(start)  # the same masks
        found.add(float(call().loss))
    assert len(found) == 1


@pytest.mark.parametrize("key", ["labels", "target", "targets"])
def test_targets_of_a_loss_function(key: str) -> None:
    model = mlp()
    expected = loss_fn(model(X), Y).item()
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.0), loss_fn=loss_fn)
    for call in (
        lambda: trainer.train_step(X, Y),
        lambda: trainer.train_step((X, Y)),
        lambda: trainer.train_step({"x": X, key: Y}),
        lambda: trainer.train_step(X, **{key: Y}),  # pyright: ignore[reportArgumentType]
    ):
        assert float(call().loss) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(OnwardError, match="target"):
        trainer.train_step(X)


DESCRIPTION = {
    "inputs": [
        ("input_ids", ["batch", "tokens"], "i64"),
        ("labels", ["batch", "tokens"], torch.int64),
    ]
}
WRONG: dict[str, tuple[Any, str]] = {
    "rank": (lambda d: {**d, "input_ids": d["input_ids"][0]}, "'input_ids' has shape"),
    "size": (lambda d: {**d, "labels": d["labels"][:, :5]}, "tokens=5"),
    "dtype": (lambda d: {**d, "labels": d["labels"].int()}, "'labels' is torch.int32"),
    "missing": (lambda d: {"input_ids": d["input_ids"]}, "lists 'labels'"),
    "extra": (lambda d: {**d, "mask": d["labels"]}, "'mask'"),
    "no tensor": (lambda d: {**d, "labels": [1, 2]}, "'labels'"),
}


@pytest.mark.parametrize("step", ["train_step", "eval_step"])
@pytest.mark.parametrize("fault", WRONG)
def test_description_is_held(fault: str, step: str) -> None:
    trainer = onward.Trainer(gpt2(), onward.optim.AdamW(), model_desc=DESCRIPTION)
    spoil, message = WRONG[fault]
    with pytest.raises(OnwardError, match=message):
        getattr(trainer, step)(spoil(batch()))
    assert trainer.updates == trainer.micro_steps == 0


def test_description_that_fits_lets_pass() -> None:
    trainer = onward.Trainer(gpt2(), onward.optim.AdamW(), model_desc=DESCRIPTION)
    assert trainer.train_step(batch()).loss.isfinite()
    assert trainer.eval_step(batch(2, 5)).loss.isfinite()


def test_fixed_size_in_a_description() -> None:
    description = {"inputs": [("input_ids", ["batch", 12]), ("labels", ["batch", 12])]}
    trainer = onward.Trainer(gpt2(), onward.optim.AdamW(), model_desc=description)
    trainer.train_step(batch(4, 12))
    with pytest.raises(OnwardError, match=r"shape \[4, 11\]"):
        trainer.train_step(batch(4, 11))


# ---- results


def test_fetched_outputs_are_the_models() -> None:
    model, data = gpt2(dropout=0.0), batch(4, 12, "right")
    expected = model(**data)
    options = TrainerOptions(fetch=("logits",))
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.1), options=options)
    always = trainer.train_step(data)  # the forward is that of the weights before the update
    torch.testing.assert_close(always.outputs["logits"], expected.logits.detach())
    once = trainer.eval_step(data, fetch=["logits"]).outputs["logits"]
    torch.testing.assert_close(once, model(**data).logits.detach(), rtol=1e-4, atol=1e-5)
    assert trainer.eval_step(data).outputs == {}
    with pytest.raises(OnwardError, match=r"the output 'hidden'.*logits"):
        trainer.train_step(data, fetch=["hidden"])


def test_step_says_what_it_did() -> None:
    model = gpt2()
    options = TrainerOptions(gradient_accumulation_steps=3, max_grad_norm=1.0)
    trainer = onward.Trainer(model, onward.optim.AdamW(lr=0.25), options=options)
    results = [trainer.train_step(batch()) for _ in range(6)]
    assert [r.updated for r in results] == [False, False, True] * 2
    assert [r.grad_norm is not None for r in results] == [False, False, True] * 2
    assert all(r.lr == 0.25 and not r.skipped for r in results)
    assert all(r.loss.shape == () and r.loss.dtype == torch.float32 for r in results)
    assert not trainer.eval_step(batch()).updated
    plain = onward.Trainer(gpt2(), onward.optim.AdamW())
    assert plain.train_step(batch()).grad_norm is None


def test_looking_before_running_is_told() -> None:
    trainer = onward.Trainer(gpt2(), onward.optim.AdamW())
    for look in (trainer.report, trainer.profile, lambda: trainer.plan):
        with pytest.raises(OnwardError, match="train_step first"):
            look()
    with pytest.raises(OnwardError, match="batch"):
        trainer.export_onnx("never.onnx")
    assert not Path("never.onnx").exists()


def test_report_counts_passes_and_profile_times_ops() -> None:
    trainer = onward.Trainer(gpt2(), onward.optim.AdamW())
    trainer.train_step(batch())
    report = trainer.report()
    names = [*(p.name for p in FORWARD), "row_demand", *(p.name for p in STEP)]
    assert [p["name"] for p in report["passes"]] == names
    assert report["predicted_peak_bytes"] == trainer.plan.peak > 0
    assert report["launches"] == len(trainer.plan.launches)
    assert any("use_cache" in note for note in report["notes"])
    times = trainer.profile()
    assert times.keys() == {x.op for x in trainer.plan.launches}
    assert list(times.values()) == sorted(times.values(), reverse=True)


def test_disabled_passes_do_not_run() -> None:
    options = TrainerOptions(disable=("common_subexpression_elimination", "scatter_into"))
    trainer = onward.Trainer(gpt2(), onward.optim.AdamW(), options=options)
    trainer.train_step(batch())
    run = {p["name"] for p in trainer.report()["passes"]}
    assert run == {p.name for p in (*FORWARD, *STEP)} - {
        "common_subexpression_elimination",
        "scatter_into",
    } | {"row_demand"}


# ---- export


@pytest.mark.sample(12)
@pytest.mark.parametrize("kind", ["gpt2", "bert", "bert-classify"])
def test_exported_model_is_the_eager_model_at_other_shapes(kind: str, tmp_path: Path) -> None:
    model = gpt2() if kind == "gpt2" else bert(classes=3 if "classify" in kind else 0)
    data = batch(4, 12, "right")
    if "classify" in kind:
        data["labels"] = tokens(4, 1)[:, 0] % 3
    trainer = onward.Trainer(model, onward.optim.AdamW(lr=1e-2))
    trainer.train_step(data)
    path = trainer.export_onnx(tmp_path / "model.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    onnx.checker.check_model(str(path), full_check=True)
    session = ort.InferenceSession(str(path))  # the engine as users run it
    assert [i.name for i in session.get_inputs()] == ["input_ids", "attention_mask"]
    assert [o.name for o in session.get_outputs()] == ["logits"]
    model.eval()
    for size, length in ((4, 12), (7, 5), (2, 33), (1, 9), (1, 1)):
        other = batch(size, length, "right", seed=9)
        other.pop("labels")
        [got] = session.run(None, {k: v.numpy() for k, v in other.items()})
        expected = model(**other).logits.detach()
        torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-4, atol=1e-5)
    assert not model.training
    named = {i.name for i in onnx.load(str(path)).graph.initializer}
    assert not any(n.startswith("exp_avg") for n in named)


ONES: dict[str, tuple[int, int]] = {"row": (1, 12), "token": (4, 1), "both": (1, 1)}


@pytest.mark.sample(3)
@pytest.mark.parametrize("through", ["seen", "given"])
@pytest.mark.parametrize("ones", ONES)
def test_a_batch_with_a_size_of_one_fixes_no_size_of_the_file(
    ones: str, through: str, tmp_path: Path
) -> None:
    model = gpt2(dropout=0.0, layers=1)
    trainer = onward.Trainer(model, onward.optim.AdamW())
    data = batch(*ONES[ones], "right" if ones == "row" else None)
    if through == "seen":
        trainer.eval_step(data)
        path = trainer.export_onnx(tmp_path / "model.onnx")
    else:
        path = trainer.export_onnx(tmp_path / "model.onnx", batch=data)
    session = ort.InferenceSession(str(path))
    model.eval()
    for size, length in ((1, 1), (1, 12), (3, 7), (4, 1)):
        feed = {k: v for k, v in batch(size, length, "right", seed=9).items() if k in data}
        feed.pop("labels")
        [got] = session.run(None, {k: v.numpy() for k, v in feed.items()})
        expected = model(**feed).logits.detach()
        torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-4, atol=1e-5)


class Ones(nn.Module):
    """A model with sizes of 1 that must stay fixed: its one feature, and a shift of both
    outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 2)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + shift


def test_a_size_of_one_that_the_model_means_stays(tmp_path: Path) -> None:
    model = Ones()
    trainer = onward.Trainer(model, onward.optim.SGD(), loss_fn=loss_fn)
    x, shift = torch.randn(1, 1), torch.randn(1)
    path = trainer.export_onnx(tmp_path / "ones.onnx", batch=(x, shift, torch.tensor([1])))
    session = ort.InferenceSession(str(path))
    shapes = {i.name: i.shape for i in session.get_inputs()}
    assert shapes["x"][1] == 1 and shapes["shift"] == [1] and isinstance(shapes["x"][0], str)
    x = torch.randn(5, 1)
    [got] = session.run(None, {"x": x.numpy(), "shift": shift.numpy()})
    np.testing.assert_allclose(np.asarray(got), model(x, shift).detach().numpy(), rtol=1e-5)


def test_tied_weight_is_stored_once(tmp_path: Path) -> None:
    model = gpt2()
    trainer = onward.Trainer(model, onward.optim.AdamW())
    trainer.train_step(batch())
    trainer.export_onnx(tmp_path / "model.onnx")
    stored = onnx.load(str(tmp_path / "model.onnx")).graph.initializer
    assert sum(list(i.dims) == [VOCABULARY, 32] for i in stored) == 1
    weights = sum(p.nbytes for p in model.parameters())
    assert (tmp_path / "model.onnx").stat().st_size < weights + 64 * 1024


def test_failed_export_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onward.train.export

    trainer = onward.Trainer(gpt2(), onward.optim.AdamW())
    trainer.train_step(batch())
    path = tmp_path / "model.onnx"
    path.write_bytes(b"the one before")

    def half(graph: Any, path: Path, weights: Any, opset: int, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(onward.train.export, "save", half)
    with pytest.raises(OSError, match="disk full"):
        trainer.export_onnx(path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    assert path.read_bytes() == b"the one before"
    with pytest.raises(OnwardError, match="is not a folder"):
        trainer.export_onnx(tmp_path / "nowhere" / "model.onnx")


def test_export_of_a_plain_module_with_a_loss_function(tmp_path: Path) -> None:
    model = mlp(dropout=0.5)
    trainer = onward.Trainer(model, onward.optim.AdamW(), loss_fn=loss_fn)
    trainer.train_step(X, Y)
    path = trainer.export_onnx(tmp_path / "mlp.onnx")
    session = ort.InferenceSession(str(path))
    [name] = [i.name for i in session.get_inputs()]
    x = torch.randn(11, 8)
    [got] = session.run(None, {name: x.numpy()})
    expected = model.eval()(x).detach().numpy()
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-5, atol=1e-6)


# ---- what eager PyTorch says


def test_eval_step_is_evaluation_at_new_weights() -> None:
    model, data = gpt2(), batch(4, 12, "right")
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.1))
    for _ in range(3):
        trainer.train_step(data)
        twin = copy.deepcopy(model).eval()
        torch.testing.assert_close(
            trainer.eval_step(data).loss, twin(**data).loss.detach(), rtol=1e-5, atol=0
        )
