"""Faults of what is known about a program: what needs a gradient, what a capture has read, whose
random numbers a call draws, which rows a gradient is of."""

from __future__ import annotations

from fault import Fault

REACH = ("capture/test_autograd_reach.py",)
READS = ("train/test_unread_settings.py",)
STOPS = ("rewrite/test_stop_gradient.py",)
EVALUATION = ("capture/test_evaluation.py",)
STATES = ("train/test_alternating.py",)
SEEDS = ("module/test_call_seeds.py",)
CLASSES = ("models/test_gradient_classes.py",)
EFFECTS = ("module/test_region_effects.py",)
LEFT_OUT = ("integrations/test_trainer_left_out.py",)

FACTS_FAULTS: tuple[Fault, ...] = (
    Fault(
        "facts: complex numbers carry no gradient", "capture/trace/gradient_edges.py",
        "and (value.is_floating_point() or value.is_complex())", "and value.is_floating_point()",
        REACH,
    ),
    Fault(
        "facts: every field of a configuration is guarded", "model_state/reads.py",
        "if found is None or found[1] & _OF_ALL:", "if True:", READS,
    ),
    Fault(
        "facts: a field that a forward reads is not guarded", "model_state/reads.py",
        "            found[1].add(name)\n", "            pass\n", READS,
    ),
    Fault(
        "facts: a field that a second graph reads is not guarded", "prepare/guards.py",
        "return None if new is None or old is None else old | new", "return old", READS,
    ),
    Fault(
        "facts: a cast that is moved loses what stops a gradient",
        "rewrite/precision/move_casts.py",
        "new = b.one(view.op_type, [inner, *view.inputs[1:]], attributes(view))",
        'new = b.one("Identity" if view.op_type == "StopGradient" else view.op_type, '
        "[inner, *view.inputs[1:]], attributes(view))", STOPS,
    ),
    Fault(
        "facts: what joins two reshapes is not known to be trained", "rewrite/noop.py",
        "            trained.add(new)", "            pass", STOPS,
    ),
    Fault(
        "facts: every question about the mode is one for dropout", "capture/mode_reads.py",
        "or calls[code, found.end] != n\n", "or False\n", EVALUATION,
    ),
    Fault(
        "facts: any state that was met is the one that came back", "prepare/guards.py",
        "        if self._without_apart(seen.facts) != self._facts:\n            return False\n",
        "", STATES,
    ),
    Fault(
        "facts: a call draws its seed from torch's generator", "module/run.py",
        "self._seed = call_seed()",
        'self._seed = torch.randint(0, 2**32, (2,), dtype=torch.int64, device="cpu")', SEEDS,
    ),
    Fault(
        "facts: rows that are ignored are multiplied by the loss's gradient",
        "kernels/aten/linear_cross_entropy.py",
        "clean = dloss.masked_fill(off.isnan(), 0.0)  # f[]", "clean = dloss", CLASSES,
    ),
    Fault(
        "facts: what a part set stays where its step fails", "kernels/region.py",
        "        except BaseException:\n            held.put_back()\n",
        "        except BaseException:\n", EFFECTS,
    ),
    Fault(
        "facts: what a part sets while it is timed stays", "kernels/region.py",
        "            self.tapes = {}\n            held.put_back()\n",
        "            self.tapes = {}\n", EFFECTS,
    ),
    Fault(
        "facts: what a part sets while it is compared stays", "train/verify/engines.py",
        "        for back in backs:\n            back()\n", "", EFFECTS,
    ),
    Fault(
        "facts: an update runs before a part has said what it leaves out", "plan/order.py",
        ' or n.op_type == "RegionGrad")', ")", EFFECTS,
    ),
    Fault(
        "facts: a window is open before its first micro-batch is done", "train/gradient_sums.py",
        "            self.window = frozenset()\n            for p in taking:\n",
        "            self.window = window\n            for p in taking:\n", EFFECTS,
    ),
    Fault(
        "facts: zeros stand in for a cotangent that does not come", "module/run.py",
        "if given.keys() < set(left.ends) and not self._takes_zeros(made):", "if False:",
        ("module/test_missing_cotangents.py",),
    ),
    Fault(
        "facts: the norm is of what the optimizer holds", "integrations/transformers.py",
        "if p.requires_grad and id(p) not in ids:", "if False:", LEFT_OUT,
    ),
)  # fmt: skip
