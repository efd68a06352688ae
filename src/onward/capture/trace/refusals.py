"""Turns errors of torch.export into one line each, with a fix where the cause is known."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from onward.capture.aten.reasons import reason
from onward.capture.regions.blame import blamed
from onward.errors import CaptureError
from onward.model_state.one_line import READ, shortened

_KNOWN = (
    ("Could not guard on data-dependent|Could not extract specialized|unbacked sym", READ),
    (
        "fake tensor in the exported program",
        (
            "a tensor is read or written through .data, so that the graph would hold the values "
            "of one batch; fix: .detach() to read it; copy_ under torch.no_grad() into a "
            "registered buffer to write it"
        ),
    ),
    (
        r"\.numpy\(\) is not supported|__array__",
        "a tensor is converted to numpy, which a graph does not run; fix: compute with torch",
    ),
    (
        "maximum recursion depth",
        (
            "calls recurse without end, or modules hold each other in a circle; fix: keep a "
            "module's parent as a weakref.ref, and flatten deeply nested lists"
        ),
    ),
    (
        "vmap|functorch",
        (
            "the forward calls a torch.func transform (vmap, grad); fix: write the computation "
            "without it"
        ),
    ),
    (
        "Attempted to call function marked as skipped|torch.compile|Dynamo",
        "the forward calls a function compiled by torch.compile; fix: call the original function",
    ),
)
_DROPS = ("layerdrop", "layer_drop")


def refusal(error: BaseException, model: torch.nn.Module) -> CaptureError:
    """Returns a CaptureError for an error of an export, with the module that was being called."""
    text = str(error).strip()
    first = (text.splitlines() or [type(error).__name__])[0]
    known = next((say for mark, say in _KNOWN if re.search(mark, text)), None)
    if known is None and first.startswith("aten."):
        why = reason(first.removeprefix("aten."))
        known = f"{first}: {why}" if why else None
    where = _where(error, model)
    text = f"{where}: {known}" if known else f"torch.export could not trace {where}: {first}"
    found = CaptureError(shortened(text))
    found.said = shortened(known or first)
    return found


def layer_drop(model: torch.nn.Module, path: str, chance: float) -> CaptureError | None:
    """Returns an error for layer drop at the module `path`, which compares a random number with
    `chance`; None where no option of the module has that value."""
    option = _drop_of(model.get_submodule(path), chance)
    if not option:
        return None
    error = CaptureError(
        f"{path or 'the model'} uses layer drop: random numbers decide which layers run, "
        f"which a graph cannot do; fix: {option} = 0"
    )
    error.said = f"layer drop skips layers at random; fix: {option} = 0"
    return error


def refuse_layer_drop(regions: Iterable[Any]) -> None:
    """Raises CaptureError where a region in PyTorch uses layer drop: in eager mode the parameters
    of a dropped layer have no gradient and stay, but the update of a whole step moves them all."""
    for region in regions:
        for name, module in () if region.module is None else region.module.named_modules():
            option = _drop_of(module)
            if option and module.training:
                path = ".".join(p for p in (region.path, name) if p)
                raise CaptureError(
                    f"{path} uses layer drop: random numbers decide which layers run, but the "
                    f"optimizer step of a Trainer updates every parameter; fix: {option} = 0, "
                    "or your own loop with onward.accelerate(model)"
                )


def _drop_of(module: torch.nn.Module, chance: float | None = None) -> str:
    """Returns the option that sets a module's layer drop; "" where it is off. chance: if given, the
    value that the option has to have."""
    config = vars(module).get("config")
    named = {n: v for n, v in vars(config).items() if _drops(n, v)} if config is not None else {}
    own = {n: v for n, v in vars(module).items() if _drops(n, v)}
    if chance is not None:
        named, own = ({n: v for n, v in x.items() if v == chance} for x in (named, own))
    options = [n for n, v in named.items() if not own or v in own.values()]
    return f"config.{options[0]}" if options else next(iter(own), "")


def _drops(name: str, value: Any) -> bool:
    return name.endswith(_DROPS) and isinstance(value, (int, float)) and value > 0


def _where(error: BaseException, model: torch.nn.Module) -> str:
    """Returns the path of the innermost module being called; "the forward" if unknown."""
    paths = {id(m): path for path, m in model.named_modules()}
    found = [paths[id(m)] for m in blamed(error, model) if id(m) in paths]
    return found[0] if found else "the forward"


__all__ = ["layer_drop", "refusal", "refuse_layer_drop"]
