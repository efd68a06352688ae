"""PyTorch's own table of operators against captures: equal to eager, refused, or wrong.

`python tests/capture/op_db.py [--write] [NAME ...]` runs the samples that PyTorch keeps for each of
its operators, in fp32 (loss and gradient of every floating input) and i64, and prints what became
of them; `--write` keeps it as the table that the suite holds captures against.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import tiny
import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from onward.errors import OnwardError
from onward.graph.names import user_name

TABLE = Path(__file__).with_name("op_db.json")
SAMPLES = 4  # of each operator and dtype, spread over all that there are
DTYPES = (torch.float32, torch.int64)
REPRODUCIBLE = 2e-5  # how far fp32 may be from fp64, of the largest number, beside eager's own
# Over one element a layer norm multiplies by 316 what is left of a difference that is 0: the
# rounding of a product that is fused with it in one place and not in the other.
AMPLIFIED = {"nn.functional.layer_norm": 1e-4, "native_layer_norm": 1e-4}


class Called(nn.Module):
    """An operator on the tensors of a sample. To each floating tensor a parameter of zeros is
    added, whose gradient is that of the tensor. The loss weighs each element differently."""

    def __init__(self, function: Any, spec: pytree.TreeSpec, leaves: list[Any]) -> None:
        super().__init__()
        self.function, self.spec = function, spec
        self.fixed = [None if isinstance(x, torch.Tensor) else (x,) for x in leaves]
        self.zeros = nn.ParameterList(
            nn.Parameter(torch.zeros_like(x))
            for x in leaves
            if isinstance(x, torch.Tensor) and x.is_floating_point()
        )
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        zeros = iter(self.zeros)
        given = iter(
            [x + next(zeros) if x.is_floating_point() else x * 1 if x.dim() else x for x in tensors]
        )
        full = [next(given) if held is None else held[0] for held in self.fixed]
        args, kwargs = pytree.tree_unflatten(full, self.spec)
        loss = self.scale * 1.0
        for y in pytree.tree_leaves(self.function(*args, **kwargs)):
            if hasattr(y, "dtype") and hasattr(y, "reshape"):  # rows that a mask chooses too
                y = torch.view_as_real(y) if y.is_complex() else y
                flat = y.to(self.scale.dtype).reshape(-1)
                weights = torch.arange(y.numel(), device=y.device) * 0.7 + 0.3
                loss = loss + (flat * torch.cos(weights).to(flat.dtype)).sum()
        return loss


def names() -> list[str]:
    """Names of all operators of `op_db`, variants included."""
    return sorted({called(op) for op in op_db})


def called(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def samples(op: Any, dtype: torch.dtype) -> list[Any]:
    """Some of the operator's own sample inputs; none where it does not take the dtype."""
    if dtype not in op.supported_dtypes("cpu"):
        return []
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():  # of sparse tensors, a beta feature, for one
            warnings.simplefilter("ignore")
            found = list(op.sample_inputs("cpu", dtype, requires_grad=False))
    except Exception:  # such as one that needs a library that is not there
        return []
    step = max(1, len(found) // SAMPLES)
    return found[::step][:SAMPLES]


def outcome(op: Any, sample: Any) -> str:
    """`equal`, `refused: why`, `WRONG: where`, or `eager: why` it says nothing."""
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
    tensors = [x.detach().clone() for x in leaves if isinstance(x, torch.Tensor)]
    if any(t.is_complex() or t.layout != torch.strided for t in tensors):
        return "eager: complex or sparse tensors"
    model = Called(op.op, spec, leaves).train()
    data = {f"x{i}": t for i, t in enumerate(tensors)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            want, exact = gradients(model, tensors, None), gradients(model, tensors, torch.float64)
        except Exception as error:
            return f"eager: {type(error).__name__}"
        if not all(t.isfinite().all() for t in want.values()):
            return "eager: not finite"
        if not torch.equal(gradients(model, tensors, None)["loss"], want["loss"]):
            return "eager: random"
        try:
            made = tiny.Compiled(model, tuple(tensors), {})
            graph = made.differentiated(tiny.trained(made))
            wanted = [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
            have = tiny.plain(tiny.execute(made, graph, data, wanted))
        except OnwardError as error:
            return f"refused: {cause(str(error))}"
        except Exception as error:
            return f"CRASH: {type(error).__name__}: {error}"[:200]
    reached = {f"grad.{user_name(n)}" for n in made.captured.reached}
    if odd := sorted(reached ^ (want.keys() - {"loss"})):
        return f"WRONG: {odd[0]} is {'none' if odd[0] in want else 'there'}, unlike eager's"
    return different(have, want, exact, AMPLIFIED.get(called(op), REPRODUCIBLE))


def gradients(
    model: nn.Module, tensors: Iterable[torch.Tensor], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    twin = tiny.copy.deepcopy(model)
    given = list(tensors)
    if dtype is not None:
        twin = twin.to(dtype)
        given = [t.to(dtype) if t.is_floating_point() else t for t in given]
    loss = twin(*given)
    loss.backward()
    found = {f"grad.{n}": p.grad for n, p in twin.named_parameters() if p.grad is not None}
    dense = {n: g if g.layout == torch.strided else g.to_dense() for n, g in found.items()}
    return {"loss": loss.detach(), **dense}


def different(
    have: dict[str, torch.Tensor],
    want: dict[str, torch.Tensor],
    exact: dict[str, torch.Tensor],
    allowed: float,
) -> str:
    for name, plain in want.items():
        if name not in have:
            if float(plain.abs().sum()) == 0:
                continue  # eager has a gradient of zeros
            return f"WRONG: {name} is missing"
        truth = exact[name] if exact[name].isfinite().all() else plain.double()
        room = 2 * (plain.double() - truth).abs().max() if plain.numel() else torch.tensor(0.0)
        size = truth.abs().max() if truth.numel() else torch.tensor(0.0)
        off = (have[name].double() - truth).abs()
        if off.numel() and not float(off.max()) <= float(room + allowed * (size + 1)):
            return f"WRONG: {name} is off by {float(off.max()):.1e} of {float(size):.1e}"
    return "equal"


def cause(message: str) -> str:
    """The reason of a refusal without the parts that change from sample to sample."""
    lines = message.splitlines()
    if "no translation:" in lines[0]:
        ops = sorted({line.split(" at ")[0].strip() for line in lines[1:]})
        return f"no translation of {', '.join(ops)}"
    text = re.sub(r"\b[a-z]*\d+\b|\([^()]*\)|\[[^\[\]]*\]", "_", lines[0])
    return re.sub(r"(_[ ,]*)+", "_ ", text)[:90].strip()


def outcomes(op: Any) -> Counter[str]:
    """How often each outcome occurs among the operator's samples."""
    if "empty" in op.name:  # whatever the memory held
        return Counter(["eager: random"])
    return Counter(outcome(op, sample) for dtype in DTYPES for sample in samples(op, dtype))


def status(found: Counter[str]) -> str:
    """One word for an operator, or the first reason: the worst of its samples decides."""
    for kind in ("WRONG", "CRASH", "refused"):
        worst = sorted(text for text in found if text.startswith(kind))
        if worst:
            return worst[0] if kind == "refused" else worst[0].partition(" is off")[0]
    return "equal" if found["equal"] else next(iter(found), "eager: no samples")


def operators(chosen: Iterable[str] = ()) -> Iterator[Any]:
    wanted = set(chosen)
    for op in sorted(op_db, key=called):
        if not wanted or called(op) in wanted or op.name in wanted:
            yield op


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table: dict[str, str] = json.loads(TABLE.read_text())["operators"] if TABLE.exists() else {}
    for op in operators(options.names):
        found = status(outcomes(op))
        table[called(op)] = found
        print(f"{called(op)}: {found}", flush=True)
    kinds = Counter(text.partition(":")[0] for text in table.values())
    print(", ".join(f"{n} {kind}" for kind, n in kinds.most_common()))
    if options.write:
        written = {
            "torch": torch.__version__.partition("+")[0],
            "operators": dict(sorted(table.items())),
        }
        TABLE.write_text(json.dumps(written, indent=0) + "\n")


if __name__ == "__main__":
    main()
