"""Models whose parameters torch's FSDP2 (`fully_shard`) keeps in parts, as calls of one graph.

FSDP gathers the parameters of a module in front of its forward, and frees them behind it. A graph
is one call of the whole model: so all modules are gathered in front of it, and the hooks that would
do so for each are set aside. The hooks of the model itself run around the graph; at the end of the
backward they sum the gradients of every module over the ranks and free the gathered parameters.
Where no gradients are asked for, they are freed behind the call.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from onward.capture import is_traced

_PACKAGE = "torch.distributed.fsdp"  # looked at where a program has imported it
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def sharded_modules(model: torch.nn.Module) -> list[Any]:
    """The modules of a model, itself first, to which `fully_shard` was applied."""
    package = sys.modules.get(_PACKAGE)
    if package is None or not hasattr(package, "FSDPModule"):
        return []
    return [module for module in model.modules() if isinstance(module, package.FSDPModule)]


def refusal(model: torch.nn.Module) -> str | None:
    """The reason why a model with sharded modules cannot run as a graph; None where it can, and
    for any other model."""
    found = sharded_modules(model)
    if not found:
        return None
    if found[0] is not model:
        return (
            f"{type(found[0]).__name__} in it has parameters in shards, and the model has not, so "
            "that nothing sums their gradients behind a graph; fix: fully_shard(model) too"
        )
    for module in found:
        policy = module._get_fsdp_state()._mp_policy  # nothing public tells it
        if any((policy.param_dtype, policy.output_dtype)):
            return (
                "fully_shard casts its parameters by a MixedPrecisionPolicy; fix: leave it out, "
                "and call the model under torch.autocast"
            )
    return None


@contextmanager
def gathered(model: torch.nn.Module, keep: bool = False) -> Generator[None]:
    """A context in which the modules of an FSDP model have whole parameters, and no hooks of FSDP
    but the model's own; for any other model nothing changes. keep: whether the parameters stay
    whole behind it, for a backward, unless an exception leaves it."""
    inner = [module for module in sharded_modules(model) if module is not model]
    if not inner:
        yield
        return
    held: list[tuple[dict[str, Any], str, Any]] = []
    is_kept = False
    try:
        for module in inner:
            module.unshard()
        for module in model.modules():
            attributes = vars(module)
            for name in _HOOKS if module is not model else ():
                hooks = attributes[name]
                if any(map(_is_fsdps, hooks.values())):
                    held.append((attributes, name, hooks))
                    others = [(k, hook) for k, hook in hooks.items() if not _is_fsdps(hook)]
                    attributes[name] = OrderedDict(others)
        yield
        is_kept = keep
    finally:
        for attributes, name, hooks in held:
            attributes[name] = hooks
        if not is_kept:
            for module in inner:
                module.reshard()


def _is_fsdps(hook: Any) -> bool:
    return is_traced(hook, (f"{_PACKAGE}.",))


__all__ = ["gathered", "refusal", "sharded_modules"]
