"""TRL's SFTTrainer with an accelerated model: as with the eager model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_runs import CLOSE, assert_same_run, assert_same_weights, causal_lm, history
from tokenizing import LINES, tokenizer

import onward
from onward.capture.huggingface.chunked_log_probs import log_probs
from onward.module import accelerated

datasets = pytest.importorskip("datasets", exc_type=ImportError)
trl = pytest.importorskip("trl", exc_type=ImportError)

# transformers calls modules of its own, and TRL those of transformers, by names of yesterday
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

RUNS: dict[str, dict[str, Any]] = {
    "plain": {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
    "dft": {"loss_type": "dft"},
    "packed": {"packing": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
}


def run(model: Any, folder: Path, **changes: Any) -> Any:
    rows = datasets.Dataset.from_dict({"text": LINES})
    args = trl.SFTConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, max_steps=4, learning_rate=1e-3,
        per_device_train_batch_size=8, report_to="none", disable_tqdm=True, save_strategy="no",
        logging_steps=1, log_level="error", dataloader_pin_memory=False, max_length=24, **changes,
    )  # fmt: skip
    datasets.disable_progress_bars()
    trainer = trl.SFTTrainer(
        model, args, train_dataset=rows.select(range(48)), eval_dataset=rows.select(range(48, 56)),
        processing_class=tokenizer(),
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.sample(2)
@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_sft(changes: dict[str, Any], tmp_path: Path, captures: list[int]) -> None:
    model: Any = onward.accelerate(causal_lm(), strict=True)
    ours, eager = run(model, tmp_path, **changes), run(causal_lm(), tmp_path, **changes)
    assert_same_run(ours, eager)
    held = accelerated(model)
    assert held is not None and held.plan.launches
    expected = {"plain": 2, "label smoothing": 2}  # evaluation; the metrics' own forward
    assert len(captures) == expected.get(next(k for k, v in RUNS.items() if v is changes), 1)


def test_metrics_of_a_run(tmp_path: Path) -> None:
    model: Any = onward.accelerate(causal_lm(), strict=True)
    ours, eager = run(model, tmp_path), run(causal_lm(), tmp_path)
    assert "entropy" in eager.state.log_history[0]
    for found, want in zip(ours.state.log_history, eager.state.log_history, strict=True):
        for name in ("entropy", "mean_token_accuracy", "num_tokens"):
            assert (name in found) == (name in want)
            if name in want:
                assert found[name] == pytest.approx(want[name], rel=1e-4), name
    assert len(history(ours)) == 5


def test_lora(tmp_path: Path) -> None:
    """SFTTrainer puts the adapter around the accelerated model itself."""
    peft = pytest.importorskip("peft", exc_type=ImportError)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    trainers = []
    for model in (onward.accelerate(causal_lm(), strict=True), causal_lm()):
        rows = datasets.Dataset.from_dict({"text": LINES[:32]})
        args = trl.SFTConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, max_steps=3, learning_rate=1e-2,
            report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1,
            log_level="error", dataloader_pin_memory=False,
        )  # fmt: skip
        torch.manual_seed(5)
        trainer = trl.SFTTrainer(
            model, args, train_dataset=rows, processing_class=tokenizer(), peft_config=config
        )
        trainer.train()
        trainers.append(trainer)
    assert_same_run(*trainers)
    held = accelerated(trainers[0].model.base_model.model)
    assert held is not None and held.plan.launches
    assert_same_weights(trainers[0].model, trainers[1].model)


OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.mark.parametrize("capped", [None, 3.0])
@pytest.mark.parametrize("scaled", [(1.0, 1.0), (0.7, 1.5)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_log_probs_are_those_of_trl(
    capped: float | None, scaled: tuple[float, float], biased: bool
) -> None:
    """The plain form gives TRL's results, and the gradients of its own backward."""
    from trl.kernels import ChunkedLogProbFunction

    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 5), torch.randn(33, 5)
    bias, targets = torch.randn(33) if biased else None, torch.randint(0, 33, (7,))
    targets[:3] = torch.nn.functional.linear(hidden, weight, bias).argmax(-1)[:3]
    temperature, scale = scaled
    results = []
    functions: tuple[Any, ...] = (log_probs, ChunkedLogProbFunction.apply)
    for function in functions:
        given = [t.clone().requires_grad_() for t in (hidden, weight)]
        b = None if bias is None else bias.clone().requires_grad_()
        found = function(*given, b, targets, temperature, 8, capped, scale, OUTPUTS)
        (found[0].sin().sum() + found[1].cos().sum()).backward()
        assert [t.requires_grad for t in found] == [True, True, False, False, False]
        assert 3 <= int(found[4].sum()) < 7
        results.append(
            [*(t.detach() for t in found), *(t.grad for t in (*given, b) if t is not None)]
        )
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
