"""Records on each traced node the dtype of the `torch.autocast` block that it is in.

A block is entered as in eager PyTorch, so that code which asks for a tensor's dtype, or whether
autocast is on, takes the branch of eager mode. The trace has no nodes for autocast's casts. Instead
each node carries its block's dtype (f32 in a block that is off), and the cast policy
(rewrite/precision) writes the casts after the capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

from onward.graph.types import DType
from onward.model_state.patches import Patch, patched

_KEY = "onward_precision"
# the dtypes that autocast casts to
LOW_TYPES = {torch.bfloat16: DType.BFLOAT16, torch.float16: DType.FLOAT16}
_MODULE: Any = torch.amp.autocast_mode
_KIND = _MODULE.autocast


@contextmanager
def autocast_noted(device: str) -> Iterator[None]:
    """A context in which autocast blocks mark the nodes that this thread traces in them, and leave
    no nodes of their own. device: type of the model's device; blocks for others mark nothing."""
    open_blocks: list[tuple[Any, ExitStack]] = []
    entering: list[Any] = []  # blocks being entered or left, whose calls `called` must not repeat
    plain_enter, plain_leave = _KIND.__enter__, _KIND.__exit__

    def enter(block: Any) -> Any:
        stack = ExitStack()
        if block.device == device:
            kind = LOW_TYPES.get(block.fast_dtype) if block._enabled else DType.FLOAT
            if kind is not None:
                stack.enter_context(traceback.annotate({_KEY: kind.name}))
        open_blocks.append((block, stack))
        entering.append(block)
        try:
            plain_enter(block)
        finally:
            entering.pop()
        return block

    def leave(block: Any, *_: Any) -> bool:
        last = max(i for i, (held, _) in enumerate(open_blocks) if held is block)
        open_blocks.pop(last)[1].close()
        entering.append(block)
        try:
            plain_leave(block, None, None, None)
        finally:
            entering.pop()
        return False

    plain = PreDispatchTorchFunctionMode.__torch_function__

    def called(mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handles the functions by which graphs of dynamo enter and leave a block."""
        if function in (_MODULE._enter_autocast, _MODULE._exit_autocast):
            if entering:
                return None
            return enter(_KIND(*args)) if function is _MODULE._enter_autocast else leave(*args)
        return plain(mode, function, types, args, kwargs)

    places: list[Patch] = [
        (_KIND, "__enter__", enter),
        (_KIND, "__exit__", leave),
        (PreDispatchTorchFunctionMode, "__torch_function__", called),
    ]
    with patched(places), traceback.preserve_node_meta():
        yield


def block_of(node: Any) -> str:
    """Returns the name of the dtype of the innermost block around a traced node; "" for none."""
    return (node.meta.get("custom") or {}).get(_KEY, "")


__all__ = ["LOW_TYPES", "autocast_noted", "block_of"]
