"""torch.nn.Module -> forward Graph: export, translate, fuse composites."""

from onward.capture.export import Captured, capture
from onward.capture.refusals import refuse_surroundings

__all__ = ["Captured", "capture", "refuse_surroundings"]
