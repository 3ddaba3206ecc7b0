"""What a person's clicks certify on a site's own images, before and after its traffic changes.

    python -m tests.bench.guarantee review [--seeds 10] [--http]

A fresh node for CIFAR-10 audits one image in five. Half of the 5,000 test images, drawn with replacement, are its
traffic. A script plays the person: it knows the true classes and answers what `/v1/review` lists, first the images
drawn at random, then those that help the targets of 2 % and 1 %, until none does; and makes certificates. *Careful*: it
is always right. *Hasty*: 5 % of its answers are wrong, another 5 % are `cannot_tell`. What is then answered to the
other half of the images is compared with the reference stage's answers.

Then all images are blurred (Gauss, `BLUR` pixels). Requests ask for both targets in turn until one answer says
`suspended`; from then on for `fast`, which goes on saying so. The person labels every block of audits that ends, until
an answer to the target of 2 % is certified again, or `MOST_BLOCKS` have ended.

Each seed runs on the product's monitor, evidence and review, with predictions that were computed once; with `--http`
one careful person labels through the routes of a real node with a real datacenter tier.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from hawkvision.guarantee.review import BLOCK
from hawkvision.tasks.class_scores import Floats
from tests.bench.guarantee.site import SHARE, Real, Said, Simulated, Site, World, digest

SUMMARY: Final = "what a person's clicks certify on a site's own images"
TARGETS: Final = (0.02, 0.01)
STEP: Final = round(256 / SHARE)
"""Requests between two looks."""
AT_ONCE: Final = 20
"""Labels between two looks."""
MOST_UNTIL_ALARM: Final = 50_000
MOST_BLOCKS: Final = 5
CONFIRM: Final = "labels_checked"


@dataclass
class Reviewed:
    """What a person's work on a block gave."""

    block: int
    before: dict[float, float]
    """The share that would be escalated without a label, by target; 1 is not certified."""
    after: dict[float, float] = field(default_factory=dict)
    clicks: int = 0
    refused: str = ""


class Person:
    """Who knows the true classes, and errs in some answers."""

    def __init__(
        self, classes: Mapping[str, int], names: Sequence[str], seed: int, wrong: float = 0.0, unsure: float = 0.0
    ) -> None:
        self._classes, self._names = classes, names
        self._rng, self._wrong, self._unsure = random.Random(seed), wrong, unsure

    def says(self, item: Any, body: bytes) -> str:
        """The answer to an image."""
        right, shown = self._names[self._classes[digest(body)]], [each["label"] for each in item["answers"]]
        place = shown.index(right) if right in shown else len(shown)
        choices = ["first", "second", "neither"] if len(shown) == 2 else ["right", "wrong"]
        u = self._rng.random()
        if u < self._unsure:
            return "cannot_tell"
        answer = choices.pop(place)
        return self._rng.choice(choices) if u < self._unsure + self._wrong else answer

    async def works(self, site: Site) -> Reviewed:
        """Label the block that is shown while that helps the targets, and make certificates of it."""
        page = await site.page()
        found = Reviewed(page["block"], escalated(page))
        while useful := await self._useful(site, page):
            for item in useful[:AT_ONCE]:
                await site.label(item["id"], self.says(item, await site.image(item["id"])))
            found.clicks += len(useful[:AT_ONCE])
            page = await site.page()
        found.after, found.refused = escalated(page), await site.certify(checked=False)
        if CONFIRM in found.refused:
            found.clicks += page["random_labelled"]  # which are looked at again
            found.refused = await site.certify(checked=True)
        return found

    async def _useful(self, site: Site, page: Any) -> list[Any]:
        useful: list[Any] = []
        while not useful:
            useful = [each for each in page["items"] if each["kind"] == "random" or set(TARGETS) & set(each["helps"])]
            if useful or page["next"] is None:
                break
            page = await site.page(page["next"])
        return useful


