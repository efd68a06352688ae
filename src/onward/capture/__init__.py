"""torch.nn.Module -> forward Graph: export, translate, fuse composites."""

from onward.capture.as_eager import called_in_inference_mode
from onward.capture.captured_module import CapturedModule
from onward.capture.evaluation import evaluation
from onward.capture.export import capture
from onward.capture.huggingface import CACHE, keeps_cache, without_flash_lengths
from onward.capture.protocol import Captured
from onward.capture.refusals import (
    AUTOCAST_DEVICES,
    apart_from_hooks,
    is_traced,
    refuse_surroundings,
)
from onward.capture.trace import in_plain_pytorch, is_plain, traced_elsewhere, untraced
from onward.capture.wrappers import SLOT, unwrapped

__all__ = [
    "AUTOCAST_DEVICES",
    "CACHE",
    "SLOT",
    "Captured",
    "CapturedModule",
    "apart_from_hooks",
    "called_in_inference_mode",
    "capture",
    "evaluation",
    "in_plain_pytorch",
    "is_plain",
    "is_traced",
    "keeps_cache",
    "refuse_surroundings",
    "traced_elsewhere",
    "untraced",
    "unwrapped",
    "without_flash_lengths",
]
