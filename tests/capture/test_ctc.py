"""CTC in the forms that models use: loss and gradient are eager's, of probabilities that sum to 1
and of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
import transformers as hf
from test_capture_vision import WAV2VEC2
from torch import nn

LABELS = torch.tensor([[1, 2, 2], [3, -100, -100], [4, 4, -100], [-100, -100, -100]])
LENGTHS = torch.tensor([3, 1, 2, 0])
STEPS = torch.tensor([12, 7, 9, 4])
FLAT = torch.tensor([1, 2, 2, 3, 4, 4])
Form = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of x f[12,4,5] and LABELS

FORMS: dict[str, Form] = {
    **{
        f"{reduction}, zero_infinity {zero}": lambda x, y, reduction=reduction, zero=zero: (
            F.ctc_loss(x, y, STEPS, LENGTHS, reduction=reduction, zero_infinity=zero)
        )
        for reduction in ("none", "mean", "sum")
        for zero in (False, True)
    },
    "labels one after the other": lambda x, y: F.ctc_loss(x, FLAT + 0 * y[0, 0], STEPS, LENGTHS),
    "labels chosen": lambda x, y: F.ctc_loss(
        x, y[y >= 0], STEPS, torch.count_nonzero(y >= 0, -1), zero_infinity=True
    ),
    "labels selected": lambda x, y: F.ctc_loss(
        x, y.masked_select(y >= 0), STEPS, (y >= 0).sum(-1), reduction="sum"
    ),
    "lengths as numbers": lambda x, y: torch.ctc_loss(x, y, (12, 7, 9, 4), (3, 1, 2, 0), 0, 1),
    "lengths of i32": lambda x, y: F.ctc_loss(x, y, STEPS.int(), LENGTHS.int()),
    "another blank": lambda x, y: F.ctc_loss(x, (y - 1) % 4, STEPS, LENGTHS, blank=4),
    "without a path": lambda x, y: F.ctc_loss(
        x, y, torch.tensor([2, 7, 2, 4]), LENGTHS, zero_infinity=True, reduction="none"
    ),
    "one sample": lambda x, y: F.ctc_loss(x[:, 0], y[0], torch.tensor(12), torch.tensor(3)),
    "of a module": lambda x, y: nn.CTCLoss(reduction="sum")(x, y, STEPS, LENGTHS),
}


class Net(nn.Module):
    def __init__(self, form: Form, normal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.normal = form, normal
        self.w = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = x * self.w
        loss = self.form(scores.log_softmax(-1) if self.normal else scores, y)
        return (loss * (torch.arange(loss.numel()) + 1).reshape(loss.shape)).sum()


@pytest.mark.sample(1)
@pytest.mark.parametrize("normal", [True, False], ids=["probabilities", "others"])
@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_eagers(name: str, normal: bool) -> None:
    x = torch.randn(12, 4, 5, generator=torch.Generator().manual_seed(1))
    model, data = Net(FORMS[name], normal), {"x": x, "y": LABELS}
    have, want = tiny.gradients(model, data), tiny.eager(model, data, torch.float32)
    assert set(have) == set(want)
    for key, y in want.items():
        torch.testing.assert_close(have[key], y, rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Wav2Vec2", "Hubert"])
def test_a_model_of_speech(family: str) -> None:
    """Labels and lengths of other samples, in one capture."""
    torch.manual_seed(0)
    options: dict[str, Any] = {**WAV2VEC2, "vocab_size": 9, "ctc_loss_reduction": "mean"}
    model = getattr(hf, f"{family}ForCTC")(getattr(hf, f"{family}Config")(**options))
    batches = []
    for ends in ((6, 3, 5), (1, 6, 4), (2, 2, 2), (5, 0, 6)):
        labels, mask = torch.randint(1, 9, (3, 6)), torch.ones(3, 400, dtype=torch.long)
        for row, end in enumerate(ends):
            labels[row, end:] = -100
        mask[1, 320:] = 0
        sound = torch.randn(3, 400) * mask
        batches.append({"input_values": sound, "attention_mask": mask, "labels": labels})
    for ours, data in zip(tiny.gradients_of(tiny.ready(model), batches), batches, strict=True):
        plain, exact = (tiny.eager(model, data, t) for t in (torch.float32, torch.float64))
        assert not tiny.differing_most(ours, plain, exact)
