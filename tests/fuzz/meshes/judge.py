"""Runs a case by its ranks and by one rank, and says what differs.

A difference of numbers is a finding if it persists: the same case with weights a little away, drawn
four times, shows it again at least three times. Else it was chance, such as a relu whose input is
closer to 0 than the rounding of a sum in another order.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import numpy as np
import torch
from fuzz.meshes.draw import Case
from fuzz.meshes.models import InvalidCase, model_of
from fuzz.meshes.world import Arrays, Outcome, World, reason

from onward.errors import CaptureError, OnwardError

PART, FLOOR, NOISE = 3e-4, 4e-6, 5e-6  # of the change, of the tensor, of the largest change
CLOSE = 2.0**-6  # of a weight
DRAWS, AGREED = 4, 3


@dataclass
class Verdict:
    """kind: ok, refused, invalid, nan, chance, or what the finding is. signature: equal findings
    have likely one cause."""

    kind: str = "ok"
    detail: str = ""
    signature: str = ""

    @property
    def finding(self) -> bool:
        return self.kind not in ("ok", "refused", "invalid", "nan", "chance")


def judge(case: Case) -> Verdict:
    """What a case shows."""
    found = judged(case)
    if found.kind != "difference":
        return found
    seen = sum(judged(case, close).kind == "difference" for close in range(1, DRAWS + 1))
    return found if seen >= AGREED else Verdict("chance", found.detail, found.signature)


def judged(case: Case, close: int = 0) -> Verdict:
    """What a case shows once. close: of weights that are a little away; 0: as they are drawn."""
    try:
        drawn = model_of(case)
        if close:
            generator = torch.Generator().manual_seed(close)
            with torch.no_grad():
                for p in drawn.module.parameters():
                    p.mul_(1.0 + CLOSE * torch.randn(p.shape, generator=generator))
        world = World(case, drawn)
        with np.errstate(all="ignore"):
            want = combined(world) if case["adasum"] else world.alone()
            have = world.by_ranks()
    except InvalidCase as error:
        return Verdict("invalid", str(error), str(error)[:60])
    except CaptureError as error:
        return Verdict("invalid", str(error), reason(error))
    except OnwardError as error:
        kind = "apart" if "rank" in str(error) and " is at " in str(error) else "refused"
        return Verdict(kind, str(error), reason(error))
    except Exception as error:
        text = traceback.format_exc()
        if "onnx/reference/" in text and ("in alone" in text or "in combined" in text):
            # packed rows may be none, which onnx's evaluator does not reshape
            return Verdict("invalid", text, "onnx's evaluator does not take one rank's step")
        last = [line.strip() for line in text.splitlines() if line.strip().startswith("File")][-1]
        return Verdict("exception", text, f"{type(error).__name__} {last.rpartition('/')[2]}")
    return _compared(world, have, want)


def _compared(world: World, have: Outcome, want: Outcome) -> Verdict:
    arrays = [*want.made.values(), np.array(want.losses)]
    if not all(np.isfinite(x.astype(np.float64)).all() for x in arrays):
        return Verdict("nan", "the numbers of one rank are not finite")
    for k, (a, b) in enumerate(zip(have.losses, want.losses, strict=True)):
        if not abs(a - b) <= 2e-5 * abs(b) + 1e-6:
            return Verdict("difference", f"the loss of micro-batch {k}: {a} is not {b}", "loss")
    if have.made.keys() != want.made.keys():
        odd = sorted(have.made.keys() ^ want.made.keys())
        return Verdict("outputs", f"{odd} are made on one side alone", "outputs")
    starts = {f"next.{n}": p.detach().numpy() for n, p in world.parameters.items()}
    changes = {n: float(np.abs(y - starts[n]).max(initial=0.0)) for n, y in want.made.items()
               if n in starts}  # fmt: skip
    most = max(changes.values(), default=0.0)
    for name, y in want.made.items():
        x, y = have.made[name].astype(np.float64), y.astype(np.float64)
        if x.shape != y.shape:
            return Verdict("outputs", f"{name} is {x.shape}, not {y.shape}", "shape")
        size = float(np.abs(y).max(initial=0.0))
        bound = PART * changes.get(name, size) + FLOOR * size
        bound += NOISE * (most if name in changes else size)
        away = float(np.abs(x - y).max(initial=0.0))
        if not away <= bound:
            kind = "state" if name not in starts else "weights"
            return Verdict("difference", f"{name}: {away:.3g} away, above {bound:.3g}", kind)
    return Verdict()


# ---- AdaSum, by its formula


def combined(world: World) -> Outcome:
    """The update by replicas' gradients, each that of the mean over its own labels, which one rank
    finds, combined in numpy as in the paper (arXiv 2006.02924)."""
    sizes = world.case["sizes"]
    replicas, within = sizes["dp_replicate"], sizes.get("dp_shard", 1)
    gradients: list[Arrays] = []
    for r in range(replicas):
        shares = range(r * within, (r + 1) * within)
        gradients.append(_mean_gradients(world, list(shares)))
    levels = gradients
    while len(levels) > 1:
        pairs = zip(levels[::2], levels[1::2], strict=True)
        levels = [{n: adaptive_sum(a[n], b[n]) for n in a} for a, b in pairs]
    [total] = levels
    made = world.update_by(total)
    return Outcome(world.alone().losses, made, {})


def adaptive_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The adaptive sum of two gradients, in f64; a gradient of 0 leaves the other as it is."""
    dot, aa, bb = float((a * b).sum()), float((a * a).sum()), float((b * b).sum())
    left = 1.0 - dot / (2 * aa) if aa else 1.0
    right = 1.0 - dot / (2 * bb) if bb else 1.0
    return left * a + right * b


def _mean_gradients(world: World, shares: list[int]) -> Arrays:
    """The gradients of a replica's mean over its window, by one rank's sums of them."""
    case = world.case
    twice = len(shares) * case["window"] == 1  # one micro-batch sums nothing
    found = world.alone(shares * 2 if twice else shares, update=False)
    return {n: g.astype(np.float64) * found.factor for n, g in found.gradients.items()}


__all__ = ["Verdict", "adaptive_sum", "judge", "judged"]
