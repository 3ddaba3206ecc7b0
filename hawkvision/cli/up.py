"""`hawkvision up`: start both tiers on this machine, test them with a request, and stop them together."""

from __future__ import annotations

import shlex
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hawkvision.client.blocking import Client
from hawkvision.core.errors import ArtifactError, BackendError, ConfigError, HawkVisionError, NotReady
from hawkvision.core.settings.config import DatacenterConfig, EdgeConfig
from hawkvision.core.settings.load import load_config, settings_of_tasks
from hawkvision.core.types import Answer, Tier
from hawkvision.datacenter.stages.catalog import variants_by_task
from hawkvision.models.artifacts import load_variant
from hawkvision.models.manifest import Manifest, cache_dir, load_manifest, models_dir
from hawkvision.models.sample_images import sample_image
from hawkvision.system.child_server import ServerProcess, running
from hawkvision.tasks.registry import form_of

WHOLE_S: Final = 60.0
"""Time for the first answer that is not degraded, once both tiers are ready."""
WATCH_S: Final = 0.2
"""Between checks whether both tiers still run."""
REQUEST_S: Final = 30.0
TARGET: Final = "max_accuracy_drop=0.02"
"""The target of the request that is shown."""
KEY_VARIABLES: Final = ("HAWKVISION_EDGE_API_KEY", "HAWKVISION_API_KEY")


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The options of the command line; None leaves a setting to file, variables and default."""

    config: Path | None = None
    host: str | None = None
    port: int | None = None
    dc_port: int | None = None
    tasks: tuple[str, ...] = ()
    """The tasks of both tiers; none leaves them to file, variables and defaults."""
    models_dir: Path | None = None
    cache_dir: Path | None = None
    profile: Path | None = None

    def edge(self) -> dict[str, Any]:
        """Settings of the edge node."""
        return {"host": self.host, "port": self.port, "profile": self.profile, **self._both()}

    def datacenter(self) -> dict[str, Any]:
        """Settings of the datacenter tier."""
        return {"port": self.dc_port, **self._both()}

    def _both(self) -> dict[str, Any]:
        return {"tasks": list(self.tasks) or None, "models_dir": self.models_dir, "cache_dir": self.cache_dir}

    def words(self, settings: Mapping[str, Any]) -> list[str]:
        """Settings in the form of a server's command line."""
        given = {"config": self.config, **settings}
        return [
            word
            for name, value in given.items()
            if value is not None
            for word in (f"--{name.replace('_', '-')}", ",".join(value) if isinstance(value, list) else str(value))
        ]


def run(options: UpOptions, environ: Mapping[str, str], say: Callable[[str], None]) -> int:
    """Start both tiers, show a request, and serve until Ctrl-C. Returns exit status 0 after a clean stop.

    Args:
        options: of the command line.
        environ: this process's variables.
        say: prints a line for the user.

    Raises:
        HawkVisionError: if a tier does not start, gives no whole answer, or ends by itself.
    """
    edge_config = load_config(EdgeConfig, options.config, options.edge())
    dc_config = load_config(DatacenterConfig, options.config, options.datacenter())
    key = _key(edge_config, environ)
    check_ports(edge_config, dc_config)
    prepare_models(edge_config, dc_config, say)
    try:
        with both_tiers(options, environ, say) as (datacenter, edge):
            url = edge.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
            image = sample_image(cache_dir(edge_config.cache_dir))
            authority = edge_config.tls_certificate
            with Client(url, api_key=key, timeout_s=REQUEST_S, ca=authority) as client:
                tasks = client.tasks()["tasks"]
                served = next(each for each in tasks if each["status"] == "ready")
                first_whole_answer(client, image, (datacenter, edge), served["task"])
            named = "" if served is tasks[0] else f"&task={served['task']}"
            asked = f"{url}{form_of(served['kind'])}?{TARGET}{named}"
            said = _asked(asked, image, key, authority)
            if edge_config.page:
                say(f"\nopen         {url}/  in a browser: try, live and review")
            say(f"edge node    {edge.url}  ({url}/docs describes its API)")
            say(f"datacenter   {datacenter.url}\n")
            say(f"$ {curl_line(asked, image, authority, environ, keyed=key is not None)}")
            say(said)
            say("\nready; Ctrl-C stops both")
            watch((datacenter, edge))
    except KeyboardInterrupt:
        say("stopped")
    return 0


def check_ports(edge: EdgeConfig, datacenter: DatacenterConfig) -> None:
    """Refuse an address that one of the tiers could not listen on, before anything is built or started.

    Raises:
        ConfigError: naming the option, the address and the reason.
    """
    with ExitStack() as held:
        for option, config in (("--dc-port", datacenter), ("--port", edge)):
            family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
            try:
                held.enter_context(socket.create_server((config.host, config.port), family=family))
            except OSError as error:
                raise ConfigError(
                    f"{option}: cannot listen on {config.host}:{config.port}: {error.strerror}; stop what listens "
                    "there (`ss -ltnp` shows it), or choose another port"
                ) from None


def prepare_models(edge: EdgeConfig, datacenter: DatacenterConfig, say: Callable[[str], None]) -> None:
    """Build the missing models of both tiers, with progress. Of several tasks, those that cannot be built are reported.

    Raises:
        HawkVisionError: if there is no such task or stage, or a model cannot be built, and there is only one task.
    """
    if edge.backend == datacenter.backend == "noop":
        return
    at_edge, named = settings_of_tasks(edge), variants_by_task(datacenter)
    tasks = dict.fromkeys((*at_edge, *datacenter.tasks))
    for task in tasks:
        wanted = named.get(task, ()) if task in datacenter.tasks else None
        try:
            _prepare(task, at_edge.get(task), wanted, edge, say)
        except HawkVisionError as error:
            if len(tasks) == 1:
                raise
            say(f"task {task} cannot be served: {error.message}")


