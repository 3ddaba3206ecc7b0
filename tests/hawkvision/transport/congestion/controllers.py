"""The controllers that must pass the conformance suite: ours, and BBR as a second implementation of the interface."""

from __future__ import annotations

from typing import Final

from hawkvision.transport.congestion.controller import CongestionController
from hawkvision.transport.congestion.loss_tolerant import LossTolerant
from tests.hawkvision.transport.congestion.bbr import Bbr

CONTROLLERS: Final[dict[str, type[CongestionController]]] = {"loss_tolerant": LossTolerant, "bbr": Bbr}
