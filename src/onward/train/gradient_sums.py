"""GradientSums: the sums of gradients of an accumulation window, by graph input.

It knows only tensors and signatures of step graphs. `UpdateState` adds what updates in a graph
read and write besides; an optimizer with a step of its own needs no more than this.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from onward.errors import OnwardError
from onward.execute import zeros
from onward.graph.signature import Signature
from onward.graph.types import DType
from onward.kernels import torch_dtype
from onward.shards import Shard


def nothing_to_train() -> OnwardError:
    """The error of a step that would update no parameter."""
    return OnwardError(
        "the loss depends on no parameter that requires grad and is in the optimizer; fix: "
        "requires_grad_(True) on those to train, and make the optimizer from model.parameters()"
    )


class GradientSums:
    """The sums that step graphs read and write, and what of a window they hold.

    names: of the parameters, for messages and files. version: grows when step graphs made before
    become wrong. done: number of updates. window: names of the parameters whose gradients the open
    accumulation window has summed. accumulator: the type of those sums; None: the parameter's own.
    """

    def __init__(self, names: Mapping[torch.Tensor, str], accumulator: DType | None = None) -> None:
        self.names, self.accumulator = dict(names), accumulator
        self.version = self.done = 0
        self.window: frozenset[str] = frozenset()
        self._parameters: dict[str, torch.Tensor] = {}  # by graph input
        self._sums: dict[torch.Tensor, torch.Tensor] = {}

    def total(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor that sums a parameter's gradients, made and zeroed at first use."""
        if parameter not in self._sums:
            low = self.accumulator is not None and parameter.dtype == torch.float32
            dtype = torch_dtype(self.accumulator or DType.FLOAT) if low else parameter.dtype
            self._sums[parameter] = zeros(parameter.shape, dtype, parameter.device)
        return self._sums[parameter]

    # ---- step graphs

    def register(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Registers the parameters of a new step graph, by graph input."""
        self._parameters.update(parameters)

    def parameter(self, name: str) -> torch.Tensor:
        """The parameter of a graph input."""
        return self._parameters[name]

    def restart(self, names: Mapping[torch.Tensor, str]) -> bool:
        """Forgets all step graphs, renames the parameters, and drops the state of parameters not in
        `names`. Returns whether any state was dropped."""
        self.names = dict(names)
        self._parameters.clear()
        self.version += 1
        gone = [p for p in self._sums if p not in self.names]
        for p in gone:
            del self._sums[p]
        return bool(gone)

    def owned(self, signature: Signature) -> dict[str, torch.Tensor]:
        """The state tensors that a graph reads, by graph input."""
        return {n: self.total(self._parameters[p]) for p, n in signature.accumulators.items()}

    # ---- on several ranks

    def shards(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, Shard]:
        """The parts that this rank updates, of these parameters by name that are cut: none."""
        return {}

    def summed_parts(self, parameters: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
        """The parameters of whose gradients a rank sums a part alone over a window: none."""
        return ()

    # ---- stepping

    def enter(self, signature: Signature, first: bool) -> None:
        """Prepares for a run; `first` of a window: zeroes the accumulators. Raises OnwardError
        where no parameter would be updated, and where a window's micro-batches train different
        parameters."""
        taking = self._summed(signature)
        if not taking and not signature.clocks and not signature.left_gradients:
            raise nothing_to_train()
        window = frozenset(self.names[p] for p in taking)
        if first:
            self.window = frozenset()
            for p in taking:
                self.total(p).zero_()
        elif window != self.window:
            odd = sorted(window ^ self.window)
            raise OnwardError(
                f"{', '.join(odd[:3])} got gradients in some micro-batches of one gradient "
                "accumulation and not in others; fix: change requires_grad and parameter "
                "groups only between optimizer updates"
            )

    def sum(self, signature: Signature) -> None:
        """Records that a micro-batch has added its gradients to the accumulators, so that a window
        is open."""
        self.window = frozenset(self.names[p] for p in self._summed(signature))

    def _summed(self, signature: Signature) -> list[torch.Tensor]:
        return [self._parameters[name] for name in signature.accumulators]

    def summed(self) -> dict[torch.Tensor, torch.Tensor]:
        """The summed gradients of the open window, by parameter."""
        return {p: self.total(p) for p, name in self.names.items() if name in self.window}

    def release(self) -> None:
        """Takes pages of state that lies on a disk out of memory, after others have read it."""

    def restore_sums(
        self,
        parameters: Mapping[str, torch.Tensor],
        sums: Mapping[str, torch.Tensor],
        done: int,
    ) -> None:
        """Replaces the sums of the window by saved ones, and the number of updates. parameters and
        sums: by parameter name."""
        for path, tensor in sums.items():
            self.total(parameters[path]).copy_(tensor)
        self.window, self.done = frozenset(sums), done


__all__ = ["GradientSums", "nothing_to_train"]
