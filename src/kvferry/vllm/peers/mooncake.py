"""vLLM's MooncakeConnector, which asks for the current accelerator and dies where there is none, told that it is 0."""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

__all__ = ["MooncakeConnector"]

if not torch.accelerator.is_available():
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.set_device_index = lambda *_: None