def _prepare(
    task: str, at_edge: EdgeConfig | None, named: Sequence[str] | None, edge: EdgeConfig, say: Callable[[str], None]
) -> None:
    """Build the missing models of one task.

    Args:
        task: its name.
        at_edge: its settings at the edge; None if it is not served there.
        named: its stages in the datacenter, none for the manifest's; None if it is not served there.
        edge: says where models are.
        say: prints a line for the user.

    Raises:
        HawkVisionError: if there is no such task or stage, or a model cannot be built.
    """
    models, cache = models_dir(edge.models_dir, task), cache_dir(edge.cache_dir)
    manifest = load_manifest(task, models)
    stages = [] if named is None else list(named or manifest.cascade.dc)
    if at_edge is not None:
        stages.insert(0, at_edge.variant or manifest.cascade.default_edge)
    missing = [stage for stage in dict.fromkeys(stages) if not _is_built(manifest, stage, cache)]
    if missing:
        say(f"building models of {task}, once: {', '.join(missing)} (weights are downloaded) …")
        # Imported here because it needs packages that only builders install.
        from hawkvision.model_zoo.building.build import build

        build(task, missing, models=models, cache=cache)


@contextmanager
def both_tiers(
    options: UpOptions, environ: Mapping[str, str], say: Callable[[str], None]
) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Run the datacenter tier and an edge node until the block ends, and show their output.

    A slow machine has the time that it takes: the tier reports a start that is not over.

    Raises:
        NotReady: if one ends before it is ready.
    """
    # `auto` also works in containers without namespaces.
    network = {"HAWKVISION_DC_RAY_NETWORK": environ.get("HAWKVISION_DC_RAY_NETWORK", "auto")}
    say("starting the datacenter tier (Ray Serve) …")
    with running(
        "hawkvision.datacenter",
        *options.words(options.datacenter()),
        title="the datacenter tier",
        env=network,
        on_line=prefixed("datacenter"),
        own_group=True,
        within_s=None,
    ) as datacenter:
        say("starting the edge node …")
        with running(
            "edge",
            *options.words({**options.edge(), "datacenter_url": datacenter.url}),
            title="the edge node",
            on_line=prefixed("edge"),
            own_group=True,
            within_s=None,
        ) as edge:
            yield datacenter, edge


def first_whole_answer(
    client: Client, image: Path, tiers: tuple[ServerProcess, ...], task: str | None = None
) -> Answer:
    """Wait for an answer of the best quality that is not degraded, which shows that both tiers work together.

    Raises:
        NotReady: if there is none within `WHOLE_S`.
        BackendError: if a tier ends meanwhile.
    """
    until = time.monotonic() + WHOLE_S
    while True:
        answer = client.infer(image, quality="best", task=task)
        if answer.tier is Tier.DATACENTER and not answer.degraded:
            return answer
        check_running(tiers)
        if time.monotonic() > until:
            raise NotReady(f"answers of the best quality were degraded for {WHOLE_S:g} s; the lines above say why")
        time.sleep(WATCH_S)


def watch(tiers: tuple[ServerProcess, ...]) -> None:
    """Wait while all servers run.

    Raises:
        BackendError: naming the one that ended.
    """
    while True:
        check_running(tiers)
        time.sleep(WATCH_S)


def check_running(tiers: tuple[ServerProcess, ...]) -> None:
    """Check that all servers run.

    Raises:
        BackendError: naming the one that ended.
    """
    for tier in tiers:
        status = tier.process.poll()
        if status is not None:
            raise BackendError(f"{tier.title} ended by itself with status {status}; its output is above")


def prefixed(name: str) -> Callable[[str], None]:
    """Show the output of a tier on standard error, each line with the tier's name."""

    def show(line: str) -> None:
        sys.stderr.write(f"{name:<10} | {line}\n")
        sys.stderr.flush()

    return show


def curl_line(url: str, image: Path, authority: Path | None, environ: Mapping[str, str], *, keyed: bool) -> str:
    """A request as a shell command."""
    words = ["curl", "--silent", "--data-binary", f"@{image}", url]
    if authority is not None:
        words[1:1] = ["--cacert", str(authority)]
    written = shlex.join(words)
    if keyed:
        variable = next((name for name in KEY_VARIABLES if environ.get(name)), KEY_VARIABLES[1])
        written += f' --header "Authorization: Bearer ${variable}"'
    return written


def _key(config: EdgeConfig, environ: Mapping[str, str]) -> str | None:
    """The key for requests, if one is needed.

    Raises:
        ConfigError: if one is needed and nobody says it.
    """
    key = config.api_key or environ.get("HAWKVISION_API_KEY")
    if key is None and config.keys_file is not None:
        raise ConfigError(
            "the edge node asks for a key of edge.keys_file: set HAWKVISION_API_KEY to one that allows `infer`"
        )
    return key


def _is_built(manifest: Manifest, stage: str, cache: Path) -> bool:
    try:
        for variant in manifest.members(stage):
            load_variant(cache, manifest.task, variant)
    except ArtifactError:
        return False
    return True


def _asked(url: str, image: Path, key: str | None, authority: Path | None) -> str:
    """The response to the request of `curl_line`, unparsed.

    Raises:
        BackendError: if there is none.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, image.read_bytes(), headers)  # noqa: S310 - the node of this command
    context = None if authority is None else ssl.create_default_context(cafile=str(authority))
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_S, context=context) as reply:  # noqa: S310
            answer: bytes = reply.read()
    except urllib.error.URLError as error:
        raise BackendError(f"{url}: {error}") from None
    return answer.decode()
