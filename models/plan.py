"""Plans the next certification of a shipped task: the drop of `balanced`, chosen before any label is opened for it.

    python models/plan.py TASK --data FILE --out design.json

FILE are the images of the task's profile. Those that certified it last, another file or a part of this one, will
certify it again; they take no part here. All else of the profile stays: models, temperatures, scores and the order of
thresholds. Prints what each drop is expected to cost and the digest of the design, which is committed before
`hawkvision calibrate --design design.json --certify-data …` opens the labels.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from hawkvision.cascade.certification.balanced import Certifying, Exchange, choose, exchanges
from hawkvision.cascade.certification.profile import Certificate, ImageUse, Pair, Profile, design_sha256
from hawkvision.cascade.certification.profile_files import dump, load_profile
from hawkvision.cascade.certification.profiling import costs_of, paths_of, write_certificate
from hawkvision.cascade.certification.threshold_order import expected_cost
from hawkvision.core.errors import ConfigError
from hawkvision.guarantee.answered import stated_drop
from hawkvision.guarantee.certificate import certify
from hawkvision.guarantee.evidence import Evidence
from hawkvision.model_zoo.calibration.certification import DELTA, pair_evidence, share_of_delta, stages_by_tier
from hawkvision.model_zoo.calibration.evidence import LabelReading, TrainedImages, read_evidence
from hawkvision.model_zoo.calibration.model_runner import run_stages
from hawkvision.model_zoo.calibration.splits import split_again
from hawkvision.models.manifest import cache_dir, load_manifest
from hawkvision.system.files import write_atomic
from hawkvision.tasks.registry import load_kind

MODELS: Final = Path(__file__).parent


def main() -> None:
    """Read the arguments, plan, and write the design."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    design = plan(arguments.task, arguments.data, Console(), MODELS, cache_dir(None))
    write_atomic(arguments.out, dump(design))


def plan(task: str, data: Path, console: Console, models: Path, cache: Path) -> Profile:
    """The design of a task of the folder `models` for its next certification; `cache` has the built models.

    Raises:
        HawkVisionError: for bad data, other images than those of the profile, or models that are not built.
    """
    manifest = load_manifest(task, models)
    profile, kind = load_profile(models / task / "profile.json", manifest.profile_sha256), load_kind(manifest, models)
    labelled = read_evidence(data, kind, manifest, models, LabelReading(trained=TrainedImages.FIT))
    if labelled.images.sha256 != profile.data.sha256:
        raise ConfigError(f"{data}: expected the images of the profile, {profile.data.name}")
    last = next(use for use in reversed(profile.uses) if use.purpose == "certify")
    split = split_again(manifest, labelled.images, profile.data)
    chosen = split.profile if last.sha256 == labelled.images.sha256 else split.used()
    edge, datacenter = stages_by_tier(profile)
    predictions = run_stages(
        kind, manifest, labelled.images, edge=edge, datacenter=datacenter, shrink=profile.shrinks_images,
        backend="onnxruntime", cache=cache, chosen=chosen,
    )  # fmt: skip
    pairs = tuple(
        _planned(profile, pair, pair_evidence(profile, pair, predictions, labelled.truths, chosen), last, console)
        for pair in profile.pairs
    )
    console.print(f"{len(chosen)} images planned this design: {design_sha256(profile, pairs)}", soft_wrap=True)
    return msgspec.structs.replace(profile, pairs=pairs)


def _planned(profile: Profile, pair: Pair, design: Evidence, last: ImageUse, console: Console) -> Pair:
    """The pair with another `balanced`, whose thresholds are those that the design's images suggest."""
    to_come = Certifying(last.n, share_of_delta(DELTA, (last.openings or 1) + 1, last.compared))
    offered = exchanges(design, paths_of(pair), costs_of(profile, pair), to_come)
    kept = choose(offered)
    console.print(f"{pair.edge}, {to_come.n} images to come, δ = {to_come.delta:g}")
    for each in offered:
        if each.certified:
            console.print(_line(each) + ("  balanced" if each is kept else ""), highlight=False, soft_wrap=True)
    condition = msgspec.structs.replace(pair.conditions[0], balanced=_suggested(profile, pair, design, kept, to_come))
    return msgspec.structs.replace(pair, conditions=(condition,))


def _suggested(profile: Profile, pair: Pair, design: Evidence, kept: Exchange, to_come: Certifying) -> Certificate:
    paths, costs = paths_of(pair), costs_of(profile, pair)
    steps = [
        certify(design, path, kept.max_drop, to_come.delta / len(paths), lambda step: expected_cost(costs, step))
        for path in paths
    ]
    cheapest = min(steps, key=lambda step: expected_cost(costs, step))
    certificate = write_certificate(design, cheapest, kept.max_drop, to_come.delta)
    return msgspec.structs.replace(certificate, basis="profile")


def _line(each: Exchange) -> str:
    return (
        f"  drop {stated_drop(each.max_drop):6.2%}  certified by {each.certified:4.0%} of the draws"
        f"  escalated {each.escalation:6.1%}  price {each.price:.2f}"
    )


if __name__ == "__main__":
    main()
