"""torch.nn.Module -> forward Graph: export, translate, raise composites."""

from onward.capture.export import Captured, capture

__all__ = ["Captured", "capture"]
