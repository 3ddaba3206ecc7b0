"""Review: people label audits, and certificates are made of them.

    GET /v1/review ────► a block's images that wait for a label, and what labels have made certifiable
    POST /v1/review/ID ─► a label ─► what each answer lost ─┐
    POST /v1/certificates ──────────────────────────────────┴─► a block, its test ─► the node's certificates file

Where the stages agree nothing is lost, so only disagreements are listed, and some images drawn at random, on which
labels are checked first. A disagreement counts as lost until a label tells otherwise, and if nobody can tell. The order
of both answers is that of a hash, which does not say whose they are.

Who sees anything of a block has opened it, which spends a part of δ (`hawkvision.guarantee.review`); older blocks tell
nothing from then on. The block may be looked at again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from edge.monitoring.evidence_log import KEPT, Audit, EvidenceLog
from hawkvision.cascade.certification.predictions import measure_accuracy
from hawkvision.cascade.certification.profile import (
    TESTED_DROPS,
    Certificate,
    Condition,
    Pair,
    Profile,
    RightAnswers,
    design_sha256,
)
from hawkvision.cascade.certification.profile_files import dump, load_site
from hawkvision.cascade.certification.profiling import certify_condition, costs_of, paths_of, written
from hawkvision.cascade.certification.site_certificates import SiteCertificates, SiteData, SitePair, SiteStage
from hawkvision.cascade.certification.threshold_order import expected_cost
from hawkvision.core.errors import BadField, ManifestError, NotFound, Overloaded
from hawkvision.core.types import Prediction
from hawkvision.guarantee.answered import stated_drop
from hawkvision.guarantee.evidence import Evidence, StageEvidence, ThresholdStep
from hawkvision.guarantee.labels import FEWEST_CHECKED, LabelNeed, doubt, harder, label_needs, neither_oftener
from hawkvision.guarantee.review import BLOCK, block_of, for_label_check, how_tested, share_of_delta
from hawkvision.models.manifest import MeasuredAccuracy
from hawkvision.system.files import sha256_of, write_atomic
from hawkvision.tasks.kind import TaskKind

DELTA: Final = 0.05
"""Probability that a certificate is wrong, for all blocks since the last one together."""
FEWEST: Final = 50
"""With fewer audits no drop below 6 % can be certified, whatever their labels."""
FAST: Final = 1.0
"""Stands for never escalating among the drops: every block that certifies bounds what it loses."""
MOST_ASKED: Final = 3
"""Blocks that are computed or wait for it; one takes a second or two of a processor."""
MOST_ITEMS: Final = 100
"""Images on one page."""
FRESH: Final = 32
"""Further audits for which what is certifiable is not computed anew; a label always is a reason to."""

FIRST, SECOND, NEITHER = "first", "second", "neither"
RIGHT, WRONG, CANNOT_TELL = "right", "wrong", "cannot_tell"


class ReviewAnswer(msgspec.Struct, frozen=True):
    """An answer of a stage; it is not said which."""

    text: Annotated[str, Meta(description="In words.")]
    label: Annotated[Any, Meta(description="The label that says that it is right.")]


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
        tuple[str, ...], Meta(description="Labels that it takes besides classes, numbers or sets of names.")
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
    random_labelled: Annotated[int, Meta(description="Of those drawn at random.")]
    random_needed: Annotated[int, Meta(description="Labels of those that a certificate needs, once there is any.")]
    doubt: Annotated[str | None, Meta(description="Why the labels are not believed; null if they are, or too few.")]
    keeps_images: Annotated[bool, Meta(description="Whether the node keeps images to label.")]
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


class _Stages(NamedTuple):
    """What is compared."""

    profile: Profile
    pair: Pair
    versions: str


class _Sample(NamedTuple):
    """The audits of a block that are evidence."""

    rows: dict[int, Audit]
    evidence: Evidence
    disagreements: int
    stages: _Stages
    part: float
    """Of the block's δ, for the test that applies."""


