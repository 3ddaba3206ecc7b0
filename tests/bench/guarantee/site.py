"""A site that `review` looks at: its images, what both stages say of them, and its node, simulated or real."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import numpy as np
from PIL import Image, ImageFilter

from edge.monitoring.evidence_log import EvidenceLog
from edge.monitoring.labelling import ReviewQuery
from edge.monitoring.review import AuditReview
from edge.monitoring.streams import Streams
from hawkvision.cascade.certification.profile_files import load_profile_of, load_site
from hawkvision.cascade.policy import Policy
from hawkvision.client import AsyncClient
from hawkvision.core.errors import BadField
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.types import AccuracyStatus, MaxAccuracyDrop, Quality
from hawkvision.guarantee.monitor import CLOCK_SET
from hawkvision.model_zoo.calibration.certification import edge_predictions
from hawkvision.model_zoo.calibration.model_runner import run_stages
from hawkvision.models.datasets import read_images
from hawkvision.models.manifest import cache_dir, load_manifest, models_dir
from hawkvision.servers.keyfile import Scope, add_key
from hawkvision.system.child_server import running
from hawkvision.tasks.class_scores import Floats
from hawkvision.tasks.registry import load_kind
from tests.bench.cascade import DATA, FILES
from tests.clocks import ManualClock
from tests.edge.conftest import Caller

TASK: Final = "cifar10"
SHARE: Final = 0.2
"""Of audits: the largest that can be set, which an operator takes until there are certificates."""
BLUR: Final = 1.0
"""Radius in pixels, of 32 x 32."""


class World:
    """The images, clean and blurred, and what both stages say of them."""

    def __init__(self) -> None:
        models = models_dir()
        self.manifest = load_manifest(TASK, models)
        self.kind, self.profile = load_kind(self.manifest, models), load_profile_of(self.manifest, models, None)
        self.pair = self.profile.pair(self.manifest.cascade.default_edge, self.manifest.best)
        images = read_images(DATA / FILES[TASK], self.kind.labels)
        chosen: Any = np.flatnonzero(images.is_test)
        blurred = dict.fromkeys(range(len(images)), b"") | {int(i): blur(images.bodies[i]) for i in chosen}
        changed = replace(images, sha256=f"{images.sha256} blurred {BLUR}", bodies=list(blurred.values()))
        self.truth = images.labels[chosen]
        self.bodies = [[each.bodies[i] for i in chosen] for each in (images, changed)]
        self.classes: dict[str, int] = {}
        """The true class of an image, by its digest."""
        for bodies in self.bodies:
            self.classes |= {digest(body): int(c) for body, c in zip(bodies, self.truth, strict=True)}
        said = [self._said(each, chosen) for each in (images, changed)]
        self.edge, self.best, self.scores = (np.array(each) for each in zip(*said, strict=True))
        """Of each image, clean and blurred (2, n): both stages' classes, and the edge stage's score."""
        mixed = np.random.default_rng(0).permutation(len(chosen))
        self.traffic, self.unseen = mixed[::2].tolist(), mixed[1::2].tolist()

    def lost(self, blurred: int, rows: Sequence[int], said: Sequence[int]) -> Floats:
        """What each answer loses against the reference stage's: 1, 0, or −1."""
        truth, best = self.truth[rows], self.best[blurred, rows]
        return np.asarray(np.subtract(np.array(said) != truth, best != truth, dtype=np.float64))

    def _said(self, images: Any, chosen: Any) -> tuple[Any, Any, Any]:
        edge, best = self.pair.edge, self.pair.best
        found = run_stages(
            self.kind, self.manifest, images, edge=[edge], datacenter=[best], cache=cache_dir(), chosen=chosen
        )
        outputs = edge_predictions(self.profile, edge, found).of(chosen)
        return (
            np.argmax(outputs, 1), np.argmax(found.served(best).of(chosen), 1),
            self.kind.score_all(outputs, self.pair.score),
        )  # fmt: skip


def blur(body: bytes) -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(body)).convert("RGB").filter(ImageFilter.GaussianBlur(BLUR)).save(out, "JPEG", quality=95)
    return out.getvalue()


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


class Said(NamedTuple):
    """An answer: what it says of its guarantee, and its class."""

    status: str
    named: int
    escalated: bool


class Site(Protocol):
    """A node with one caller and one person."""

    async def ask(self, blurred: int, rows: Sequence[int], target: float | None, *, audits: bool = True) -> list[Said]:
        """Answers to images; a target of None is `fast`. Without `audits` they are no evidence, where that can be."""

    async def page(self, offset: int = 0) -> Any:
        """What `/v1/review` shows."""

    async def image(self, number: str) -> bytes:
        """The image of an audit."""

    async def label(self, number: str, label: str) -> None:
        """Label it."""

    async def certify(self, *, checked: bool) -> str:
        """Make certificates, and put them in force; what was refused."""


