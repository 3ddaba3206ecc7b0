"""What people are asked of images, be they a node's audits or a folder's: items, labels, and who is given which.

One labelled image in twenty is given a second time, as another item, with an order of the answers of its own. If both
labels differ in what they say is lost, the image counts as if it had none.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from hawkvision.cascade.certification.profiling import written
from hawkvision.core.clock import Clock
from hawkvision.core.errors import NotFound
from hawkvision.guarantee.answered import stated_drop
from hawkvision.guarantee.labels import LabelNeed
from hawkvision.guarantee.review import labelled_twice
from hawkvision.tasks.kind import TaskKind

MOST_ITEMS: Final = 100
"""Images on one page."""
GIVEN_S: Final = 120.0
"""So long an image that somebody was given is not listed for others."""
MOST_GIVEN: Final = 2_000
"""Images that are remembered as given: twenty people with a full page each."""
APART: Final = 5
"""The least labels of other images between both labels of one."""

FIRST, SECOND, NEITHER = "first", "second", "neither"
RIGHT, WRONG, CANNOT_TELL = "right", "wrong", "cannot_tell"


class ReviewAnswer(msgspec.Struct, frozen=True):
    """An answer of a stage; it is not said which."""

    text: Annotated[str, Meta(description="In words.")]
    label: Annotated[Any, Meta(description="The label that says that it is right; for detection, its boxes.")]


class ReviewItem(msgspec.Struct, frozen=True):
    """An image to label."""

    id: Annotated[str, Meta(description="Names it in `/v1/review/{id}`.")]
    kind: Annotated[
        Literal["random", "disagreement"],
        Meta(description="Why it is listed: drawn at random from all audits, or the stages answer differently."),
    ]
    drawn: Annotated[datetime, Meta(description="When the node got the image.")]
    stream: Annotated[str, Meta(description="A hash that tells streams and callers apart.")]
    image: Annotated[str | None, Meta(description="Path of the image; null if it is not kept any more.")]
    answers: Annotated[
        tuple[ReviewAnswer, ...], Meta(description="Both, the first and the second; one where the stages agree.")
    ]
    choices: Annotated[
        tuple[str, ...],
        Meta(
            description="Labels that it takes besides classes, numbers or sets of names; empty if it is there to "
            "look at only."
        ),
    ]
    helps: Annotated[tuple[float, ...], Meta(description="The `max_accuracy_drop` of each target that it may help.")]
    label: Annotated[Any, Meta(description="What was said; null for nothing.")] = None


class ReviewTarget(msgspec.Struct, frozen=True):
    """What the block certifies for a target, and what labels would do."""

    max_accuracy_drop: Annotated[float, Meta(description="The target.")]
    certified: Annotated[bool, Meta(description="Whether a stage below the reference stage may answer.")]
    escalation: Annotated[float, Meta(description="The share that leaves the edge.")]
    to_best: Annotated[float, Meta(description="The share that the reference stage answers.")]
    accept_from: Annotated[
        float | Literal["always", "never"],
        Meta(description="The edge's score from which on its answer is accepted, or when it escalates."),
    ]
    labels: Annotated[int, Meta(description="Labels of disagreements that this rests on.")]
    more: Annotated[int, Meta(description="Disagreements whose labels would help.")]
    then: Annotated[float, Meta(description="`to_best` if none of those loses anything.")]
    delta: Annotated[float, Meta(description="Probability that this is wrong, at most.")]


class Review(msgspec.Struct, frozen=True):
    """A block of audits: the images that wait for a label, and what it certifies."""

    task: Annotated[str, Meta(description="Whose audits they are.")]
    block: Annotated[int, Meta(description="Its number; blocks follow one another.")]
    newest: Annotated[int, Meta(description="The number of the newest block, which may still fill.")]
    audits: Annotated[int, Meta(description="Audits of it that are evidence.")]
    size: Annotated[int, Meta(description="Audits of a full block.")]
    disagreements: Annotated[int, Meta(description="Audits in which the stages differ, or that are missing.")]
    labelled: Annotated[int, Meta(description="Audits with a label.")]
    waiting: Annotated[int, Meta(description="Items that wait for a label, those that others were given included.")]
    repeated: Annotated[int, Meta(description="Images that were labelled a second time, unasked.")]
    contradictions: Annotated[
        int, Meta(description="Of those whose labels differ in what is lost; they count as if they had none.")
    ]
    random_labelled: Annotated[int, Meta(description="Of those drawn at random.")]
    random_needed: Annotated[int, Meta(description="Labels of those that a certificate needs, once there is any.")]
    doubt: Annotated[str | None, Meta(description="Why the labels are not believed; null if they are, or too few.")]
    keeps_images: Annotated[bool, Meta(description="Whether the node keeps images to label.")]
    before_alarm: Annotated[
        bool,
        Meta(description="Whether an alarm stands that came after the block began, which its certificates cannot end."),
    ]
    targets: Annotated[tuple[ReviewTarget, ...], Meta(description="What it certifies, by target.")]
    items: Annotated[
        tuple[ReviewItem, ...], Meta(description="Those drawn at random first, then those that help the most targets.")
    ]
    next: Annotated[int | None, Meta(description="The `offset` of the next page; null on the last one.")]


class ReviewAccuracy(msgspec.Struct, frozen=True):
    """How often a stage is right."""

    value: Annotated[float, Meta(description="The share of these images.")]
    n: Annotated[int, Meta(description="Images.")]
    low: Annotated[float, Meta(description="The lower end of an interval at 95 %.")]
    high: Annotated[float, Meta(description="Its upper end.")]


class NewCertificates(msgspec.Struct, frozen=True):
    """The certificates that were made; they are in force within seconds."""

    task: Annotated[str, Meta(description="Whose audits they are.")]
    edge: Annotated[str, Meta(description="The edge stage.")]
    block: Annotated[int, Meta(description="The block of audits.")]
    file: Annotated[str, Meta(description="Where they were written.")]
    n: Annotated[int, Meta(description="Its audits.")]
    labels: Annotated[int, Meta(description="Audits with a label that tells what is lost.")]
    accuracies: Annotated[
        dict[str, ReviewAccuracy], Meta(description="Of each stage, on the images drawn at random that have a label.")
    ]
    basis: Annotated[
        Literal["labelled", "agreement", "disagreement", "profile"],
        Meta(description="Labels; the agreement of both stages; or that alone, where it bounds no accuracy drop."),
    ]
    targets: Annotated[tuple[ReviewTarget, ...], Meta(description="What was certified, by target.")]


Task = Annotated[Annotated[str, Meta(max_length=128)] | None, Meta(description="The task; default: the first.")]
Block = Annotated[
    Annotated[int, Meta(ge=0)] | None,
    Meta(
        description="The block of audits; default: that which is open until certificates are made of it, else the "
        "newest that has ended. Looking at a block opens it, and older ones are refused from then on."
    ),
]


class ReviewQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of `GET /v1/review`."""

    task: Task = None
    block: Block = None
    labelled: Annotated[bool, Meta(description="List the images that have a label, not those that wait.")] = False
    offset: Annotated[int, Meta(ge=0, description="Images to pass over.")] = 0
    limit: Annotated[int, Meta(ge=1, le=MOST_ITEMS, description="Images to list.")] = 20
    reviewer: Annotated[
        str,
        Meta(
            max_length=64,
            description="A name of who asks, to divide the work: what another one was given in the last two minutes "
            "and has not labelled is not listed.",
        ),
    ] = ""


