"""Commands that start servers: an edge node, a datacenter tier, and both."""

from __future__ import annotations

import sys
from typing import Any

import typer

from hawkvision.cli.options import PASS_ON

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
