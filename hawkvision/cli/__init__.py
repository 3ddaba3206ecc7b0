"""The command line: `hawkvision …`. Each command imports what it needs when it runs, so `--help` is fast.

Exit status: 0 done, 1 an error that was explained on standard error, 2 a wrong command line.
"""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from hawkvision.cli import certification, classify, keys, servers, tools
from hawkvision.cli.models import adding, building, own
from hawkvision.cli.options import PASS_ON
from hawkvision.core import logs
from hawkvision.core.errors import HawkVisionError
from hawkvision.core.logs import LogFormat, LogLevel
from hawkvision.core.version import __version__
from hawkvision.system.child_server import exit_on_sigterm
from hawkvision.system.closed_output import quiet_without_reader
from hawkvision.system.unicode_fallback import write_anything

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Modeless vision inference: state the accuracy you need, not the model.",
)

EXTRA_OF: Final = {
    "onnx": "build",
    "safetensors": "build",
    "scipy": "build",
    "jinja2": "report",
    "ray": "datacenter",
}
"""The extra of this package for each optional library."""


def main() -> None:
    """Run the command of this process's command line."""
    write_anything()
    with quiet_without_reader():
        _run()


def _run() -> None:
    exit_on_sigterm()  # so that a compiler started by a command ends, too
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
        LogLevel, typer.Option(envvar="HAWKVISION_LOG_LEVEL", help="Log level of commands, not of servers.")
    ] = "warning",
    log_format: Annotated[
        LogFormat, typer.Option(envvar="HAWKVISION_LOG_FORMAT", help="Format of log lines.")
    ] = "text",
) -> None:
    """Options of every command."""
    if context.obj is not None:  # the console script, which configures logging itself
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
app.command(rich_help_panel=ASK)(classify.detect)
app.command(rich_help_panel=ASK)(classify.infer)
app.command("load", context_settings=PASS_ON, rich_help_panel=ASK)(tools.load_test)
building.models_app.command("add")(adding.models_add)
building.models_app.command("check")(own.models_check)
building.models_app.command("quantize")(own.models_quantize)
app.add_typer(building.models_app, name="models", rich_help_panel=MODELS)
app.command(rich_help_panel=MODELS)(certification.calibrate)
app.command(rich_help_panel=MODELS)(certification.certify)
app.command("seal", rich_help_panel=MODELS)(certification.seal_file)
app.add_typer(certification.report_app, name="report", rich_help_panel=MODELS)
app.command("fpga", context_settings=PASS_ON, rich_help_panel=MODELS)(tools.fpga_command)
app.command("plan", context_settings=PASS_ON, rich_help_panel=MODELS)(tools.plan_command)
app.add_typer(keys.keys_app, name="keys", rich_help_panel=OPERATE)
app.command(rich_help_panel=OPERATE)(tools.doctor)