def escalated(page: Any) -> dict[float, float]:
    """What is escalated at each target by what a page shows as certifiable."""
    found = {each["max_accuracy_drop"]: each["escalation"] for each in page["targets"]}
    return {target: found.get(target, 1.0) for target in TARGETS}


class Drop(NamedTuple):
    """What the answers to the unseen images that say `certified` give up at a target."""

    certified: float
    """The share that says so."""
    escalated: float
    drop: float
    error: float
    """Half of its 95 % interval."""
    true: float
    """Over all images that the traffic is drawn from, where asking for them adds no evidence; else NaN."""


async def measured(site: Site, world: World, blurred: int, target: float) -> Drop:
    """Ask for all unseen images, and those of the traffic."""

    async def lost(rows: Sequence[int]) -> tuple[list[Said], Floats]:
        said = await site.ask(blurred, rows, target, audits=False)
        certified = np.array([each.status == "certified" for each in said])
        return said, world.lost(blurred, rows, [each.named for each in said])[certified]

    said, losses = await lost(world.unseen)
    true = float((await lost(world.traffic))[1].mean()) if isinstance(site, Simulated) else math.nan
    share, error = float(np.mean([each.escalated for each in said])), 1.96 * float(losses.std()) / len(losses) ** 0.5
    return Drop(len(losses) / len(said), share, float(losses.mean()), error, true)


@dataclass
class Found:
    """What one seed gave."""

    first: dict[float, tuple[int, float]] = field(default_factory=dict)
    """Requests after which a target could be certified without a label, and the share that it escalated."""
    requests: int = 0
    """Until the block was whole."""
    fresh: Reviewed | None = None
    drops: dict[tuple[int, float], Drop] = field(default_factory=dict)
    """Of the unseen images, clean or blurred, by target."""
    alarm: int = 0
    """Requests until the first answer that was suspended."""
    certified: int = 0
    """Of those, such as said certified, and what these lost: images."""
    lost: float = 0.0
    later: list[Reviewed] = field(default_factory=list)
    again: int = 0
    """Requests from the alarm until an answer was certified again; 0: never."""


