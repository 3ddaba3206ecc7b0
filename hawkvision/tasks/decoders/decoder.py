"""The interface of decoders, and what all decoders of boxes have in common.

    model's tensors ──► candidates above `score_floor` whose class has a label, at most `max_candidates`
                            ──► boxes of these, as fractions of the input
                            ──► labels by `class_map` ──► non-maximum suppression by class ──► best 100, padded

The result is `boxes` (n, k, 4), `scores` (n, k) and `classes` (n, k), best first, where rows of score 0 are padding
(`hawkvision.tasks.boxes.rows`). Whatever the tensors hold, a decoder returns finite numbers or raises BackendError.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, NoReturn, TypeAlias, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hawkvision.core.errors import BackendError, ManifestError
from hawkvision.core.types import LOGITS, Tensors
from hawkvision.models.input_spec import InputSpec
from hawkvision.tasks.boxes.rows import BOXES, CLASSES, MOST, SCORES, overlaps


class Candidates(NamedTuple):
    """Boxes of one image, surest first."""

    boxes: NDArray[Any]
    """(k, 4) of x1, y1, x2, y2."""
    scores: NDArray[Any]
    """(k,)."""
    classes: NDArray[np.intp]
    """(k,)."""

    def of(self, rows: NDArray[np.intp] | slice) -> Candidates:
        """Some of them."""
        return Candidates(self.boxes[rows], self.scores[rows], self.classes[rows])


Indices: TypeAlias = NDArray[np.intp]


def suppressed(found: Candidates, iou: float, most: int) -> NDArray[np.intp]:
    """Non-maximum suppression by class: the rows that stay, at most `most`.

    The surest box stays, and those of its class that overlap it by more than `iou` are dropped, and so on (R. Girshick
    et al., "Rich feature hierarchies for accurate object detection and semantic segmentation", CVPR 2014, §2.2).
    """
    left = np.arange(len(found.scores))
    kept: list[int] = []
    while len(left) and len(kept) < most:
        first, left = left[0], left[1:]
        kept.append(int(first))
        same = overlaps(found.boxes[first : first + 1], found.boxes[left])[0] > iou
        left = left[~(same & (found.classes[left] == found.classes[first]))]
    return np.asarray(kept, np.intp)


Order: TypeAlias = Literal["xyxy", "yxyx", "cxcywh", "xywh"]
"""What the four numbers of a box are: corners, x or y first; or the centre or the upper left corner, and the sides."""


def corners(boxes: NDArray[Any], order: Order) -> NDArray[Any]:
    """Boxes (..., 4) of x1, y1, x2, y2 from boxes in another order."""
    if order in ("xyxy", "yxyx"):
        return boxes if order == "xyxy" else boxes[..., [1, 0, 3, 2]]
    point, sides = np.asarray(boxes[..., :2], np.float64), np.asarray(boxes[..., 2:4], np.float64)
    low, high = (point - sides / 2, point + sides / 2) if order == "cxcywh" else (point, point + sides)
    return np.concatenate([low, high], axis=-1)


ROUNDING: Final = 1e-3
"""Scores may be outside 0..1 by this much, as float16 rounds."""
UNUSED_COCO_IDS: Final = frozenset({12, 26, 29, 30, 45, 66, 68, 69, 71, 83})
"""The ids of 1..90 of COCO's categories without objects; the others are the 80 labels, in their order."""
UNSTATED: Final = "unstated"
"""The value, in a manifest, of an option that the owner of a model must still state: nothing serves the model."""
READINGS: Final[Mapping[str, tuple[Any, ...]]] = {
    "order": get_args(Order),
    "scale": ("pixels", "fractions"),
    "first_class": (1, 0),
    "centre": (0.0, 0.5),
    "sigmoid": (False, True),
}
"""Options whose wrong value may still give boxes, with the values that exports need; the first takes all numbers."""


def valid_options(options: type[msgspec.Struct]) -> str:
    """The options of a decoder with their valid values, where these are few."""
    words = []
    for name, kind in get_type_hints(options).items():
        values = ("true", "false") if kind is bool else get_args(kind) if get_origin(kind) is Literal else ()
        words.append(f"{name} ({', '.join(map(str, values))})" if values else name)
    return ", ".join(words)


