"""The engines: the ways to run a training step, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

LEARNING_RATE = 5e-5


@dataclass(frozen=True)
class Engine:
    """One way to run a step. `compiled`: under torch.compile; `fused`: one-kernel AdamW. onward: a
    Trainer; module: a model that `onward.accelerate` was given, in the loop of the others.

    mode: of torch.compile; "": its default. liger: with the kernels of the package liger-kernel.
    precision: another than the case's. disable, seed: Onward's options of these names; a seed makes
    dropout the same in every run.
    change: the model that is trained instead, made of the case's own; a function of a module.
    """

    name: str
    about: str
    compiled: bool = False
    mode: str = ""
    liger: bool = False
    fused: bool = False
    onward: bool = False
    module: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    disable: tuple[str, ...] = ()
    seed: int | None = None
    precision: str = ""
    change: Callable[[nn.Module], nn.Module] | None = None


# Fewer page faults: torch then asks for large allocations in huge pages.
_LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}

ENGINES = {
    engine.name: engine
    for engine in (
        Engine("eager", "PyTorch as it comes"),
        Engine(
            "eager-tuned",
            "eager, THP_MEM_ALLOC_ENABLE=1, fused AdamW",
            fused=True,
            env=_LARGE_PAGES,
        ),
        Engine("compile", "torch.compile(model)", compiled=True),
        Engine(
            "compile-tuned",
            "torch.compile(model), THP_MEM_ALLOC_ENABLE=1, fused AdamW",
            compiled=True,
            fused=True,
            env=_LARGE_PAGES,
        ),
        Engine("onward", "onward.Trainer", onward=True),
        Engine("onward-module", "onward.accelerate(model), fused AdamW", module=True, fused=True),
    )
}

# Fused AdamW is what PyTorch recommends on a GPU, so that both peers get it.
GPU_ENGINES = {
    "eager": replace(ENGINES["eager"], fused=True, about="PyTorch, fused AdamW"),
    "compile": replace(ENGINES["compile"], fused=True, about="torch.compile(model), fused AdamW"),
    "onward": ENGINES["onward"],
    "compile-graphs": Engine(
        "compile-graphs", "torch.compile(model, mode='reduce-overhead'), fused AdamW",
        compiled=True, mode="reduce-overhead", fused=True,
    ),
    "liger": Engine("liger", "PyTorch with liger-kernel, fused AdamW", fused=True, liger=True),
}  # fmt: skip
GPU_DEFAULT = "eager,compile,onward"

# Onward with the same dropout in every run, so that its losses can be compared one by one.
SEEDED = replace(ENGINES["onward"], seed=0)


# Onward in fp32 beside what runs in the precision of a case.
FP32 = replace(ENGINES["onward"], name="onward-fp32", about="the same in fp32", precision="fp32")


def without_pass(pass_name: str, name: str, about: str) -> Engine:
    """Seeded Onward with a rewrite pass switched off."""
    return replace(SEEDED, name=name, about=about, disable=(pass_name,))


def named(engines: Mapping[str, Engine], names: Iterable[str]) -> dict[str, Engine]:
    """The engines whose names are in `names`, in the order of `engines`."""
    wanted = set(names)
    return {name: engine for name, engine in engines.items() if name in wanted}