class Simulated:
    """The product's monitor, evidence, review and policy, at a request a second."""

    def __init__(self, world: World, folder: Path, seed: int) -> None:
        self._world, self._file, self._now = world, folder / "certificates.json", ManualClock(CLOCK_SET + 86_400.0)
        pair, now = world.pair, self._now.now
        self._log = EvidenceLog(folder / "audits", SHARE, most_bytes=1 << 30, most_days=30.0, now=now)
        self._policy = Policy(world.profile, pair.edge, pair.best)
        self._streams = Streams(
            TASK, 64, SHARE, EdgeMetrics(), None, self._now, random.Random(seed), self._policy.claims_in_force,
            self._policy.source.dates, now,
        )  # fmt: skip
        of = (world.profile, pair)
        self._review = AuditReview(TASK, world.kind, self._log, lambda: of, lambda: "1", self._file, self._now)
        self._review.on_written = self._adopt

    def _adopt(self) -> None:
        pair, site = self._world.pair, load_site(self._file)
        self._policy = Policy(self._world.profile, pair.edge, pair.best, site=site)
        self._streams.monitor.adopt(self._policy.claims_in_force, self._policy.source.dates)

    async def ask(self, blurred: int, rows: Sequence[int], target: float | None, *, audits: bool = True) -> list[Said]:
        return [self._one(blurred, row, target, audits) for row in rows]

    def _one(self, blurred: int, row: int, target: float | None, audits: bool) -> Said:
        world, monitor = self._world, self._streams.monitor
        edge, best = int(world.edge[blurred, row]), int(world.best[blurred, row])
        score = float(world.scores[blurred, row])
        route = self._policy.route(Quality.FAST if target is None else MaxAccuracyDrop(target))
        watched = self._streams.watched(None, route.claims, "me", route.counted_as)
        escalated = score < route.threshold or (watched.suspended and target is not None)
        status = route.guarantee.status
        if watched.suspended:
            status = AccuracyStatus.SUSPENDED
        elif not watched.monitored(route.disagreement):
            status = AccuracyStatus.BEST_EFFORT
        said = Said(status.value, best if escalated else edge, escalated)
        self._now.advance(1.0)
        due = monitor.draw(watched) if audits else None
        if due is not None:
            body = world.bodies[blurred][row]
            number = self._log.draw(due.u, due.streams[0].key, "1", body, score, {"index": edge})
            if number is not None:
                self._log.settle(number, body, {"index": best}, float(edge != best))
            claims = watched.edge_claims
            monitor.settle(due, [] if claims is None else [(claims, score, float(edge != best))])
        return said

    async def page(self, offset: int = 0) -> Any:
        return msgspec.to_builtins(await self._review.show(ReviewQuery(offset=offset, limit=100)))

    async def image(self, number: str) -> bytes:
        return await self._review.image(number)

    async def label(self, number: str, label: str) -> None:
        await self._review.label(number, label)

    async def certify(self, *, checked: bool) -> str:
        try:
            await self._review.certify(None, labels_checked=checked)
        except BadField as refused:
            return str(refused)
        return ""


class Real:
    """A node and a datacenter tier as processes of their own, over HTTP."""

    def __init__(self, world: World, stack: ExitStack, folder: Path) -> None:
        key = add_key(folder / "keys.toml", "all", list(Scope))
        tier = stack.enter_context(running("hawkvision.datacenter", "--port", "0", "--tasks", TASK, within_s=300.0))
        node = stack.enter_context(
            running(
                "edge", "--port", "0", "--task", TASK, "--datacenter-url", tier.url, "--audit-share", str(SHARE),
                "--state-file", str(folder / "state"), "--certificates", str(folder / "certificates.json"),
                "--review-max-bytes", str(1 << 30), "--review-max-days", "30", "--keys-file", str(folder / "keys.toml"),
            )
        )  # fmt: skip
        self._world, self._caller = world, Caller(node)
        self._client = AsyncClient(node.url, api_key=key)
        self._headers = {"Authorization": f"Bearer {key}"}

    async def ask(self, blurred: int, rows: Sequence[int], target: float | None, *, audits: bool = True) -> list[Said]:
        fields: Any = {"quality": "fast"} if target is None else {"max_accuracy_drop": target}
        said: list[Said] = []
        for first in range(0, len(rows), 8):
            some = [self._world.bodies[blurred][row] for row in rows[first : first + 8]]
            answers = await asyncio.gather(*(self._client.classify(body, **fields) for body in some))
            said += [Said(each.accuracy.status.value, each.index, each.escalated) for each in answers]
        made, before = self._audited(), -1.0
        while made > before:
            await asyncio.sleep(1.0)
            made, before = self._audited(), made
        return said

    def _audited(self) -> float:
        lines = self._send("GET", "/metrics").decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("hawkvision_audits_total{"))

    def _send(self, method: str, path: str, **said: Any) -> bytes:
        body = json.dumps(said).encode() if said else None
        reply = self._caller.send(method, path, body, self._headers)
        if reply.status >= 400:
            raise BadField(reply.body.decode())
        return bytes(reply.body)

    async def page(self, offset: int = 0) -> Any:
        return json.loads(self._send("GET", f"/v1/review?limit=100&offset={offset}"))

    async def image(self, number: str) -> bytes:
        return self._send("GET", f"/v1/review/{number}/image")

    async def label(self, number: str, label: str) -> None:
        self._send("POST", f"/v1/review/{number}", label=label)

    async def certify(self, *, checked: bool) -> str:
        try:
            self._send("POST", "/v1/certificates", labels_checked=checked)
            await asyncio.sleep(5.0)
        except BadField as refused:
            return str(refused)
        return ""
