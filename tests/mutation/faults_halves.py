"""Faults of the two halves: the cut, blocks, runs."""

from __future__ import annotations

from fault import Fault

HALVES = ("execute/test_halves.py",)
BLOCKS = ("execute/test_halves.py", "module/test_gradients.py")

HALVES_FAULTS: tuple[Fault, ...] = (
    Fault(
        "halves: the forward half is not put first", "plan/order.py",
        "out = [n for n in out if n in first] + [n for n in out if n not in first]",
        "assert first", HALVES,
    ),
    Fault(
        "halves: a forward that needs a cotangent is planned", "plan/order.py",
        "        if early is not None:\n", "        if False:\n", HALVES,
    ),
    Fault(
        "halves: a gradient that reads a state that is new by then is planned", "plan/order.py",
        "        if late is not None:\n", "        if False:\n", HALVES,
    ),
    Fault(
        "halves: an output's memory serves others before it is read", "plan/liveness.py",
        "        if len(self._shown):", "        if False:", HALVES,
    ),
    Fault(
        "halves: the seed is the caller's tensor, which may change", "execute/halves.py",
        "n: x.clone() if isinstance(x, torch.Tensor) else x", "n: x", HALVES,
    ),
    Fault(
        "halves: a changed parameter is not seen", "execute/halves.py",
        "        if seen == residuals.seen:", "        if True:", HALVES,
    ),
    Fault(
        "halves: a cotangent of another shape is broadcast", "execute/halves.py",
        "if isinstance(given, torch.Tensor) and given.shape != shape:", "if False:", HALVES,
    ),
    Fault(
        "halves: residuals that are kept are overwritten", "execute/halves.py",
        "if keep or block is None:", "if block is None:", BLOCKS,
    ),
    Fault(
        "halves: a gradient that lies outside of the block is handed out of it",
        "execute/halves.py",
        "        if own and layout.buffer not in taken and",
        "        if layout.buffer not in taken and", BLOCKS,
    ),
    Fault(
        "halves: two equal gradients are one tensor", "execute/halves.py",
        "if own and layout.buffer not in taken and", "if own and", BLOCKS,
    ),
    Fault(
        "halves: buffers of the module keep their values", "execute/halves.py",
        "            binder.write_back()\n", "", BLOCKS,
    ),
    Fault(
        "halves: autograd does not hear of buffers that were written", "execute/halves.py",
        "            torch.autograd.graph.increment_version(written)", "            pass", BLOCKS,
    ),
    Fault(
        "blocks: one in use is lent again", "execute/blocks.py",
        "(self._storage._cdata) > 1 +", "(self._storage._cdata) > 9 +",
        BLOCKS,
    ),
    Fault(
        "blocks: one is never free again", "execute/blocks.py",
        "(self._storage._cdata) > 1 +", "(self._storage._cdata) > 0 +",
        BLOCKS,
    ),
    Fault(
        "blocks: their memory goes with those who lend", "execute/blocks.py",
        "        self._storage.base = base\n", "", BLOCKS,
    ),
    Fault(
        "blocks: a window stands at the block's start", "execute/blocks.py",
        "empty.set_(self._storage, offset, x.shape, x.stride())",
        "empty.set_(self._storage, offset * 0, x.shape, x.stride())", BLOCKS,
    ),
    Fault(
        "halves: launches stay bound to the block before", "execute/binder.py",
        "pointers = (self.memory.version, lent, ", "pointers = (self.memory.version, ", HALVES,
    ),
    Fault(
        "halves: a cotangent of rows is kept as a scalar is", "plan/placement.py",
        "if role is Role.COTANGENT and type_of(value).rank:", "if False:", HALVES,
    ),
)  # fmt: skip
