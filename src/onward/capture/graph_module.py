"""GraphModule: a module that brings its graph, so that nothing of it is traced."""

from __future__ import annotations

import torch

from onward.capture.captured_module import CapturedModule
from onward.capture.request import CaptureRequest


class GraphModule(torch.nn.Module):
    """A module whose call is a graph already, such as a model read from an ONNX file."""

    def captured(self, request: CaptureRequest) -> CapturedModule:
        """Returns the graph of this call of the module. Raises CaptureError for arguments that the
        graph does not take."""
        raise NotImplementedError


__all__ = ["GraphModule"]
