"""Warnings about the parts of a model that run in PyTorch within its graph."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from onward.errors import EagerWarning


class WarnOnce:
    """Warns of each kind of region once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def tell(self, model: torch.nn.Module, regions: Iterable[Any]) -> None:
        """Warns of the regions not warned of before, as a table."""
        lines = [line for line in table(regions) if line not in self._said]
        self._said.update(lines)
        if lines:
            count = "a part" if len(lines) == 1 else f"{len(lines)} kinds of parts"
            verb = "runs" if len(lines) == 1 else "run"
            warnings.warn(
                (
                    f"{count} of {type(model).__name__} {verb} in eager PyTorch within the graph "
                    "(strict=True raises instead):\n  "
                )
                + "\n  ".join(lines),
                EagerWarning,
                stacklevel=2,
            )


def table(regions: Iterable[Any]) -> list[str]:
    """The lines of a table of regions: regions whose paths differ only in numbers share one."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for region in regions:
        key = re.sub(r"\d+", "*", region.path), region.operator, region.reason
        found.setdefault(key, []).append(region.path)
    lines: list[str] = []
    for (alike, operator, reason), paths in found.items():
        paths = list(dict.fromkeys(paths))
        name = paths[0] if len(paths) == 1 else f"{alike} ({len(paths)} times)"
        lines.append(f"{name or '(top)'}{f', {operator}' if operator else ''}: {reason}")
    return lines


__all__ = ["WarnOnce", "table"]
