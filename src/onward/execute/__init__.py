"""Executes a Plan: allocates its memory, binds its launches to it once, and runs them in order.

In: a Plan and tensors that the user or the session owns. Out: results, and these tensors updated.
Imports: plan and the stages before it.
"""

from onward.execute.blocks import Block, Blocks, leave_in, left_in
from onward.execute.executable import Executable
from onward.execute.halves import ExecutableHalves, Residuals
from onward.execute.memory import Memory, zeros
from onward.execute.owned import Marks, marks
from onward.execute.process_mesh import ProcessMesh
from onward.execute.state_store import StateStore

__all__ = [
    "Block",
    "Blocks",
    "Executable",
    "ExecutableHalves",
    "Marks",
    "Memory",
    "ProcessMesh",
    "Residuals",
    "StateStore",
    "leave_in",
    "left_in",
    "marks",
    "zeros",
]
