"""Training steps as ONNX files for stock onnxruntime: Onward's, onnxsim's, and eager PyTorch's."""

from __future__ import annotations

import contextlib
import io
import re
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

STEPS, LR = 20, 1e-3
ROWS, LENGTH, WORDS, CLASSES = 8, 32, 512, 4
Batch = dict[str, Tensor]
Step = Callable[[Batch], float]


class WithLoss(nn.Module):
    """A model whose forward takes positional inputs and returns the loss alone, f32[], as onnxsim
    asks for. loss: of the outputs and the labels; None: the model's own."""

    def __init__(self, model: nn.Module, names: list[str], loss: Any) -> None:
        super().__init__()
        self.model, self.names, self.loss = model, names, loss

    def forward(self, *given: Tensor) -> Tensor:
        batch = dict(zip(self.names, given, strict=True))
        if self.loss is None:
            return self.model(**batch).loss
        labels = batch.pop("labels")
        found = self.model(**batch)
        return self.loss(found if isinstance(found, Tensor) else found.logits, labels)


class Named(WithLoss):
    """A model with its loss for the Trainer, which gives a batch by names."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        labels: Tensor,
        x: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        given = {
            "x": x, "input_ids": input_ids, "attention_mask": attention_mask, "labels": labels,
        }  # fmt: skip
        return super().forward(*(given[name] for name in self.names))


def squared(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean square of the scores' distance from one-hot labels f32[..., C], by products."""
    return ((scores - labels) * (scores - labels)).mean()


class Perceptron(nn.Module):
    """Three layers: f32[B,T] to scores f32[B,C]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(LENGTH, 128), nn.Tanh(), nn.Linear(128, 128), nn.ReLU(),
            nn.Linear(128, CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@dataclass(frozen=True)
class PortableCase:
    """A model with its batches, and the settings under which a peer may find it easier."""

    name: str
    make: Callable[..., nn.Module]
    inputs: tuple[str, ...]
    easier: Mapping[str, Any] = field(default_factory=dict)
    loss: Any = None  # None: the model's own

    def batch(self, seed: int, loss: Any = None) -> Batch:
        """One batch: token ids i64[B,T] (or f32[B,T]) and labels, i64[B,T] or i64[B]; for `squared`
        one-hot, f32[..., C]."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, WORDS, (ROWS, LENGTH), generator=generator)
        drawn = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "x": torch.randn(ROWS, LENGTH, generator=generator),
            "labels": ids if "input_ids" in self.inputs else ids[:, 0] % CLASSES,
        }
        if "attention_mask" in self.inputs:
            drawn["labels"] = ids[:, 0] % CLASSES
        if loss is squared:
            count = WORDS if drawn["labels"].dim() == 2 else CLASSES
            drawn["labels"] = nn.functional.one_hot(drawn["labels"], count).float()
        return {name: drawn[name] for name in self.inputs}


def _causal(config: type, model: type, **sizes: Any) -> Callable[..., nn.Module]:
    def make(**more: Any) -> nn.Module:
        return model(config(vocab_size=WORDS, use_cache=False, **{**sizes, **more}))

    return make


_EASIER = {"attn_implementation": "eager", "tie_word_embeddings": False}
CASES = (
    PortableCase("MLP", Perceptron, ("x", "labels"), loss=nn.functional.cross_entropy),
    PortableCase(
        "GPT-2",
        _causal(
            transformers.GPT2Config, transformers.GPT2LMHeadModel, n_layer=2, n_embd=128, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ),
        ("input_ids", "labels"), _EASIER,
    ),
    PortableCase(
        "BERT, classifier",
        lambda **more: transformers.BertForSequenceClassification(
            transformers.BertConfig(
                vocab_size=WORDS, num_hidden_layers=2, hidden_size=128, num_attention_heads=4,
                intermediate_size=512, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                **{"num_labels": CLASSES, **more},
            )
        ),
        ("input_ids", "attention_mask", "labels"), {"attn_implementation": "eager"},
    ),
    PortableCase(
        "Llama",
        _causal(
            transformers.LlamaConfig, transformers.LlamaForCausalLM, hidden_size=128,
            intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        ),
        ("input_ids", "labels"), _EASIER,
    ),
    PortableCase(
        "T5",
        _causal(
            transformers.T5Config, transformers.T5ForConditionalGeneration, d_model=128, d_kv=32,
            d_ff=256, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
        ),
        ("input_ids", "labels"), _EASIER,
    ),
)  # fmt: skip


