"""Runs a case on every side and says what is wrong, if anything is.

A difference is one that fp64 eager does not excuse: Onward may be several times as far from it as
fp32 eager, and a part of the change so far. Refusals (one line of OnwardError, nothing changed)
are no findings.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from fuzz import drop_in
from fuzz.counted import most_captures
from fuzz.engines import Captures, Eager, Moment, Tensors, namespace, ours_of, variant_set
from fuzz.maker import Case
from fuzz.regions import classes

from onward.errors import OnwardError


@dataclass(frozen=True)
class Bounds:
    """far: times eager's own distance to fp64. part: of the change since the start, or of what was
    said. floor: of the tensor's own norm. noise: of the largest tensor of its kind, or of the
    largest change where precision is mixed: a gradient that is 0 but for rounding."""

    far: float
    part: float
    floor: float
    noise: float


FP32 = Bounds(10.0, 2e-4, 2e-6, 3e-6)
BF16 = Bounds(10.0, 0.1, 2e-6, 0.02)  # beside autocast; a rounding is 0.004 at most
DRAWS, AGREED = 5, 4  # runs with close weights; how many of them show that a difference is chance
IN_VAIN = 2  # captures that are refused, until no more are tried
TINY = 1e-9  # a gradient whose terms cancel to 0 is left with a rounding of them


@dataclass
class Verdict:
    """kind: ok, refused, invalid, or what the finding is. `signature`: findings of equal ones have
    likely one cause. variant: in which it happened."""

    kind: str = "ok"
    detail: str = ""
    signature: str = ""
    variant: dict[str, Any] = field(default_factory=dict)
    at: int = 0  # index of the action

    @property
    def finding(self) -> bool:
        return self.kind not in ("ok", "refused", "invalid", "nan", "unread", "chance")


def judge(case: Case) -> Verdict:
    """The worst that any variant of the case shows."""
    torch.manual_seed(0)
    if not any(a["do"] == "train" for a in case["history"]):
        return Verdict("invalid", "nothing is trained")
    try:
        defined = namespace(case)
        sides = [Eager(case, defined, d) for d in (torch.float32, torch.float64)]
    except Exception as error:
        return Verdict("invalid", f"{error!r}", _said(error))
    if case["dropout"]:
        return _between_variants(case, defined)
    eager, exact = (side.play() for side in sides)
    first = eager[0]
    if first.error is not None and not case["history"][0].get("spoil"):
        return Verdict("invalid", f"{first.error!r}", _said(first.error))
    start = Eager(case, defined, torch.float64).state()
    captures = Captures()
    best, refused = Verdict(), False
    for i, variant in enumerate(case["variants"]):
        if refused and "loop" not in variant:
            continue  # it would refuse as well
        if variant.get("loop") == "drop-in":
            with captures.of(variant, i):
                found = _in_place_of_stock(case, variant, captures)
            if found.finding:
                return found
            continue
        beside, bounds = eager, FP32
        if "mixed_precision" in variant:
            side = Eager(case, defined, torch.float32, variant)
            beside, bounds = side.play(), BF16
            if any(
                (a.error is None) != (b.error is None) for a, b in zip(beside, eager, strict=True)
            ):
                continue  # autocast cannot run what eager can
        with variant_set(variant), captures.of(variant, i):
            found = _against(case, defined, variant, beside, exact, start, bounds, captures)
            whole = variant.get("loop") != "compiled"  # whose graphs are torch.compile's to choose
            most, tried = most_captures(case), captures.count
            if whole and found.kind == "ok" and (captures.made > most or tried > most + IN_VAIN):
                text = f"{tried} captures where {most} are enough"
                found = Verdict("captures", text, "captures", variant)
        if found.kind == "difference" and bounds is BF16 and _is_chance(case, variant):
            best = Verdict("chance", found.detail, found.signature, variant, found.at)
            continue
        if found.finding:
            return found
        if found.kind == "nan" and bounds is BF16:
            continue  # the other variants are looked at whole
        if found.kind == "refused" and "memory_budget" in variant:
            continue  # too little memory for a step so small is the variant's own fault
        if found.kind != "ok":
            best = found
            refused = refused or (found.kind == "refused" and not i)
    return best


def _against(
    case: Case,
    defined: dict[str, Any],
    variant: dict[str, Any],
    eager: list[Moment],
    exact: list[Moment],
    start: Tensors,
    bounds: Bounds,
    captures: Captures,
) -> Verdict:
    try:
        ours = ours_of(case, defined, variant)
    except Exception as error:
        return _raised(error, variant, 0)
    last, said = Moment(state=ours.state()), _sizes(exact)
    owns: dict[str, float] = {}
    by_hand = "loop" in variant  # where a step that fails is the user's own matter
    spoilt, moved = False, ""
    torch.manual_seed(case["seed"])
    for i, action in enumerate(case["history"]):
        one, two = eager[i], exact[i]
        spoilt = spoilt or one.error is not None  # where each has drawn what it came to
        if action["do"] == "code" and one.error is not None:
            return Verdict("invalid", f"{one.error!r}", _said(one.error))
        if one.error is not None and "to_padded_tensor" in str(one.error):
            # nn.TransformerEncoder's own path cannot leave out every token of a batch
            return Verdict("invalid", f"{one.error!r}", _said(one.error))
        moved = moved or (one.error is not None and i > 0 and _torn(eager[i - 1].state, one.state))
        if spoilt and one.error is None and (moved or ".calls" in classes(case)):
            # eager has counted the call that failed, or moved a buffer: here a step is whole or
            # nothing
            return Verdict()
        if one.error is None and two.error is not None:  # a constant that fp64 takes otherwise
            return Verdict("invalid", f"fp64: {two.error!r}", _said(two.error))
        tried = captures.count
        moment = ours.act(action)
        if one.error is not None:
            captures.count = tried  # what eager refuses too is tried each time
            if moment.error is None:
                if _unread(case, variant, i):
                    return Verdict("unread", "what eager refuses is in rows that nobody reads")
                return Verdict(
                    "no exception", f"eager raises {one.error!r}",
                    f"no exception: {action.get('spoil', '')}", variant, i,
                )  # fmt: skip
            found = _raised(moment.error, variant, i)
            if found.finding and not _as_eager(moment.error, one.error):
                found.detail = f"{found.detail}\neager: {one.error!r}"
                return found
            if not by_hand and (torn := _torn(last.state, moment.state)):
                return Verdict("torn", f"{torn} after {moment.error!r}", "torn", variant, i)
        elif moment.error is not None:
            kept = by_hand or action["do"] == "code"
            if not kept and (torn := _torn(last.state, moment.state)):
                return Verdict("torn", f"{torn} after {moment.error!r}", "torn", variant, i)
            return _raised(moment.error, variant, i)
        elif not all(
            x.isfinite().all() for m in (one, two) for x in (*m.said.values(), *m.state.values())
        ):
            return Verdict("nan", "eager is not finite", "nan")
        else:
            worst = _differs(moment, one, two, start, bounds, said, owns)
            if worst:
                what = worst.split()[0]
                return Verdict(
                    "difference", f"action {i}: {worst}", f"difference: {what}", variant, i
                )
            if not spoilt and moment.generator != one.generator:
                text = f"action {i}: torch's generator stands elsewhere than eager's"
                return Verdict("difference", text, "difference: generator", variant, i)
        last = moment
    return Verdict()


def _is_chance(case: Case, variant: dict[str, Any]) -> bool:
    """Whether nothing differs in at least AGREED of DRAWS runs of the variant with weights close to
    the case's.

    Where the input of a relu lies closer to 0 than a rounding to the low type, rounding decides its
    sign, and with it a whole gradient. That happens in autocast as in Onward, not to the same
    elements: an autocast run that has the sign right by luck is no bound. With other weights the
    element lies elsewhere; a gradient that is missing or scaled by a wrong graph stays so."""
    if "close" in case:
        return False
    ok = 0
    for draw in range(1, DRAWS + 1):
        ok += judge(case | {"variants": [variant], "close": draw}).kind == "ok"
        if draw - ok > DRAWS - AGREED:
            return False
    return True


def _in_place_of_stock(case: Case, variant: dict[str, Any], captures: Captures) -> Verdict:
    """transformers' own Trainer in two precisions, and Onward's."""
    if not drop_in.fits(case):
        return Verdict()
    case = drop_in.with_outputs(case)
    defined = namespace(case)
    kinds = (drop_in.STOCK, torch.float32), (drop_in.STOCK, torch.float64)
    try:
        one, two = (drop_in.Led(case, defined, d, kind).play() for kind, d in kinds)
    except Exception as error:
        return Verdict("invalid", f"{error!r}", _said(error))
    start = Eager(case, defined, torch.float64).state()
    captures.made = 0
    try:
        ours = drop_in.Led(case, defined, torch.float32, drop_in.OURS).play()
    except Exception as error:
        return _raised(error, variant, 0)
    said, owns = _sizes(two), dict[str, float]()
    for i, (mine, eager, exact) in enumerate(zip(ours, one, two, strict=True)):
        told = [x for m in (eager, exact) for x in (*m.said.values(), *m.state.values())]
        if not all(x.isfinite().all() for x in told):
            return Verdict("nan", "eager is not finite", "nan")
        if worst := _differs(mine, eager, exact, start, FP32, said, owns):
            what = f"drop-in difference: {worst.split()[0]}"
            return Verdict("difference", f"update {i}: {worst}", what, variant, i)
        if mine.generator != eager.generator:
            text = f"update {i}: torch's generator stands elsewhere than in transformers' Trainer"
            return Verdict("difference", text, "drop-in difference: generator", variant, i)
    # a part in PyTorch may need gradients that a whole step does not show: halves are captured then
    most = most_captures(case) + bool(classes(case))
    if captures.made > most:  # what is refused runs in PyTorch
        text = f"{captures.made} captures where {most} are enough"
        return Verdict("captures", text, "drop-in captures", variant)
    return Verdict()


def _unread(case: Case, variant: dict[str, Any], at: int) -> bool:
    """Whether every row computed, Onward raises as eager does: an id out of range, in a row that
    the loss does not read, is none of the packed step's business."""
    if "row_demand" in variant.get("disable", ()):
        return False
    whole = {**variant, "disable": [*variant.get("disable", ()), "row_demand"]}
    found = judge(case | {"variants": [whole], "history": case["history"][: at + 1]})
    return not found.finding


