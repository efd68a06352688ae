"""A step planned for a GPU that is not here is the one that a process there would plan."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny
import torch
from device_double import planned_for_cuda
from torch import nn

import onward
from onward.cli import main
from onward.errors import OnwardError
from onward.explanation import ExplanationRequest, StepExplanation
from onward.kernels import GPUS, Gpu, Target
from onward.recipes.explain_options import ExplainConfig

MODELS = {"gpt2": tiny.gpt2, "bert": tiny.bert}
NAMES = ("launches", "changes", "memory", "dims", "results", "near_misses", "rows")


@dataclass(frozen=True)
class Bare(Gpu):
    """A GPU without Triton, so that the plans that count rows there run here too."""

    @property
    def target(self) -> Target:
        return replace(super().target, triton=False)


def explained(trainer: onward.Trainer, data: dict[str, torch.Tensor]) -> StepExplanation:
    return onward.explain(trainer, data)


def trainer_of(model: nn.Module, **options: Any) -> onward.Trainer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return onward.Trainer(model, optimizer, options={"seed": 1, **options})


def assert_alike(found: StepExplanation, expected: StepExplanation) -> None:
    for name in NAMES:
        a, b = (e.as_dict()[name] for e in (found, expected))
        assert a == b, name


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_the_plan_is_that_of_a_process_on_the_device(name: str, gpu: Gpu, precision: str) -> None:
    model, data = MODELS[name](0.1), tiny.batch(4, 12, "right", ignored=True)
    options = {"disable": ("row_demand",), "mixed_precision": precision}
    with planned_for_cuda(None, gpu.target):
        expected = explained(trainer_of(copy.deepcopy(model), **options), data)
    found = onward.explain(trainer_of(model, **options), data, gpu=gpu.name.lower())
    assert found.gpu == gpu.name and not expected.gpu
    assert f"planned for one {gpu.name}" in str(found)
    assert_alike(found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_counted_here_and_rounded_as_there(name: str) -> None:
    model, data = MODELS[name](0.1), tiny.batch(8, 12, "right", ignored=True)
    bare = Bare("bare", "", 10**9, GPUS[0].rates, (9, 0))
    with planned_for_cuda(None, bare.target):
        expected = explained(trainer_of(copy.deepcopy(model)), data)
    trainer = trainer_of(model)
    found = trainer.explain_call(((), data), asked=ExplanationRequest(gpu=bare))
    exact = explained(trainer, data)
    assert found.packed
    assert found.dims == expected.dims
    assert found.dims != exact.dims, "counts are rounded where launches are recorded"
    kinds: list[dict[str, int]] = []
    for each in (found, expected):
        assert each.memory is not None
        kinds.append({k: n for k, n in each.memory.kinds.items() if k != "row counting"})
    assert kinds[0] == kinds[1]


def test_nothing_changes_here() -> None:
    """A step that was explained for a GPU, before it and between steps, is the step it was."""
    data = tiny.batch(4, 12, "right", ignored=True)
    plain, looked = (trainer_of(tiny.gpt2(0.3)) for _ in range(2))
    onward.explain(looked, data, gpu="A100")
    for _ in range(3):
        a, b = (t.train_step(data).loss for t in (plain, looked))
        assert torch.equal(a, b)
        onward.explain(looked, gpu="V100", memory="1GB")
    assert looked.plan.launches[0].kernel.name == plain.plan.launches[0].kernel.name


def test_a_larger_batch_and_the_users_loop() -> None:
    data = tiny.batch(4, 12)
    trainer = trainer_of(tiny.gpt2(0.1))
    found = onward.explain(trainer, data, gpu="H100", memory="4MB", batch_sizes=(1, 4, 16))
    assert found.largest is not None and found.memory is not None
    sizes = {x.batch_size: x.nbytes for x in found.sizes}
    assert sizes[4] == found.memory.total
    one, four, many = (sizes[n] or 0 for n in (1, 4, 16))
    assert 0 < one < four < many
    size = found.largest.batch_size
    assert size > 16 and found.largest.nbytes is not None and found.largest.nbytes <= 4 * 10**6
    assert found.largest.beyond is not None and found.largest.beyond > 4 * 10**6
    loop = onward.explain(tiny.gpt2(0.1), data, gpu="H100")
    assert loop.gpu == "H100" and any(x.op == "FlashAttention" for x in loop.launches)


REFUSED = {
    "a strange GPU": ({"gpu": "H10"}, "unknown GPU in gpu: 'h10' (did you mean h100"),
    "times of an absent GPU": ({"gpu": "H100", "profile": True}, "gpu='H100' only plans them"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case: str) -> None:
    options, text = REFUSED[case]
    trainer = trainer_of(tiny.gpt2(0.1))
    with pytest.raises(OnwardError) as caught:
        onward.explain(trainer, tiny.batch(4, 12), **options)
    assert text in str(caught.value) and "; fix: " in str(caught.value)


def test_the_help_names_every_gpu() -> None:
    told = ExplainConfig.__dataclass_fields__["gpu"].metadata["help"]
    assert all(gpu.name in told for gpu in GPUS)


def test_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "gpt2-tiny", "--gpu", "h100", "--memory", "1GB"]) == 0
    printed = capsys.readouterr().out
    assert "planned for one H100" in printed and "largest batch within" in printed
    assert main(["explain", "gpt2-tiny", "--gpu", "h100", "--profile"]) == 2
    assert "nothing runs on that GPU, in --profile" in capsys.readouterr().err
