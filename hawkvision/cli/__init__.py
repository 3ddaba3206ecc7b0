"""The command line: `hawkvision …`. Every command imports what it needs when it runs, so `--help` is instant.

Exit status: 0 done, 1 an error that was explained on standard error, 2 a wrong command line.
"""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from hawkvision.cli import certification, classify, keys, models, servers, tools
from hawkvision.cli.options import PASS_ON, renamed_option
from hawkvision.core import logs
from hawkvision.core.errors import HawkVisionError
from hawkvision.core.logs import LogFormat, LogLevel
from hawkvision.core.version import __version__
from hawkvision.system.process import exit_on_sigterm
from hawkvision.system.terminal import write_anything

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Modeless vision inference: say what the answer must be worth, not which model to run.",
)

EXTRA_OF: Final = {
    "onnx": "build",
    "safetensors": "build",
    "scipy": "build",
    "jinja2": "report",
    "ray": "datacenter",
    "torch": "models",
    "torchvision": "models",
}
"""The extra of this package that brings each optional library."""


def main() -> None:
    """Entry point of the console script."""
    write_anything()
    if (renamed := renamed_option(sys.argv[1:])) is not None:
        typer.echo(f"error: {renamed}", err=True)
        sys.exit(2)
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


SERVE: Final = "Serve"
ASK: Final = "Ask and test"
MODELS: Final = "Models and guarantees"
OPERATE: Final = "Operate"

app.command(rich_help_panel=SERVE)(servers.up)
app.command(rich_help_panel=SERVE)(tools.demo)
app.add_typer(servers.edge_app, name="edge", rich_help_panel=SERVE)
app.add_typer(servers.dc_app, name="dc", rich_help_panel=SERVE)
app.command(rich_help_panel=ASK)(classify.classify)
app.command("load", context_settings=PASS_ON, rich_help_panel=ASK)(tools.load_test)
app.add_typer(models.models_app, name="models", rich_help_panel=MODELS)
app.command(rich_help_panel=MODELS)(certification.calibrate)
app.command(rich_help_panel=MODELS)(certification.certify)
app.command("seal", rich_help_panel=MODELS)(certification.seal_file)
app.add_typer(certification.report_app, name="report", rich_help_panel=MODELS)
app.command("fpga", context_settings=PASS_ON, rich_help_panel=MODELS)(tools.fpga_command)
app.command("plan", context_settings=PASS_ON, rich_help_panel=MODELS)(tools.plan_command)
app.add_typer(keys.keys_app, name="keys", rich_help_panel=OPERATE)
app.command(rich_help_panel=OPERATE)(tools.doctor)
