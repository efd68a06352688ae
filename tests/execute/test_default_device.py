"""Memory of the host where torch.set_default_device names another device: the device of tensors
without numbers stands for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.checkpoint.tensor_file import copied_tensors
from onward.execute import StateStore
from onward.execute.runtime import CudaRuntime
from onward.execute.state_store import SMALL
from onward.kernels import RankGroups, moments


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("size", [3, SMALL])
def test_state_outside_of_the_device_is_the_hosts(size: int, tmp_path: Path) -> None:
    store = StateStore(torch.device("cpu"), tmp_path)
    made = store.zeros((size,), torch.float32)
    assert made.device.type == "cpu" and not made.any()


def test_a_batch_is_staged_in_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    plain = torch.empty

    def empty(*shape: Any, pin_memory: bool, **more: Any) -> torch.Tensor:
        asked.append((pin_memory, more.get("device")))
        return plain(*shape, **more)

    content = torch.arange(6, device="cpu")
    place = torch.empty(6, dtype=torch.int64)
    monkeypatch.setattr(torch, "empty", empty)
    CudaRuntime(torch.device("cuda")).put(content, place)
    assert asked == [(True, "cpu")]


def test_codes_of_moments_are_made_from_numbers_of_the_host() -> None:
    moments._levels.cache_clear()
    levels = moments._levels(True, torch.device("cpu"))
    assert levels.shape == (5, 9) and not levels[:, 0].any()


def test_copies_for_a_file_and_for_an_exchange_are_the_hosts() -> None:
    x = torch.arange(4.0, device="cpu")
    assert torch.equal(copied_tensors({"x": x})["x"], x)
    assert torch.equal(RankGroups().borrowed(x), x)
