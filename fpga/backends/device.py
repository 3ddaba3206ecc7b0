"""`fpga-device`: a device behind a link (`fpga/device/FRAMING.md`)."""

from __future__ import annotations

import logging
import secrets
import threading
from concurrent.futures import Future
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fpga.backends.base import CycleBasis, FpgaBackend, TimeBasis
from fpga.device.device_client import DeviceConnection, PendingImage
from fpga.device.frame_transport import open_link
from fpga.device.host_session import MAX_ATTEMPTS, HostSession
from fpga.reports.build_report import UNKNOWN_DESIGN, DesignInfo
from hawkvision.core.errors import BackendError, BackendUnavailable
from hawkvision.core.types import Pixels
from hawkvision.inference.backends.interface import check_open
from hawkvision.integer import reference
from hawkvision.integer.ir import IntegerGraph

log = logging.getLogger("hawkvision.fpga")

MAX_WAITING: Final = 1024
"""Images that may wait for the device: four for each of 256 workers."""


class DeviceBackend(FpgaBackend):
    """The device at `address` (`fpga.device.frame_transport.open_link`), which must hold exactly this graph.

    A broken connection fails the images on it; the next image opens a new one.

    Args:
        graph: the graph that the device must hold.
        address: the device's address.
        design: the known properties of its design.
        attempts: how often an image is sent at most: six fail after 16 s, three after 1.75 s.
        max_waiting: images that may wait for the device, in addition to those that it holds.
        given_up: closes the backend when it is done, even while it waits for the greeting.

    Raises:
        ConfigError: if the address is invalid.
        BackendUnavailable: if no device answers, it holds another graph, or `given_up` is done first.
        BackendError: if the link cannot be opened.
    """

    name = "fpga-device"

    def __init__(
        self,
        graph: IntegerGraph,
        address: str,
        design: DesignInfo = UNKNOWN_DESIGN,
        attempts: int = MAX_ATTEMPTS,
        max_waiting: int = MAX_WAITING,
        given_up: Future[None] | None = None,
    ) -> None:
        super().__init__(graph, design)
        self._address, self._attempts, self._max_waiting = address, attempts, max_waiting
        self._connection_lock = threading.Lock()
        self._connection = self._open()
        if given_up is not None:
            given_up.add_done_callback(lambda _: self.close())
        try:
            self.device = self._connection.device()
        except BackendError as error:
            self._connection.close()
            raise type(error)(f"{address}: {error}") from None
        if self.device.emulated:
            log.warning("fpga-device: at %s is an emulator, not hardware; its times are modelled", address)

    @property
    def emulated(self) -> bool:
        """See `FpgaBackend.emulated`."""
        return self.device.emulated

    def close(self) -> None:
        """See `Backend.close`."""
        with self._connection_lock:
            super().close()
            self._connection.close()

    def _integers(self, batch: Pixels) -> NDArray[np.int32]:
        n, connection = len(batch), self._connected()
        rows = reference.planes(self.graph, batch).reshape(n, -1, self.graph.input.channels)
        # Copied, because the caller may reuse its memory when one image has failed and others are still being sent.
        rows = rows.copy() if np.shares_memory(rows, batch) else rows
        images: list[PendingImage] = []
        try:
            for pixels in rows:
                images.append(PendingImage(pixels))
                connection.submit(images[-1])
            return np.stack([self._wait(image) for image in images])
        except BackendError:
            for image in images:
                connection.drop(image)
            raise

    def _wait(self, image: PendingImage) -> NDArray[np.int32]:
        # The session bounds the attempts.
        answered, round_trip_s, self.device = image.answer.result()
        cycles: dict[CycleBasis, int] = {}
        seconds: dict[TimeBasis, float] = {"round_trip": round_trip_s}
        if answered.cycles:
            cycles["modelled" if self.device.emulated else "reported"] = answered.cycles
            if self.device.emulated and self.device.clock_hz:
                seconds["modelled"] = answered.cycles / self.device.clock_hz
        self._count(1, cycles, seconds)
        return answered.logits

    def _open(self) -> DeviceConnection:
        link, session = open_link(self._address), HostSession(self.graph, secrets.randbits(32), self._attempts)
        try:
            return DeviceConnection(link, session, self._max_waiting)
        except OSError as error:  # for instance, no descriptor is left
            link.close()
            raise BackendError(f"{self._address}: {error.strerror}") from None

    def _connected(self) -> DeviceConnection:
        """The connection, reopened if it broke.

        Raises:
            BackendUnavailable: if it cannot be reopened.
        """
        with self._connection_lock:
            check_open(self.name, self._closed)
            if self._connection.broken is not None:
                self._connection.close()
                try:
                    self._connection = self._open()
                except BackendError as error:
                    raise BackendUnavailable(error.message) from None
            return self._connection