def _differs(
    ours: Moment,
    eager: Moment,
    exact: Moment,
    start: Tensors,
    bounds: Bounds = FP32,
    sizes: Mapping[str, float] | None = None,
    owns: dict[str, float] | None = None,
) -> str:
    """sizes: of what is said, over the whole history; rounding of terms that cancel in one step is
    small beside another's. owns: how far eager has been from fp64, by name; weights that are far
    give a loss that is near by chance."""
    owns = {} if owns is None else owns
    for name, x in exact.said.items():
        if name not in ours.said:
            return f"{name} is missing"
        noise = TINY if bounds is FP32 else bounds.noise * (sizes or {}).get(name, 0.0)
        if text := _distance(name, ours.said[name], eager.said[name], x, x, noise, bounds, owns):
            return text
    largest: dict[str, float] = {}
    for name, x in exact.state.items():
        kind = name.partition(" ")[0]
        moved = x - start[name] if bounds is BF16 and name in start else x
        largest[kind] = max(largest.get(kind, 0.0), float(moved.double().norm()))
    for name, x in exact.state.items():
        if name not in ours.state:
            if x.count_nonzero():
                return f"{name} is missing"
            continue
        change = x - start[name] if name in start else x
        noise = bounds.noise * largest[name.partition(" ")[0]] + TINY
        one, two = ours.state[name], eager.state[name]
        if text := _distance(name, one, two, x, change, noise, bounds, owns):
            return text
    for name, x in ours.state.items():
        if name not in exact.state and not name.startswith("step") and x.count_nonzero():
            return f"{name} is not in eager"
    return ""