class Decoder(ABC):
    """Makes a kind's tensors from a model's. Instances are immutable and may be used from several threads."""

    options: type[msgspec.Struct]
    """The declaration of a manifest's `decoder_options`, which refuses unknown ones."""
    asked: Mapping[str, str] = {}
    """Options whose wrong value no tensor shows, with what they say, which the owner of a model must state."""

    def __init__(self, options: Mapping[str, Any], spec: InputSpec, labels: int) -> None:
        """Take a variant's `decoder_options` and input, and the number of its task's labels.

        Raises:
            ManifestError: naming an option that is unknown or out of range.
        """
        self.spec = spec
        self.labels = labels
        self.settings = self.read(options)

    def read(self, options: Mapping[str, Any]) -> Any:
        """The options as `self.options` declares them.

        Raises:
            ManifestError: as the constructor.
        """
        for name, value in options.items():
            if value == UNSTATED:
                meaning = self.asked.get(name) or " or ".join(map(str, READINGS.get(name, ())))
                raise ManifestError(
                    f"decoder_options: {name} is not stated: expected {meaning}; `hawkvision models check` says which "
                    f"fits, and `hawkvision models add` takes it as `--decoder-option {name}=VALUE`"
                )
        try:
            return msgspec.convert(dict(options), self.options)
        except msgspec.ValidationError as error:
            raise ManifestError(f"decoder_options: {error}; the options are {valid_options(self.options)}") from None

    @abstractmethod
    def __call__(self, tensors: Tensors) -> Tensors:
        """Decode the tensors of n images.

        Raises:
            BackendError: if they are not those of such a model.
        """


class BoxOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of all decoders of boxes."""

    outputs: dict[str, str] = {}
    """Names of the model's outputs by their role, where they are not those of the usual export."""
    score_floor: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.05
    """Boxes are dropped up to this score."""
    iou: Annotated[float, Meta(gt=0.0, le=1.0)] | None = 0.6
    """The less sure of two boxes of a label that overlap by more is dropped; 1 drops none."""
    max_candidates: Annotated[int, Meta(ge=1, le=10_000)] = 1000
    """Boxes that are compared with one another, surest first."""
    class_map: tuple[int, ...] | Literal["coco90", "coco91"] | None = None
    """The label's index of each of the model's classes, −1 for none. `coco90`: COCO's ids from 1; `coco91`: from 0."""
    scale: Literal["pixels", "fractions"] = "pixels"
    """Whether the model's coordinates are pixels of the input or fractions of its sides."""
    sigmoid: bool = False
    """Whether the model's scores are logits."""


