"""The review of a folder: what its stages answer differently waits for a label, and each label is in a file at once."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from edge.monitoring.labelling import (
    FIRST,
    RIGHT,
    WRONG,
    Labelled,
    NewCertificates,
    Review,
    ReviewAccuracy,
    ReviewAnswer,
    ReviewItem,
    ReviewQuery,
    ReviewTarget,
    Showing,
    Worklist,
    choices,
    exchanged,
    not_waiting,
    target,
)
from hawkvision.core.clock import Clock
from hawkvision.core.errors import BadField, ConfigError, NotFound
from hawkvision.guarantee.answered import stated_drop
from hawkvision.guarantee.labels import FEWEST_CHECKED
from hawkvision.guarantee.review import labelled_twice
from hawkvision.model_zoo.calibration.certify import Site, SiteCertification, truths_of
from hawkvision.model_zoo.calibration.label_check import random_images
from hawkvision.models.image_sets.labels_file import CANNOT_TELL, COLUMNS, NEITHER, Words, agreed, class_of, read_words
from hawkvision.system.files import write_atomic
from hawkvision.tasks.kind import Prediction


class _Image(NamedTuple):
    """An image that people may label."""

    name: str
    digest: str
    below: Prediction
    """The answer of the first stage below the reference stage that differs from it."""
    reference: Prediction
    differs: bool
    random: bool
    """Whether labels are checked on it."""


class _Certifiable(NamedTuple):
    """What some labels certify."""

    certification: SiteCertification
    targets: tuple[ReviewTarget, ...]
    helped: Mapping[int, tuple[float, ...]]
    """By image, the targets that its label may help."""
    doubt: str | None


class FolderReview:
    """The review of one edge stage on a folder's images; a `Reviewer`. Used on one event loop."""

    def __init__(self, task: str, site: Site, labels: Path, numbers: Mapping[str, int], clock: Clock) -> None:
        """Begin, with the labels of an earlier review.

        Args:
            task: its name; labels are classes.
            site: the images and the answers to them; its profile has one pair of stages.
            labels: the file that labels are written to (`labels_file`); it need not exist.
            numbers: the class index of each name that a label may have.
            clock: for what people were given.

        Raises:
            ConfigError: if the file cannot be used.
        """
        (self._pair,) = site.profile.pairs
        self._task, self._site, self._labels, self._numbers = task, site, labels, numbers
        self._kind = site.answers.kind
        self._words: dict[int, Words] = {}
        """Both labels of each image, as they are written."""
        if labels.exists():
            self._words = read_words(labels, site.images, numbers)
        self._images = self._to_label()
        self._worklist = Worklist(clock)
        self._turn = asyncio.Lock()
        self._known: _Certifiable | None = None

    def _to_label(self) -> dict[int, _Image]:
        """Those drawn at random, and those that stages answer differently."""
        site, kind, chosen = self._site, self._kind, self._site.answers.chosen
        drawn = set(random_images(site.images, chosen).tolist())
        below = site.answers.below(self._pair)
        found = {}
        for index in chosen.tolist():
            best = kind.predict(site.answers.datacenter[self._pair.best].outputs[index], 1)
            others = [kind.predict(stage.outputs[index], 1) for stage in below]
            other = next((each for each in others if kind.disagreement(each, best)), None)
            if other is not None or index in drawn:
                digest, name = hashlib.sha256(site.images.bodies[index]).hexdigest(), site.images.called(index)
                found[index] = _Image(name, digest, other or best, best, other is not None, index in drawn)
        return found

    async def show(self, asked: ReviewQuery) -> Review:
        """See `Reviewer.show`. There is one block, of all images."""
        if asked.block:
            raise NotFound(f"block: there is none of number {asked.block}; a folder is block 0")
        async with self._turn:
            known = await self._certifiable()
        page, waiting, following = self._worklist.page(asked, self._listed(known))
        n, words = len(self._site.answers.chosen), self._words.values()
        return Review(
            task=self._task,
            block=0,
            newest=0,
            audits=n,
            size=n,
            disagreements=sum(image.differs for image in self._images.values()),
            labelled=sum(bool(first) for first, _ in words),
            waiting=waiting,
            repeated=sum(bool(first and again) for first, again in words),
            contradictions=sum(self._contradict(each) for each in words),
            random_labelled=self._checked(),
            random_needed=self._needed(),
            doubt=known.doubt,
            keeps_images=True,
            before_alarm=False,
            targets=known.targets,
            items=tuple(self._item(each, known.helped.get(each.number, ())) for each in page),
            next=following,
        )

    async def label(self, item: str, label: Any) -> ReviewItem:
        """See `Reviewer.label`; the file has the label before this returns."""
        showing = Showing.read(item)
        async with self._turn:
            image = self._images.get(showing.number)
            first, again = self._words.get(showing.number, ("", ""))
            said = again if showing.again else first
            twice = image is not None and first and labelled_twice(image.digest)
            if image is None or (showing.again and not (twice or again)):
                raise not_waiting(item)
            word = "" if label is None else self._word(showing, image, label)
            if word and said and word != said:
                raise BadField(f"image {item} has the label {said!r}; who is sure takes that back first (DELETE)")
            words = self._words | {showing.number: (first, word) if showing.again else (word, again)}
            await asyncio.to_thread(self._write, words)
            self._words, self._known = words, None
            if word:
                self._worklist.labelled(showing.number)
        return self._item(showing, ())

    async def image(self, item: str) -> bytes:
        """See `Reviewer.image`."""
        index = Showing.read(item).number
        if index not in self._images:
            raise not_waiting(item)
        return self._site.images.bodies[index]

    async def certify(self, block: int | None, *, labels_checked: bool) -> NewCertificates:
        """See `Reviewer.certify`."""
        if block:
            raise NotFound(f"block: there is none of number {block}; a folder is block 0")
        async with self._turn:
            known = await self._certifiable()
            try:
                made, accuracies = await asyncio.to_thread(
                    self._site.write, known.certification, str(self._labels), labels_checked=labels_checked
                )
            except ConfigError as error:
                raise BadField(error.message.replace("--labels-checked", "labels_checked")) from None
        return NewCertificates(
            self._task,
            self._pair.edge,
            0,
            str(self._site.out),
            made.data.n,
            made.data.labels,
            {name: ReviewAccuracy(each.value, each.n, each.low, each.high) for name, each in accuracies.items()},
            made.pairs[0].conditions[0].fast.basis,
            known.targets,
        )

    # ------------------------------------------------------------------------------------------------------ labels

    def _word(self, showing: Showing, image: _Image, label: Any) -> str:
        """What the file says for a label.

        Raises:
            BadField: if it is none of this image.
        """
        if label in choices(self._kind, float(image.differs)):
            if label in (CANNOT_TELL, NEITHER):
                return str(label)
            if label == WRONG:
                return NEITHER
            reference_first = exchanged(image.digest, again=showing.again)
            right = image.reference if (label == FIRST) == reference_first or label == RIGHT else image.below
            label = self._kind.stated(right)
        name = self._kind.labels[self._kind.read_label(label)]
        return name if self._numbers[name] == self._kind.read_label(label) else str(self._kind.read_label(label))

    def _write(self, words: Mapping[int, Words]) -> None:
        text = io.StringIO()
        rows = csv.writer(text)
        rows.writerow(COLUMNS)
        names = {index: Path(self._site.images.called(index)).name for index in words}
        rows.writerows((names[index], *both) for index, both in sorted(words.items()) if any(both))
        write_atomic(self._labels, text.getvalue().encode())

    def _contradict(self, words: Words) -> bool:
        return all(words) and class_of(words[0], self._numbers) != class_of(words[1], self._numbers)

    def _checked(self) -> int:
        """The images drawn at random that have a label that tells."""
        drawn = (self._words.get(index, ("", "")) for index, image in self._images.items() if image.random)
        return sum(agreed(each, self._numbers) is not None for each in drawn)

    def _needed(self) -> int:
        return min(FEWEST_CHECKED, sum(image.random for image in self._images.values()))

    # ------------------------------------------------------------------------------------------------------- items

    def _listed(self, known: _Certifiable) -> Iterator[Labelled]:
        """The images to label; those drawn at random are the most urgent."""
        for index, image in self._images.items():
            first, again = self._words.get(index, ("", ""))
            urgency = int(image.random), len(known.helped.get(index, ()))
            yield Labelled(index, image.digest, first or None, again or None, urgency)

    def _item(self, showing: Showing, helps: tuple[float, ...]) -> ReviewItem:
        image, words = self._images[showing.number], self._words.get(showing.number, ("", ""))
        answers = [image.below, image.reference] if image.differs else [image.reference]
        if exchanged(image.digest, again=showing.again):
            answers.reverse()
        return ReviewItem(
            id=showing.id,
            kind="random" if image.random else "disagreement",
            drawn=datetime.fromtimestamp(Path(image.name).stat().st_mtime, UTC),
            stream="",
            image=f"/v1/review/{showing.id}/image?task={self._task}",
            answers=tuple(ReviewAnswer(each.summary(), self._kind.stated(each)) for each in answers),
            choices=choices(self._kind, float(image.differs)),
            helps=helps,
            label=words[showing.again] or None,
        )

    # ------------------------------------------------------------------------------------------------ certificates

    async def _certifiable(self) -> _Certifiable:
        if self._known is None:
            self._known = await asyncio.to_thread(self._compute, self._words)
        return self._known

    def _compute(self, words: Mapping[int, Words]) -> _Certifiable:
        """What these labels certify, if they are right, and what more would do; it writes nothing."""
        site = self._site
        classes = [agreed(words.get(index, ("", "")), self._numbers) for index in range(len(site.images))]
        certification = site.certification(truths_of(self._kind, classes))
        wish = certification.wish(self._pair)
        helped: dict[int, tuple[float, ...]] = {}
        for drop, need in wish.needs.items():
            for index in wish.images[need.helps].tolist():
                helped[index] = (*helped.get(index, ()), stated_drop(drop))
        targets = tuple(target(drop, need, site.share, labels=True) for drop, need in wish.needs.items())
        doubt = None
        if self._checked() >= self._needed():
            try:
                certification.check(str(self._labels), confirmed=True)
            except ConfigError as error:
                doubt = error.message
        return _Certifiable(certification, targets, helped, doubt)
