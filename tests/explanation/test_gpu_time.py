"""The time of a step on a GPU that is not here: eager PyTorch's launches are those of a run, and a
launch takes what its FLOPs and bytes say."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tiny_families import CASES
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import onward
from onward.cli import main
from onward.explanation.as_on_cuda import ATTENTION_FLOPS
from onward.explanation.eager_step import EagerWork, eager_work
from onward.explanation.facts import GpuTime
from onward.explanation.gpu_seconds import DeviceSeconds, LaunchWork, device_seconds, host_seconds
from onward.explanation.gpu_time import plan_work, planned_work
from onward.explanation.text import time_lines, verdict
from onward.graph.ops import OPS
from onward.kernels import gpu_called
from onward.prepare.batch import bind_batch

H100 = gpu_called("H100").rates
GAP = 3e-6


class Counted(TorchDispatchMode):
    """Counts the operators that PyTorch runs, but for those that make views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        views = (torch.ops.aten._unsafe_view, torch.ops.aten.detach)
        is_view = func.is_view or func.overloadpacket in views
        self.count += func.namespace == "aten" and not is_view
        return func(*args, **(kwargs or {}))


class Mlp(nn.Module):
    """y = b relu(a x). f32[N,64] -> f32[N,64]."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


def found(model: nn.Module, batch: Any, **options: Any) -> EagerWork:
    options = {"loss_fn": None, "autocast": None, "backward": True, **options}
    work = eager_work(model, batch=bind_batch((batch,), {}, False), **options)
    assert isinstance(work, EagerWork), work
    return work


def trainer_of(model: nn.Module, **options: Any) -> onward.Trainer:
    return onward.Trainer(model, torch.optim.AdamW(model.parameters()), options=options)


def time_of(model: Any, batch: Any, gpu: str = "H100", **more: Any) -> GpuTime:
    time = onward.explain(model, batch, gpu=gpu, **more).time
    assert time is not None
    return time


# ---- the price of a launch

PRICES: dict[str, tuple[LaunchWork, float, str]] = {
    "products of fp32": (LaunchWork(1e12, 4.0), 1e12 / (0.75 * 67e12), "products"),
    "products of 16 bits": (LaunchWork(1e12, low=True), 1e12 / (0.6 * 989e12), "products"),
    "rows of cuBLAS's fast products": (
        LaunchWork(1e12, low=True, rows=(64, 8, 50_264)), 1e12 / (0.6 * 989e12), "products",
    ),
    "an odd vocabulary": (
        LaunchWork(1e12, low=True, rows=(64, 8, 50_257)), 4e12 / (0.6 * 989e12), "products",
    ),
    "odd rows in fp32": (LaunchWork(1e12, rows=(3, 5, 7)), 1e12 / (0.75 * 67e12), "products"),
    "attention": (LaunchWork(1e12, attention=True), 1e12 / (0.25 * 67e12), "attention"),
    "attention of 16 bits": (
        LaunchWork(1e12, low=True, attention=True), 1e12 / (0.13 * 989e12), "attention",
    ),
    "bytes": (LaunchWork(nbytes=1e9), 1e9 / (0.8 * 3.35e12), "memory"),
    "a product bound by its bytes": (LaunchWork(1e6, 1e9), 1e9 / (0.8 * 3.35e12), "memory"),
    "nothing": (LaunchWork(), 0.0, "memory"),
}  # fmt: skip


@pytest.mark.parametrize("case", PRICES)
def test_a_launch_takes_the_larger_of_its_two_times_and_a_gap(case: str) -> None:
    work, seconds, kind = PRICES[case]
    price = device_seconds([work], H100, tf32=False)
    assert getattr(price, kind) == pytest.approx(seconds + GAP) == price.total
    assert price.launches == 1
    three = device_seconds([work] * 3, H100, tf32=False)
    assert three.total == pytest.approx(3 * price.total) and three.launches == 3


def test_tf32_is_for_products_of_fp32() -> None:
    def seconds(work: LaunchWork, tf32: bool) -> float:
        return device_seconds([work], H100, tf32).total

    assert seconds(LaunchWork(1e12), True) == pytest.approx(1e12 / (0.6 * 989e12 / 2) + GAP)
    for same in (
        LaunchWork(1e12, low=True),
        LaunchWork(1e12, attention=True),
        LaunchWork(nbytes=1e9),
    ):
        assert seconds(same, True) == seconds(same, False)


def test_the_host_launches_operators_and_lighter_ones() -> None:
    assert host_seconds(100, 0) == pytest.approx(3e-3)
    assert host_seconds(0, 100) == pytest.approx(1e-3)


# ---- what eager PyTorch launches

MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "mlp": lambda: (Mlp(), torch.randn(8, 64)),
    "gpt2": lambda: (tiny.gpt2(0.0), tiny.batch(4, 12)),
    "bert": lambda: (tiny.bert(0.0), tiny.batch(4, 12)),
    "bert, padded": lambda: (tiny.bert(0.0), tiny.batch(4, 12, "right", ignored=True)),
}


@pytest.mark.parametrize("backward", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", MODELS)
def test_operators_and_flops_are_those_of_a_run(name: str, backward: bool) -> None:
    """Beside a run on real tensors, counted by PyTorch's own modes."""
    model, batch = MODELS[name]()
    work = found(model, batch, backward=backward)
    counter = FlopCounterMode(display=False, custom_mapping=ATTENTION_FLOPS)
    count = Counted()
    with torch.set_grad_enabled(backward), counter, count:
        output = model(**batch) if isinstance(batch, dict) else model(batch)
        if backward and isinstance(batch, dict):
            output["loss"].backward()
        elif backward:
            torch.stack([output.sum()]).sum().backward()
    flops = counter.get_total_flops()
    causal = sum(w.flops for w in work.launches if w.attention) if name == "gpt2" else 0.0
    assert sum(w.flops for w in work.launches) + causal == pytest.approx(flops)
    # what masks hide is asked of real tensors with more operators
    assert len(work.launches) == pytest.approx(count.count, abs=0 if name == "mlp" else 12)