class Reviewer(Protocol):
    """The review of one task's images."""

    async def show(self, asked: ReviewQuery) -> Review:
        """A page of images, and what is certifiable.

        Raises:
            HawkVisionError: if there is no such page, or not now.
        """
        ...

    async def label(self, item: str, label: Any) -> ReviewItem:
        """Label an image; None takes a label back.

        Raises:
            BadField: if it is no label of this image, or the image has another one, which must be taken back first.
            NotFound: if there is no such item.
        """
        ...

    async def image(self, item: str) -> bytes:
        """The image of an item.

        Raises:
            NotFound: if there is none.
        """
        ...

    async def certify(self, block: int | None, *, labels_checked: bool) -> NewCertificates:
        """Make certificates and write them.

        Raises:
            HawkVisionError: saying why there can be none.
        """
        ...


class Showing(NamedTuple):
    """An image as an item: by its number, for the first or the second time."""

    number: int
    again: bool = False

    @property
    def id(self) -> str:
        """Names it. People cannot see which image it is, nor for which time."""
        return f"{(2 * self.number + self.again) * _FACTOR % _PRIME:016x}"

    @classmethod
    def read(cls, item: str) -> Showing:
        """The showing of an id.

        Raises:
            NotFound: if it is none.
        """
        if not _ID(item):
            raise not_waiting(item)
        number, again = divmod(int(item, 16) * _INVERSE % _PRIME, 2)
        return cls(number, bool(again))


_ID: Final = re.compile(r"[0-9a-f]{16}").fullmatch
_PRIME: Final = 2**61 - 1
_FACTOR: Final = 0x0E3779B97F4A7C15
_INVERSE: Final = pow(_FACTOR, -1, _PRIME)


