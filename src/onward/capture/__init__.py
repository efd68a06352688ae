"""torch.nn.Module -> forward Graph: export, translate, fuse composites."""

from onward.capture.export import CapturedModule, capture
from onward.capture.protocol import Captured
from onward.capture.refusals import refuse_surroundings

__all__ = ["Captured", "CapturedModule", "capture", "refuse_surroundings"]
