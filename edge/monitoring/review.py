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
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from edge.monitoring.evidence_log import KEPT, Audit, EvidenceLog
from edge.monitoring.labelling import (
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
    chosen_losses,
    exchanged,
    not_waiting,
    target,
)
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
from hawkvision.cascade.certification.profiling import certify_condition, costs_of, paths_of
from hawkvision.cascade.certification.site_certificates import SiteCertificates, SiteData, SitePair, SiteStage
from hawkvision.cascade.certification.threshold_order import expected_cost
from hawkvision.core.clock import Clock
from hawkvision.core.errors import BadField, ManifestError, NotFound, Overloaded
from hawkvision.core.types import Prediction
from hawkvision.guarantee.answered import stated_drop
from hawkvision.guarantee.evidence import Evidence, StageEvidence, ThresholdStep
from hawkvision.guarantee.labels import FEWEST_CHECKED, LabelNeed, doubt, harder, label_needs, neither_oftener
from hawkvision.guarantee.review import BLOCK, block_of, for_label_check, how_tested, labelled_twice, share_of_delta
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
FRESH: Final = 32
"""Further audits for which what is certifiable is not computed anew; a label always is a reason to."""


class _Stages(NamedTuple):
    """What is compared."""

    profile: Profile
    pair: Pair
    versions: str
    executions: Mapping[str, frozenset[str]]


class _Sample(NamedTuple):
    """The audits of a block that are evidence."""

    rows: dict[int, Audit]
    evidence: Evidence
    disagreements: int
    stages: _Stages
    part: float
    """Of the block's δ, for the test that applies."""


