"""Fingerprints of what computed an answer, as stated by the process that ran the models.

    fingerprint = SHA-256 of models, inputs, temperatures and averaging  "/"  executions

A replica states for each of its variants the hash of the file's content as it was loaded, the input, the temperature,
and the execution: what ran the network, on which provider and in which precision. From that statement a stage's
fingerprint follows (`stage_fingerprint`); its first part is `Manifest.fingerprint` of a manifest that says the same, by
which certificates name a stage. The second part lists the executions of its members, each once.

Certificates are made with ONNX Runtime's CPU provider. `EXACT` are the executions that give the same answers: bit for
bit (our own kernels, which are compared at each start) or by integer arithmetic (the FPGA's). Any other needs a
certificate of its own or a passed equivalence check (`hawkvision.cascade.certification.equivalence`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import msgspec

from hawkvision.models.manifest import InputSpec, model_fingerprint

EXACT: Final = frozenset(
    {"onnxruntime:CPUExecutionProvider", "int8", "fpga-ref", "fpga-sim", "fpga-device", "fpga-offload"}
)
"""Executions that certificates cover."""
SEPARATOR: Final = "/"
BETWEEN: Final = "+"


class Execution(msgspec.Struct, frozen=True):
    """What ran a network. Fields other than `backend` are empty if they do not change its answers."""

    backend: str
    provider: str = ""
    precision: str = ""
    """Precision of layers that are not computed as in the model file: `tf32`, `fp16`, …"""
    version: str = ""
    """Version of the runtime."""
    device: str = ""

    def __str__(self) -> str:
        words = (self.backend, self.provider, self.precision, self.version, self.device)
        return ":".join(word.replace(SEPARATOR, "|").replace(BETWEEN, "&") for word in words if word)


class VariantRun(msgspec.Struct, frozen=True):
    """One variant as loaded by a process."""

    name: str
    sha256: str | None
    """Of the model file's content; None for a backend without a file."""
    input: InputSpec
    temperature: float
    execution: str
    """`Execution` as text."""


def statement(runs: Sequence[VariantRun]) -> str:
    """The statement of a process about its variants, as text that travels with its answers."""
    return msgspec.json.encode(list(runs)).decode()


@functools.lru_cache(256)
def stage_fingerprint(
    stated: str,
    members: tuple[str, ...],
    *,
    horizontal_flip: bool = False,
    temperature: float = 1.0,
    accept_confidence: float | None = None,
) -> str | None:
    """The fingerprint of a stage whose members ran in a process with this statement.

    Args:
        stated: a `statement`.
        members: of the stage; more than one are averaged.
        horizontal_flip: whether mirror images are averaged, too.
        temperature: of the average.
        accept_confidence: of a conditional ensemble.

    Returns: None if the process did not state one of them, or ran no model file.
    """
    found = {run.name: run for run in _decoder.decode(stated)} if stated else {}
    if any(name not in found or found[name].sha256 is None for name in members):
        return None
    runs = [found[name] for name in members]
    models = model_fingerprint(
        [(run.name, run.sha256, run.input, run.temperature) for run in runs],
        horizontal_flip=horizontal_flip,
        temperature=temperature if len(members) > 1 else None,
        accept_confidence=accept_confidence,
    )
    return f"{models}{SEPARATOR}{BETWEEN.join(dict.fromkeys(run.execution for run in runs))}"


def parts_of(fingerprint: str) -> tuple[str, frozenset[str]]:
    """The models' part of a fingerprint, and the executions."""
    models, _, executions = fingerprint.partition(SEPARATOR)
    return models, frozenset(executions.split(BETWEEN))


def is_exact(fingerprint: str) -> bool:
    """Whether all executions are in `EXACT`."""
    return parts_of(fingerprint)[1] <= EXACT


_decoder = msgspec.json.Decoder(list[VariantRun])
