"""The `groups` of an optimizer's description: parameters by pattern, as torch's param_groups.

    onward.optim.AdamW(lr=1e-3, groups=[{"params": ["*.bias", "*norm*"], "weight_decay": 0.0}])

A pattern is a shell's (`fnmatch`) over the names of `model.named_parameters()`, aliases of tied
weights included. Settings that a group does not give are the description's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from onward.errors import OnwardError
from onward.graph.names import named_by

Made: TypeAlias = "list[dict[str, Any]]"
SettingsOf: TypeAlias = Callable[[str, tuple[int, ...], bool], "dict[str, Any]"]


def param_groups(
    model: nn.Module, groups: Sequence[Mapping[str, Any]], settings: Iterable[str]
) -> Made:
    """Makes torch's param_groups: those of `groups`, in order, then one of all other parameters
    that require grad. settings: the names that a group may set.

    Raises OnwardError for a pattern that matches no trained parameter, for a parameter that two
    groups match, and for an unknown setting.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    owner: dict[torch.Tensor, int] = {}
    made: Made = []
    names = _names(model)
    for i, group in enumerate(groups):
        known = sorted(settings)
        if not isinstance(group, Mapping) or "params" not in group:
            raise OnwardError(f"groups[{i}] has no 'params'; fix: a dict with a pattern of names")
        odd = sorted(str(key) for key in group if key != "params" and key not in known)
        if odd:
            raise OnwardError(
                f"groups[{i}] sets '{odd[0]}', which this optimizer does not have; fix: one of "
                f"{', '.join(known)}"
            )
        held = _matched(i, group["params"], names, trained)
        for p in held:
            if p in owner:
                raise OnwardError(
                    f"groups[{owner[p]}] and groups[{i}] both have the parameter '{names[p][0]}'; "
                    "fix: patterns that match each parameter once"
                )
            owner[p] = i
        made.append({**group, "params": held})
    rest = [p for p in trained if p not in owner]
    return [*made, {"params": rest}] if rest or not made else made


def split(model: nn.Module, made: Made, settings_of: SettingsOf) -> Made:
    """Splits each group by settings that depend on the parameter. settings_of: these, from a
    parameter's name, its shape, and whether it is a table of embeddings or the output layer. A
    group that gives such a setting itself keeps it."""
    names, tables = _names(model), _tables(model)
    found: Made = []
    for group in made:
        parts: dict[str, dict[str, Any]] = {}
        for p in group["params"]:
            settings = {**settings_of(names[p][0], tuple(p.shape), p in tables), **group}
            settings.pop("params")
            part = parts.setdefault(repr(sorted(settings.items())), {**settings, "params": []})
            part["params"].append(p)
        found += parts.values()
    return found


def _names(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """All names of each parameter; a tied weight has several."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return names


def embedding_tables(model: nn.Module) -> set[torch.Tensor]:
    """The weights of a model's embeddings."""
    return {m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}


def _tables(model: nn.Module) -> set[torch.Tensor]:
    """The weights of embeddings, and of the output layer that a transformers model names."""
    found = embedding_tables(model)
    output = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(output, "weight", None)
    return found if weight is None else {*found, weight}


def _matched(
    i: int, given: Any, names: Mapping[torch.Tensor, list[str]], trained: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The trained parameters that `params` of groups[i] names: patterns, or parameters
    themselves."""
    items = [given] if isinstance(given, str | torch.Tensor) else list(given)
    if not items:
        raise OnwardError(f"groups[{i}] has no parameters; fix: a pattern such as '*.bias'")
    held: list[torch.Tensor] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            found = [p for p in trained if p is item]
            what = f"a parameter of shape {list(item.shape)} that the model does not train"
        else:
            named = set(named_by(str(item), [n for p in names for n in names[p]]))
            found = [p for p in trained if not named.isdisjoint(names[p])]
            what = f"the pattern '{item}', which matches no parameter that requires grad"
        if not found:
            raise OnwardError(
                f"groups[{i}] has {what}; fix: a name such as '{next(iter(names.values()))[0]}'"
            )
        held += found
    return list(dict.fromkeys(held))


__all__ = ["embedding_tables", "param_groups", "split"]
