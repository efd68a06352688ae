"""torch.nn.Module -> forward Graph: export, translate, fuse composites."""

from onward.capture.captured_module import CapturedModule
from onward.capture.export import capture
from onward.capture.protocol import Captured
from onward.capture.refusals import refuse_surroundings

__all__ = ["Captured", "CapturedModule", "capture", "refuse_surroundings"]
