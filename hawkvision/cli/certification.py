"""Commands that measure and certify: profiles and certificates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from hawkvision.cli.options import (
    Authority,
    ClassMap,
    CleanIds,
    Compared,
    ModelsDir,
    OperateKey,
    Profile,
    Task,
    TrainedImages,
)
from hawkvision.core.types import time_text
from hawkvision.guarantee.answered import stated_drop
from hawkvision.system.files import CacheDir

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hawkvision.cascade.certification.profile import Profile as CalibratedProfile
    from hawkvision.model_zoo.calibration.certify import Comparing, SiteRun
    from hawkvision.model_zoo.calibration.model_runner import AnyImages

COMPARING_S: Final = 60.0
"""Time for one image."""
BUSY_S: Final = 10.0
"""Pauses where the node is busy, for one image."""


def calibrate(
    data: Annotated[
        Path | None,
        Meta(description="Labelled images: a directory per class, npz, COCO json or YOLO folders; or --design."),
    ] = None,
    task: Task = "imagenet",
    edge: Annotated[list[str] | None, Meta(description="Edge stages to certify; default: the cascade's.")] = None,
    best: Annotated[str | None, Meta(description="The stage to certify against; default: the cascade's best.")] = None,
    intermediate: Annotated[
        str | None, Meta(description="A stage between them, or `none`; default: the cascade's.")
    ] = None,
    out: Annotated[
        Path | None,
        Meta(description="Where the profile goes; default: beside your own manifest, else ./TASK-profile.json."),
    ] = None,
    seed: Annotated[int, Meta(description="Of the split.")] = 2405,
    datagram: Annotated[
        bool, Meta(description="Measure lossy links too; takes 20 times as long.", extra={"name": "--lossy"})
    ] = False,
    certify_data: Annotated[
        Path | None, Meta(description="Labelled images that served no choice, to certify on; default: part of --data.")
    ] = None,
    design: Annotated[
        Path | None, Meta(description="A profile to certify anew on --certify-data, instead of measuring --data.")
    ] = None,
    compared: Compared = 1,
    allow_worse_reference: Annotated[
        bool, Meta(description="Certify against a reference stage that is measurably worse than a stage below it.")
    ] = False,
    class_map: ClassMap = None,
    clean_ids: CleanIds = None,
    trained_images: TrainedImages = "refuse",
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Measure a cascade on your own labelled images: temperatures, accuracies, certificates."""
    from hawkvision.core.errors import ConfigError
    from hawkvision.model_zoo.calibration.calibrate import calibrate as run
    from hawkvision.model_zoo.calibration.certification import certify_design
    from hawkvision.model_zoo.calibration.evidence import LabelReading
    from hawkvision.model_zoo.calibration.evidence import TrainedImages as Trained
    from hawkvision.models import manifest

    models, cache = manifest.models_dir(models_dir, task), manifest.cache_dir(cache_dir)
    path = out or manifest.default_profile(models_dir, task)
    reading = LabelReading(class_map, clean_ids, Trained(trained_images))
    if design is not None:
        if data is not None or certify_data is None or edge or best or intermediate or datagram:
            raise ConfigError("--design takes --certify-data and neither --data, --lossy nor other stages")
        profile = certify_design(
            task, design, certify_data, path, compared=compared, allow_worse=allow_worse_reference,
            reading=reading, models=models, cache=cache,
        )  # fmt: skip
    elif data is None:
        raise ConfigError("expected --data, or --design with --certify-data")
    else:
        profile = run(
            task, data, path, edges=tuple(edge or ()), best=best, intermediate=intermediate, seed=seed,
            datagram=datagram, certify_data=certify_data, compared=compared, allow_worse=allow_worse_reference,
            reading=reading, models=models, cache=cache,
        )  # fmt: skip
    _print_summary(profile, path, models)


def _print_summary(profile: CalibratedProfile, path: Path, models: Path) -> None:
    """What was measured and certified, and the next command."""
    from rich.console import Console
    from rich.table import Table

    from hawkvision.model_zoo.calibration import summary
    from hawkvision.models import manifest
    from hawkvision.tasks.registry import load_kind

    console = Console(highlight=False)
    kind = load_kind(manifest.load_manifest(profile.task, models), models)
    for found in (summary.accuracies_table(profile), *(summary.targets_table(profile, p) for p in profile.pairs)):
        if found.rows:
            table = Table(*found.columns, box=None, pad_edge=False, header_style="bold", title=found.title)
            table.title_justify = "left"
            for row in found.rows:
                table.add_row(*row)
            console.print(table)
            console.print()
    for note in summary.notes(profile, kind):
        console.print(note, soft_wrap=True)
    own = path.resolve() != (models / profile.task / "profile.json").resolve()
    console.print(f"written to {path}; next: {summary.next_command(profile, path, own=own)}", soft_wrap=True)


