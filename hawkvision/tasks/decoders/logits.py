"""Logits of classes or labels, as the model gives them."""

from __future__ import annotations

import msgspec

from hawkvision.core.errors import BackendError
from hawkvision.core.types import LOGITS, Tensors
from hawkvision.tasks.decoders.decoder import Decoder


class _Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    output: str = LOGITS
    """The model's output, where it has several. The only one of a model is called `logits`."""


class Logits(Decoder):
    """See the module."""

    options = _Options

    def __call__(self, tensors: Tensors) -> Tensors:
        """See `Decoder`."""
        name: str = self.settings.output
        if name not in tensors:
            raise BackendError(f"decoder logits: no output {name!r}; the model has {', '.join(tensors)}")
        return tensors if len(tensors) == 1 and name == LOGITS else {LOGITS: tensors[name]}
