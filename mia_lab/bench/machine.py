"""What a measurement was made on."""
from __future__ import annotations

import platform
import time
from typing import Any

import torch

_PROBE_BYTES = 256 << 20


def about() -> dict[str, Any]:
    """Device, versions, and what the device can bring to the host at best."""
    import vllm

    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    return {"device": device, "python": platform.python_version(), "vllm": vllm.__version__, "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"), "device_to_host_bytes_per_s": to_host() if cuda else None}


def to_host() -> float:
    """Bytes a second from the device into pinned memory, the best of five large copies."""
    source = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    found = []
    for _ in range(5):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source, non_blocking=True)
        stop.record()
        stop.synchronize()
        found.append(_PROBE_BYTES / (start.elapsed_time(stop) / 1e3))
    return max(found)
