"""Makes images smaller before they are escalated, within the node's memory budget."""

from __future__ import annotations

import asyncio
import math

from edge.inference.decoding_limits import DecodingLimits
from hawkvision.core.errors import DeadlineMissed, EscalationFailed, Overloaded
from hawkvision.imaging.downscale import Reducer
from hawkvision.imaging.image_header import ImageHeader
from hawkvision.system.memory import to_the_end


class ImageReducer:
    """Reduces images to the size that the datacenter's stages use."""

    def __init__(self, reducer: Reducer | None = None, limits: DecodingLimits | None = None) -> None:
        """Prepare.

        Args:
            reducer: knows the stages' input sizes; None leaves images as they are.
            limits: provide the memory for decoding; None has no bound.
        """
        self._reducer = reducer
        self._limits = limits

    async def prepare(self, body: bytes, header: ImageHeader, until: float = math.inf) -> bytes:
        """The image to send: the caller's bytes, or a smaller image if that saves much.

        Formats that the datacenter may not read are converted.

        Args:
            body: the image.
            header: its header.
            until: on the loop's clock; the work is not started if it cannot end by then.

        Raises:
            BadImage, TooLarge: if the image has to be reduced and cannot be decoded.
            EscalationFailed: if there is no time or memory for the reduction.
        """
        reducer = self._reducer
        if reducer is None or (header.format.native and not reducer.saves(header)):
            return body
        if self._limits is None:
            return await asyncio.to_thread(reducer.reduced, body, header)
        try:
            async with self._limits.beside(body, header, reducer.least_side(header), until):
                running = asyncio.get_running_loop().run_in_executor(None, reducer.reduced, body, header)
                return await to_the_end(running)
        except (Overloaded, DeadlineMissed) as error:
            raise EscalationFailed(f"the image could not be made smaller: {error}") from None
