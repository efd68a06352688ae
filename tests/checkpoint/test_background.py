"""Checkpoints that a thread writes are those of the moment of the call, byte for byte."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from checkpoint_faults import watching
from torch import nn

import onward
from onward.checkpoint import BackgroundWriter, checkpoints
from onward.checkpoint.tensor_file import copied_tensors, tensor_chunks
from onward.errors import CheckpointError


def trained() -> tuple[onward.Trainer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    trainer = onward.Trainer(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), loss_fn=nn.functional.mse_loss
    )
    return trainer, torch.randn(4, 6)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_steps_go_on_while_it_is_written(tmp_path: Path) -> None:
    """On a slow disk each checkpoint is that of a save which waited."""
    trainer, x = trained()

    def slow(name: str, args: tuple[Any, ...]) -> None:
        if name == "fsync" and threading.current_thread() is not threading.main_thread():
            time.sleep(0.002)

    with watching(slow):
        for step in range(25):
            trainer.train_step(x, x)
            waited = trainer.save(tmp_path / "waited")
            written = trainer.save(tmp_path / "written", background=True)
            trainer.train_step(x, x)  # in place, while the thread writes
            trainer.finish_saves()
            assert content(waited) == content(written), step


def test_the_newest_that_waits_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, x = trained()
    released = threading.Event()

    def held(name: str, args: tuple[Any, ...]) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert released.wait(30)

    with watching(held):
        for _ in range(4):
            trainer.train_step(x, x)
            trainer.save(tmp_path, background=True)
            time.sleep(0.05)  # the first begins
        released.set()
        trainer.finish_saves()
    assert [found.manifest.place[0] for found in checkpoints(tmp_path)] == [4, 1]
    told = [r.message for r in caplog.records if "is left out" in r.message]
    assert [text.split("checkpoint-")[1][0] for text in told] == ["2", "3"]


def test_a_disk_that_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on, and whoever asks is told; the next save works."""
    trainer, x = trained()
    trainer.train_step(x, x)
    trainer.save(tmp_path)

    def full(name: str, args: tuple[Any, ...]) -> None:
        if name == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with watching(full):
        trainer.train_step(x, x)
        with pytest.raises(CheckpointError, match=r"checkpoint-2 cannot be written: No space left"):
            trainer.save(tmp_path)
        trainer.save(tmp_path, background=True)
        trainer.train_step(x, x)
        with pytest.raises(CheckpointError, match="No space left"):
            trainer.finish_saves()
    assert "No space left on device; training goes on" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    trainer.save(tmp_path, background=True, save_total_limit=1)
    trainer.finish_saves()
    trainer.finish_saves()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_a_bug_in_a_write_is_raised() -> None:
    writer = BackgroundWriter()

    def broken() -> None:
        raise ZeroDivisionError

    writer.add(Path("a"), broken)
    with pytest.raises(ZeroDivisionError):
        writer.finish()
    writer.add(Path("b"), lambda: None)
    writer.finish()


def test_it_is_written_in_few_calls(tmp_path: Path) -> None:
    """The thread writes a header and one block (of less than 16 MB here) for each file of tensors:
    training waits for it at each of its calls."""
    trainer, x = trained()
    trainer.train_step(x, x)
    calls: list[str] = []

    def seen(name: str, args: tuple[Any, ...]) -> None:
        if threading.current_thread() is not threading.main_thread():
            calls.append(name)

    with watching(seen):
        trainer.save(tmp_path, background=True)
        trainer.finish_saves()
    assert calls.count("write") == 2 * 2 + 2, "two files of tensors, the state, the manifest"


def test_copies_are_of_the_same_bytes_and_share_no_memory() -> None:
    wide = torch.randn(4, 6)
    tensors = {
        "half": torch.randn(3).half(),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "transposed": wide.t(),
        "a part": wide[1:3, ::2],
        "expanded": torch.randn(1, 3).expand(5, 3),
        "empty": torch.zeros(0, 7),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "flags": torch.tensor([True, False, True]),
        "bfloat16": torch.randn(5).bfloat16(),
        "eight bits": torch.randn(5).to(torch.float8_e4m3fn),
        "counts": torch.arange(4),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": nn.Parameter(torch.randn(2, 3)),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    want = [bytes(memoryview(chunk).cast("B")) for chunk in tensor_chunks(tensors)]
    copies = copied_tensors(tensors)
    assert list(copies) == list(tensors)
    for name, copy in copies.items():
        own = tensors[name].detach()
        assert copy.shape == own.shape and copy.dtype == own.dtype and not copy.requires_grad
        if own.numel():
            assert copy.untyped_storage().data_ptr() != own.untyped_storage().data_ptr(), name
    found = [bytes(memoryview(chunk).cast("B")) for chunk in tensor_chunks(copies)]
    assert len(found) == 2, "the header and one block"
    assert b"".join(found) == b"".join(want)


class Distant(torch.Tensor):
    """A tensor that is not in the host's memory, as far as a copy of it can tell."""

    asked: ClassVar[list[tuple[Any, ...]]] = []

    def __new__(cls, x: torch.Tensor) -> Distant:
        return x.as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.to, torch.Tensor.clone, torch.Tensor.cpu):
            cls.asked.append((func.__name__, *args[1:], kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_devices_tensors_are_copied_to_the_host_at_once() -> None:
    """On the caller's stream, where nothing that is queued later can change them first."""
    Distant.asked = []
    x = torch.arange(6.0).reshape(2, 3)
    copy = copied_tensors({"x": Distant(x)})["x"]
    assert Distant.asked == [("to", "cpu", {"copy": True})]
    x.zero_()
    assert copy.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_copy_holds_the_numbers_of_its_moment() -> None:
    x = torch.ones(1 << 24, device="cuda")
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for _ in range(50):
        x.add_(1)
    copy = copied_tensors({"x": x})["x"]
    x.zero_()
    assert torch.cuda.memory_allocated() == held
    with torch.cuda.stream(torch.cuda.Stream()):
        assert copy.device.type == "cpu" and bool((copy == 51).all())


@pytest.mark.parametrize(
    "made", [lambda: torch.eye(3).to_sparse(), lambda: torch.eye(3).to("meta")]
)
def test_what_no_file_holds_is_refused_as_it_is_written(made: Callable[[], torch.Tensor]) -> None:
    copies = copied_tensors({"held": torch.ones(2), "odd": made()})
    with pytest.raises(CheckpointError, match=r"odd is .* which a safetensors file cannot hold"):
        list(tensor_chunks(copies))
