"""Faults of the two halves: partition, residual blocks, runs."""

from __future__ import annotations

from fault import Fault

HALVES = ("differentiate/test_partition.py", "execute/test_halves.py", "plan/test_replay.py")
RUNS = ("execute/test_halves.py",)

HALVES_FAULTS: tuple[Fault, ...] = (
    Fault(
        "halves: a leaf of the batch is not saved", "differentiate/partition.py",
        "if role_of(value) is Role.BATCH:", "if False:", HALVES,
    ),
    Fault(
        "halves: what the batch decides counts as known from sizes", "differentiate/partition.py",
        "array_of(x) is not None or x.producer() in found for x in sources",
        "array_of(x) is not None or x.producer() in found or role_of(x) is Role.BATCH "
        "for x in sources", HALVES,
    ),
    Fault(
        "halves: all that is computed early is saved", "differentiate/partition.py",
        "if maker.op_type in _VIEWS or maker in known:", "if False:", HALVES,
    ),
    Fault(
        "halves: a pass that joins them is not left out", "rewrite/lists.py",
        "[item for item in STEP if not item.joins_halves]", "list(STEP)", RUNS,
    ),
    Fault(
        "halves: a residual's place in its block is its place in its buffer", "plan/plan.py",
        "offset=layout.offset + first)", "offset=layout.offset)", HALVES,
    ),
    Fault(
        "halves: a residual lies in scratch", "plan/placement.py",
        "        if buffer.region is not Region.RESIDUAL:\n", "        if False:\n", HALVES,
    ),
    Fault(
        "halves: a residual that is another's memory is not copied", "plan/placement.py",
        "        if buffer.region not in _ARENAS:\n", "        if False:\n", HALVES,
    ),
    Fault(
        "halves: the seed is the caller's tensor, which may change", "execute/halves.py",
        "x.clone() if isinstance(x, torch.Tensor) else x", "x", RUNS,
    ),
    Fault(
        "halves: a changed parameter is not seen", "execute/halves.py",
        "if residuals.seen.get(name) != version:", "if False:", RUNS,
    ),
    Fault(
        "halves: a block in use is lent again", "execute/memory.py",
        "return self._blocks.pop(i)", "return self._blocks[i]", RUNS,
    ),
    Fault(
        "halves: a forward that fails keeps its block", "execute/halves.py",
        "            self.first.memory.give_back(block)\n            raise\n",
        "            raise\n", RUNS,
    ),
    Fault(
        "halves: launches stay bound to the block before", "execute/binder.py",
        "pointers = (self.memory.version, lent, ", "pointers = (self.memory.version, ", RUNS,
    ),
    Fault(
        "halves: a cotangent of rows is kept as a scalar is", "plan/placement.py",
        "if role is Role.COTANGENT and type_of(value).rank:", "if False:", RUNS,
    ),
)  # fmt: skip
