"""Faults of plans."""

from __future__ import annotations

from fault import BUFFERS, PLAN, Fault

PLAN_FAULTS: tuple[Fault, ...] = (
    # plan
    Fault(
        "plan: buffers that meet at one launch share memory", "plan/arena.py",
        "(since <= last[i]) & (until >= first[i])", "(since < last[i]) & (until > first[i])", PLAN,
    ),
    Fault(
        "plan: a last read one launch early", "plan/liveness.py",
        "np.maximum.at(last, target, at[self._reader])",
        "np.maximum.at(last, target, at[self._reader] - 1)", PLAN,
    ),
    Fault(
        "plan: a window's readers do not count", "plan/storages.py",
        "for v in read if v is not None)",
        "for v in read if v is not None and v.producer() not in self.views)", PLAN,
    ),
    Fault(
        "plan: an output over an input that is read later", "plan/liveness.py",
        "    return last <= place\n", "    return True\n", PLAN,
    ),
    Fault(
        "plan: an output dies with its last reader", "plan/liveness.py",
        "        last[self._kept] = end\n", "", PLAN,
    ),
    Fault(
        "plan: an output over memory that another input shows too", "plan/storages.py",
        "self.layouts[v].buffer != storage or (v is x and i in rights)",
        "True", PLAN,
    ),
    Fault(
        "plan: an addend that is an operand too", "plan/storages.py",
        "(v is x and i in rights)", "v is x", PLAN,
    ),
    Fault(
        "plan: an update whose gradient shows the parameter", "plan/storages.py",
        "if source in updated and source in at and self._alone(node, source, rights):",
        "if source in updated and source in at:", PLAN,
    ),
    Fault(
        "plan: a count is stored while the forward goes on", "plan/order.py",
        "producer = None if following.uses() else following.producer()",
        "producer = following.producer()", BUFFERS,
    ),
    Fault(
        "plan: an output that shows a parameter after the update", "plan/placement.py",
        "        if not unchanged and _shown(value, storages.views) in states:\n",
        "        if False:\n", PLAN,
    ),
    Fault(
        "plan: two outputs over one input", "plan/liveness.py",
        "if dies(until[x], place) and x not in taken:", "if dies(until[x], place):", PLAN,
    ),
    Fault(
        "plan: what is taken over dies with its first owner", "plan/placement.py",
        "            buffer.last = last\n", "", PLAN,
    ),
    Fault(
        "plan: state is replaced while it is still read", "plan/storages.py",
        "if last[source] <= maker and source not in self.kept:",
        "if source not in self.kept:", PLAN,
    ),
    Fault(
        "plan: what a Concat copies dies before it", "plan/storages.py",
        "self._at(node.inputs)\n        self.accesses.append(Access(node, position, reads, tuple(",
        "self._at(node.outputs)\n        self.accesses.append(Access(node, position, reads, tuple(",
        PLAN,
    ),
    Fault(
        "plan: an output over an input has strides of its own", "plan/placement.py",
        "            self._layouts[value] = self._replaced(access.node, before)\n", "", PLAN,
    ),
    Fault(
        "plan: state is not written back", "plan/planner.py",
        "            if here != there:\n", "            if False:\n", PLAN,
    ),
    Fault(
        "plan: a buffer that gets another's old value gets the new one", "plan/placement.py",
        "        unchanged = value is graph.state.get(name)\n",
        "        unchanged = name in graph.state\n", ("models/test_buffers_of_buffers.py",),
    ),
    Fault(
        "plan: updates that read each other's state wait for each other", "plan/order.py",
        "if readers and readers & _behind_all(node, ahead):", "if False:",
        ("models/test_buffers_of_buffers.py",),
    ),
    Fault(
        "plan: an update before a reader", "plan/order.py",
        "            before |= set(source.consumers())\n", "            pass\n", PLAN,
    ),
    Fault(
        "plan: a Concat's part with several readers", "plan/output_layout.py",
        "if assigned is not None and not (others and steps):", "if assigned is not None:", PLAN,
    ),
    Fault(
        "plan: a slice of a window starts at the owner", "plan/views.py",
        "            offset = x.offset\n            starts, ends",
        "            offset = 0\n            starts, ends", PLAN,
    ),
    Fault(
        "plan: an expanded dim keeps its stride", "plan/views.py",
        "0 if size == 1 and out[0][extra + i] != 1 else stride", "stride", PLAN,
    ),
)  # fmt: skip
