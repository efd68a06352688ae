"""Capture: from a call of a `torch.nn.Module` to a forward graph.

In: a `CaptureRequest` (module, arguments, loss). Out: a `CapturedModule` (graph, tensors, guards).
`export.py` drives it; `stages.py` lists the stages in order.
"""

from onward.capture.captured_module import CapturedModule
from onward.capture.evaluation import evaluation
from onward.capture.export import capture
from onward.capture.graph_module import GraphModule
from onward.capture.huggingface import CACHE, CacheSetting, without_flash_lengths
from onward.capture.request import CaptureRequest, LossFunction
from onward.capture.trace.as_eager import called_in_inference_mode
from onward.capture.trace.export import ONE_AT_A_TIME, traced_elsewhere, untraced
from onward.capture.weighted_losses import WeightedLosses
from onward.captured import Captured
from onward.model_state.eager_context import eager, is_eager
from onward.model_state.refusals import (
    AUTOCAST_DEVICES,
    apart_from_hooks,
    is_traced,
    refuse_surroundings,
)
from onward.model_state.wrappers import SLOT, unwrapped

__all__ = [
    "AUTOCAST_DEVICES",
    "CACHE",
    "ONE_AT_A_TIME",
    "SLOT",
    "CacheSetting",
    "CaptureRequest",
    "Captured",
    "CapturedModule",
    "GraphModule",
    "LossFunction",
    "WeightedLosses",
    "apart_from_hooks",
    "called_in_inference_mode",
    "capture",
    "eager",
    "evaluation",
    "is_eager",
    "is_traced",
    "refuse_surroundings",
    "traced_elsewhere",
    "untraced",
    "unwrapped",
    "without_flash_lengths",
]
