"""Commands that start servers: an edge node, a datacenter tier, and both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from hawkvision.cli.options import ModelsDir, Profile
from hawkvision.core.command_line import Group, Program
from hawkvision.core.settings.config import Port
from hawkvision.system.files import CacheDir


def up(
    host: Annotated[str | None, Meta(description="Address of the edge node; default: 127.0.0.1.")] = None,
    port: Annotated[Port | None, Meta(description="Port of the edge node; 0 takes a free one; default: 8080.")] = None,
    dc_port: Annotated[Port | None, Meta(description="Port of the datacenter tier; default: 8090.")] = None,
    task: Annotated[
        str | None, Meta(description="The task to serve, or several, comma-separated; default: imagenet.")
    ] = None,
    profile: Profile = None,
    config: Annotated[
        Path | None, Meta(description="TOML file with sections edge and dc, for all other settings.")
    ] = None,
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> int:
    """Start both tiers on this machine in the foreground, building missing models, and show a request."""
    import os
    import signal

    from hawkvision.cli import up as both

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a signal stops it like Ctrl-C
    tasks = tuple(word.strip() for word in task.split(",")) if task else ()
    options = both.UpOptions(config, host, port, dc_port, tasks, models_dir, cache_dir, profile)
    return both.run(options, os.environ, print)


def _edge_up(words: Sequence[str], _: str) -> int:
    from edge.__main__ import main as edge_main

    return edge_main(words)


def _dc_up(words: Sequence[str], _: str) -> int:
    from hawkvision.datacenter.__main__ import main as datacenter_main

    return datacenter_main(words)


def _dc_deploy(words: Sequence[str], prog: str) -> None:
    from hawkvision.core.errors import ConfigError
    from hawkvision.core.settings.config import DatacenterConfig
    from hawkvision.core.settings.load import read_command_line
    from hawkvision.datacenter.cluster import deploy

    read = partial(
        read_command_line, DatacenterConfig, words, prog, "Deploy the datacenter tier to a running Ray cluster."
    )
    address = read().address
    if address is None:
        raise ConfigError("dc.address is not set: expected --address of a running Ray cluster, or 'auto'")
    deploy(read, address)


Address = Annotated[str, Meta(description="The cluster: auto, or HOST:PORT.")]


def dc_remove(
    address: Address = "auto",
    app_name: Annotated[str, Meta(description="Name of the application, as `dc deploy` took it.")] = "hawkvision",
) -> None:
    """Remove the tier from a Ray cluster; other applications stay."""
    from hawkvision.datacenter.cluster import remove

    remove(address, app_name)
    print(f"removed: {app_name}")


def dc_environment() -> None:
    """Print the variables for every machine of a new Ray cluster: Ray's settings, its token and the tier's key."""
    from hawkvision.datacenter.deployment.ray_settings import environment

    print(environment(), end="")


def dc_drain(
    address: Address = "auto",
    node: Annotated[str | None, Meta(description="Name, address or ID of the node; default: this machine's.")] = None,
    limit_s: Annotated[int, Meta(ge=1, le=86400, description="Seconds that the node may take.")] = 60,
) -> None:
    """Take a node out of a Ray cluster: its replicas move to other nodes, and no request is lost."""
    from hawkvision.datacenter.cluster import drain

    print(f"drained: {drain(address, node, limit_s)}")


EDGE: Final = Group(
    "Edge nodes.",
    {"": {"up": Program("Start an edge node; `hawkvision edge up --help` lists its settings.", _edge_up)}},
)
DC: Final = Group(
    "The datacenter tier on Ray Serve.",
    {
        "": {
            "up": Program(
                "Start a datacenter tier on this machine; `hawkvision dc up --help` lists its settings.", _dc_up
            ),
            "deploy": Program(
                "Deploy to a running Ray cluster; needs `--address`. `hawkvision dc deploy --help` lists the settings.",
                _dc_deploy,
            ),
            "remove": dc_remove,
            "environment": dc_environment,
            "drain": dc_drain,
        }
    },
)
