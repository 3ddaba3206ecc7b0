"""Commands that start servers: an edge node, a datacenter tier, and both."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hawkvision.cli.options import PASS_ON, CacheDir, ModelsDir, Profile

edge_app = typer.Typer(no_args_is_help=True, help="Edge nodes.")
dc_app = typer.Typer(no_args_is_help=True, help="The datacenter tier on Ray Serve.")


def up(
    host: Annotated[str | None, typer.Option(help="Address of the edge node; default: 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the edge node; 0 takes a free one; default: 8080.")
    ] = None,
    dc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the datacenter tier; default: 8090.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="The task to serve, or several, comma-separated; default: imagenet.")
    ] = None,
    profile: Profile = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file with sections edge and dc, for all other settings."),
    ] = None,
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Start both tiers on this machine in the foreground, building missing models, and show a request."""
    import os
    import signal

    from hawkvision.cli import up as both

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a signal stops it like Ctrl-C
    tasks = tuple(word.strip() for word in task.split(",")) if task else ()
    options = both.UpOptions(config, host, port, dc_port, tasks, models_dir, cache_dir, profile)
    raise typer.Exit(both.run(options, os.environ, typer.echo))


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
    from hawkvision.core.errors import ConfigError
    from hawkvision.core.settings.config import DatacenterConfig
    from hawkvision.core.settings.load import read_command_line
    from hawkvision.datacenter.cluster import deploy

    description = "Deploy the datacenter tier to a running Ray cluster."
    config = read_command_line(DatacenterConfig, context.args, "hawkvision dc deploy", description)
    if config.address is None:
        raise ConfigError("dc.address is not set: expected --address of a running Ray cluster, or 'auto'")
    deploy(config, config.address)


@dc_app.command("environment")
def dc_environment() -> None:
    """Print the variables for every machine of a new Ray cluster: Ray's settings, its token and the tier's key."""
    from hawkvision.datacenter.deployment.ray_settings import environment

    typer.echo(environment(), nl=False)


@dc_app.command("drain")
def dc_drain(
    address: Annotated[str, typer.Option(help="The cluster: auto, or HOST:PORT.")] = "auto",
    node: Annotated[str | None, typer.Option(help="Name, address or ID of the node; default: this machine's.")] = None,
    limit_s: Annotated[int, typer.Option(min=1, max=86400, help="Seconds that the node may take.")] = 60,
) -> None:
    """Take a node out of a Ray cluster: its replicas move to other nodes, and no request is lost."""
    from hawkvision.datacenter.cluster import drain

    typer.echo(f"drained: {drain(address, node, limit_s)}")
