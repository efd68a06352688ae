"""Plan -> running: regions of memory, launches bound once, the loop."""

from onward.execute.blocks import Block, Blocks, leave_in, left_in
from onward.execute.executable import Executable
from onward.execute.halves import ExecutableHalves, Residuals
from onward.execute.memory import Memory, zeros
from onward.execute.owned import Marks, marks

__all__ = [
    "Block",
    "Blocks",
    "Executable",
    "ExecutableHalves",
    "Marks",
    "Memory",
    "Residuals",
    "leave_in",
    "left_in",
    "marks",
    "zeros",
]
