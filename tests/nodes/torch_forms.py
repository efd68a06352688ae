"""The rows of all families."""

from __future__ import annotations

from nodes import torch_layers, torch_pointwise, torch_shapes, torch_windows
from nodes.torch_table import AT_KINKS, FORMS, WITHOUT_TORCH, Attributes, NoForm

FAMILIES = (torch_layers, torch_pointwise, torch_shapes, torch_windows)
__all__ = ["AT_KINKS", "FAMILIES", "FORMS", "WITHOUT_TORCH", "Attributes", "NoForm"]
