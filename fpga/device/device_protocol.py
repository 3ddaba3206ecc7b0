"""The constants and checks that both ends of the protocol between a host and a device share (`fpga/device/FRAMING.md`).

The ends are `fpga.device.host_session` and `fpga.device.device_session`: pure, with frames and the time as arguments.
"""

from __future__ import annotations

from typing import Final

from hawkvision.integer.ir import IntegerGraph

SPAN: Final = 64
"""Sequence numbers between the oldest unanswered image and the newest; a device keeps as many replies."""
MAX_WINDOW: Final = SPAN - 1


def graph_digest(graph: IntegerGraph) -> bytes:
    """Both ends compare the graph's SHA-256."""
    return bytes.fromhex(graph.sha256)