def test_bytes_of_an_operator_are_what_it_reads_and_writes() -> None:
    x = torch.randn(8, 64)
    up, relu, _ = found(Mlp(), x, backward=False).launches
    assert up.nbytes == 4 * (8 * 64 + 64 * 96 + 8 * 96) and up.flops == 2 * 8 * 64 * 96
    assert relu.nbytes == 2 * 4 * 8 * 96 and relu.flops == 0
    assert sorted(set(up.rows)) == [64, 96], "the weight is stored f32[96,64]"
    low = found(Mlp(), x, backward=False, autocast=torch.bfloat16)
    products = [w for w in low.launches if w.flops]
    assert len(products) == 2 and all(w.low for w in products)
    assert low.light - found(Mlp(), x, backward=False).light == 3, "casts of x and two weights"


def test_scores_that_a_causal_mask_hides_are_not_computed() -> None:
    """Where no token is padding, as in transformers' own choice; with padding all are."""

    def attention(batch: Any) -> float:
        return sum(w.flops for w in found(tiny.gpt2(0.0), batch).launches if w.attention)

    plain, padded = tiny.batch(4, 12), tiny.batch(4, 12, "right")
    ones = plain | {"attention_mask": torch.ones(4, 12, dtype=torch.long)}
    assert not bool(padded["attention_mask"].all())
    assert attention(padded) == 2 * attention(plain) > 0
    assert attention(ones) == attention(plain)


