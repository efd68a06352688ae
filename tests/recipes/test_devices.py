"""The device of a run: a GPU where one is here, by torch.cuda in other words than this machine's;
the last tests need a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.cli import main, parse
from onward.prepare.batch import batch_of, bind_batch
from onward.recipes import verify
from onward.recipes.devices import BACKENDS, take_device, telling_shortages, training_device
from onward.recipes.engines import EagerTrainer
from onward.recipes.options import FinetuneConfig, InputError


def machine(
    monkeypatch: pytest.MonkeyPatch, gpus: int, local_rank: str = "", ranks: int = 1
) -> None:
    """A machine with so many GPUs, and this process among those of torchrun."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if ranks > 1:
        told = {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": str(ranks)}
        for name, value in told.items():
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("gpus", "options", "started", "device"),
    [
        (0, {}, {}, "cpu"),
        (1, {}, {}, "cuda:0"),
        (4, {}, {}, "cuda:0"),
        (4, {"use_cpu": True}, {}, "cpu"),
        (0, {"use_cpu": True}, {}, "cpu"),
        (4, {"tf32": True}, {}, "cuda:0"),
        (4, {}, {"local_rank": "2", "ranks": 4}, "cuda:2"),
        (4, {"use_cpu": True}, {"local_rank": "2", "ranks": 4}, "cpu"),
        (0, {}, {"local_rank": "1", "ranks": 2}, "cpu"),
        *((2, {}, {"local_rank": odd, "ranks": 2}, "cuda:0") for odd in ("", "\u00b2", "-1", "x")),
    ],
)
def test_a_process_has_a_gpu_of_its_own_where_one_is_here(
    gpus: int,
    options: dict[str, Any],
    started: dict[str, Any],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, gpus, **started)
    found = training_device(FinetuneConfig(**options))
    assert str(found) == device
    assert found.type in BACKENDS