def not_waiting(item: str) -> NotFound:
    """The error for an item that does not exist."""
    return NotFound(f"no image {item[:40]!r} waits for a label; GET /v1/review lists those that do")


def exchanged(digest: str, *, again: bool) -> bool:
    """Whether the reference stage's answer is the first, by the image's SHA-256 in hexadecimal."""
    return int(digest[again], 16) % 2 == 1


def choices(kind: TaskKind[Any], disagreement: float) -> tuple[str, ...]:
    """What may be said of an image besides its label; nothing for kinds that take no labels here."""
    if not kind.agreement_bounds_drop:
        return ()
    if disagreement == 0.0:
        return (RIGHT, WRONG, CANNOT_TELL) if kind.binary else (RIGHT, CANNOT_TELL)
    return (FIRST, SECOND, NEITHER, CANNOT_TELL) if kind.binary else (FIRST, SECOND, CANNOT_TELL)


def chosen_losses(choice: str, disagreement: float, reference_first: bool) -> tuple[float, float] | None:
    """What the edge's and the reference stage's answer lose by one of `choices`; None if it does not tell."""
    if choice == CANNOT_TELL:
        return None
    if choice in (NEITHER, WRONG):
        return 1.0, 1.0
    if choice == RIGHT:
        return 0.0, 0.0
    return (disagreement, 0.0) if (choice == FIRST) == reference_first else (0.0, disagreement)


def target(drop: float, need: LabelNeed, delta: float, *, labels: bool) -> ReviewTarget:
    """What is certified for a target; `labels` if such may be given."""
    return ReviewTarget(
        stated_drop(drop),
        need.now.to_best < 1.0,
        round(need.now.escalation, 6),
        round(need.now.to_best, 6),
        written(need.now.thresholds.edge),
        need.used,
        int(need.helps.sum()) if labels else 0,
        round(need.to_best if labels else need.now.to_best, 6),
        delta,
    )


class Labelled(NamedTuple):
    """An image that people may label, and what they said."""

    number: int
    digest: str
    """SHA-256 in hexadecimal."""
    label: Any
    again: Any
    urgency: tuple[int, ...]
    """Those with the highest come first."""


class Worklist:
    """What waits for whom: two people do not label the same, and nobody labels an image twice in a row."""

    def __init__(self, clock: Clock) -> None:
        """Begin with nothing given to anybody."""
        self._clock = clock
        self._given: dict[str, tuple[str, float]] = {}
        """Who has each item, and since when; the oldest first."""
        self._recent: deque[int] = deque(maxlen=APART)
        """The images that were labelled last, which are not shown again yet."""

    def labelled(self, number: int) -> None:
        """Note that an image got a label."""
        self._recent.append(number)

    def page(self, asked: ReviewQuery, images: Iterable[Labelled]) -> tuple[list[Showing], int, int | None]:
        """The items to list, which are given to who asks; how many wait in all; and where the next page begins.

        Second showings come first, because what follows a batch of images does not look as if it came again.
        """
        waiting, labelled = list[tuple[tuple[int, ...], Showing]](), list[tuple[tuple[int, ...], Showing]]()
        for number, digest, label, again, urgency in images:
            (waiting if label is None else labelled).append(((0, *urgency), Showing(number)))
            if again is not None:
                labelled.append(((1, *urgency), Showing(number, again=True)))
            elif label is not None and labelled_twice(digest) and number not in self._recent:
                waiting.append(((1, *urgency), Showing(number, again=True)))
        chosen = sorted(labelled if asked.labelled else waiting, key=lambda each: each[0], reverse=True)
        found = [each for _, each in chosen if asked.labelled or self._free(asked.reviewer, each)]
        end = asked.offset + asked.limit
        page = found[asked.offset : end]
        if asked.reviewer and not asked.labelled:
            self._give(asked.reviewer, page)
        return page, len(waiting), end if end < len(found) else None

    def _free(self, reviewer: str, showing: Showing) -> bool:
        """Whether nobody else was given this lately; who gives no name sees everything."""
        who, since = self._given.get(showing.id, (reviewer, 0.0))
        return not reviewer or who == reviewer or since <= self._clock.now() - GIVEN_S

    def _give(self, reviewer: str, page: Iterable[Showing]) -> None:
        for item in (each.id for each in page):
            self._given.pop(item, None)
            self._given[item] = reviewer, self._clock.now()
        while len(self._given) > MOST_GIVEN:
            del self._given[next(iter(self._given))]
