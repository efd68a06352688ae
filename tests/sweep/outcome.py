"""One class against eager: does eager run, does torch.export accept it, are Onward's numbers
eager's, and does the capture serve a batch of another size."""

from __future__ import annotations

import copy
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import tiny
import torch
import torch.nn.functional as F
from batches import MADE_UP, Batch, Form, Maker, forms, with_marks
from classes import Entry
from configs import LABELS, WIDTH, small
from modules import TASK, ModuleMaker, module_fitting
from tiny import Tensors
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from onward.errors import OnwardError
from onward.graph.graph import type_of
from onward.graph.names import user_name

PARAMETERS = 50_000_000
RATE = 0.25
LOOKING = 15.0  # seconds for a form of batch
Say = Callable[[str], None]


class Called(nn.Module):
    """A model with arguments that never change; a loss made of its results where it has none."""

    def __init__(self, model: nn.Module, fixed: dict[str, Any], made_up: bool) -> None:
        super().__init__()
        self.model, self.fixed, self.made_up = model, fixed, made_up

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        outputs = self.model(**batch, **self.fixed)
        if not self.made_up:
            return outputs.loss
        leaves = [x for x in tree_flatten(outputs)[0] if isinstance(x, torch.Tensor)]
        x = next(x for x in leaves if x.is_floating_point() and x.dim() > 1)
        return (x - torch.arange(x.shape[-1]).to(x.dtype) / 8).square().mean()


class Refused(Exception):
    """Raised where eager does not run; the message is that of the likeliest form of batch."""


def build(entry: Entry, level: int) -> tuple[nn.Module, Any]:
    """The tiny model in training mode."""
    torch.manual_seed(0)
    cls = entry.cls
    config = small(cls.config_class(), level)
    for part in (config, config.get_text_config()):
        part.use_cache = False
        if entry.task == "CAUSAL_LM" and hasattr(part, "is_decoder"):
            part.is_decoder = True
    config.num_labels = 2 if entry.task in ("NEXT_SENTENCE_PREDICTION",) else LABELS
    if entry.task == "QUESTION_ANSWERING":
        config.num_labels = 2
    with torch.device("meta"):
        many = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if many > PARAMETERS:
        raise Refused(f"{many:,} parameters with the small configuration")
    model = cls(config)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return tiny.ready(model.float()), config


def loss_of(model: nn.Module, batch: Batch) -> str:
    """The reason why eager PyTorch is no oracle here, "" if it is one. Two runs have to agree."""
    first = tiny.eager(model, batch, torch.float32)
    if not first["loss"].isfinite() or first["loss"].numel() != 1:
        return "a loss that is not a finite number"
    if not all(t.isfinite().all() for t in first.values()):
        return "a gradient that is not finite"
    if len(first) < 2 or not any(t.any() for n, t in first.items() if n != "loss"):
        return "no gradients"
    again = tiny.eager(model, batch, torch.float32)
    if not all(torch.equal(t, again[n]) for n, t in first.items()):
        return "random numbers in the forward"
    return ""


def wrapped(model: nn.Module, fixed: dict[str, Any], form: Form) -> nn.Module:
    if fixed or form.target == MADE_UP:
        return Called(model, fixed, form.target == MADE_UP).train()
    return model


def fitting(entry: Entry) -> tuple[nn.Module, Maker | ModuleMaker, str]:
    """A model, a form of batch that eager trains it on, and why its own loss was not taken."""
    if entry.task == TASK:
        model, made = module_fitting(entry)
        model = tiny.ready(model)
        batch, fixed = made(3, 8)
        if problem := loss_of(wrapped(model, fixed, made.form), batch):
            raise Refused(problem)
        return model, made, ""
    why: dict[str, str] = {}
    began = time.process_time()
    for form in forms(entry):
        if time.process_time() - began > LOOKING:
            why.setdefault("forward", "no form of batch within the time")
            break
        for level in (0, 1, 2):
            key = "loss" if form.target != MADE_UP else "forward"
            try:
                model, config = _built(entry, level)
                maker, problem = _matched(entry, model, config, form)
                if not problem:
                    return model, maker, why.get("loss", "") if key == "forward" else ""
            except Refused as error:
                problem = str(error)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            why.setdefault(key, _line(problem))
    raise Refused("; without labels: ".join(dict.fromkeys(why.values())) or "no form of batch")


