"""What a client's connection knows of its paths now."""

from __future__ import annotations

from time import monotonic

from hawkvision.transport.client.sender import Sender
from hawkvision.transport.congestion.loss_meter import LossEstimate


class PathEstimates:
    """Loss, round trips and silence of a connection's paths."""

    _sender: Sender | None

    @property
    def sender(self) -> Sender:
        """The part without sockets."""
        assert self._sender is not None, "made by connect"
        return self._sender

    def loss(self) -> LossEstimate:
        """The worst loss of the living paths, as far as it is known."""
        return self.sender.loss(monotonic())

    def rtt_s(self) -> float | None:
        """The best living path's round trip: smoothed, unless it has just grown."""
        return self.sender.channel.best(monotonic()).rate.latest_rtt_s

    def repair_s(self) -> float:
        """The time from a request for a fragment to its arrival, over the best living path."""
        return self.sender.channel.best(monotonic()).rate.repair_s()

    @property
    def behind(self) -> bool:
        """Whether reports are late on every path: the link may have become slower than measured."""
        now = monotonic()
        return all(path.behind(now) for path in self.sender.channel.paths.values())

    def silent_s(self) -> float:
        """How long datagrams have gone unanswered on every path; 0 if one of them waits for nothing."""
        since = [path.waiting_since for path in self.sender.channel.paths.values()]
        waiting = [at for at in since if at is not None]
        return monotonic() - max(waiting) if len(waiting) == len(since) else 0.0

    def spare_s(self, size: int) -> float:
        """How long the link takes to carry `size` bytes."""
        return self.sender.spare_s(size, monotonic())

    @property
    def queued_bytes(self) -> int:
        """The bytes that have not left yet."""
        return self.sender.queued_bytes
