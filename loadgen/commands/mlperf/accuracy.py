"""What LoadGen's accuracy log holds of each answer, and how right that is.

Of kinds whose predictions are one class, the log holds the class (int32, −1 for none), as MLPerf's scripts for
ResNet-50 read it. Of any other kind it holds 1 − the loss of the answer (float32): 0 without an answer, NaN without a
label.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, Final

from hawkvision.tasks.kind import TaskKind, Truth
from loadgen.clients.base import ClientReply
from loadgen.workload.judging import rightness

NO_CLASS: Final = -1
"""What the log says of a request that was not answered."""
_CLASS: Final = struct.Struct("<i")
_RIGHT: Final = struct.Struct("<f")


class AnswerJudge:
    """Judges answers to the images of a data set."""

    def __init__(self, kind: TaskKind[Any] | None, truths: Sequence[Truth] | None) -> None:
        """Judge by these labels, as the kind's loss takes them; None judges nothing.

        Args:
            kind: of the task; None if it is not known here, and a class is expected.
            truths: by image.
        """
        single = kind is None or "index" in kind.wire_tensors
        self.kind = None if single else kind
        """The kind whose loss judges; None where the class does."""
        self._truths = truths

    def answered(self, reply: ClientReply) -> bool:
        """Whether there is an answer that can be judged."""
        return reply.status == 200 and (reply.index if self.kind is None else reply.prediction) is not None

    def right(self, reply: ClientReply, image: int) -> float | None:
        """How right an answer is: 0 or 1 of a class, else 1 − the loss; None without labels or an answer."""
        if self._truths is None or not self.answered(reply):
            return None
        return rightness(self.kind, reply.prediction, reply.index, self._truths[image])

    def logged(self, reply: ClientReply, image: int) -> bytes:
        """What the log holds of a reply."""
        if self.kind is None:
            return _CLASS.pack(NO_CLASS if reply.index is None else reply.index)
        if not self.answered(reply):
            return _RIGHT.pack(0.0)
        right = self.right(reply, image)
        return _RIGHT.pack(math.nan if right is None else right)

    def read(self, logged: bytes, image: int) -> float:
        """How right an answer was, by what the log holds of it.

        Raises:
            struct.error, IndexError: if that is no answer, or to no image of these.
        """
        assert self._truths is not None, "only what has labels is read"
        truth = self._truths[image]
        if self.kind is None:
            return float(_CLASS.unpack(logged)[0] == truth)
        right: float = _RIGHT.unpack(logged)[0]
        return right