def made(case: PortableCase, **more: Any) -> nn.Module:
    """The model in training mode, with the same weights each time."""
    torch.manual_seed(0)
    return case.make(**more).train()


def eager(case: PortableCase, loss: Any, **more: Any) -> list[float]:
    """The losses of PyTorch's own steps with `torch.optim.Adam`."""
    model = WithLoss(made(case, **more), list(case.inputs), loss)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    losses = []
    for seed in range(STEPS):
        optimizer.zero_grad()
        value = model(*case.batch(seed, loss).values())
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def by_onward(case: PortableCase, folder: Path, loss: Any, **more: Any) -> Step:
    """Exports the step of a Trainer; returns what runs it on onnxruntime, without torch."""
    import onward
    from onward.train.portable_runner import Training

    module = Named(made(case, **more), list(case.inputs), loss)
    trainer = onward.Trainer(module, torch.optim.Adam(module.parameters(), lr=LR))
    trainer.export_training(folder, case.batch(0, loss))
    training = Training(folder)

    def step(batch: Batch) -> float:
        found = training.step({name: x.numpy() for name, x in batch.items()}, lr=LR)
        return float(found["loss"])

    return step


def by_onnxsim(case: PortableCase, simplified: bool, loss: Any, **more: Any) -> Step:
    """Compiles the step by onnxsim; it runs on onnxruntime as well. simplified: onnxsim's own
    simplifier runs over the forward first, which makes more shapes known."""
    import onnxsim  # pyright: ignore[reportMissingImports]
    from onnxsim.torch_training import (  # pyright: ignore[reportMissingImports]
        export_torch_module_to_onnx,
    )

    module = WithLoss(made(case, **more), list(case.inputs), loss)
    names = [name for name, _ in module.named_parameters()]
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = tuple(case.batch(0, loss).values())
        if simplified:
            exported = export_torch_module_to_onnx(module, given, output_names=("loss",))
            exported, _ = onnxsim.simplify(exported, perform_optimization=False)  # names stay
            loop = onnxsim.compile_training_loop(exported, "loss", names)
        else:
            loop = onnxsim.compile_torch_training_loop(module, given)
    names = [value.name for value in loop.model.graph.input]

    def step(batch: Batch) -> float:
        return float(loop(dict(zip(names, batch.values(), strict=True)), lr=LR))

    return step


def measured(
    make: Callable[[], Step], case: PortableCase, loss: Any, **more: Any
) -> dict[str, Any]:
    """What 20 steps gave: seconds to build with the first step, steps per second, and the largest
    difference of a loss from eager's, relative to it. `refused`: why there are no steps."""
    begun = time.perf_counter()
    try:
        step = make()
        losses = [step(case.batch(0, loss))]
        built = time.perf_counter() - begun
        begun = time.perf_counter()
        losses += [step(case.batch(seed, loss)) for seed in range(1, STEPS)]
        seconds = time.perf_counter() - begun
    except Exception as error:  # a peer may fail in any way: that is what is counted
        text = " ".join(re.sub(r"\x1b\[\d*m", "", str(error)).split())
        return {"refused": f"{type(error).__name__}: {text[:300]}"}
    reference = eager(case, loss, **more)
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))
    return {"built_s": built, "steps_per_s": (STEPS - 1) / seconds, "difference": apart}
