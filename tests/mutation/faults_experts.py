"""Faults of loops over experts."""

from __future__ import annotations

from fault import Fault

LOOPS = ("capture/test_expert_loops.py",)

EXPERTS_FAULTS: tuple[Fault, ...] = (
    Fault(
        "experts: any loop may have turns without rows", "capture/chosen/groups.py",
        "if not begins(frame):", "if False:", LOOPS,
    ),
    Fault(
        "experts: a turn may read what the one before has stored", "capture/chosen/loop_body.py",
        "    return not _reads_first(loop.body, stored - own) and not", "    return not", LOOPS,
    ),
    Fault(
        "experts: what a turn stores may be read after the loop", "capture/chosen/loop_body.py",
        " and not _read_later(tree, loop, stored)", "", LOOPS,
    ),
    Fault(
        "experts: a question is of whatever rows", "capture/chosen/loop_body.py",
        " and names <= chosen", "", LOOPS,
    ),
    Fault(
        "experts: those that are not hit have a turn", "capture/chosen/groups.py",
        "found = self.hit.reshape(-1)[group]", "found = group >= 0", LOOPS,
    ),
    Fault(
        "experts: those that are not hit have a turn by number", "capture/chosen/groups.py",
        "return member & self.hit.reshape(-1)[self.now[0]]", "return member", LOOPS,
    ),
    Fault(
        "experts: a turn is for all, whatever their number says", "capture/chosen/groups.py",
        "            self._waiting.append(others)\n", "", LOOPS,
    ),
    Fault(
        "experts: their rows see each other", "capture/chosen/groups.py",
        'raise of_loop("the rows of one expert, taken together")',
        "return self.owner.group >= 0", LOOPS,
    ),
    Fault(
        "experts: any mask is a one-hot", "capture/chosen/one_hot.py",
        "        case _:\n            return None\n",
        "        case _:\n            return held\n", LOOPS,
    ),
    Fault(
        "experts: one without weights has the last one's", "capture/chosen/groups.py",
        "if max(own.owner.loop.now) < size:", "if True:", LOOPS,
    ),
    Fault(
        "experts: modules of one class are alike", "capture/chosen/experts.py",
        "return [*mine] == [*others] and all(_equal(mine[k], others[k]) for k in mine)",
        "return True", LOOPS,
    ),
    Fault(
        "experts: anything may be changed in a turn", "capture/chosen/groups.py",
        "if not RUNNING or not in_place:", "if True:", LOOPS,
    ),
    Fault(
        "products by group: turned whoever reads them", "rewrite/noop.py",
        "        if alone and _order(node) == [0, 2, 1]:", "        if _order(node):",
        ("rewrite/test_passes.py",),
    ),
)  # fmt: skip
