"""timm without torchvision, whose wheels are for builds of torch with CUDA.

timm's models read the names of its data loading when they are imported, and call none of them.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any


class _Empty(type):
    """A metaclass of classes in which every name is a string."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Hollow(ModuleType):
    """A module in which every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Empty(name, (), {})
        setattr(self, name, made)
        return made


NAMES = ("torchvision", "torchvision.datasets", "torchvision.datasets.folder", "torchvision.io",
         "torchvision.ops", "torchvision.ops.misc", "torchvision.transforms",
         "torchvision.transforms.functional", "torchvision.transforms.v2")  # fmt: skip


def import_timm() -> bool:
    """Imports timm; whether there is one."""
    if importlib.util.find_spec("timm") is None:
        return False
    hollow = {} if importlib.util.find_spec("torchvision") else {n: _Hollow(n) for n in NAMES}
    for name, module in hollow.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(hollow[parent], child, module)
    sys.modules.update(hollow)
    try:
        importlib.import_module("timm")
    finally:
        for name in hollow:
            del sys.modules[name]  # transformers looks for it
    return True
