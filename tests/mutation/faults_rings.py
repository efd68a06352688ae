"""Faults of keys and values that go round a ring of ranks."""

from __future__ import annotations

from fault import Fault

_RING = "distribute/tensor/rules/attention_ring.py"
_STEPS = ("distribute/test_ring.py",)

RINGS_FAULTS: tuple[Fault, ...] = (
    Fault(
        "ranks: results of two turns are joined without their highest scores",
        _RING,
        "        return b.Mul(self.total, b.Exp(below))\n", "        return self.total\n", _STEPS,
    ),
    Fault(
        "ranks: a rank sees the keys of ranks behind it",
        _RING,
        "        return not self.is_causal or part <= self.place.at\n",
        "        return True\n", _STEPS,
    ),
    Fault(
        "ranks: a causal mask hides keys of ranks before as those of the rank",
        _RING,
        "int(self.is_causal and part == self.place.at)", "int(self.is_causal)", _STEPS,
    ),
    Fault(
        "ranks: keys that go round have the positions of the rank's own",
        _RING,
        "of_rank = replace(self.place, at=part)", "of_rank = self.place", _STEPS,
    ),
    Fault(
        "ranks: each turn reads the first columns of a mask",
        _RING,
        "rank - 1, part * size, (part + 1) * size)", "rank - 1, 0, size)", _STEPS,
    ),
    Fault(
        "ranks: an exchange is missing on ranks that do not see what it brings",
        _RING,
        "        if self.sees(self.part(self.place.ranks - 1)):\n", "        if True:\n", _STEPS,
    ),
    Fault(
        "ranks: keys of backward go round while forward runs",
        _RING,
        "ring.send(x, n, turn == 0)", "ring.send(x, n)", _STEPS,
    ),
    Fault(
        "ranks: gradients of keys leave out the rank's own queries",
        _RING,
        "            own = terms\n", "            own = [b.full(0.0, type_of(x)) for x in terms]\n",
        _STEPS,
    ),
    Fault(
        "ranks: columns of a bias are in the order of turns",
        _RING,
        "    parts = [biases.get(part) for part in range(ranks)]\n",
        "    parts = [*biases.values(), *[None] * (ranks - len(biases))]\n", _STEPS,
    ),
    Fault(
        "ranks: a ring is formed whatever the number of heads of keys",
        "distribute/tensor/rules/attention_methods.py",
        "return groups * call.ranks > 4 * heads", "return True", _STEPS,
    ),
    Fault(
        "ranks: a ring goes the other way round", "distribute/lockstep.py",
        'xs[(place - int(attrs["shift"]))', 'xs[(place + int(attrs["shift"]))',
        ("distribute/test_lockstep.py", *_STEPS),
    ),
    Fault(
        "ranks: a given delta is not read", "graph/ops/flash.py",
        "    if known is not None:\n", "    if False:\n", ("distribute/test_tensor_rules.py",),
    ),
    Fault(
        "ranks: a part of the keys is taken for the whole row",
        "kernels/native/attention.py",
        "totals=totals, given=given,", "totals=totals, given=None,",
        ("kernels/test_attention_of_parts.py",),
    ),
)  # fmt: skip

__all__ = ["RINGS_FAULTS"]
