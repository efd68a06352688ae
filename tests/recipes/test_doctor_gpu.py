"""`onward doctor --gpu`, without a GPU and with a double of one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_double import DoubleRuntime, planned_for_cuda

from onward.cli import main
from onward.recipes import doctor_gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_machine_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpu"]) == 0
    out = capsys.readouterr().out
    assert "none that PyTorch sees; torch " in out and "; fix: " in out
    assert main(["doctor"]) == 0
    assert "none that PyTorch sees" not in capsys.readouterr().out


def test_a_small_step_is_tried_on_the_device() -> None:
    """The losses on a device are those of the CPU, dropout included, or it is said."""
    double = DoubleRuntime()
    with planned_for_cuda(double):
        said = doctor_gpu.tried(torch.device("cpu"))
    assert said.startswith("no Triton kernel; losses of 3 steps with dropout as on the CPU")
    assert double.replays


def test_losses_that_differ_and_errors_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = doctor_gpu._losses
    numbers = iter((0.0, 0.1))

    def losses(device: torch.device) -> tuple[list[float], Any]:
        found, trainer = plain(device)
        off = next(numbers)
        return [x + off for x in found], trainer

    monkeypatch.setattr(doctor_gpu, "_losses", losses)
    assert "NOT those of the CPU" in doctor_gpu.tried(torch.device("cpu"))

    def fails(_: torch.device) -> Any:
        raise RuntimeError("no kernel image is available\nfor this device")

    monkeypatch.setattr(doctor_gpu, "_losses", fails)
    said = doctor_gpu.tried(torch.device("cpu"))
    assert said == "fails: RuntimeError: no kernel image is available for this device"


def test_the_facts_of_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names, memory and rates are what PyTorch and its clocks say, by number of the device."""
    found = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", total_memory=85 * 10**9, major=9, minor=0,
        multi_processor_count=132,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(doctor_gpu, "tried", lambda device: f"tried {device}")

    def seconds(_: torch.device, work: Callable[[], object], repetitions: int = 10) -> float:
        return 1e-3

    monkeypatch.setattr(doctor_gpu, "_seconds", seconds)
    monkeypatch.setattr(doctor_gpu, "_copy", lambda _: print)
    monkeypatch.setattr(doctor_gpu, "_products", lambda _, dtype: 1e12 * dtype.itemsize)
    facts = dict(doctor_gpu.gpu_facts())
    assert {"driver", "GPU 0", "GPU 1", "  rates", "  training"} == set(facts)
    assert facts["GPU 1"].startswith("NVIDIA H100 80GB HBM3, 79.2 GiB, capability 9.0, 132")
    assert facts["  training"] == "tried cuda:1"
    assert "copies 537 GB/s" in facts["  rates"] and "fp32 4.0" in facts["  rates"]
    assert "; plans assume 3350 GB/s, fp32 67.0, 16 bits 989" in facts["  rates"]
    found.name = "NVIDIA of next year"
    unknown = dict(doctor_gpu.gpu_facts())["  rates"]
    assert "Onward does not know this GPU and takes it for a T4: plans assume 320 GB/s" in unknown