def _sizes(moments: Iterable[Moment]) -> dict[str, float]:
    """The largest norm of what is said, by name."""
    found: dict[str, float] = {}
    for moment in moments:
        for name, x in moment.said.items():
            found[name] = max(found.get(name, 0.0), float(x.double().norm()))
    return found


def _distance(
    name: str,
    ours: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor,
    change: torch.Tensor,
    noise: float,
    bounds: Bounds,
    owns: dict[str, float],
) -> str:
    if ours.shape != exact.shape:
        return f"{name} has shape {tuple(ours.shape)}, eager {tuple(exact.shape)}"
    if not ours.is_floating_point():
        if bounds is BF16:
            return ""  # places of largest numbers and the like, which rounding moves
        return "" if torch.equal(ours, eager) else f"{name} differs"
    far, own = float((ours.double() - exact).norm()), float((eager.double() - exact).norm())
    own = owns[name] = max(own, owns.get(name, 0.0))
    scale = max(float(change.norm()), TINY)
    allowed = bounds.far * own + bounds.part * scale + bounds.floor * float(exact.norm()) + noise
    if far <= allowed:
        return ""
    return f"{name}: Onward {far:.3g} from fp64, eager {own:.3g}, change {scale:.3g}"


def _between_variants(case: Case, defined: dict[str, Any]) -> Verdict:
    """Dropout on: the variants draw the same masks, so they are compared with the first."""
    captures = Captures()
    reference: list[Moment] = []
    start: Tensors = {}
    for i, variant in enumerate(case["variants"]):
        with variant_set(variant), captures.of(variant, i):
            try:
                ours = ours_of(case, defined, variant)
            except Exception as error:
                return _raised(error, variant, 0)
            start = start or {n: x.double() for n, x in ours.state().items()}
            torch.manual_seed(case["seed"])
            for k, action in enumerate(case["history"]):
                moment = ours.act(action)
                if i == 0:
                    reference.append(moment)
                one = reference[k]
                if moment.error is not None and action["do"] != "code":
                    found = _raised(moment.error, variant, k)
                    if found.finding and "spoil" not in action:
                        return found
                    if one.error is None:
                        return Verdict(
                            "difference", f"raises {moment.error!r}, the default does not",
                            "variant raises", variant, k,
                        )  # fmt: skip
                    if found.kind == "refused" and "spoil" not in action:
                        return found
                    continue
                if any(not x.isfinite().all() for x in {**one.said, **one.state}.values()):
                    break
                wide = Moment(
                    {n: x.double() if x.is_floating_point() else x for n, x in one.said.items()},
                    {n: x.double() if x.is_floating_point() else x for n, x in one.state.items()},
                )
                if worst := _differs(moment, one, wide, start):
                    return Verdict(
                        "difference", f"dropout, action {k}: {worst}",
                        f"dropout difference: {worst.split()[0]}", variant, k,
                    )  # fmt: skip
                if moment.generator != one.generator:
                    return Verdict(
                        "difference", f"dropout, action {k}: the variants' generators differ",
                        "dropout difference: generator", variant, k,
                    )  # fmt: skip
    return Verdict()


