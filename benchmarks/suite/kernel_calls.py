"""The calls that steps make of kernels, and operands to make them again.

The calls are seen while each workload's step and evaluation run, and the step without the passes
that fuse, and with gradient clipping, so that an op which is replaced by a fused one is met too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import onward
from onward.graph.types import Type, parse_type, value
from suite import passes
from suite.cases import Case
from suite.engines import LEARNING_RATE
from suite.kernel_table import Bound, KernelSpec, preferred, torch_dtype, type_of, watched
from suite.progress import say
from suite.workloads import make_batches, make_model

STEP = "step"
_KEPT = 4096  # elements: tensors up to this size keep the contents they have in the step


@dataclass(frozen=True)
class Operand:
    """Where a tensor's elements lie, in elements."""

    type: Type
    strides: tuple[int, ...]
    is_contiguous: bool

    @classmethod
    def of(cls, x: torch.Tensor) -> Operand:
        """The layout of a tensor."""
        return cls(type_of(x), x.stride(), x.is_contiguous())

    def empty(self) -> torch.Tensor:
        """An uninitialised tensor with this type and layout."""
        shape, dtype = [value(n) for n in self.type.shape], torch_dtype(self.type.dtype)
        return torch.empty_strided(shape, self.strides, dtype=dtype)


@dataclass
class Call:
    """One distinct call of an op. `contents[i]`: what input i holds, None where it is drawn.

    kernel: the one that the plan chose. inputs, outputs: where they lie. shares: pairs (output,
    input) in one memory. count: launches in the workload's own step; 0 for calls of the variants
    only.
    """

    spec: KernelSpec
    kernel: str
    inputs: tuple[Operand | None, ...]
    outputs: tuple[Operand, ...]
    shares: tuple[tuple[int, int], ...]
    contents: list[torch.Tensor | None]
    origin: str
    count: int = 0
    results: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        """Types of the inputs; `'` marks one that is not contiguous."""
        inputs = [
            "-" if x is None else f"{x.type}{'' if x.is_contiguous else chr(39)}"
            for x in self.inputs
        ]
        if len(inputs) > 8:
            inputs[4:-1] = ["..."]
        return f"({', '.join(inputs)}){' in place' if self.shares else ''}"

    def tensors(self) -> list[torch.Tensor | None]:
        """Inputs, made anew, with the strides of the plan."""
        generator = torch.Generator().manual_seed(0)
        made: list[torch.Tensor | None] = []
        for operand, content in zip(self.inputs, self.contents, strict=True):
            if operand is None:
                made.append(None)
                continue
            x = operand.empty()
            if content is not None:
                x = content.clone() if 0 in operand.strides else x.copy_(content)
            elif 0 in operand.strides:  # expanded: one number for many places
                x = x.fill_(0.5)
            else:
                x = x.uniform_(generator=generator)
            made.append(x)
        return made


def _variants() -> list[tuple[str, dict[str, Any]]]:
    """Steps by name, and the options of the trainer that makes them."""
    return [
        (STEP, {}),
        ("step, nothing fused", {"disable": passes.fusions()}),
        ("step, clipped", {"max_grad_norm": 1.0}),
    ]


def harvested(case: Case) -> list[Call]:
    """The distinct calls of a case's step and of its variants, in the order they are made."""
    found: dict[Any, Call] = {}
    for origin, options in _variants():
        say(f"{case.name}: {origin}")
        model = make_model(case)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        low = {"mixed_precision": "bf16"} if case.precision == "bf16" else {}
        trainer = onward.Trainer(model, optimizer, options={"seed": 0, **low, **options})
        (batch,) = make_batches(case, 1)
        with _recorded(origin) as made:
            trainer.train_step(batch)
        # Launches that counted the batch's rows ran before the step and are no part of it.
        length = len(trainer.plan.launches)
        counting = {key for key, _ in made[:-length]}
        for key, call in made[-length:]:
            found.setdefault(key, call).count += origin == STEP
        if origin == STEP:
            with _recorded("evaluation") as made:
                trainer.eval_step(batch)
            for key, call in made:
                if key not in counting:
                    found.setdefault(key, call)
    return list(found.values())


@contextmanager
def _recorded(origin: str) -> Iterator[list[tuple[Any, Call]]]:
    """The launches that are made within the block, by kernels that are bound within it."""
    made: list[tuple[Any, Call]] = []
    with watched(lambda launch: made.append(_seen(launch, origin))):
        yield made


def _seen(launch: Bound, origin: str) -> tuple[Any, Call]:
    """A launch about to be made, as a key that equal calls share and the call itself."""
    args, spec = launch.args, launch.spec
    shares = tuple(
        (o, i)
        for o, y in enumerate(args.outputs)
        for i, x in enumerate(args.inputs)
        if x is not None and _same_place(x, y)
    )
    inputs = tuple(None if x is None else Operand.of(x) for x in args.inputs)
    outputs = tuple(Operand.of(y) for y in args.outputs)
    attrs = {name: a for name, a in spec.attrs.items() if name != "site"}  # one per dropout
    contents = [None if x is None else _content(x) for x in args.inputs]
    key = (spec.op, repr(attrs), inputs, outputs, shares)
    return key, Call(spec, launch.kernel, inputs, outputs, shares, contents, origin)


def _same_place(x: torch.Tensor, y: torch.Tensor) -> bool:
    return (x.data_ptr(), x.shape, x.stride()) == (y.data_ptr(), y.shape, y.stride())


def _content(x: torch.Tensor) -> torch.Tensor | None:
    return x.clone() if x.numel() <= _KEPT or not x.is_floating_point() else None


# Calls that no workload makes, of ops whose operands are all real numbers: op, attributes, inputs
# and output.
_EXTRA: tuple[tuple[str, dict[str, Any], tuple[str, ...], str], ...] = (
    ("Gelu", {"approximate": "none"}, ("f32[1024,2048]",), "f32[1024,2048]"),
    ("GeluGrad", {"approximate": "none"}, ("f32[1024,2048]",) * 2, "f32[1024,2048]"),
)


def extra() -> list[Call]:
    """The calls of `_EXTRA`, on contiguous operands."""
    calls: list[Call] = []
    for op, attrs, texts, output in _EXTRA:
        types, result = tuple(parse_type(text) for text in texts), parse_type(output)
        spec = KernelSpec(op, attrs, types, (result,))
        inputs, (y,) = [_contiguous(t) for t in types], (_contiguous(result),)
        nothing: list[torch.Tensor | None] = [None] * len(inputs)
        calls.append(
            Call(spec, preferred(spec), tuple(inputs), (y,), (), nothing, "not in either step")
        )
    return calls


def _contiguous(type: Type) -> Operand:
    shape = [value(n) for n in type.shape]
    return Operand.of(torch.empty(shape, dtype=torch_dtype(type.dtype), device="meta"))