@pytest.mark.parametrize(
    ("gpus", "options", "started", "words"),
    [
        (
            2,
            {},
            {"local_rank": "2", "ranks": 3},
            "process 2 of this machine has no GPU: it sees 2",
        ),
        (0, {"tf32": True}, {}, "in --tf32"),
        (1, {"tf32": True, "use_cpu": True}, {}, "in --tf32"),
    ],
)
def test_what_the_machine_has_not_is_refused_in_one_line(
    gpus: int,
    options: dict[str, Any],
    started: dict[str, Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, gpus, **started)
    with pytest.raises(InputError) as raised:
        training_device(FinetuneConfig(**options))
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("gpus", "told", "device"),
    [
        (1, {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_PER_TASK": "1"}, "cuda:0"),
        (1, {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}, "cuda:0"),
        (1, {"HIP_VISIBLE_DEVICES": "3"}, "cuda:0"),
        (1, {}, None),
        (1, {"CUDA_VISIBLE_DEVICES": "0,1"}, None),
        (1, {"CUDA_VISIBLE_DEVICES": "0", "TORCHELASTIC_RUN_ID": "none"}, None),
        (2, {"CUDA_VISIBLE_DEVICES": "0,1", "TORCHELASTIC_RUN_ID": "none"}, "cuda:1"),
    ],
)
def test_a_launcher_may_let_each_process_see_one_gpu(
    gpus: int, told: dict[str, str], device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of torchrun all see the same, and would share it."""
    machine(monkeypatch, gpus, "1", 2)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    if device is None:
        with pytest.raises(InputError, match=r"process 1 .* no GPU: it sees 1.*fix: torchrun"):
            training_device(FinetuneConfig())
    else:
        assert str(training_device(FinetuneConfig())) == device


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_a_flag_of_pytorch(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 2)
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    before = torch.get_float32_matmul_precision()
    try:
        assert [take_device(FinetuneConfig(tf32=tf32))] == taken
        assert torch.backends.cuda.matmul.allow_tf32 == tf32
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("spelled", ["--use_cpu", "--no_cuda", "--use-cpu=true"])
def test_switches_of_transformers_are_understood(
    spelled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse([spelled], "finetune", FinetuneConfig) == FinetuneConfig(use_cpu=True)
    assert "changes nothing" not in capsys.readouterr().err


def test_tf32_without_a_gpu_ends_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, 0)
    assert main(["finetune", "--tf32", "--output_dir", str(tmp_path / "out")]) == 2
    assert "in --tf32; fix: leave it out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_in_tf32_is_verified_in_fp32_on_any_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[FinetuneConfig] = []

    class Report:
        ok = True
        rows = mismatches = notes = ()

    def verification(config: FinetuneConfig, bisect: bool) -> Report:
        asked.append(config)
        return Report()

    monkeypatch.setattr(verify, "verification", verification)
    monkeypatch.setattr(verify, "is_run", lambda folder: True)
    monkeypatch.setattr(verify, "tell_page", lambda folder: None)
    record = {"options": {"tf32": True, "seed": 3}}
    monkeypatch.setattr(verify, "read_record", lambda folder: record)
    assert verify.verify_run(tmp_path, bisect=False) == 0
    assert asked == [FinetuneConfig(seed=3)]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nSee more."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=["a GPU's", "the host's", "Python's"],
)
@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("train_step", "at update 1 with engine torch; fix: lower --per_device_train"),
        ("eval_step", "in an evaluation; fix: lower --per_device_eval"),
    ],
)
def test_a_batch_that_does_not_fit_is_one_line(
    method: str,
    said: str,
    error: Exception,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(EagerTrainer, method, fails)
    small = ["--vocab_size", "320", "--block_size", "32", "--max_steps", "1", "--engine", "torch"]
    small += ["--train_file", str(text_file), "--per_device_train_batch_size", "2"]
    assert main(["finetune", *small, "--output_dir", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert f"out of memory on cpu, {said}" in printed
    assert "Traceback" not in printed


def test_another_error_of_pytorch_is_not_called_a_shortage() -> None:
    with (
        pytest.raises(RuntimeError, match="another"),
        telling_shortages(torch.device("cpu"), "now", "less"),
    ):
        raise RuntimeError("another")


def test_a_batch_of_the_host_is_moved_whole_or_not_at_all() -> None:
    """PyTorch's device of tensors without numbers stands for a GPU."""
    meta, x, y = torch.device("meta"), torch.ones(3, 2), torch.ones(3)
    moved = bind_batch((), {"x": x, "pair": (y, 1.5)}, has_loss=False).on(meta)
    assert [t.device for t in moved.tensors] == [meta, meta]
    assert moved.kwargs["pair"][1] == 1.5
    assert moved.kind == bind_batch((), {"x": x, "pair": (y, 1.5)}, has_loss=False).kind
    mixed = batch_of((), {"x": x.to(meta), "lengths": y}, ())
    assert mixed.on(meta) is mixed
    assert mixed.on(torch.device("cpu")) is mixed


# ---- with a GPU

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@NEEDS_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["onward", "torch"])
@pytest.mark.parametrize("task", ["causal-lm", "masked-lm"])
def test_a_run_on_a_gpu_learns_what_a_run_on_the_cpu_does(
    engine: str, task: str, tmp_path: Path
) -> None:
    small = [
        *("--task", task, "--vocab_size", "320", "--block_size", "32", "--max_steps", "6"),
        *("--per_device_train_batch_size", "4", "--dropout", "0", "--max_eval_samples", "5"),
        *("--engine", engine, "--logging_steps", "1", "--save_steps", "4", "--bf16", "false"),
    ]
    losses, results = [], []
    for use_cpu in ("true", "false"):
        folder = tmp_path / use_cpu
        assert main(["finetune", *small, "--use_cpu", use_cpu, "--output_dir", str(folder)]) == 0
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines if '"loss"' in line])
        results.append(json.loads((folder / "eval_results.json").read_text()))
    there, here = results
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert here["eval_loss"] == pytest.approx(there["eval_loss"], rel=1e-3)
    assert here["start_weights_sha256"] == there["start_weights_sha256"]
    assert here["peak_device_mib"] > 0 and "peak_device_mib" not in there
    assert (folder / "model.safetensors").is_file()


@NEEDS_GPU
@pytest.mark.gpu
def test_batches_of_the_host_train_a_model_on_a_gpu(tmp_path: Path) -> None:
    import onward

    torch.manual_seed(0)
    losses = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4).to(device)
        x, target = torch.randn(6, 8), torch.randint(0, 4, (6,))
        loss = torch.nn.CrossEntropyLoss()
        trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
        losses.append([float(trainer.train_step(x, target=target).loss) for _ in range(3)])
        assert trainer.verify(x, target=target).ok
        assert trainer.export_onnx(tmp_path / f"{device}.onnx").is_file()
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
