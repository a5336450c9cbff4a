"""Lets PyPI's torchvision import beside a CPU build of torch.

Its compiled operators do not load there, and while it imports it registers shape functions for two of them: enough
that their schemas exist. Nothing that a text model does calls them.
"""

from __future__ import annotations

import torch


def declare() -> None:
    """Declare the two schemas, once in a process."""
    if hasattr(torch.library, "_seatrial_torchvision"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    # The schemas last only as long as this object.
    torch.library._seatrial_torchvision = library
