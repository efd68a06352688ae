"""Faults of keys and values that go round a ring of ranks."""

from __future__ import annotations

from fault import Fault

_RING = "distribute/tensor/rules/attention_ring.py"
_FILE = "distribute/test_ring.py::"
_STEPS = (f"{_FILE}test_three_ranks",)
_SKIPS = (f"{_FILE}test_keys_behind_a_causal_query_are_skipped",)
_ALIKE = (f"{_FILE}test_every_rank_plans_the_same_exchanges",)
_BYTES = (f"{_FILE}test_bytes_and_numbers_of_exchanges",)
_BIAS = (f"{_FILE}test_without_dropout",)
_METHOD = (f"{_FILE}test_the_method_of_each_call",)

RINGS_FAULTS: tuple[Fault, ...] = (
    Fault(
        "ring: results of two turns are joined without their highest scores",
        _RING,
        "        return b.Mul(self.total, b.Exp(below))\n", "        return self.total\n", _STEPS,
    ),
    Fault(
        "ring: a rank sees the keys of ranks behind it",
        _RING,
        "        return not self.is_causal or part <= self.place.at\n",
        "        return True\n", _SKIPS,
    ),
    Fault(
        "ring: a causal mask hides keys of ranks before as those of the rank",
        _RING,
        "int(self.is_causal and part == self.place.at)", "int(self.is_causal)", _STEPS,
    ),
    Fault(
        "ring: keys that go round have the positions of the rank's own",
        _RING,
        "of_rank = replace(self.place, at=part)", "of_rank = self.place", _STEPS,
    ),
    Fault(
        "ring: each turn reads the first columns of a mask",
        _RING,
        "rank - 1, part * size, (part + 1) * size)", "rank - 1, 0, size)", _STEPS,
    ),
    Fault(
        "ring: an exchange is missing on ranks that do not see what it brings",
        _RING,
        "        if self.sees(self.part(self.place.ranks - 1)):\n", "        if True:\n", _ALIKE,
    ),
    Fault(
        "ring: keys of backward go round while forward runs",
        _RING,
        "ring.send(x, n, turn == 0)", "ring.send(x, n)", _BYTES,
    ),
    Fault(
        "ring: gradients of keys leave out the rank's own queries",
        _RING,
        "            own = terms\n", "            own = [b.full(0.0, type_of(x)) for x in terms]\n",
        _STEPS,
    ),
    Fault(
        "ring: columns of a bias are in the order of turns",
        _RING,
        "    parts = [biases.get(part) for part in range(ranks)]\n",
        "    parts = [*biases.values(), *[None] * (ranks - len(biases))]\n", _BIAS,
    ),
    Fault(
        "ring: a ring is formed whatever the number of heads of keys",
        "distribute/tensor/rules/attention_methods.py",
        "return groups * call.ranks > 4 * heads", "return True", _METHOD,
    ),
    Fault(
        "ring: a ring goes the other way round", "distribute/lockstep.py",
        'xs[(place - int(attrs["shift"]))', 'xs[(place + int(attrs["shift"]))',
        ("distribute/test_lockstep.py",),
    ),
    Fault(
        "ring: a given delta is not read", "graph/ops/flash.py",
        "    if known is not None:\n", "    if False:\n", ("distribute/test_tensor_rules.py",),
    ),
    Fault(
        "ring: a part of the keys is taken for the whole row",
        "kernels/native/attention.py",
        "totals=totals, given=given,", "totals=totals, given=None,",
        ("kernels/test_attention_of_parts.py",),
    ),
)  # fmt: skip

__all__ = ["RINGS_FAULTS"]
