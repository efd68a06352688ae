"""What Hugging Face models need while they are captured: attention whole, masks in compact form."""

from onward.capture.huggingface.attention import attention_kept_whole
from onward.capture.huggingface.settings import forward_defaults, require_mask

__all__ = ["attention_kept_whole", "forward_defaults", "require_mask"]