class AuditReview:
    """The review of one task's audits; a `Reviewer`. Used on one event loop."""

    def __init__(
        self,
        task: str,
        kind: TaskKind[Any],
        log: EvidenceLog,
        pair: Callable[[], tuple[Profile, Pair]],
        versions: Callable[[], str],
        certificates: Path | None,
        clock: Clock,
        executions: Callable[[], Mapping[str, frozenset[str]]] = dict,
        alarm_raised: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        """Prepare.

        Args:
            task: its name.
            kind: of the task.
            log: the audits.
            pair: the profile in force, and its pair of stages.
            versions: of the stages, and of what their scores depend on; audits of others are no evidence.
            certificates: the node's file; None if it has none.
            clock: for what people were given.
            executions: what may execute a stage, where that is not `EXACT`; new certificates cover the same.
            alarm_raised: when the last alarm that stands was raised, in seconds since 1970; −∞ if none stands.
        """
        self._task = task
        self._kind = kind
        self._log = log
        self._pair = pair
        self._versions = versions
        self._executions = executions
        self._alarm_raised = alarm_raised
        self._certificates = certificates
        self.on_written: Callable[[], None] = lambda: None
        """Called when the file was written."""
        self._turn, self._computing = asyncio.Lock(), asyncio.Lock()
        self._asked = 0
        """Blocks that are computed or wait for it."""
        self._labels = 0
        """Labels given or taken back since the start."""
        self._worklist = Worklist(clock)
        self._known: tuple[object, tuple[ReviewTarget, ...], dict[float, LabelNeed]] | None = None

    async def show(self, asked: ReviewQuery) -> Review:
        """A block's page, which opens it; `labelled` lists the images that have a label, not those that wait for one.

        If further labels cannot make a full block certify a target, certificates of older blocks lose it here.

        Raises:
            BadField: if a newer block was opened.
            NotFound: if there is no such block.
            Overloaded: if more than `MOST_ASKED` wait.
        """
        async with self._place():
            async with self._turn:
                number = await self._chosen(asked.block)
                sample = await self._sample(number)
                if sample.rows:
                    await asyncio.to_thread(self._log.open, number)
            targets, needs = await self._certifiable(number, sample) if len(sample.rows) else ((), {})
        helps = [(stated_drop(drop), need.helps.tolist()) for drop, need in needs.items()]  # of fewer rows, perhaps
        helped = {
            row: tuple(drop for drop, known in helps if place < len(known) and known[place])
            for place, row in enumerate(sample.rows)
        }
        page, waiting, following = self._worklist.page(asked, self._to_label(sample, helped))
        checked = self._checked(sample)
        doubted = self._doubt(checked, sample.stages.pair) if len(checked) >= FEWEST_CHECKED else None
        failed = [drop for drop, need in needs.items() if need.to_best == 1.0]
        if failed and doubted is None and len(checked) >= FEWEST_CHECKED and number < block_of(self._log.last + 1):
            await self._withdraw(sample, failed)
        audits = sample.rows.values()
        return Review(
            task=self._task,
            block=number,
            newest=block_of(max(1, self._log.last)),
            audits=len(audits),
            size=BLOCK,
            disagreements=sample.disagreements,
            labelled=sum(audit.label is not None for audit in audits),
            waiting=waiting,
            repeated=sum(audit.label is not None and audit.again is not None for audit in audits),
            contradictions=sum(audit.contradicted for audit in audits),
            random_labelled=len(checked),
            random_needed=FEWEST_CHECKED if self._kind.agreement_bounds_drop else 0,
            doubt=doubted,
            keeps_images=self._log.keeps_images,
            before_alarm=any(audit.drawn <= self._alarm_raised() for audit in audits),
            targets=targets,
            items=tuple(self._item(each, sample.rows[each.number], helped[each.number]) for each in page),
            next=following,
        )

    async def label(self, item: str, label: Any) -> ReviewItem:
        """Label an audit, for the first or the second time; None takes that label back.

        Raises:
            BadField: if it is no label of this audit, or of this kind of task; if it has another label, which must be
                taken back first; or if a newer block was opened.
            NotFound: if there is no such audit, or nobody has opened its block.
        """
        kind, showing = self._kind, Showing.read(item)
        if not kind.agreement_bounds_drop:
            raise BadField(
                f"task {self._task!r} is of kind {kind.name!r}, which cannot be labelled here: all of its images need "
                "labels; certify with `hawkvision certify --data` and labelled images"
            )
        async with self._turn:
            audit = await self._audit(showing)
            await self._chosen(block_of(showing.number))
            losses = None if label is None else self._losses(showing, audit, label)
            said = audit.again if showing.again else audit.label
            if label is not None and said is not None and label != said:
                raise BadField(f"image {item} has the label {said!r}; who is sure takes that back first (DELETE)")
            if showing.again:
                audit.again, audit.losses_again = label, losses
            else:
                audit.label, audit.losses = label, losses
            if label is not None:
                self._worklist.labelled(showing.number)
            await self._log.update(showing.number, audit)
            self._labels += 1
        return self._item(showing, audit, ())

    async def image(self, item: str) -> bytes:
        """The image of an audit.

        Raises:
            NotFound: if it is not kept, or its block is not open yet: that it is kept says that the stages differ.
        """
        number = Showing.read(item).number
        found = await asyncio.to_thread(self._log.image, number)
        if found is None or block_of(number) > max(await asyncio.to_thread(self._log.openings), default=-1):
            raise NotFound(f"no image {item} is kept (any more); see review_max_bytes and review_max_days")
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

    async def _audit(self, showing: Showing) -> Audit:
        opened = block_of(showing.number) in await asyncio.to_thread(self._log.openings)
        found = await self._log.audit(showing.number) if opened else None
        if found is None or found.reference is None or not self._wanted(showing.number, found):
            raise not_waiting(showing.id)
        if showing.again and found.again is None and (found.label is None or not labelled_twice(found.digest)):
            raise not_waiting(showing.id)
        return found

    def _wanted(self, number: int, audit: Audit) -> bool:
        """Whether a look at the audit, or its label, tells anything."""
        useful = audit.disagreement > 0.0 or (for_label_check(number) and self._kind.agreement_bounds_drop)
        return useful and audit.reference is not None

    def _to_label(self, sample: _Sample, helped: Mapping[int, tuple[float, ...]]) -> Iterator[Labelled]:
        """The audits whose label would tell something; those drawn at random are the most urgent."""
        for row, audit in sample.rows.items():
            if self._log.has_image(row) and self._wanted(row, audit):
                urgency = int(for_label_check(row)), len(helped[row])
                yield Labelled(row, audit.digest, audit.label, audit.again, urgency)

    def _answers(self, audit: Audit) -> tuple[Prediction, Prediction]:
        """The edge stage's and the reference stage's answer."""
        decode = self._kind.decode_compared
        return decode(msgspec.json.encode(audit.answer)), decode(msgspec.json.encode(audit.reference))

    def _losses(self, showing: Showing, audit: Audit, label: Any) -> tuple[float, float] | None:
        """What both answers lose by a label; None if it does not tell.

        Raises:
            BadField: if it is no label.
        """
        words = choices(self._kind, audit.disagreement)
        if isinstance(label, str) and label in words:
            return chosen_losses(label, audit.disagreement, exchanged(audit.digest, again=showing.again))
        try:
            truth = self._kind.read_label(label)
        except BadField as error:
            raise BadField(f"image {showing.id} takes {', '.join(words)}, or: {error.message}") from None
        at_edge, reference = (self._kind.loss(each, truth) for each in self._answers(audit))
        return at_edge, reference

    def _item(self, showing: Showing, audit: Audit, helps: tuple[float, ...]) -> ReviewItem:
        answers = list(self._answers(audit))
        if exchanged(audit.digest, again=showing.again):
            answers.reverse()
        del answers[1 if audit.disagreement == 0.0 else 2 :]
        kept, useful = self._log.has_image(showing.number), self._kind.agreement_bounds_drop
        return ReviewItem(
            id=showing.id,
            kind="random" if for_label_check(showing.number) and useful else "disagreement",
            drawn=datetime.fromtimestamp(audit.drawn, UTC),
            stream=audit.stream,
            image=f"/v1/review/{showing.id}/image?task={self._task}" if kept else None,
            answers=tuple(ReviewAnswer(each.summary(), self._kind.stated(each)) for each in answers),
            choices=choices(self._kind, audit.disagreement),
            helps=helps if useful else (),
            label=audit.again if showing.again else audit.label,
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
        """The block asked for; else that which is open, until certificates are made of it, or a restart has cut it too
        short for labels to count; else the newest that has ended with `FEWEST` audits. Nobody may choose among those
        that ended.

        Raises:
            BadField: if a newer one was opened, or has ended.
            NotFound: if there is none of this number, or not any more.
        """
        newest, openings = block_of(max(1, self._log.last)), await asyncio.to_thread(self._log.openings)
        opened, oldest = max(openings, default=-1), max(0, newest + 1 - KEPT // BLOCK)
        ended = opened if opened >= oldest else newest
        for each in range(block_of(self._log.last + 1) - 1, max(opened, oldest) - 1, -1):
            if await self._log.count(each) >= FEWEST:
                ended = each
                break
        if block is None:
            stays = opened >= oldest and FAST not in openings[opened]
            return opened if stays and (opened == newest or await self._checkable(opened)) else ended
        if not oldest <= block <= newest:
            raise NotFound(f"block: there is none of number {block}; expected {oldest} to {newest}")
        if block < opened:
            raise BadField(f"block {block}: block {opened} was opened; older ones tell nothing any more")
        if block not in {opened, ended, newest}:
            raise BadField(f"block {block}: block {ended} has ended since; of those that ended only the newest opens")
        return block

    async def _checkable(self, block: int) -> bool:
        """Whether a block that has ended has enough images on which labels are checked."""
        return sum(map(for_label_check, await self._log.read(block))) >= FEWEST_CHECKED

    async def _sample(self, block: int) -> _Sample:
        """The audits of a block by the stages that run now."""
        stages = self._stages()
        rows = {row: audit for row, audit in (await self._log.read(block)).items() if audit.versions == stages.versions}
        audits = rows.values()
        losses = np.array([audit.told or (np.nan, np.nan) for audit in audits]).reshape(-1, 2)
        differing = np.array([audit.disagreement for audit in audits])
        if not rows:  # evidence has images
            losses, differing = np.zeros((1, 2)), np.zeros(1)
        stage = StageEvidence(np.array([audit.score for audit in audits] or [0.0]), losses[:, 0], differing)
        planned, part = how_tested(len(rows), binary=self._kind.binary)
        evidence = Evidence(stage, losses[:, 1], binary=self._kind.binary, planned=planned)
        return _Sample(rows, evidence, int((differing > 0.0).sum()), stages, part)

    def _stages(self) -> _Stages:
        return _Stages(*self._pair(), self._versions(), self._executions())

    def _checked(self, sample: _Sample) -> dict[int, Audit]:
        """The audits drawn at random that have a label that tells."""
        return {row: audit for row, audit in sample.rows.items() if for_label_check(row) and audit.told is not None}

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
        if isinstance(audit.label, str) and audit.label in choices(self._kind, audit.disagreement):
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
        profile, pair, *_ = sample.stages
        costs, paths = costs_of(profile, pair), paths_of(pair)[:1]

        def cost(step: ThresholdStep) -> float:
            return expected_cost(costs, step)

        needs, deltas = dict[float, LabelNeed](), dict[float, float]()
        for delta, drops in self._deltas(block, sample.part, TESTED_DROPS).items():
            needs |= label_needs(sample.evidence, paths, drops, delta, cost)
            deltas |= dict.fromkeys(drops, delta)
        bounded = self._kind.agreement_bounds_drop
        found = tuple(target(drop, needs[drop], deltas[drop], labels=bounded) for drop in TESTED_DROPS)
        return found, needs

    def _condition(self, block: int, sample: _Sample) -> Condition:
        """The certificates of all targets and of never escalating, each by its part of δ."""
        profile, pair, *_ = sample.stages
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
        profile, pair, *_ = sample.stages
        self._check_replaceable(pair)
        checked = self._checked(sample)
        labels = int(sample.evidence.labelled.sum())
        accuracies = self._check(checked, profile, pair, confirmed=labels_checked) if labels else {}
        self._log.open(block)
        condition = self._condition(block, sample)
        rows, between = list(sample.rows.values()), pair.intermediate
        streams, drawn = {audit.stream for audit in rows}, [audit.drawn for audit in rows]
        names = (pair.edge, pair.best) if between is None else (pair.edge, between.name, pair.best)
        stages = [profile.stage(name) for name in names]
        site = SiteCertificates(
            format=4,
            task=self._task,
            basis="review",
            since=datetime.fromtimestamp(min(drawn), UTC),  # the clock may have been set meanwhile
            until=datetime.fromtimestamp(max(drawn), UTC),
            data=SiteData(
                name=f"audits, block {block}",
                sha256=sha256_of("".join(audit.digest for audit in rows).encode()),
                n=len(rows),
                labels=labels,
                shrinks_images=profile.shrinks_images,
                labels_checked=labels_checked,
                design=design_sha256(profile, (pair,)),
                stream=(streams.pop() or None) if len(streams) == 1 else None,
            ),
            stages=tuple(
                SiteStage(
                    name=each.name, fingerprint=each.fingerprint, temperature=each.temperature,
                    executions=tuple(sorted(sample.stages.executions.get(each.name, ()))),
                )
                for each in stages
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
            str(self._certificates),
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
            kept = site.without(failed)
            if kept != site:
                write_atomic(path, dump(kept))
            return kept != site

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