class Reviewer:
    """The review of one task. Used on one event loop."""

    def __init__(
        self,
        task: str,
        kind: TaskKind[Any],
        log: EvidenceLog,
        pair: Callable[[], tuple[Profile, Pair]],
        versions: Callable[[], str],
        certificates: Path | None,
    ) -> None:
        """Prepare.

        Args:
            task: its name.
            kind: of the task.
            log: the audits.
            pair: the profile in force, and its pair of stages.
            versions: of the stages, and of what their scores depend on; audits of others are no evidence.
            certificates: the node's file; None if it has none.
        """
        self._task = task
        self._kind = kind
        self._log = log
        self._pair = pair
        self._versions = versions
        self._certificates = certificates
        self.on_written: Callable[[], None] = lambda: None
        """Called when the file was written."""
        self._turn, self._computing = asyncio.Lock(), asyncio.Lock()
        self._asked = 0
        """Blocks that are computed or wait for it."""
        self._labels = 0
        """Labels given or taken back since the start."""
        self._known: tuple[object, tuple[ReviewTarget, ...], dict[float, LabelNeed]] | None = None

    async def show(self, block: int | None, offset: int, limit: int, *, labelled: bool) -> Review:
        """A block's page, which opens it; `labelled` lists the images that have a label, not those that wait for one.

        If further labels cannot make a full block certify a target, certificates of older blocks lose it here.

        Raises:
            BadField: if a newer block was opened.
            NotFound: if there is no such block.
            Overloaded: if more than `MOST_ASKED` wait.
        """
        async with self._place():
            async with self._turn:
                number = await self._chosen(block)
                sample = await self._sample(number)
                if sample.rows:
                    await asyncio.to_thread(self._log.open, number)
            targets, needs = await self._certifiable(number, sample) if len(sample.rows) else ((), {})
        helped = {
            row: tuple(stated_drop(drop) for drop, need in needs.items() if need.helps[place : place + 1].any())
            for place, row in enumerate(sample.rows)
        }
        found = [
            row
            for row, audit in sample.rows.items()
            if (audit.label is not None) == labelled and self._log.has_image(row) and self._wanted(row, audit)
        ]
        found.sort(key=lambda row: (not for_label_check(row), -len(helped[row]), row))
        page = found[offset : offset + limit]
        checked = self._checked(sample)
        doubted = self._doubt(checked, sample.stages.pair) if len(checked) >= FEWEST_CHECKED else None
        failed = [drop for drop, need in needs.items() if need.to_best == 1.0]
        if failed and doubted is None and len(checked) >= FEWEST_CHECKED and number < block_of(self._log.last + 1):
            await self._withdraw(sample, failed)
        return Review(
            task=self._task,
            block=number,
            newest=block_of(max(1, self._log.last)),
            audits=len(sample.rows),
            size=BLOCK,
            disagreements=sample.disagreements,
            labelled=sum(audit.label is not None for audit in sample.rows.values()),
            random_labelled=len(checked),
            random_needed=FEWEST_CHECKED,
            doubt=doubted,
            keeps_images=self._log.keeps_images,
            targets=targets,
            items=tuple(self._item(row, sample.rows[row], helped[row]) for row in page),
            next=offset + limit if offset + limit < len(found) else None,
        )

    async def label(self, number: int, label: Any) -> ReviewItem:
        """Label an audit; None takes a label back.

        Raises:
            BadField: if it is no label of this audit, or of this kind of task; if it has another label, which must be
                taken back first; or if a newer block was opened.
            NotFound: if there is no such audit.
        """
        kind = self._kind
        if not kind.agreement_bounds_drop:
            raise BadField(
                f"task {self._task!r} is of kind {kind.name!r}, which cannot be labelled here: all of its images need "
                "labels; certify with `hawkvision certify --data` and labelled images"
            )
        async with self._turn:
            audit = await self._audit(number)
            block = await self._chosen(block_of(number))
            losses = None if label is None else self._losses(number, audit, label)
            if label is not None and audit.label is not None and label != audit.label:
                raise BadField(
                    f"audit {number} has the label {audit.label!r}; who is sure takes that back first (DELETE)"
                )
            audit.losses, audit.label = losses, label
            if label is not None:
                await asyncio.to_thread(self._log.open, block)
            await self._log.update(number, audit)
            self._labels += 1
        return self._item(number, audit, ())

    async def image(self, number: int) -> bytes:
        """The image of an audit.

        Raises:
            NotFound: if it is not kept, or its block is not open yet: that it is kept says that the stages differ.
        """
        found = await asyncio.to_thread(self._log.image, number)
        if found is None or block_of(number) > max(await asyncio.to_thread(self._log.openings), default=-1):
            raise NotFound(f"no image of {number} is kept (any more); see review_max_bytes and review_max_days")
        return found

    async def certify(self, block: int | None, *, labels_checked: bool) -> NewCertificates:
        """Make certificates of a block's audits, and write them to the node's file.

        Raises:
            BadField: if there is no such file, or it holds what no review made; if there is none that remembers
                openings; if a newer block was opened, there are too few audits, the labels are not believed, or the
                stages change meanwhile.
            NotFound: if there is no such block.
            Overloaded: if more than `MOST_ASKED` wait.
        """
        if self._certificates is None:
            raise BadField("this node has no file for certificates; set `edge.certificates` to a path and restart it")
        if not self._log.remembers:
            raise BadField(
                "a restart of this node would forget which blocks were opened; set `edge.state_file` to a path that it "
                "can write and restart it"
            )
        async with self._place(), self._turn:
            number = await self._chosen(block)
            sample = await self._sample(number)
            if len(sample.rows) < FEWEST:
                raise BadField(f"block {number}: {len(sample.rows)} audits certify nothing; expected at least {FEWEST}")
            made = await asyncio.to_thread(self._certify, number, sample, labels_checked=labels_checked)
        self.on_written()
        return made

    # -------------------------------------------------------------------------------------------------- one audit

    async def _audit(self, number: int) -> Audit:
        found = await self._log.audit(number)
        if found is None or found.reference is None or not self._wanted(number, found):
            raise NotFound(f"no audit {number} waits for a label; GET /v1/review lists those that do")
        return found

    def _wanted(self, number: int, audit: Audit) -> bool:
        """Whether a label of the audit tells anything."""
        useful = audit.disagreement > 0.0 or for_label_check(number)
        return useful and audit.reference is not None and self._kind.agreement_bounds_drop

    def _answers(self, audit: Audit) -> tuple[Prediction, Prediction]:
        """The edge stage's and the reference stage's answer."""
        decode = self._kind.decode_compared
        return decode(msgspec.json.encode(audit.answer)), decode(msgspec.json.encode(audit.reference))

    @staticmethod
    def _exchanged(audit: Audit) -> bool:
        """Whether the reference stage's answer is the first."""
        return int(audit.digest[0], 16) % 2 == 1

    def _choices(self, audit: Audit) -> tuple[str, ...]:
        if audit.disagreement == 0.0:
            return (RIGHT, WRONG, CANNOT_TELL) if self._kind.binary else (RIGHT, CANNOT_TELL)
        return (FIRST, SECOND, NEITHER, CANNOT_TELL) if self._kind.binary else (FIRST, SECOND, CANNOT_TELL)

    def _losses(self, number: int, audit: Audit, label: Any) -> tuple[float, float] | None:
        """What both answers lose by a label; None if it does not tell.

        Raises:
            BadField: if it is no label.
        """
        choices = self._choices(audit)
        if isinstance(label, str) and label in choices:
            if label == CANNOT_TELL:
                return None
            if label in (NEITHER, WRONG):
                return 1.0, 1.0
            if label == RIGHT:
                return 0.0, 0.0
            reference_right = (label == FIRST) == self._exchanged(audit)
            return (audit.disagreement, 0.0) if reference_right else (0.0, audit.disagreement)
        try:
            truth = self._kind.read_label(label)
        except BadField as error:
            raise BadField(f"audit {number} takes {', '.join(choices)}, or: {error.message}") from None
        at_edge, reference = (self._kind.loss(each, truth) for each in self._answers(audit))
        return at_edge, reference

    def _item(self, number: int, audit: Audit, helps: tuple[float, ...]) -> ReviewItem:
        answers = list(self._answers(audit))
        if self._exchanged(audit):
            answers.reverse()
        del answers[1 if audit.disagreement == 0.0 else 2 :]
        return ReviewItem(
            id=str(number),
            kind="random" if for_label_check(number) else "disagreement",
            drawn=datetime.fromtimestamp(audit.drawn, UTC),
            stream=audit.stream,
            image=f"/v1/review/{number}/image?task={self._task}" if self._log.has_image(number) else None,
            answers=tuple(ReviewAnswer(each.summary(), self._kind.stated(each)) for each in answers),
            choices=self._choices(audit),
            helps=helps,
            label=audit.label,
        )

    # ------------------------------------------------------------------------------------------------- a block

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of the places of those who wait for a block."""
        if self._asked >= MOST_ASKED:
            raise Overloaded(f"{self._asked} requests for a review are already being computed", 2.0)
        self._asked += 1
        try:
            yield
        finally:
            self._asked -= 1

    async def _chosen(self, block: int | None) -> int:
        """The block asked for; else that which is open, until certificates are made of it; else the newest that has
        ended with `FEWEST` audits.

        Raises:
            BadField: if a newer one was opened.
            NotFound: if there is none of this number, or not any more.
        """
        newest, openings = block_of(max(1, self._log.last)), await asyncio.to_thread(self._log.openings)
        opened, oldest = max(openings, default=-1), max(0, newest + 1 - KEPT // BLOCK)
        if block is None:
            if opened >= oldest and FAST not in openings[opened]:
                return opened
            for ended in range(block_of(self._log.last + 1) - 1, max(opened, oldest) - 1, -1):
                if len(await self._log.read(ended)) >= FEWEST:
                    return ended
            return opened if opened >= oldest else newest
        if not oldest <= block <= newest:
            raise NotFound(f"block: there is none of number {block}; expected {oldest} to {newest}")
        if block < opened:
            raise BadField(f"block {block}: block {opened} was opened; older ones tell nothing any more")
        return block

    async def _sample(self, block: int) -> _Sample:
        """The audits of a block by the stages that run now."""
        stages = self._stages()
        rows = {row: audit for row, audit in (await self._log.read(block)).items() if audit.versions == stages.versions}
        audits = rows.values()
        losses = np.array([audit.losses or (np.nan, np.nan) for audit in audits]).reshape(-1, 2)
        differing = np.array([audit.disagreement for audit in audits])
        if not rows:  # evidence has images
            losses, differing = np.zeros((1, 2)), np.zeros(1)
        stage = StageEvidence(np.array([audit.score for audit in audits] or [0.0]), losses[:, 0], differing)
        planned, part = how_tested(len(rows), binary=self._kind.binary)
        evidence = Evidence(stage, losses[:, 1], binary=self._kind.binary, planned=planned)
        return _Sample(rows, evidence, int((differing > 0.0).sum()), stages, part)

    def _stages(self) -> _Stages:
        return _Stages(*self._pair(), self._versions())

    def _checked(self, sample: _Sample) -> dict[int, Audit]:
        """The audits drawn at random that have a label that tells."""
        return {row: audit for row, audit in sample.rows.items() if for_label_check(row) and audit.losses is not None}

    def _doubt(self, checked: Mapping[int, Audit], pair: Pair) -> str | None:
        """Why the labels of these audits cannot be believed."""
        losses = np.array([audit.losses for audit in checked.values()])
        classes = None
        if self._kind.one_class:
            number = len(self._kind.labels)
            said = [self._kind.read_label(self._kind.stated(self._answers(audit)[1])) for audit in checked.values()]
            told = [self._class(audit, number) for audit in checked.values()]
            classes = np.array(told, np.int64), np.array(said, np.int64), number
        return doubt(pair.best, losses[:, 1], {pair.edge: losses[:, 0]}, classes, binary=self._kind.binary)

    def _class(self, audit: Audit, unknown: int) -> int:
        """The class that a label names; `unknown` if it says only that no answer is right."""
        assert audit.losses is not None, "it tells"
        if isinstance(audit.label, str) and audit.label in self._choices(audit):
            if min(audit.losses) > 0.0:
                return unknown
            right = self._answers(audit)[0 if audit.losses[0] == 0.0 else 1]
            return int(self._kind.read_label(self._kind.stated(right)))
        return int(self._kind.read_label(audit.label))

    async def _certifiable(
        self, block: int, sample: _Sample
    ) -> tuple[tuple[ReviewTarget, ...], dict[float, LabelNeed]]:
        """What a block certifies now, if its labels are right, and what more would do; it changes nothing."""
        key = block, next(iter(sample.rows)), self._labels, len(sample.rows) // FRESH, sample.stages
        async with self._computing:
            if self._known is None or self._known[0] != key:
                self._known = key, *await asyncio.to_thread(self._targets, block, sample)
            return self._known[1], self._known[2]

    def _deltas(self, block: int, part: float, drops: Iterable[float]) -> dict[float, list[float]]:
        """The drops for which a block may spend the same part of δ, by that."""
        openings, found = self._log.openings(), dict[float, list[float]]()
        earlier = list(itertools.takewhile(lambda opened: opened != block, openings))
        for drop in drops:
            delta = share_of_delta(part * DELTA, [drop in openings[each] for each in earlier])
            found.setdefault(delta, []).append(drop)
        return found

    def _targets(self, block: int, sample: _Sample) -> tuple[tuple[ReviewTarget, ...], dict[float, LabelNeed]]:
        profile, pair, _ = sample.stages
        costs, paths = costs_of(profile, pair), paths_of(pair)[:1]

        def cost(step: ThresholdStep) -> float:
            return expected_cost(costs, step)

        needs, deltas = dict[float, LabelNeed](), dict[float, float]()
        for delta, drops in self._deltas(block, sample.part, TESTED_DROPS).items():
            needs |= label_needs(sample.evidence, paths, drops, delta, cost)
            deltas |= dict.fromkeys(drops, delta)
        found = tuple(
            ReviewTarget(
                stated_drop(drop),
                needs[drop].now.to_best < 1.0,
                round(needs[drop].now.escalation, 6),
                round(needs[drop].now.to_best, 6),
                written(needs[drop].now.thresholds.edge),
                needs[drop].used,
                int(needs[drop].helps.sum()),
                round(needs[drop].to_best, 6),
                deltas[drop],
            )
            for drop in TESTED_DROPS
        )
        return found, needs

    def _condition(self, block: int, sample: _Sample) -> Condition:
        """The certificates of all targets and of never escalating, each by its part of δ."""
        profile, pair, _ = sample.stages
        costs, paths, balanced = costs_of(profile, pair), paths_of(pair)[:1], pair.conditions[0].balanced.max_drop
        spent = self._deltas(block, sample.part, (FAST, balanced, *TESTED_DROPS))
        made = {
            delta: certify_condition(
                sample.evidence, paths, costs, balanced, delta, bounds_drop=self._kind.agreement_bounds_drop
            )
            for delta in spent
        }
        certificates: dict[float, Certificate] = {}
        for delta, drops in spent.items():
            found = (made[delta].balanced, *made[delta].certificates)
            certificates |= {each.max_drop: each for each in found if each.max_drop in drops}
        return msgspec.structs.replace(
            made[next(delta for delta, drops in spent.items() if FAST in drops)],
            balanced=certificates[balanced],
            certificates=tuple(certificates[drop] for drop in TESTED_DROPS if drop in certificates),
        )

    def _certify(self, block: int, sample: _Sample, *, labels_checked: bool) -> NewCertificates:
        """See `certify`."""
        profile, pair, _ = sample.stages
        self._check_replaceable(pair)
        checked = self._checked(sample)
        labels = int(sample.evidence.labelled.sum())
        accuracies = self._check(checked, profile, pair, confirmed=labels_checked) if labels else {}
        self._log.open(block)
        condition = self._condition(block, sample)
        rows, between = list(sample.rows.values()), pair.intermediate
        names = (pair.edge, pair.best) if between is None else (pair.edge, between.name, pair.best)
        stages = [profile.stage(name) for name in names]
        site = SiteCertificates(
            format=4,
            task=self._task,
            basis="review",
            since=datetime.fromtimestamp(rows[0].drawn, UTC),
            until=datetime.fromtimestamp(rows[-1].drawn, UTC),
            data=SiteData(
                name=f"audits, block {block}",
                sha256=sha256_of("".join(audit.digest for audit in rows).encode()),
                n=len(rows),
                labels=labels,
                shrinks_images=profile.shrinks_images,
                labels_checked=labels_checked,
                design=design_sha256(profile, (pair,)),
            ),
            stages=tuple(
                SiteStage(name=each.name, fingerprint=each.fingerprint, temperature=each.temperature) for each in stages
            ),
            pairs=(
                SitePair(
                    edge=pair.edge, best=pair.best, intermediate=None if between is None else between.name,
                    score=pair.score, intermediate_score=None if between is None else between.score,
                    conditions=(condition,),
                ),
            ),
        )  # fmt: skip
        assert self._certificates is not None, "it was checked"
        if self._stages() != sample.stages:
            raise BadField(f"block {block}: the stages or their profile changed meanwhile; ask again")
        write_atomic(self._certificates, dump(site))
        certified = (each.max_drop for each in (condition.balanced, *condition.certificates) if each.to_best < 1.0)
        self._log.certified(block, (FAST, *certified))
        targets, _ = self._targets(block, sample)
        return NewCertificates(
            self._task,
            pair.edge,
            block,
            len(rows),
            labels,
            {name: ReviewAccuracy(each.value, each.n, each.low, each.high) for name, each in accuracies.items()},
            condition.fast.basis,
            targets,
        )

    def _check_replaceable(self, pair: Pair) -> None:
        """Raises: BadField: if the file holds certificates that no review of this pair made."""
        path = self._certificates
        if path is None or not path.exists():
            return
        try:
            site = load_site(path)
        except ManifestError as error:
            raise BadField(f"the certificates in force would be replaced, but: {error}") from None
        pairs = [(each.edge, each.best) for each in site.pairs]
        if site.basis != "review" or pairs != [(pair.edge, pair.best)]:
            raise BadField(
                f"{path} holds certificates of {site.data.name!r} (basis {site.basis}, edge stages "
                f"{', '.join(edge for edge, _ in pairs)}), which these would replace; move it away and ask again"
            )

    async def _withdraw(self, sample: _Sample, failed: Collection[float]) -> None:
        """Take these drops, and `fast`, out of the certificates of a block that ended before this one began."""

        def write(path: Path) -> bool:
            try:
                site = load_site(path)
            except ManifestError:  # what is in force was read before the file broke
                return False
            began = datetime.fromtimestamp(next(iter(sample.rows.values())).drawn, UTC)
            if site.basis != "review" or site.until > began:
                return False
            pairs = tuple(
                msgspec.structs.replace(pair, conditions=tuple(_without(each, failed) for each in pair.conditions))
                for pair in site.pairs
            )
            changed = pairs != site.pairs
            if changed:
                write_atomic(path, dump(msgspec.structs.replace(site, pairs=pairs)))
            return changed

        async with self._turn:
            path = self._certificates
            if path is not None and path.is_file() and await asyncio.to_thread(write, path):
                self.on_written()

    def _check(
        self, checked: Mapping[int, Audit], profile: Profile, pair: Pair, *, confirmed: bool
    ) -> dict[str, MeasuredAccuracy]:
        """Check the labels; the accuracy of both stages on the images that they were checked on.

        Raises:
            BadField: if they cannot be believed, or must be confirmed.
        """
        if len(checked) < FEWEST_CHECKED:
            raise BadField(
                f"{len(checked)} of the images drawn at random, on which labels are checked, have a label that tells; "
                f"expected at least {FEWEST_CHECKED}: they come first in /v1/review, and fill with the block"
            )
        doubted = self._doubt(checked, pair)
        right = 1.0 - np.array([audit.losses for audit in checked.values()])
        digest = sha256_of("".join(audit.digest for audit in checked.values()).encode())
        found = {
            name: measure_accuracy(column == 1.0 if self._kind.binary else column, digest, DELTA)
            for name, column in zip((pair.edge, pair.best), right.T, strict=True)
        }
        unlike = harder(pair.best, found[pair.best], profile.stage(pair.best).datacenter_accuracy)
        if unlike is None and isinstance(pair.right, RightAnswers):
            unlike = neither_oftener(pair.edge, pair.best, 1.0 - right, pair.right.neither, pair.right.n)
        if doubted is None and unlike is not None and not confirmed:
            doubted = f"{unlike} by labels_checked"
        if doubted is not None:
            raise BadField(doubted)
        return found


def _without(condition: Condition, failed: Collection[float]) -> Condition:
    """The certificates without those of the drops that failed. Never escalating loses its own with any of them."""

    def fails(certificate: Certificate) -> bool:
        return certificate.max_drop in failed and certificate.to_best < 1.0 and certificate.basis != "profile"

    replace, balanced = msgspec.structs.replace, condition.balanced
    if not any(map(fails, (balanced, *condition.certificates))):
        return condition
    return replace(
        condition,
        balanced=replace(balanced, basis="profile") if fails(balanced) else balanced,
        fast=replace(condition.fast, basis="profile"),
        certificates=tuple(each for each in condition.certificates if not fails(each)),
    )