class BoxDecoder(Decoder):
    """What decoders of boxes have in common."""

    options: type[msgspec.Struct] = BoxOptions
    roles: Mapping[str, Sequence[str]]
    """The tensors that are read, each with its usual names, best first."""
    optional: Mapping[str, Sequence[str]] = {}
    """Tensors that only some models have, read by name alone."""

    def __init__(self, options: Mapping[str, Any], spec: InputSpec, labels: int) -> None:
        """See `Decoder`."""
        super().__init__(options, spec, labels)
        roles = (*self.roles, *self.optional)
        unknown = sorted(self.settings.outputs.keys() - set(roles))
        if unknown:
            raise ManifestError(f"decoder_options: outputs.{unknown[0]}: expected one of {', '.join(roles)}")
        self._map = _class_map(self.settings.class_map, labels)
        self._labelled = None if self._map is None else self._map >= 0
        """Whether each class of the model has a label; None where all have one."""

    @property
    def classes(self) -> int:
        """The number of classes that the model should have."""
        return self.labels if self._map is None else len(self._map)

    @abstractmethod
    def candidates(self, tensors: dict[str, NDArray[np.float32]], image: int) -> Candidates:
        """The candidates of one image, surest first, with boxes in the model's unit."""

    @abstractmethod
    def check(self, tensors: dict[str, NDArray[np.float32]]) -> None:
        """Check the shapes of the tensors, by role.

        Raises:
            BackendError: saying what is expected; `self.refuse` raises it.
        """

    def __call__(self, tensors: Tensors) -> Tensors:
        """See `Decoder`."""
        found = self._by_role(tensors)
        self.check(found)
        with np.errstate(all="ignore"):
            images = [self._finished(self.candidates(found, i)) for i in range(len(next(iter(found.values()))))]
        k = max((len(each.scores) for each in images), default=0)
        boxes, scores, classes = np.zeros((len(images), k, 4), np.float32), *np.zeros((2, len(images), k), np.float32)
        for i, each in enumerate(images):
            rows = slice(0, len(each.scores))
            boxes[i, rows], scores[i, rows], classes[i, rows] = each.boxes, each.scores, each.classes
        return {BOXES: boxes, SCORES: scores, CLASSES: classes}

    def _by_role(self, tensors: Tensors) -> dict[str, NDArray[np.float32]]:
        """The tensors that are read. Where a name says nothing, the model's outputs are taken in their order."""
        names = list(tensors)
        roles = (*self.roles, *self.optional)
        by_order = dict(zip(roles, names, strict=False)) if len(names) >= len(self.roles) else {}
        found: dict[str, NDArray[np.float32]] = {}
        usual = {role: next((name for name in self.roles[role] if name in tensors), None) for role in self.roles}
        for role in self.roles:
            name = self.settings.outputs.get(role)
            if name is None:
                name = usual[role] if all(usual.values()) else by_order.get(role)
            if name is None or name not in tensors:
                self.refuse(f"no output {name or role!r}; the model has {', '.join(names) or 'none'}")
            found[role] = tensors[name]
        ordered = not (self.settings.outputs or all(usual.values()))
        found |= self._by_name(tensors, by_order if ordered else {})
        lengths = {len(tensor) if tensor.ndim else -1 for tensor in found.values()}
        if len(lengths) != 1 or -1 in lengths:
            self.refuse(f"outputs of {sorted(lengths)} images")
        if not all(np.isfinite(tensor).all() for tensor in found.values()):
            self.refuse("outputs that are not finite")
        return found

    def _by_name(self, tensors: Tensors, by_order: Mapping[str, str]) -> dict[str, NDArray[np.float32]]:
        """The optional tensors that the model gives."""
        found: dict[str, NDArray[np.float32]] = {}
        for role, usual in self.optional.items():
            stated = self.settings.outputs.get(role)
            if stated is not None and stated not in tensors:
                self.refuse(f"no output {stated!r}; the model has {', '.join(tensors)}")
            names = (stated,) if stated is not None else (*usual, by_order.get(role, ""))
            name = next((each for each in names if each in tensors), None)
            if name is not None:
                found[role] = tensors[name]
        return found

    def refuse(self, found: str) -> NoReturn:
        """Raise a BackendError about what a model gave."""
        raise BackendError(f"decoder {type(self).__name__}: the model gave {found}; name its decoder and outputs")

    def shape(self, tensors: Mapping[str, NDArray[Any]], role: str, *expected: int | None) -> None:
        """Check the shape of a tensor behind its first axis; None stands for any length.

        Raises:
            BackendError: if it has another.
        """
        shape = tensors[role].shape[1:]
        if len(shape) != len(expected) or any(b not in (None, a) for a, b in zip(shape, expected, strict=True)):
            wanted = ", ".join("any" if each is None else str(each) for each in expected)
            self.refuse(f"{role} of shape (n, {', '.join(map(str, shape))}), expected (n, {wanted})")

    def probabilities(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scores as probabilities, by `sigmoid`.

        Raises:
            BackendError: if they are none.
        """
        if self.settings.sigmoid:
            return np.asarray(1.0 / (1.0 + np.exp(-np.clip(scores, -80.0, 80.0))), np.float32)
        if scores.size and not (scores.min() >= -ROUNDING and scores.max() <= 1.0 + ROUNDING):
            self.refuse(f"scores from {scores.min():g} to {scores.max():g}; logits need sigmoid = true")
        return scores

    def surest(
        self, scores: NDArray[np.float32], *, one_class: bool = False, most: int | None = None
    ) -> tuple[Indices, Indices, NDArray[np.float32]]:
        """Boxes, classes and scores of the surest pairs above `score_floor` whose class has a label, surest first.

        Args:
            scores: (k, classes).
            one_class: whether a box has only its surest class; where that has no label, the box has none.
            most: pairs that are returned; None takes `max_candidates`.
        """
        floor, most = self.settings.score_floor, self.settings.max_candidates if most is None else most
        if one_class and scores.shape[1]:
            best = scores.argmax(axis=1)
            of_best = scores[np.arange(len(scores)), best]
            sure = of_best > floor
            rows = np.flatnonzero(sure if self._labelled is None else sure & self._labelled[best])
            classes, found = best[rows], of_best[rows]
        else:
            sure = scores > floor
            rows, classes = np.nonzero(sure if self._labelled is None else sure & self._labelled)
            found = scores[rows, classes]
        if len(found) > 4 * most:  # sorting all of them would take longer
            kept = np.sort(np.argpartition(-found, most)[:most])
            rows, classes, found = rows[kept], classes[kept], found[kept]
        order = np.argsort(-found, kind="stable")[:most]
        return rows[order], classes[order], found[order]

    def detected(self, boxes: NDArray[Any], scores: NDArray[np.float32], classes: NDArray[np.float32]) -> Candidates:
        """The candidates of a model that gives boxes (k, 4), scores (k,) and classes (k,); negative classes are none.

        Raises:
            BackendError: for a class that the model should not have.
        """
        scores = self.probabilities(scores)
        index = np.rint(np.clip(classes, -1.0, 1e6)).astype(np.intp)
        rows = np.flatnonzero((scores > self.settings.score_floor) & (index >= 0))
        if len(rows) and index[rows].max() >= self.classes:
            self.refuse(f"class {index[rows].max()} of {self.classes}; class_map says which labels classes are")
        if self._labelled is not None:
            rows = rows[self._labelled[index[rows]]]
        rows = rows[np.argsort(-scores[rows], kind="stable")[: self.settings.max_candidates]]
        return Candidates(boxes[rows], scores[rows], index[rows])

    def _finished(self, found: Candidates) -> Candidates:
        """In fractions of the input, with labels; suppressed; the best ones."""
        boxes = np.asarray(found.boxes, np.float64)
        if self.settings.scale == "pixels":
            boxes = boxes / [self.spec.width, self.spec.height, self.spec.width, self.spec.height]
        boxes = np.clip(np.nan_to_num(boxes, nan=0.0), -1.0, 2.0)
        labels = found.classes if self._map is None else self._map[found.classes]
        kept = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
        result = Candidates(boxes[kept], np.clip(found.scores[kept], 0.0, 1.0), labels[kept])
        if self.settings.iou is not None:
            result = result.of(suppressed(result, self.settings.iou, MOST))
        return result.of(slice(0, MOST))


def _class_map(stated: tuple[int, ...] | str | None, labels: int) -> Indices | None:
    """The label's index of each class of a model; None where classes are labels.

    Raises:
        ManifestError: if a label does not exist.
    """
    if stated is None:
        return None
    if isinstance(stated, str):
        ids = range(1, 91) if stated == "coco90" else range(91)
        known = [each for each in range(1, 91) if each not in UNUSED_COCO_IDS]
        stated = tuple(known.index(each) if each in known else -1 for each in ids)
    if not all(-1 <= index < labels for index in stated):
        raise ManifestError(f"decoder_options: class_map: expected indices from -1 to {labels - 1}")
    return np.asarray(stated, np.intp)


class _LogitsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    output: str = LOGITS
    """The model's output, where it has several. The only one of a model is called `logits`."""
    class_map: tuple[int, ...] | None = None
    """The label's index of each of the model's logits, where their order is not that of the task's labels."""


class Logits(Decoder):
    """Logits of classes or labels, in the order of the task's labels."""

    options = _LogitsOptions

    def __init__(self, options: Mapping[str, Any], spec: InputSpec, labels: int) -> None:
        """See `Decoder`."""
        super().__init__(options, spec, labels)
        stated = _class_map(self.settings.class_map, labels)
        if stated is not None and sorted(stated) != list(range(labels)):
            raise ManifestError(f"decoder_options: class_map: expected each index from 0 to {labels - 1} once")
        self._logit = None if stated is None else np.argsort(stated)
        """The model's logit of each label."""

    def __call__(self, tensors: Tensors) -> Tensors:
        """See `Decoder`."""
        name: str = self.settings.output
        if name not in tensors:
            raise BackendError(f"decoder logits: no output {name!r}; the model has {', '.join(tensors)}")
        if self._logit is None:
            return tensors if len(tensors) == 1 and name == LOGITS else {LOGITS: tensors[name]}
        if tensors[name].shape[1:] != self._logit.shape:
            raise BackendError(f"decoder logits: {name!r} has shape {tensors[name].shape}, expected (n, {self.labels})")
        return {LOGITS: tensors[name].take(self._logit, axis=1)}
