"""Fingerprints of what computed an answer, as stated by the process that ran the models.

    fingerprint = SHA-256 of models, inputs, decoders, temperatures, combination and kind  "/"  executions

A replica states for each of its variants the hash of the file's content as it was loaded, the input, the temperature,
the decoder and the execution: what ran the network, on which provider and in which precision. From that statement a
stage's fingerprint follows (`stage_fingerprint`); its first part is `Manifest.fingerprint` of a manifest that says the
same, by which certificates name a stage. The second part lists the executions of its members, each once.

Certificates are made with ONNX Runtime's CPU provider. `EXACT` are the executions that give the same answers: bit for
bit (our own kernels, which are compared at each start) or by integer arithmetic (the FPGA's). Certificates that a site
made of what others answered, a GPU for instance, cover exactly those.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from hawkvision.models.input_spec import InputSpec, Weights, input_facts, model_fingerprint
from hawkvision.models.manifest import Variant

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
    """The model file's; None for a backend without a file."""
    input: InputSpec
    temperature: float
    execution: str
    """`Execution` as text."""
    decoder: str = "logits"
    decoder_options: dict[str, Any] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, variant: Variant, sha256: str | None, execution: str) -> VariantRun:
        """A variant of a manifest, run from a file with this hash in this way."""
        return cls(
            variant.name,
            sha256,
            variant.input,
            variant.temperature,
            execution,
            variant.decoder,
            variant.decoder_options,
        )


def statement(runs: Sequence[VariantRun]) -> str:
    """The statement of a process about its variants, as text that travels with its answers.

    Fields that came later are left out where they have their defaults, so that earlier releases read it.
    """
    return msgspec.json.encode([_stated(run) for run in runs]).decode()


def _stated(run: VariantRun) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.structs.asdict(run) | {"input": input_facts(run.input)}
    if run.decoder == "logits" and not run.decoder_options:
        del fields["decoder"], fields["decoder_options"]
    return fields


@functools.lru_cache(256)
def stage_fingerprint(
    stated: str,
    members: tuple[str, ...],
    *,
    horizontal_flip: bool = False,
    temperature: float = 1.0,
    accept_confidence: float | None = None,
    weights: Weights = (),
    task: str = "",
) -> str | None:
    """The fingerprint of a stage whose members ran in a process with this statement.

    Args:
        stated: a `statement`.
        members: of the stage; more than one are combined.
        horizontal_flip: whether mirror images are combined, too.
        temperature: of the combination.
        accept_confidence: of a conditional ensemble.
        weights: of the members, as the manifest's.
        task: `Manifest.task_facts`.

    Returns: None if the process did not state one of them, or ran no model file.
    """
    found = {run.name: run for run in _decoder.decode(stated)} if stated else {}
    if any(name not in found or found[name].sha256 is None for name in members):
        return None
    runs = [found[name] for name in members]
    models = model_fingerprint(
        runs,
        horizontal_flip=horizontal_flip,
        temperature=temperature if len(members) > 1 else None,
        accept_confidence=accept_confidence,
        weights=weights,
        task=task,
    )
    return f"{models}{SEPARATOR}{BETWEEN.join(dict.fromkeys(run.execution for run in runs))}"


@functools.lru_cache(256)
def parts_of(fingerprint: str) -> tuple[str, frozenset[str]]:
    """The models' part of a fingerprint, and the executions."""
    models, _, executions = fingerprint.partition(SEPARATOR)
    return models, frozenset(executions.split(BETWEEN))


class CertifiedVersions:
    """The models that certificates are about, by stage, and what may execute them. Immutable."""

    def __init__(self, stages: Mapping[str, str], executions: Mapping[str, frozenset[str]] | None = None) -> None:
        """Begin with the models' fingerprint of each stage, as the profile has it; `EXACT` may execute those for which
        `executions` names none.
        """
        self.stages = dict(stages)
        self.executions = dict(executions or {})

    def holds(self, stage: str, fingerprint: str | None) -> bool:
        """Whether this fingerprint, stated by the process that ran it, is of the stage as certified; None never is."""
        if fingerprint is None:
            return False
        models, executions = parts_of(fingerprint)
        return self.models_of(stage, models) and executions <= self.executions.get(stage, EXACT)

    def executions_of(self, stage: str, fingerprint: str | None) -> frozenset[str]:
        """What executed the stage's models, certified or not; nothing if these were others."""
        models, executions = parts_of(fingerprint or "")
        return executions if self.models_of(stage, models) else frozenset()

    def models_of(self, stage: str, models: str | None) -> bool:
        """Whether these are the stage's models, whatever executes them."""
        return models is not None and self.stages.get(stage) == models


_decoder = msgspec.json.Decoder(list[VariantRun])
