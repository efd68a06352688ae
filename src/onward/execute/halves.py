"""The two halves of a call in memory: a forward now, its backward later, others in between.

forward(inputs)  ->  Residuals, which hold a block of memory
backward(residuals, cotangents)  ->  gradients, as often as the residuals are kept
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from onward.config import OnwardError
from onward.execute.executable import Executable
from onward.execute.memory import Memory
from onward.graph.names import user_name

Inputs = Mapping[str, torch.Tensor | float | int]


class Residuals:
    """What one forward has left for its backward.

    Their block goes back when `give_back` is called, or when nobody holds this object any more.
    """

    def __init__(
        self,
        memory: Memory,
        block: torch.Tensor,
        dims: Mapping[str, int],
        given: Inputs,
        seen: Mapping[str, tuple[int, int]],
        shapes: Mapping[str, torch.Size],
    ) -> None:
        self.dims = dict(dims)
        self.shapes = dict(shapes)
        self.given = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
        self.seen = dict(seen)
        self._block = block
        self._lent = weakref.finalize(self, memory.give_back, block)
        self._lent.atexit = False

    @property
    def block(self) -> torch.Tensor:
        """`u8[n]`. Raises OnwardError where it was given back."""
        if not self._lent.alive:
            raise OnwardError(
                "the backward of this forward has run, and its values are given back; fix: run the "
                "forward again, or keep them for a second backward (keep=True)"
            )
        return self._block

    def give_back(self) -> None:
        """Lets another forward have the block; a second time does nothing."""
        self._lent()


class ExecutableHalves:
    """A forward half and its backward half, planned one for the other, bound to one memory.

    Any number of forwards may be outstanding: each has a block of its own, and their backwards may
    run in any order. The scratch of all is one arena. Launches are bound anew where a run meets
    another block than the one before.
    """

    def __init__(self, forward: Executable, backward: Executable) -> None:
        assert forward.memory is backward.memory, "the halves are bound to two memories"
        self.first, self.second = forward, backward
        self._nbytes = forward.plan.residual_block.nbytes

    def forward(self, inputs: Inputs, dims: Mapping[str, int] | None = None) -> Residuals:
        """Runs the forward half; its outputs are read by `output`, before the next run."""
        block = self.first.memory.lend(self._nbytes)
        try:
            self.first.run(inputs, dims, block=block)
        except BaseException:
            self.first.memory.give_back(block)
            raise
        again = {n: x for n, x in inputs.items() if n in self.second.plan.inputs}
        ends = self.second.plan.signature.cotangents
        shapes = {name: self.first.view(name).shape for name in ends}
        return Residuals(self.first.memory, block, self.first.dims, again, self._read(), shapes)

    def output(self, name: str) -> torch.Tensor:
        """A copy of an output of the last forward."""
        return self.first.output(name)

    def backward(
        self, residuals: Residuals, cotangents: Inputs, keep: bool = False
    ) -> dict[str, torch.Tensor]:
        """Copies of the gradients, by the name of the input that they are by.

        cotangents: by output, all that the halves were made for, of the output's shape. keep: the
        residuals serve a second backward. Raises OnwardError for residuals that are given back, for
        cotangents that are missing or of another shape, and where a tensor that the backward reads
        was changed since.
        """
        block = residuals.block
        signature = self.second.plan.signature
        missing = [name for name in signature.cotangents if name not in cotangents]
        if missing:
            raise OnwardError(f"no cotangent of {', '.join(map(user_name, missing))}")
        for name, shape in residuals.shapes.items():
            given = cotangents[name]
            if isinstance(given, torch.Tensor) and given.shape != shape:
                raise OnwardError(
                    f"the cotangent of '{user_name(name)}' is {list(given.shape)}; "
                    f"fix: give one of the output's shape, {list(shape)}"
                )
        for name, version in self._read().items():
            if residuals.seen.get(name) != version:
                raise OnwardError(
                    f"'{user_name(name)}' was changed between this forward and its backward; fix: "
                    "update parameters after the backward"
                )
        named = {name: cotangents[output] for output, name in signature.cotangents.items()}
        self.second.run({**residuals.given, **named}, residuals.dims, block=block)
        made = {wrt: self.second.output(name) for wrt, name in signature.gradients.items()}
        if not keep:
            residuals.give_back()
        return made

    def _read(self) -> dict[str, tuple[int, int]]:
        """Of each owned tensor that the backward half reads, where it lies and its version."""
        plan, owned = self.second.plan, self.second.owned
        return {n: (t.data_ptr(), t._version) for n, t in owned.items() if n in plan.inputs}