async def seed_of(site: Site, world: World, person: Person, seed: int) -> Found:
    """One node's life."""
    rng, found = np.random.default_rng(seed), Found()

    def drawn(n: int) -> list[int]:
        return [world.traffic[place] for place in rng.integers(len(world.traffic), size=n)]

    page: Any = {"audits": 0, "size": BLOCK}
    while page["audits"] < page["size"]:
        await site.ask(0, drawn(STEP), None)
        found.requests, page = found.requests + STEP, await site.page()
        for target, share in escalated(page).items():
            if share < 1.0:
                found.first.setdefault(target, (found.requests, share))
    found.fresh = await person.works(site)
    for target in TARGETS:
        found.drops[0, target] = await measured(site, world, 0, target)
    suspended = False
    while not suspended and found.alarm < MOST_UNTIL_ALARM:
        rows, target = drawn(40), TARGETS[found.alarm // 40 % len(TARGETS)]
        said = await site.ask(1, rows, target)
        lost, states = world.lost(1, rows, [each.named for each in said]), [each.status for each in said]
        certified, suspended = np.array(states) == "certified", "suspended" in states
        found.alarm += states.index("suspended") if suspended else len(rows)
        found.certified += int(certified.sum())
        found.lost += float(lost[certified].sum())
    requests, done = 0, page["block"]
    while suspended and requests < MOST_BLOCKS * BLOCK / SHARE:
        await site.ask(1, drawn(STEP), None)
        requests, page = requests + STEP, await site.page()
        if page["block"] > done and page["audits"] == page["size"]:
            done = page["block"]
            found.later.append(await person.works(site))
        if (await site.ask(1, drawn(1), TARGETS[0]))[0].status == "certified":
            found.again = requests
            for target in TARGETS:
                found.drops[1, target] = await measured(site, world, 1, target)
            break
    return found


def _row(name: str, values: Sequence[float], form: str) -> str:
    """A line of the table: the median of all seeds, and the extremes."""
    if not values:
        return f"| {name} | | |"
    low, middle, high = (format(float(each), form) for each in np.quantile(values, (0.0, 0.5, 1.0)))
    return f"| {name} | {middle} | {low} to {high} |"


def show(title: str, seeds: Sequence[Found]) -> None:
    """The table of one person, in Markdown."""
    print(f"\n**{title}**\n\n| | median | least to most |\n|---|---|---|")
    print(_row("requests until the block is whole", [each.requests for each in seeds], ",.0f"))
    for target in TARGETS:
        first = [each.first[target] for each in seeds if target in each.first]
        fresh = [each.fresh for each in seeds if each.fresh is not None]
        print(_row(f"{target:.0%}: first certifiable, requests", [each[0] for each in first], ",.0f"))
        print(_row("escalated then, no label", [each[1] for each in first], ".1%"))
        print(_row("escalated, whole block, no label", [each.before[target] for each in fresh], ".1%"))
        print(_row("escalated, labelled", [each.after[target] for each in fresh], ".1%"))
        for blurred, what in enumerate(("unseen", "unseen and blurred, certified again")):
            drops = [each.drops[blurred, target] for each in seeds if (blurred, target) in each.drops]
            print(_row(f"{what}: certified", [each.certified for each in drops], ".1%"))
            print(_row(f"{what}: escalated", [each.escalated for each in drops], ".1%"))
            print(_row(f"{what}: drop", [each.drop for each in drops], ".2%"))
            print(_row(f"{what}: ± of its interval", [each.error for each in drops], ".2%"))
            print(_row(f"{what}: true drop of the traffic", [each.true for each in drops], ".2%"))
    print(_row("clicks until no label helps", [each.fresh.clicks for each in seeds if each.fresh], ".0f"))
    print(_row("blurred: requests until the alarm", [each.alarm for each in seeds], ",.0f"))
    print(_row("of these certified", [each.certified for each in seeds], ",.0f"))
    print(_row("lost by these, images", [each.lost for each in seeds], ".0f"))
    again = [each for each in seeds if each.again]
    print(_row(f"requests until certified again ({len(again)} of {len(seeds)})", [e.again for e in again], ",.0f"))
    print(_row("clicks of that", [sum(block.clicks for block in each.later) for each in seeds], ".0f"))
    for refused in sorted({block.refused for each in seeds for block in each.later if block.refused}):
        print(f"\nrefused: {refused}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--http", action="store_true", help="one careful person, a real node and tier")


def run(given: argparse.Namespace) -> int:
    """Live through all seeds; exit status 1 if more certificates are wrong than 5 % and three standard errors."""
    world, broken = World(), False
    errors = {"careful": (0.0, 0.0)} if given.http else {"careful": (0.0, 0.0), "hasty": (0.05, 0.05)}
    for name, (wrong, unsure) in errors.items():
        seeds = []
        for seed in range(1 if given.http else given.seeds):
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                person = Person(world.classes, world.kind.labels, seed, wrong, unsure)
                seeds.append(asyncio.run(_life(world, folder, stack, person, seed, real=given.http)))
        show(f"{name}, {len(seeds)} seeds", seeds)
        above = [drop.true >= target for each in seeds for (_, target), drop in each.drops.items()]
        print(f"\n{sum(above)} of {len(above)} certificates give up more than they state")
        broken |= sum(above) > 0.05 * len(above) + 3.0 * math.sqrt(0.05 * 0.95 * len(above))
    return int(broken)


async def _life(world: World, folder: Path, stack: ExitStack, person: Person, seed: int, *, real: bool) -> Found:
    site: Site = Real(world, stack, folder) if real else Simulated(world, folder, seed)
    started = time.monotonic()
    found = await seed_of(site, world, person, seed)
    print(f"seed {seed}: {time.monotonic() - started:.0f} s, {found}", flush=True)
    return found