_models: dict[tuple[str, int], Any] = {}


def _built(entry: Entry, level: int) -> tuple[nn.Module, Any]:
    key = entry.name, level
    if key not in _models:
        try:
            _models[key] = build(entry, level)
        except Exception as error:
            _models[key] = error
    if isinstance(_models[key], Exception):
        raise _models[key]
    return _models[key]


def _matched(entry: Entry, model: nn.Module, config: Any, form: Form) -> tuple[Maker, str]:
    """A maker of batches, and what is wrong with them. Where the number of tokens for an image is
    not what the model wants, the message says how many features there are: rows, or numbers."""
    waiting, tried = [form.marks], set()
    while True:
        form = with_marks(form, waiting.pop(0))
        tried.add(form.marks)
        maker = Maker(entry, config, form)
        batch, fixed = maker(3, 8)
        try:
            return maker, loss_of(wrapped(model, fixed, form), batch)
        except Exception as error:
            told = re.search(r"okens\D*(\d+)\D+features\D*(\d+)", str(error))
            each = int(told[2]) // 3 if told else 0
            waiting += [n for n in (each, each // WIDTH) if 0 < n < 300 and n not in tried]
            if not waiting:
                raise


def _line(text: Any) -> str:
    """The text on one line; of many places only the first."""
    parts = [x.strip() for x in str(text).splitlines() if x.strip()]
    parts = [
        re.sub(r"( at [\w.]+)(, [\w.]+)+$", r"\1 and others", p)
        for p in "; ".join(parts).split("; ")
    ]
    return "; ".join(p for p in parts if p)[:1500]


def exported(model: nn.Module, batch: Batch) -> str:
    """Nothing where torch.export accepts the model with these shapes, else why not."""
    try:
        torch.export.export(copy.deepcopy(model), (), dict(batch))
    except Exception as error:
        return f"{type(error).__name__}: {_line(error)}"[:300]
    return ""


def gradients(made: tiny.Compiled, batch: Batch, both: bool) -> list[tuple[str, Tensors]]:
    """Onward's loss and gradients: of every row, then where asked of the rows that are read."""
    found = []
    trained = tiny.trained(made)
    ways = [("", made.forward), *([("packed: ", made.packed(["loss"]))] if both else [])]
    for label, forward in ways:
        if forward is None:
            continue
        graph = made.differentiated(trained, forward)
        names = [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
        if graph.counts:
            found.append((label, tiny.execute_packed(made, graph, batch, names)[0]))
        else:
            found.append((label, tiny.execute(made, graph, batch, names)))
    return found


def difference(ours: Tensors, model: nn.Module, data: Tensors) -> str:
    """The tensor that differs most, where one differs by more than eager from itself in fp64."""
    want = tiny.eager(model, data, torch.float32)
    try:
        exact = tiny.eager(model, data, torch.float64)
    except (RuntimeError, TypeError, ValueError):  # a model that names float32 itself
        exact = want
    ours = tiny.plain(ours)
    off = tiny.differing_most(ours, want, exact)
    if off and len(ours) == len(want):
        rounded = [tiny.eager(_rounded(model, seed), data, torch.float32) for seed in range(16)]
        if all(_within(ours[n], want[n], [r[n] for r in rounded]) for n in want):
            return ""
    return off


def moved_apart(made: tiny.Compiled, model: nn.Module, data: Tensors, ours: Tensors) -> str:
    """A parameter that a step moves and eager does not, or the other way round. Those of an expert
    that gets no token may have a gradient of zeros (docs/guarantees.md, Not promised)."""
    trained = made.captured.reached - set(made.captured.frozen)
    reached = {f"grad.{user_name(n)}" for n in trained}
    idle = {n for n, gradient in tiny.plain(ours).items() if not gradient.any()}
    moved = tiny.eager(model, data, torch.float32).keys() - {"loss"}
    odd = sorted((reached - moved - idle) | (moved - reached))
    if not odd:
        return ""
    return f"{odd[0]} is {'there' if odd[0] in reached else 'none'}, unlike eager's"


def _rounded(model: nn.Module, seed: int) -> nn.Module:
    """A copy of the model with every parameter changed by up to a rounding of fp32."""
    twin, random = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in twin.parameters():
            if p.is_floating_point():
                p.mul_(1 + 6e-8 * torch.randn(p.shape, generator=random).clamp(-1, 1))
    return twin


def _within(ours: torch.Tensor, want: torch.Tensor, rounded: list[torch.Tensor]) -> bool:
    """Whether the result is at most twice as far off as eager's own with parameters rounded
    otherwise: a few numbers are normalized by next to nothing. The factor 2 is the law's."""
    far = max(float((r - want).norm()) for r in rounded)
    return float((ours - want).norm()) <= 2 * far + 1e-5 * float(want.norm())


def second_batch(
    maker: Maker | ModuleMaker, model: nn.Module, batch: Batch
) -> tuple[Batch, dict[str, Any], str]:
    """A batch of another size, and of another length where the model has one; else one of the
    two."""
    for size, length in ((4, 10), (4, 8), (3, 10)):
        other, fixed = maker(size, length)
        if {k: v.shape for k, v in other.items()} == {k: v.shape for k, v in batch.items()}:
            continue
        try:
            if not loss_of(wrapped(model, fixed, maker.form), other):
                return other, fixed, f"{size}x{length}"
        except Exception:
            continue
    return {}, {}, ""


def outcome(entry: Entry, say: Say = lambda _: None, export: bool = True) -> dict[str, Any]:
    """The sweep's line for a class, in the words of `run.py`."""
    warnings.simplefilter("ignore")
    began = time.process_time()
    row: dict[str, Any] = {
        "family": entry.family, "class": entry.name, "kind": entry.kind, "task": entry.task,
        "loss": "own", "status": "", "reason": "", "export_ok": None, "export_reason": "",
        "seconds": 0.0, "second_capture": None, "note": "",
    }  # fmt: skip
    say("eager")
    try:
        model, maker, awkward = fitting(entry)
    except Exception as error:
        row |= {"status": "eager-fails", "reason": _line(error), "seconds": _since(began)}
        return row
    if maker.form.target == MADE_UP:
        row |= {"loss": "made up", "note": awkward or "the forward takes no labels"}
    batch, fixed = maker(3, 8)
    whole = wrapped(model, fixed, maker.form)
    if export:
        say("export")
        row["export_reason"] = exported(whole, batch)
        row["export_ok"] = not row["export_reason"]
    say("onward")
    row["status"], row["reason"], row["second_capture"] = compared(whole, maker, model, batch)
    if row["status"] == "equal":
        say("dropout")
        row["dropout"], row["reason"] = dropped(whole, batch)
        row["status"] = "sites" if row["reason"] else "equal"
    row["seconds"] = _since(began)
    return row


def compared(
    whole: nn.Module, maker: Maker | ModuleMaker, model: nn.Module, batch: Batch
) -> tuple[str, str, str | bool | None]:
    """Status, reason, and whether a second batch needed a capture of its own."""
    twin = copy.deepcopy(whole)
    again: str | bool | None = None
    where = ""
    try:
        made = tiny.compiled(twin, batch)
        forms = gradients(made, batch, both=True)
        if wrong := moved_apart(made, whole, batch, forms[0][1]):
            return "WRONG", wrong, None
        for label, ours in forms:
            if wrong := difference(ours, whole, batch):
                return "WRONG", label + wrong, None
        other, fixed, where = second_batch(maker, model, batch)
        if not other:
            return "equal", "", None
        whole = wrapped(model, fixed, maker.form)
        leaves = list(other.values())
        again = made.captured.dims(leaves) is None or not made.captured.suits(leaves)
        again |= any(isinstance(v, list) for v in fixed.values())
        if again:
            made = tiny.compiled(copy.deepcopy(whole), other)
        for label, ours in gradients(made, other, both=False):
            if wrong := difference(ours, whole, other):
                return "WRONG", f"second batch, {where}: {label}{wrong}", again
    except OnwardError as error:
        return "refused", _prefix(where) + _line(error), again
    except Exception as error:
        text = _prefix(where) + f"{type(error).__name__}: {_line(error)}"
        return "CRASH", text, again
    return "equal", "", again


_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout,
             F.feature_alpha_dropout, torch.dropout, torch.feature_dropout)  # fmt: skip


class Sites(TorchFunctionMode):
    """Keeps the results of the calls that draw a mask of dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = dict(zip(("x", "p", "training"), args, strict=False)) | kwargs
        draws = False
        if func in _DROPOUTS:
            draws = given.get("p", 0.5) > 0 and given.get("training", given.get("train", True))
        elif func is F.scaled_dot_product_attention:
            draws = dict(zip("qkvmp", args, strict=False)).get("p", kwargs.get("dropout_p", 0)) > 0
        elif func is F.multi_head_attention_forward:
            draws = args[10] > 0 and given_training(args, kwargs)
        result = func(*args, **kwargs)
        if draws:
            made = result[0] if isinstance(result, tuple) else result
            self.made.append(made)
            if made.requires_grad:
                made.retain_grad()
        return result

    def read(self) -> int:
        """The number of these results that the loss has read."""
        return sum(t.grad is not None or not t.requires_grad for t in self.made)


def given_training(args: tuple[Any, ...], kwargs: Any) -> bool:
    return bool(kwargs.get("training", args[13] if len(args) > 13 else True))


def dropped(whole: nn.Module, batch: Batch) -> tuple[int, str]:
    """With dropout on wherever the model has some: how many sites a forward executes, and what is
    wrong with those of the graph."""
    model = copy.deepcopy(whole)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = RATE
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float) and value == 0.0:
                setattr(module, name, RATE)
    count = _executed(model, batch)
    if not count:
        return 0, ""
    try:
        made = tiny.compiled(model, batch)
        read = _of_loss(made)
        have = sum(n in read for n in tiny.dropout_nodes(made.captured.graph))
        values = gradients(made, batch, both=False)[0][1]
    except Exception as error:
        return count, f"with dropout: {type(error).__name__}: {_line(error)}"
    if have > count:  # experts that no token was sent to: draws differ, and so do the tokens
        count = max(count, *(_executed(model, batch, seed) for seed in range(8)))
    if have != count:
        return count, f"with dropout: {have} sites of {count}"
    finite = all(t.isfinite().all() for t in values.values())
    return count, "" if finite else "with dropout: a number that is not finite"


def _executed(model: nn.Module, batch: Batch, seed: int | None = None) -> int:
    """How many sites a forward in eager has."""
    with Sites() as sites, torch.random.fork_rng():
        if seed is not None:
            torch.manual_seed(seed)
        outputs = copy.deepcopy(model)(**batch)
        (outputs if isinstance(outputs, torch.Tensor) else outputs.loss).backward()
    return sites.read()


def _of_loss(made: tiny.Compiled) -> set[Any]:
    """The nodes that the loss reads as floats, as gradients do; a graph may have more results."""
    found, waiting = set(), [made.captured.graph.outputs["loss"]]
    while waiting:
        node = waiting.pop().producer()
        if node is not None and node not in found:
            found.add(node)
            waiting += [x for x in node.inputs if x is not None and type_of(x).is_floating]
    return found


def _prefix(where: str) -> str:
    return f"second batch, {where}: " if where else ""


def _since(began: float) -> float:
    return round(time.process_time() - began, 1)
