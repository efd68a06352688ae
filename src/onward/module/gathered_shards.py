"""Models whose parameters another package keeps in shards, one on each rank, as calls of one graph:
those of torch's FSDP2 (`fully_shard`) and of DeepSpeed's ZeRO-3.

These packages gather the parameters of a module in front of its forward and of its backward, and
free them behind it, by hooks on each module. A graph is one call of the whole model: so all
parameters are gathered in front of it, and the hooks of modules within the model are set aside
meanwhile. They are freed at the end of the backward, or behind a call without gradients. The hooks
of the model itself run around the graph, and those that sum gradients over the ranks are hooks of
parameters, which autograd calls.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import distributed
from torch.autograd import Variable
from torch.utils import _pytree as pytree

from onward.capture import is_traced

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_FSDP = "torch.distributed.fsdp"  # looked at where a program has imported it
_DEEPSPEED = "deepspeed"


class Shards(Protocol):
    """Parameters of a model in shards. package: of the hooks on its modules that gather and free
    them."""

    package: str

    def refusal(self) -> str | None:
        """The reason why the model cannot run as a graph; None where it can."""
        ...

    def gather(self) -> None:
        """Makes the parameters whole."""
        ...

    def free(self) -> None:
        """Leaves this rank's shards of the parameters alone."""
        ...

    def free_behind_backward(self, outputs: Any) -> None:
        """Frees the parameters at the end of the backward from these outputs of the model."""
        ...


class _FullyShardedModules:
    """The modules of a model to which `fully_shard` was applied, the model itself among them."""

    package = _FSDP

    def __init__(self, model: torch.nn.Module, modules: Sequence[Any]) -> None:
        self._model, self._modules = model, modules
        self._inner = [module for module in modules if module is not model]

    def refusal(self) -> str | None:
        if len(self._inner) == len(self._modules):
            return (
                f"{type(self._inner[0]).__name__} in it has parameters in shards, and the model "
                "has not, so that nothing sums their gradients behind a graph; fix: "
                "fully_shard(model) too"
            )
        for module in self._modules:
            policy = module._get_fsdp_state()._mp_policy  # nothing public tells it
            if any((policy.param_dtype, policy.output_dtype)):
                return (
                    "fully_shard casts its parameters by a MixedPrecisionPolicy; fix: leave it "
                    "out, and call the model under torch.autocast"
                )
        return None

    def gather(self) -> None:
        for module in self._inner:
            module.unshard()

    def free(self) -> None:
        for module in self._inner:
            module.reshard()

    def free_behind_backward(self, outputs: Any) -> None:
        """Does nothing: the hooks of the model itself do it."""


class _PartitionedParameters:
    """Parameters that DeepSpeed's ZeRO-3 has partitioned."""

    package = _DEEPSPEED

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = parameters

    def refusal(self) -> str | None:
        dtype = next((p.dtype for p in self._parameters if p.dtype != torch.float32), None)
        if dtype is None:
            return None
        return (
            f"DeepSpeed keeps its parameters in {str(dtype)[6:]}; fix: leave bf16 and fp16 out of "
            "its config, and use its torch_autocast"
        )

    def gather(self) -> None:
        first, *_ = self._parameters
        first.all_gather(param_list=list(self._parameters))

    def free(self) -> None:
        for parameter in self._parameters:
            if not parameter.ds_persist:  # small ones stay whole
                parameter.partition()

    def free_behind_backward(self, outputs: Any) -> None:
        def at_the_end(gradient: torch.Tensor) -> None:
            engine = Variable._execution_engine  # pyright: ignore[reportPrivateUsage]
            engine.queue_callback(self.free)

        for tensor in pytree.tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(at_the_end)


def shards_of(model: torch.nn.Module) -> Shards | None:
    """The parameters of a model that are in shards; None where none are."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    fsdp = sys.modules.get(_FSDP)
    if fsdp is not None:
        modules = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
        if modules:
            return _FullyShardedModules(model, modules)
    if _DEEPSPEED in sys.modules:
        parameters = [p for p in model.parameters() if hasattr(p, "ds_status")]
        if parameters:
            return _PartitionedParameters(parameters)
    return None


def call_gathered(
    model: torch.nn.Module, shards: Shards, call: Callable[[], Any], for_backward: bool
) -> Any:
    """Returns `call()`, for which the parameters of a model are gathered. for_backward: whether
    they stay whole until the end of a backward, unless the call raises an exception."""
    with _hooks_aside(model, shards.package):
        try:
            shards.gather()
            outputs = call()
        except BaseException:
            shards.free()
            raise
    if for_backward:
        shards.free_behind_backward(outputs)
    else:
        shards.free()
    return outputs


@contextmanager
def _hooks_aside(model: torch.nn.Module, package: str) -> Generator[None]:
    """A context in which the modules within a model have no forward hooks of a package."""

    def is_of_package(hook: Any) -> bool:
        return is_traced(hook, (f"{package}.",))

    held: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        for name in _HOOKS if module is not model else ():
            hooks = vars(module)[name]
            if any(map(is_of_package, hooks.values())):
                held.append((vars(module), name, hooks))
    try:
        for attributes, name, hooks in held:
            others = [(key, hook) for key, hook in hooks.items() if not is_of_package(hook)]
            attributes[name] = OrderedDict(others)
        yield
    finally:
        for attributes, name, hooks in held:
            attributes[name] = hooks


__all__ = ["Shards", "call_gathered", "shards_of"]