def _torn(before: Tensors, after: Tensors) -> str:
    for name, x in before.items():
        if name not in after or not torch.equal(x.nan_to_num(), after[name].nan_to_num()):
            return f"{name} has changed"
    return ""


def _as_eager(ours: Exception, eager: Exception) -> bool:
    """Whether an error is eager's: of its type, or an IndexError for an index out of range, for
    which torch.gather and one_hot raise RuntimeError."""
    if isinstance(ours, IndexError) and type(eager) is RuntimeError:
        return bool(re.search("out of bounds|Class values must be", str(eager)))
    return type(ours) is type(eager)


def _raised(error: Exception, variant: dict[str, Any], at: int) -> Verdict:
    """A refusal is one clear line; anything else that comes out, or a line about Onward's own
    insides, is a finding."""
    text = f"{type(error).__name__}: {error}"
    inside = any(words in str(error) for words in ("no kernel for", "cannot be compiled, at"))
    if isinstance(error, OnwardError) and not inside:
        return Verdict("refused", text, _said(error), variant, at)
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/onward/" in f.filename]
    if variant.get("loop") == "compiled" and not own:
        return Verdict("refused", text, _said(error), variant, at)  # by torch.compile itself
    place = f"{own[-1].filename.rpartition('/onward/')[2]}:{own[-1].name}" if own else ""
    tail = "".join(traceback.format_tb(error.__traceback__)[-4:])
    return Verdict("exception", f"{text[:600]}\n{tail}", f"{place} {_said(error)}", variant, at)


def _said(error: Exception) -> str:
    """The error's first line, without what differs from case to case."""
    line = (str(error).strip().splitlines() or [""])[0]
    line = re.sub(r"block\d+\S*|part\d+\S*|[hpmst]\d+\b|\d+(\.\d+)?(e-?\d+)?|<case \d+>", "#", line)
    return f"{type(error).__name__}: {line[:110]}"