def certify(
    data: Annotated[
        Path | None,
        Meta(description="The site's images: labelled, or with --labels or --unlabelled a plain folder; or --from."),
    ] = None,
    task: Task = "imagenet",
    labels: Annotated[
        Path | None, Meta(description="A CSV file with the columns file,label, for some or all of the images.")
    ] = None,
    unlabelled: Annotated[bool, Meta(description="Certify without labels: what differs counts as lost.")] = False,
    to_label: Annotated[
        Path | None, Meta(description="Write here which images to label, the most helpful first; then --labels.")
    ] = None,
    labels_checked: Annotated[
        bool, Meta(description="The labels are right although the reference stage is worse than in its profile.")
    ] = False,
    edge: Annotated[list[str] | None, Meta(description="Edge stages to certify; default: the profile's.")] = None,
    compared: Compared = 1,
    class_map: ClassMap = None,
    clean_ids: CleanIds = None,
    trained_images: TrainedImages = "refuse",
    node: Annotated[
        str | None,
        Meta(
            description="URL of an edge node: with --data it and its datacenter answer the images, for one edge stage; "
            "else it certifies from its own audits, with the labels of its /v1/review.",
            extra={"name": "--from"},
        ),
    ] = None,
    api_key: OperateKey = None,
    ca: Authority = None,
    out: Annotated[Path | None, Meta(description="Where they go; default: ./certificates.json.")] = None,
    profile: Profile = None,
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Certify a cascade for one site, from that site's own images; the profile stays as it is."""
    from hawkvision.core.errors import ConfigError

    if node is not None and data is None:
        if any((labels, unlabelled, to_label, edge, out, profile, class_map, clean_ids)) or compared > 1:
            raise ConfigError(
                "--from without --data takes --task, --labels-checked, --api-key and --ca; the node has all else"
            )
        _certify_from(node, task, api_key, ca, labels_checked=labels_checked)
        return
    if data is None:
        raise ConfigError("expected --data, or --from with the URL of a node, or both")
    from hawkvision.model_zoo.calibration.certify import certify_site
    from hawkvision.model_zoo.calibration.evidence import LabelReading
    from hawkvision.model_zoo.calibration.evidence import TrainedImages as Trained
    from hawkvision.models import manifest

    path = out or Path("certificates.json")
    found = certify_site(
        task, data, path, labelled=not unlabelled, labels=labels, to_label=to_label, labels_checked=labels_checked,
        edges=tuple(edge or ()), compared=compared, profile=profile,
        reading=LabelReading(class_map, clean_ids, Trained(trained_images)),
        comparing=None if node is None else by_node(node, api_key, ca),
        models=manifest.models_dir(models_dir, task), cache=manifest.cache_dir(cache_dir),
    )  # fmt: skip
    _print_site(found, path)
    if to_label is not None:
        print(
            f"{found.listed} images to label: {to_label}; fill in the column `label` of as many as you like, from the "
            "top, and certify with --labels in place of --unlabelled"
        )


def by_node(url: str, api_key: str | None, ca: Path | None) -> Comparing:
    """Lets a node and its datacenter answer images, for certificates of what runs there.

    Raises:
        ConfigError: from the function, for an image that the node refuses, or a node that runs another cascade than the
            profile's, or one that changes meanwhile.
        HawkVisionError: from the function, if the node or its datacenter does not answer.
    """
    from rich.progress import track

    from hawkvision.cascade.certification.profile import design_sha256
    from hawkvision.client import Client
    from hawkvision.core.errors import BadImage, ConfigError, TooLarge, UnsupportedMedia
    from hawkvision.model_zoo.calibration import certify as site

    def compare(cascade: site.Cascade, images: AnyImages, chosen: NDArray[np.intp]) -> site.ComparedImages:
        (pair,) = cascade.profile.pairs
        expected = {
            "edge": pair.edge, "best": pair.best, "design": design_sha256(cascade.profile, (pair,)),
        }  # fmt: skip
        found, first, decode = list[site.Compared](), dict[str, Any](), cascade.kind.decode_compared
        with Client(url, api_key=api_key, ca=ca, timeout_s=COMPARING_S, retry_budget_s=BUSY_S) as client:
            for index in track(chosen.tolist(), "compared by the node", transient=True):
                try:
                    told = client.compare(images.bodies[index], cascade.manifest.task)
                except (BadImage, TooLarge, UnsupportedMedia) as error:
                    raise ConfigError(f"{images.called(index)}: {error.message}") from None
                for name, value in expected.items():
                    if told[name] != value:
                        raise ConfigError(
                            f"{url}: {name}: the node has {told[name]}, expected {value}: --edge and --profile must be "
                            "the node's"
                        )
                ran = {name: told[name] for name in ("versions", "executions")}
                if ran != (first := first or ran):
                    raise ConfigError(f"{url}: the stages, or what runs them, changed meanwhile; certify again")
                answer, reference = (decode(msgspec.json.encode(told[name])) for name in ("answer", "reference"))
                found.append(site.Compared(told["score"], answer, reference))
        return site.ComparedImages(found, first.get("executions", {}))

    return compare


def _certify_from(url: str, task: str, api_key: str | None, ca: Path | None, *, labels_checked: bool) -> None:
    """Let a node certify from its audits, and print what it did."""
    from hawkvision.client import Client

    with Client(url, api_key=api_key, ca=ca) as client:
        made = client.certify(task, labels_checked=labels_checked)
    found = made["accuracies"].items()
    _print_accuracies({name: (each["value"], each["n"], each["low"], each["high"]) for name, each in found})
    _print_targets(
        [
            (
                made["edge"], each["max_accuracy_drop"], each["certified"], each["escalation"], each["to_best"],
                each["accept_from"], (each["labels"], each["more"], each["then"]),
            )
            for each in made["targets"]
        ],
        bounded=made["basis"] == "disagreement",
    )  # fmt: skip
    print(f"certified on {made['n']} audits of {url}, block {made['block']}; in force there within seconds")


def _print_site(found: SiteRun, path: Path) -> None:
    """Accuracies, what is certified for each target, and what more labels would do."""
    site = found.certificates
    _print_accuracies({name: (each.value, each.n, each.low, each.high) for name, each in found.accuracies.items()})
    rows: list[_Row] = []
    for pair in site.pairs:
        needs = found.needs.get(pair.edge, {})
        for each in pair.conditions[0].certificates:
            need = needs.get(each.max_drop)
            labels = None if need is None else (need.used, int(need.helps.sum()), need.to_best)
            rows.append(
                (
                    pair.edge, stated_drop(each.max_drop), each.to_best < 1.0, each.escalation, each.to_best,
                    each.threshold, labels,
                )
            )  # fmt: skip
    _print_targets(rows, bounded={pair.conditions[0].fast.basis for pair in site.pairs} == {"disagreement"})
    taken = f"from {'an unknown time' if site.since is None else time_text(site.since)} to {time_text(site.until)}"
    print(f"certified on {site.data.n} images {taken}")
    print(f"written to {path}; `hawkvision edge up --certificates {path}`")


_Row: TypeAlias = tuple[str, float, bool, float, float, float | str, tuple[int, int, float] | None]
"""Of a target: stage, drop, whether it is certified, shares escalated and for the reference stage, threshold; labels
used, how many more would help, and the reference stage's share then.
"""


def _print_accuracies(found: Mapping[str, tuple[float, int, float, float]]) -> None:
    for name, (value, n, low, high) in found.items():
        print(f"{name} is right on {value:.1%} of {n} images drawn at random ({low:.1%} to {high:.1%})")


def _print_targets(rows: Sequence[_Row], *, bounded: bool) -> None:
    """The table of targets; `bounded` where the drop of a target is a disagreement."""
    from rich.console import Console
    from rich.table import Table

    console, counted = Console(highlight=False), any(row[-1] is not None for row in rows)
    table = Table(box=None, pad_edge=False, header_style="bold")
    limit = "disagreement" if bounded else "drop"
    for title in ("stage", f"max {limit}", "certified", "escalated", "reference", "accept from"):
        table.add_column(title)
    for title in ("labels", "more", "then") if counted else ():
        table.add_column(title)
    for stage, drop, certified, escalation, to_best, accept_from, labels in rows:
        table.add_row(
            stage,
            f"{drop:.2%}",
            "yes" if certified else "no",
            f"{escalation:.1%}",
            f"{to_best:.1%}",
            accept_from if isinstance(accept_from, str) else f"{accept_from:.4f}",
            *(() if labels is None else (str(labels[0]), str(labels[1]), f"{labels[2]:.1%}")),
        )
    console.print(table)
    if counted:
        console.print(
            "labels: that the certificate rests on. more: disagreements whose labels would help. then: answered by the "
            "reference stage if none of those loses anything.",
            soft_wrap=True,
        )
    if bounded:
        console.print("Without labels only the agreement with the reference stage is certified, no accuracy drop.")