def test_a_loss_function_and_other_outputs() -> None:
    x = torch.randn(8, 64)
    batch = bind_batch((x, torch.randn(8, 64)), {}, True)
    work = eager_work(Mlp(), nn.functional.mse_loss, batch, None, True)
    assert isinstance(work, EagerWork)
    plain = found(Mlp(), x)
    assert sum(w.flops for w in work.launches) == sum(w.flops for w in plain.launches)

    class Two(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            return {"h": self.a(x), "y": super().forward(x), "mask": x > 0}

    more = sum(w.flops for w in found(Two(), x).launches) - sum(w.flops for w in plain.launches)
    assert more == 2 * 2 * 8 * 64 * 96, "one more product, and the gradient of its weight"


# ---- nothing of the user's changes


class Counting(Mlp):
    """Draws numbers, counts its calls, keeps a result, and writes a buffer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.kept = 0, None
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.add_(1)
        random.random()
        np.random.rand()
        self.kept: Any = super().forward(nn.functional.dropout(x, 0.5)) + torch.rand(())
        return self.kept


def test_model_and_generators_stay_as_they_are() -> None:
    model, x = Counting(), torch.randn(8, 64)
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False))
    assert found(model, x).operators
    assert model.calls == 0 and model.kept is None and float(model.seen) == 0
    assert all(p.grad is None and not isinstance(p, FakeTensor) for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert repr(np.random.get_state(legacy=False)) == repr(states[2])


def test_transformers_asks_as_before_afterwards() -> None:
    from transformers.utils import import_utils

    before = import_utils.is_fake_tensor
    assert found(tiny.gpt2(0.0), tiny.batch(2, 6)).operators
    assert import_utils.is_fake_tensor is before


def test_an_accelerated_model_is_run_in_eager() -> None:
    plain, x = Mlp(), torch.randn(8, 64)
    expected = found(plain, x)
    assert found(onward.accelerate(plain), x) == expected
    assert found(onward.Module(Mlp()), x) == expected


# ---- the plan


@pytest.mark.parametrize("op", ["Attention", "FlashAttention", "FlashAttentionGrad"])
def test_attention_of_packed_rows_is_that_of_its_samples(op: str) -> None:
    """The coordinates stand where the ops' own cases have them."""
    from onward.explanation.gpu_time import COORDINATES

    at = COORDINATES[op]
    packed = [c for _, c in OPS[op].cases if len(c) > at and c[at] is not None]
    assert packed and all(str(c[at]).startswith("i64[") for c in packed)


def test_packed_rows_are_predicted_faster_than_padded_ones() -> None:
    batch, full = tiny.batch(16, 64, "right", ignored=True), tiny.batch(16, 64)
    packed, whole = (time_of(trainer_of(tiny.bert(0.1)), b).onward for b in (batch, full))
    assert packed is not None and whole is not None
    assert packed.attention < whole.attention


def test_updates_are_one_launch() -> None:
    trainer = trainer_of(tiny.gpt2(0.0))
    trainer.train_step(tiny.batch(2, 6))
    launches = trainer.plan.launches
    assert len(plan_work(trainer.plan, 2)) == len(launches)  # a CPU's kernels take one each
    work = [planned_work(x, 2) for x in launches]
    assert sum(w.flops for w in work) > 0 and all(w.nbytes >= 0 for w in work)


def test_gradients_and_updates_count_where_the_step_has_them() -> None:
    model, batch = tiny.gpt2(0.0), tiny.batch(4, 12)
    whole = time_of(trainer_of(model), batch)
    loop = time_of(model, batch)
    with torch.no_grad():
        alone = time_of(model, batch)
    totals = [t.eager.total for t in (whole, loop, alone) if t.eager is not None]
    assert len(totals) == 3 and totals[0] > totals[1] > totals[2] > 0


# GPU, precision, rows and features of a product, and the rate of its FLOPs
RATES: dict[str, tuple[str, str, int, int, float]] = {
    "fp32": ("H100", "no", 8192, 4096, 0.75 * 67e12),
    "bf16": ("H100", "bf16", 8192, 4096, 0.6 * 989e12),
    "an odd number of rows": ("H100", "bf16", 8191, 4096, 0.6 * 989e12),
    "features that are no multiple of 8": ("H100", "bf16", 8192, 4100, 0.15 * 989e12),
    "a GPU without bf16": ("V100", "bf16", 8192, 4096, 0.75 * 15.7e12),
    "that GPU in fp16": ("V100", "fp16", 8192, 4096, 0.6 * 125e12),
}


@pytest.mark.parametrize("case", RATES)
def test_products_have_one_rate_for_both(case: str) -> None:
    gpu, precision, rows, features, rate = RATES[case]
    model, batch = nn.Linear(features, features, bias=False), torch.randn(rows, features)
    time = time_of(trainer_of(Scored(model), mixed_precision=precision), batch, gpu)
    assert time.onward is not None and time.eager is not None
    seconds = 2 * 2 * rows * features**2 / rate
    assert time.onward.products == pytest.approx(seconds, rel=0.01)
    assert time.eager.products == pytest.approx(seconds, rel=0.01)


class Scored(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_families_are_predicted_in_both_precisions(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, data = CASES[name][0](), CASES[name][1]()
    for precision in ("no", "bf16"):
        time = time_of(trainer_of(model, mixed_precision=precision), data)
        assert time.onward is not None and not time.reason
        assert time.eager is not None and time.eager.launches > time.onward.launches / 2
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# ---- what is shown


class Strange(Mlp):
    """Looks at numbers, which fake tensors have not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if not torch.is_grad_enabled() else x.abs().max().item())


SECONDS = DeviceSeconds(0.02, 0.01, 0.01, 100)
VERDICTS: dict[str, tuple[GpuTime, str, str]] = {
    "faster": (
        GpuTime(SECONDS, DeviceSeconds(0.05, 0.02, 0.01, 200), 0.03, 250),
        "step                 40.00      80.00", "2.00x as fast as eager PyTorch",
    ),
    "eager's host": (
        GpuTime(SECONDS, SECONDS, 0.1, 250),
        "step                 40.00     100.00",
        "2.50x as fast as eager PyTorch, which its host limits",
    ),
    "slower": (
        GpuTime(SECONDS, DeviceSeconds(0.01, 0.01, 0.0, 10), 0.01, 20),
        "step                 40.00      20.00", "predicted slower than eager PyTorch: 0.50x",
    ),
    "short": (
        GpuTime(DeviceSeconds(0.001, 0.001, 0.002, 9), SECONDS, 0.1, 250),
        "step               under 5     100.00", "the host limits steps under 5 ms",
    ),
    "unknown": (
        GpuTime(SECONDS, eager_reason="no such thing"),
        "step                 40.00", "eager PyTorch's time is unknown: no such thing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict(case: str) -> None:
    time, line, said = VERDICTS[case]
    shown = "\n".join(time_lines(time))
    assert line in shown and said in verdict(time) in shown
    assert json.loads(json.dumps(time.as_dict()))["speedup"] == time.speedup


def test_parts_in_eager_pytorch_are_not_predicted() -> None:
    time = GpuTime(reason="a part of the model runs in eager PyTorch")
    assert list(time_lines(time)) == [
        "time: not predicted, since a part of the model runs in eager PyTorch"
    ]
    assert time.step is None and time.eager_step is None and time.speedup is None


def test_a_model_that_fakes_cannot_run_has_no_time_of_eager() -> None:
    work = eager_work(Strange(), None, bind_batch((torch.randn(8, 64),), {}, False), None, True)
    assert isinstance(work, str) and "DataDependentOutputException" in work


def test_an_operator_that_fakes_refuse_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch logs a traceback of its own for it."""

    class Grouped(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            grouped: Any = getattr(torch, "_grouped_mm")  # noqa: B009
            return grouped(x.double(), self.a.weight.double()[None], offs=None)

    work = eager_work(Grouped(), None, bind_batch((torch.randn(8, 64),), {}, False), None, True)
    assert isinstance(work, str) and "Expected" in work
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("loop", ["trainer", "module"])
def test_text_page_and_json_have_it(loop: str, tmp_path: Any) -> None:
    model, batch = tiny.gpt2(0.0), tiny.batch(4, 12)
    subject = trainer_of(model) if loop == "trainer" else model
    explained = onward.explain(subject, batch, gpu="H100")
    assert "operators of eager PyTorch" in str(explained)
    assert explained.as_dict()["time"]["onward"]["launches"] > 0
    page = explained.save(tmp_path / "page.html").read_text()
    assert "Time on one H100" in page and "the host limits" in page
    here = onward.explain(subject, batch)
    assert here.time is None and here.as_dict()["time"] is None and "time, ms" not in str(here)


def test_the_command_line_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    moved: list[float] = []
    for precision in ("no", "bf16"):
        line = ["explain", "gpt2-tiny", "--gpu", "H100", "--json", "--mixed_precision", precision]
        assert main(line) == 0
        time = json.loads(capsys.readouterr().out)["time"]
        assert time["eager"]["launches"] > 0 and time["step"] is None
        moved.append(time["operators"])
    assert moved[1] > moved[0], "autocast adds casts"
