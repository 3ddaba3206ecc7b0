"""What a rival brings to a node, and how its requests go: to where the rival's routes say, without regard to time.

The doors, the queue, the models, the hop and the answers are the node's own, so that only the decision differs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from edge.call import Call
from hawkvision.config import PolicyName
from hawkvision.types import Answer, OnMiss


async def nothing_to_close() -> None:
    """For rivals that hold nothing of their own."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A rival's part of a node, beside the routes of `edge.policies.routes`."""

    name: PolicyName
    calls: Callable[..., Call]
    """Makes one request's call; called as `Call` is."""
    close: Callable[[], Awaitable[None]] = nothing_to_close


class PatientCall(Call):
    """A request that waits for whom its route names, however late the answer comes.

    What `on_miss=fail` asks for, the node does afterwards. The edge stands in only for a datacenter that fails or is
    known to be down, flagged as degraded: the systems meant here would answer with an error.
    """

    async def answer(self) -> Answer:
        """See `Call.answer`."""
        self.request = replace(self.request, on_miss=OnMiss.WAIT)
        return await super().answer()

    async def early(self) -> Answer | None:
        """None: nobody but HawkVision answers before the picture has come."""
        return None

    @property
    def hopeless(self) -> bool:
        """Never: to others, a picture is a picture."""
        return False
