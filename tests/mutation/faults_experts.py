"""Faults of loops over experts."""

from __future__ import annotations

from fault import Fault

LOOPS = ("capture/test_expert_loops.py",)

EXPERTS_FAULTS: tuple[Fault, ...] = (
    Fault(
        "experts: any loop may have turns without rows", "capture/expert_loops/batched_turn.py",
        "if not begins(frame):", "if False:", LOOPS,
    ),
    Fault(
        "experts: a turn may read what the one before has stored",
        "capture/expert_loops/loop_source.py",
        "    return not _reads_first(loop.body, stored - own) and not", "    return not", LOOPS,
    ),
    Fault(
        "experts: what a turn stores may be read after the loop",
        "capture/expert_loops/loop_source.py",
        " and not _read_later(tree, loop, stored)", "", LOOPS,
    ),
    Fault(
        "experts: a question is of whatever rows", "capture/expert_loops/loop_source.py",
        " and names <= chosen", "", LOOPS,
    ),
    Fault(
        "experts: those that are not hit have a turn", "capture/expert_loops/batched_turn.py",
        "found = self.hit.reshape(-1)[group]", "found = group >= 0", LOOPS,
    ),
    Fault(
        "experts: those that are not hit have a turn by number",
        "capture/expert_loops/batched_turn.py",
        "return member & self.hit.reshape(-1)[self.now[0]]", "return member", LOOPS,
    ),
    Fault(
        "experts: a turn is for all, whatever their number says",
        "capture/expert_loops/batched_turn.py",
        "            self._waiting.append(others)\n", "", LOOPS,
    ),
    Fault(
        "experts: their rows see each other", "capture/expert_loops/batched_turn.py",
        'raise of_loop("the rows of one expert, taken together")',
        "return self.owner.group >= 0", LOOPS,
    ),
    Fault(
        "experts: any mask is a one-hot", "capture/expert_loops/one_hot.py",
        "        case _:\n            return None\n",
        "        case _:\n            return held\n", LOOPS,
    ),
    Fault(
        "experts: one without weights has the last one's", "capture/expert_loops/batched_turn.py",
        "if max(own.owner.loop.now) < size:", "if True:", LOOPS,
    ),
    Fault(
        "experts: modules of one class are alike", "capture/expert_loops/module_list.py",
        "return [*mine] == [*others] and all(_equal(mine[k], others[k]) for k in mine)",
        "return True", LOOPS,
    ),
    Fault(
        "experts: anything may be changed in a turn", "capture/expert_loops/batched_turn.py",
        "if not RUNNING or not in_place:", "if True:", LOOPS,
    ),
    Fault(
        "experts: a turn may read what rows are added to", "capture/expert_loops/batched_turn.py",
        "if self._several and self._added", "if False and self._added", LOOPS,
    ),
    Fault(
        "experts: a number of Python's may be any number", "capture/expert_loops/loop_source.py",
        "    return named - {*ast.walk(loop.target)} <= indices\n", "    return True\n", LOOPS,
    ),
    Fault(
        "experts: each has a turn with the rows of all", "capture/expert_loops/batched_turn.py",
        "if self.of_all and 2 * len({*values}) > self.groups:", "if False:", LOOPS,
    ),
    Fault(
        "experts: a loop over all is not traced again turn by turn", "capture/trace/export.py",
        "if flat.alone or not flat.noted.over_all:", "if True:", LOOPS,
    ),
    Fault(
        "products by group: turned whoever reads them", "rewrite/noop.py",
        "        if alone and _order(node) == [0, 2, 1]:", "        if _order(node):",
        ("rewrite/test_passes.py",),
    ),
    Fault(
        "pieces: any list is all of them", "capture/expert_loops/split_rows.py",
        "[*range(pieces[0]._cut.counts.shape[0])]", "[p._number for p in pieces]", LOOPS,
    ),
    Fault(
        "pieces: rows beyond the counts are those of the sums",
        "capture/expert_loops/split_rows.py",
        "    if not whole.short:\n", "    if True:\n", LOOPS,
    ),
    Fault(
        "pieces: a loop may list others than it asks for", "capture/expert_loops/counts.py",
        "if asked.turns != [", "if False and asked.turns != [", LOOPS,
    ),
    Fault(
        "pieces: a turn without rows may do anything", "capture/expert_loops/loop_source.py",
        "if not all(isinstance(s, (ast.Continue, ast.Pass)) for s in without):", "if False:", LOOPS,
    ),
    Fault(
        "pieces: what a turn hands to the next may be read", "capture/expert_loops/loop_source.py",
        "    if not _only_bounds(statements, loop, sums) or _read_later", "    if _read_later",
        LOOPS,
    ),
    Fault(
        "pieces: a list may be read by others than cat", "capture/expert_loops/loop_source.py",
        "    if stored & lists or not all(_only_cat(tree, name) for name in lists):\n"
        "        return None\n", "", LOOPS,
    ),
    Fault(
        "pieces: slices between any two sums", "capture/expert_loops/counts.py",
        " if end.last == start.last + 1 else None", "", LOOPS,
    ),
    Fault(
        "pieces: a tensor written in part may be read", "capture/expert_loops/loops.py",
        "if any(is_tensor(a) and _memory(a) in own for a in given):", "if False:", LOOPS,
    ),
    Fault(
        "experts: a mask of one that the loop leaves out has rows",
        "capture/expert_loops/batched_turn.py",
        "    return loop.limited(made)", "    return made", LOOPS,
    ),
    Fault(
        "capture: a part without gradients writes into what others read",
        "capture/translate/functionalize.py",
        "any(order[u] > order[region] for n in before for u in n.users)", "False",
        ("capture/test_in_place.py",),
    ),
    Fault(
        "capture: a gradient ends where a part without gradients has written",
        "capture/translate/functionalize.py",
        "    if carries(owner.meta[\"val\"]) and any(",
        "    if False and any(", ("capture/test_in_place.py",),
    ),
    Fault(
        "capture: nodes that share one meta share their memory's owner",
        "capture/trace/aliasing.py",
        "    if held is None or held[0] is not node:\n", "    if held is None:\n",
        ("capture/test_in_place.py",),
    ),
    Fault(
        "capture: a forward may change the batch it is captured from",
        "capture/batch_guards/batch_writes.py",
        "steps is None or not found[-1].holds(tensors)", "steps is None",
        ("capture/test_batch_writes.py",),
    ),
    Fault(
        "capture: a forward may change a later batch", "capture/batch_guards/batch_writes.py",
        "        return torch.equal(", "        return True or torch.equal(",
        ("capture/test_batch_writes.py",),
    ),
    Fault(
        "capture: a question about a batch writes into it", "capture/translate/batch_program.py",
        "tensors[i].detach().clone()", "tensors[i].detach()", ("capture/test_batch_writes.py",),
    ),
)  # fmt: skip
