"""`fpga-device`: a device behind a link (`fpga/device/FRAMING.md`)."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fpga.backends.base import FpgaBackend
from fpga.backends.metrics import CycleBasis, TimeBasis
from fpga.device.device_client import DeviceConnection, PendingImage, Piece
from fpga.device.frame_transport import open_link
from fpga.device.host_session import MAX_ATTEMPTS, HostSession, ImageAnswered
from fpga.reports.design_info import UNKNOWN_DESIGN, DesignInfo
from hawkvision.core.errors import BackendError, BackendUnavailable
from hawkvision.core.types import Logits, Pixels
from hawkvision.inference.backends.interface import check_open
from hawkvision.integer import reference
from hawkvision.integer.ir import IntegerGraph
from hawkvision.integer.reference import Mask

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

    def infer_pieces(self, pieces: Iterable[Piece]) -> Logits:
        """Logits (classes,) of one image that arrives in pieces; each piece is sent when the iterator yields it.

        Pixels that are left when the iterator ends count as not arrived.

        Raises:
            BackendUnavailable: if the device does not answer, or too many images wait.
            BackendError: as `infer`, and if there are more pixels than the image has.
        """
        check_open(self.name, self._closed)
        connection, image = self._connected(), PendingImage()
        left = area = self._shape[0] * self._shape[1]
        try:
            for pixels, mask in pieces:
                left -= len(pixels)
                if left < 0:
                    raise BackendError(f"fpga-device: {-left} pixels more than an image's {area}")
                # Copied, because the caller may reuse its memory before the piece is sent, or sent again.
                image.pieces.append((pixels.copy(), None if mask is None else mask.copy()))
                connection.submit(image)
            if left > 0:
                channels = self.graph.input.channels
                image.pieces.append((np.zeros((left, channels), np.uint8), np.zeros(left, np.bool_)))
                connection.submit(image)
            answered = self._wait(image)
        except BaseException:  # the caller's iterator may raise anything
            connection.drop(image)
            raise
        return self._floats(answered.logits)

    def _integers(self, batch: Pixels, mask: Mask | None) -> NDArray[np.int32]:
        n, connection = len(batch), self._connected()
        rows = reference.planes(self.graph, batch).reshape(n, -1, self.graph.input.channels)
        masks = None if mask is None else mask.reshape(n, -1).copy()
        # Copied, because the caller may reuse its memory when one image has failed and others are still being sent.
        rows = rows.copy() if np.shares_memory(rows, batch) else rows
        images: list[PendingImage] = []
        try:
            for index in range(n):
                image = PendingImage()
                image.pieces.append((rows[index], None if masks is None else masks[index]))
                connection.submit(image)
                images.append(image)
            return np.stack([self._wait(image).logits for image in images])
        except BackendError:
            for image in images:
                connection.drop(image)
            raise

    def _wait(self, image: PendingImage) -> ImageAnswered:
        reply = image.answer.result()  # the session bounds the attempts
        answered, self.device = reply.answered, reply.device
        cycles: dict[CycleBasis, int] = {}
        seconds: dict[TimeBasis, float] = {"round_trip": reply.round_trip_s}
        if answered.cycles:
            cycles["modelled" if self.device.emulated else "reported"] = answered.cycles
            if self.device.emulated and self.device.clock_hz:
                seconds["modelled"] = answered.cycles / self.device.clock_hz
        self._count(1, cycles, seconds)
        return answered

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
