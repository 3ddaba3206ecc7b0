"""The input of a model, as manifests state it, and the fingerprint of the models behind an answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Protocol, TypeAlias

import msgspec
from msgspec import Meta

Interpolation: TypeAlias = Literal[
    "bilinear",
    "bicubic",
    "area",
    "opencv_bilinear",
    "opencv_bicubic",
    "opencv_area",
    "pillow_bilinear",
    "pillow_bicubic",
]
"""How images are scaled (`hawkvision.imaging.preprocessing.scaled`). Those of a library scale whole images."""
Fit: TypeAlias = Literal["crop", "stretch", "letterbox"]
Weights: TypeAlias = tuple[float | tuple[float, ...], ...]
"""Weights of an ensemble's members: one number each, or one per label each."""


class ManifestStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all tables of a manifest; unknown keys are errors."""


class InputSpec(ManifestStruct, frozen=True):
    """The input of a variant: uint8 RGB (n, height, width, 3), with `mean` and `std` on the 0..255 scale.

    By `fit`, an image is placed into the input in one of three ways. `crop`: scaled so that its centred square,
    `crop_fraction` of the shorter side, covers the input. `stretch`: scaled to the input, whatever its aspect.
    `letterbox`: scaled to fit inside the input with its aspect, the rest filled with `pad_value`.
    Normalisation is folded into the graph; `mean` and `std` are kept for the builder and for other runtimes.
    """

    height: Annotated[int, Meta(ge=8, le=4096)]
    width: Annotated[int, Meta(ge=8, le=4096)]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: Interpolation = "bilinear"
    crop_fraction: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    channel_order: Literal["rgb", "bgr"] = "rgb"
    fit: Fit = "crop"
    pad_value: Annotated[int, Meta(ge=0, le=255)] = 114
    """All three channels of the pixels beside a letterboxed image."""
    pad_position: Literal["centre", "top_left"] = "centre"
    """Where a letterboxed image lies."""

    @property
    def exact(self) -> bool:
        """Whether images are scaled as a library does, from the whole decoded image."""
        return "_" in self.interpolation

    @property
    def needs_pillow(self) -> bool:
        """Whether Pillow scales the images."""
        return self.interpolation.startswith("pillow_")

    def contradiction(self) -> str | None:
        """Two fields that exclude each other, as a sentence for the user; None if there are none."""
        if self.fit != "crop" and self.crop_fraction != 1.0:
            return f"crop_fraction applies to fit = 'crop', got fit = {self.fit!r}"
        if self.fit != "letterbox" and (self.pad_value, self.pad_position) != (114, "centre"):
            return f"pad_value and pad_position apply to fit = 'letterbox', got fit = {self.fit!r}"
        return None


class Member(Protocol):
    """What decides the tensors that one model of a stage gives to its task kind: a variant, stated or run."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def sha256(self) -> str | None: ...  # noqa: D102
    @property
    def input(self) -> InputSpec: ...  # noqa: D102
    @property
    def temperature(self) -> float: ...  # noqa: D102
    @property
    def decoder(self) -> str: ...  # noqa: D102
    @property
    def decoder_options(self) -> Mapping[str, Any]: ...  # noqa: D102


DEFAULT_KIND: Final = "classification"
"""The kind of manifests that name none."""
_LATER: Final = {"fit": "crop", "pad_value": 114, "pad_position": "centre"}
"""Fields of inputs that came after the first certificates, with their defaults."""


def input_facts(spec: InputSpec) -> dict[str, Any]:
    """The fields of an input as JSON values. Those that came later are left out where they have their defaults."""
    fields: dict[str, Any] = msgspec.to_builtins(spec)
    return {key: value for key, value in fields.items() if key not in _LATER or value != _LATER[key]}


def model_fingerprint(
    members: Sequence[Member],
    *,
    horizontal_flip: bool,
    temperature: float | None,
    accept_confidence: float | None,
    weights: Weights = (),
    task: str = "",
) -> str:
    """SHA-256 of everything that decides a stage's answers (`Manifest.fingerprint`).

    Keys of what is hashed never change, whatever a field is called later, and a key that came later is hashed only
    where its value is not the default.

    Args:
        members: of the stage.
        horizontal_flip: whether mirror images are combined, too.
        temperature: of the ensemble; None where there is none.
        accept_confidence: of a conditional ensemble.
        weights: of the members; empty where all weigh the same.
        task: the kind and its options (`task_facts`).
    """
    facts: dict[str, Any] = {
        "members": [_member_facts(each) for each in members],
        "horizontal_flip": horizontal_flip,
        "temperature": temperature,
    }
    if accept_confidence is not None:
        facts["sure_from"] = accept_confidence
    if weights:
        facts["weights"] = weights
    if task:
        facts["task"] = task
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()


def task_facts(kind: str, options: Mapping[str, Any]) -> str:
    """A task kind and its options as text, equal for equal ones; empty for the default kind without options."""
    if kind == DEFAULT_KIND and not options:
        return ""
    return msgspec.json.encode({"kind": kind, "options": options}, order="sorted").decode()


def _member_facts(member: Member) -> list[Any]:
    facts: list[Any] = [member.name, member.sha256, input_facts(member.input), member.temperature]
    if member.decoder != "logits" or member.decoder_options:
        facts.append({"decoder": member.decoder, "options": member.decoder_options})
    return facts
