"""Commands that start servers: an edge node, a datacenter tier, and both."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from hawkvision.cli.options import PASS_ON

if TYPE_CHECKING:
    from hawkvision.arguments import ServerCommand

edge_app = typer.Typer(no_args_is_help=True, help="Edge nodes.")
dc_app = typer.Typer(no_args_is_help=True, help="The datacenter tier on Ray Serve.")


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
    """Deploy to a running Ray cluster; needs `--address`. `hawkvision dc deploy --help` lists the settings."""
    from hawkvision.arguments import DC_DEPLOY, parse_arguments
    from hawkvision.config import DatacenterConfig
    from hawkvision.datacenter.run import deploy
    from hawkvision.errors import ConfigError

    config = parse_arguments(DatacenterConfig, *DC_DEPLOY, context.args)
    if config.address is None:
        raise ConfigError("dc.address is not set: expected --address of a running Ray cluster, or 'auto'")
    deploy(config, config.address)


@dc_app.command("config", context_settings=PASS_ON)
def dc_config(context: typer.Context) -> None:
    """Print a Ray Serve config file; with `--rayservice IMAGE`, a KubeRay manifest."""
    from hawkvision.arguments import configured
    from hawkvision.config import DatacenterConfig
    from hawkvision.datacenter.manifests import rayservice, serve_config

    parsed = config_command().parse(context.args)
    config = configured(DatacenterConfig, parsed)
    image = parsed.more["rayservice"]
    typer.echo(rayservice(config, image) if image else serve_config(config), nl=False)


def config_command() -> ServerCommand:
    """The command line of `hawkvision dc config`."""
    from hawkvision.arguments import DC_CONFIG, ServerCommand
    from hawkvision.config import DatacenterConfig

    more = {"rayservice": ("IMAGE", "Print a KubeRay RayService that runs this container image.")}
    return ServerCommand(DatacenterConfig, *DC_CONFIG, more)
