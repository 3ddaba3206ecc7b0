"""The settings of the edge node and of the datacenter tier, declared: types, defaults and descriptions.

`Meta.description` says what a setting is for: `--help` shows the first sentence, the reference pages all of it. Every
setting has a default. `hawkvision.core.settings.load` reads them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta

from hawkvision.core.logs import LogFormat, LogLevel
from hawkvision.core.settings.access import MinimumVersion
from hawkvision.core.settings.package_settings import HAWKVISION, ServerSettings

Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
Key: TypeAlias = Annotated[str, Meta(min_length=1)]
"""A secret. An empty one is an error, because an unset variable in a template must not open the server to everybody."""
Memory: TypeAlias = Annotated[int, Meta(ge=32 * 1024 * 1024)]
"""Bytes. Less does not suffice to decode an image."""
Word: TypeAlias = Annotated[str, Meta(min_length=1)]
EdgeBackend: TypeAlias = Literal[
    "auto", "int8", "onnxruntime", "noop", "fpga-ref", "fpga-sim", "fpga-device", "fpga-offload"
]
Seconds: TypeAlias = Annotated[float, Meta(gt=0.0, le=86_400.0)]
Millis: TypeAlias = Annotated[float, Meta(gt=0.0, le=3_600_000.0)]


def topic(title: str) -> Callable[..., Meta]:
    """Makes the `Meta` of a setting of this topic, from its description and bounds."""

    def described(description: str, **bounds: Any) -> Meta:
        return Meta(title=title, description=description, **bounds)

    return described


LISTENING: Final = topic("Listening")
CALLERS: Final = topic("Who may call")
MODEL: Final = topic("Model")
IMAGES: Final = topic("Limits on images")
LOGS: Final = topic("Logs")
QUEUES: Final = topic("Threads and queues")
TIER: Final = topic("Datacenter")
GUARANTEES: Final = topic("Guarantees")
POLICY: Final = topic("Policy")
REPLICAS: Final = topic("Replicas and batches")
INGRESS: Final = topic("Ingress")
RAY: Final = topic("Ray")


# fmt: off
class ServerConfig(ServerSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings that both servers have, with the same meaning."""

    host: Annotated[str, LISTENING("Address to listen on. Beyond loopback, keys and TLS are required.")] = "127.0.0.1"
    max_body_bytes: Annotated[int, LISTENING(
        "Longest request body, in bytes; longer ones are refused with 413.", ge=1)] = 10 * 1024 * 1024
    connections_per_address: Annotated[int, LISTENING(
        "Most HTTP connections from one address (IPv6: one /64 network), at most half of all; 0 for no bound. Loopback "
        "is exempt. Set 0 behind a proxy on another machine, because all callers then share its address. In a cluster "
        "Serve's own proxies take the connections.", ge=0)] = 512
    api_key: Annotated[Key | None, CALLERS(
        "A key that callers must send (`Authorization: Bearer …`); it allows everything. This or `keys_file` is "
        "required when `host` is not loopback.")] = None
    keys_file: Annotated[Path | None, CALLERS(
        "File of callers' keys with names, scopes and optional rates, written by `hawkvision keys add`. Read again "
        "when it changes.")] = None
    tls_certificate: Annotated[Path | None, CALLERS(
        "PEM file of the certificate chain, leaf first; HTTP is then served over TLS only. Read again when it "
        "changes.")] = None
    tls_key: Annotated[Path | None, CALLERS("PEM file of the certificate's private key, unencrypted.")] = None
    tls_minimum_version: Annotated[MinimumVersion, CALLERS("The oldest TLS version that callers may use.")] = "1.2"
    tls_client_ca: Annotated[Path | None, CALLERS(
        "PEM file of authorities for callers' certificates. Without it, callers need no certificate.")] = None
    allow_plain_http: Annotated[bool, CALLERS(
        "Serve HTTP without TLS beyond loopback, behind a proxy that ends TLS or on a private network.")] = False
    onnx_providers: Annotated[tuple[Word, ...], MODEL(
        "ONNX Runtime execution providers in order of preference, such as `TensorrtExecutionProvider`, "
        "`CUDAExecutionProvider`, `CPUExecutionProvider`. Each takes the layers that those before it cannot run. One "
        "that is not installed or does not start is an error; so are layers that only the CPU can run, unless it is "
        "named.")] = ("CPUExecutionProvider",)
    onnx_precision: Annotated[Literal["model", "fp16"], MODEL(
        "Precision of the layers in ONNX Runtime: that of the model files, or half precision (`fp16`) for float "
        "models on a GPU. Answers in half precision are `best_effort`."
    )] = "model"
    models_dir: Annotated[Path | None, MODEL(
        "Folder of manifests, labels and profiles, one folder per task. Default: those that come with HawkVision, and "
        "the user's own below `~/.local/share/hawkvision/models`.")] = None
    cache_dir: Annotated[Path | None, MODEL(
        "Folder of built models and compiled kernels. Default: `$XDG_CACHE_HOME/hawkvision` (`~/.cache/hawkvision`)."
    )] = None
    intra_op_threads: Annotated[int, MODEL(
        "CPU threads of a model for one image while no other is processed; otherwise each image has one. 0: an edge "
        "node tries 2 and 4 at its start, if there are as many cores, and takes the fastest; a datacenter tier takes "
        "two. On a datacenter tier `num_cpus` bounds all of them.", ge=0, le=64)] = 0
    max_pixels: Annotated[int, IMAGES(
        "Most pixels of an image, by its header; larger ones are refused with 413.", ge=1)] = 50_000_000
    max_pixels_whole: Annotated[int, IMAGES(
        "Most pixels of an image in a format that cannot be decoded at a smaller size (all but JPEG). A PNG of 25 MP "
        "takes 150 MB.", ge=1)] = 25_000_000
    memory_bytes: Annotated[Memory | None, IMAGES(
        "Memory for decoding, in bytes: of an edge node with request bodies, in equal parts for several tasks; of "
        "each replica of a datacenter tier. Default: three quarters of what the process may still use when its models "
        "are loaded, cgroup limits included; on a datacenter tier, divided by `max_replicas`.")] = None
    request_memory_bytes: Annotated[Memory | None, IMAGES(
        "Memory for decoding the images of one request, in bytes. Default: half of what `memory_bytes` leaves for "
        "decoding.")] = None
    log_level: Annotated[LogLevel, LOGS(
        "Lowest level of our own log lines. Other libraries log from `warning` on, or from `info` with `debug`."
    )] = "info"
    log_format: Annotated[LogFormat, LOGS("`text` for people; `json` for programs, one object per line.")] = "text"


class EdgeConfig(ServerConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An edge node. File section `[edge]`, variables `HAWKVISION_EDGE_*`."""

    port: Annotated[Port, LISTENING("TCP port to listen on; 0 takes a free one.")] = 8080
    cors_origins: Annotated[tuple[Word, ...], LISTENING(
        "Origins whose pages may call this node from a browser, such as `https://shop.example`; `*` for all.")] = ()
    page: Annotated[bool, LISTENING("Serve the page at `/`: try, live and review.")] = True
    hosts: Annotated[tuple[Word, ...], LISTENING(
        "Names by which browsers reach this node, besides `localhost` and the machine's own. The page, and every "
        "request to a node without keys, is refused under other names (DNS rebinding).")] = ()
    drain_timeout_s: Annotated[Seconds, LISTENING(
        "Seconds to finish accepted requests when the node is stopped.")] = 20.0
    task: Annotated[Word, MODEL("The task to serve: a folder with a manifest in `models_dir`.")] = "imagenet"
    tasks: Annotated[tuple[Word, ...], MODEL(
        "Several tasks to serve at once, in place of `task`. The first answers requests that name no task. They share "
        "`max_queue` and `memory_bytes` in equal parts; each has its own workers, certificates and streams. A task "
        "that cannot be loaded does not take the others down.")] = ()
    task_settings: Annotated[tuple[Word, ...], MODEL(
        "Settings of single tasks, each as `TASK.SETTING=VALUE`, such as `pets.variant=small`. They override the "
        "node's own for that task.")] = ()
    model_memory_bytes: Annotated[int, MODEL(
        "Memory for the models of all tasks, in bytes. Where they do not fit, tasks are loaded when they are asked "
        "for, and the least recently used ones are unloaded. Default: three quarters of what the process may use at "
        "its start, cgroup limits included.", ge=1)] | None = None
    pinned_tasks: Annotated[tuple[Word, ...], MODEL(
        "Tasks whose models are never unloaded.")] = ()
    variant: Annotated[Word | None, MODEL(
        "The edge stage: a variant or ensemble of the manifest. Default: the manifest's `cascade.default_edge`, or "
        "`cascade.fpga` with an FPGA.")] = None
    backend: Annotated[EdgeBackend, MODEL(
        "What runs the model. `auto` takes the `int8` kernels for models and processors that they support, else ONNX "
        "Runtime, which gives the same outputs. The last four run a quantised variant: on the CPU with a device's "
        "arithmetic, as simulated RTL, on a device, and on a device with the CPU taking what the device cannot "
        "(`fpga/backends/offload.py`).")] = "auto"
    profile: Annotated[Path | None, MODEL(
        "A profile made by `hawkvision calibrate`. Default: `<models_dir>/<task>/profile.json`.")] = None
    certificates: Annotated[Path | None, MODEL(
        "This site's own certificates, made by `hawkvision certify`; they replace those of the profile.")] = None
    allow_worse_reference: Annotated[bool, MODEL(
        "Start although the datacenter's reference stage is measurably worse than a stage below it, by the profile."
    )] = False
    workers: Annotated[int, QUEUES(
        "Threads that decode and infer, one image each; 0 takes the number of usable cores. With `fpga-offload`, 0 "
        "adds 16 threads that wait for the device.", ge=0, le=1024)] = 0
    max_queue: Annotated[Count, QUEUES(
        "Requests that may wait for a worker; further ones are refused with 429. Several tasks have an equal part "
        "each.")] = 256
    datacenter_url: Annotated[str | None, TIER(
        "Address of the datacenter tier, `http://HOST[:PORT][/PATH]` or https; the path is `dc.route_prefix`. Without "
        "it the node answers alone.")] = None
    datacenter_api_key: Annotated[Key | None, TIER(
        "The key that the datacenter tier asks for; it must allow `infer`.")] = None
    datacenter_ca: Annotated[Path | None, TIER(
        "PEM file of the authorities for the datacenter's certificate. Default: the system's.")] = None
    datacenter_certificate: Annotated[Path | None, TIER(
        "PEM file of this node's own certificate, for a datacenter tier that asks for one.")] = None
    datacenter_key: Annotated[Path | None, TIER(
        "PEM file of the private key of `datacenter_certificate`, unencrypted.")] = None
    datacenter_transport: Annotated[Literal["tcp", "datagram", "auto"], TIER(
        "Transport to the datacenter: HTTP (`tcp`), datagrams (`datagram`), or datagrams while the link loses packets "
        "or HTTP is too slow for deadlines (`auto`). Datagrams need `dc.datagram_port` there.")] = "tcp"
    min_on_time_probability: Annotated[float, TIER(
        "A request with a deadline waits for the datacenter while a reply in time is at least this likely; 0 waits "
        "until the deadline. Its image leaves before the edge stage ends where that makes an answer in time more "
        "likely by at least as much.", ge=0.0, lt=1.0)] = 0.05
    uplink_metered: Annotated[bool, TIER(
        "Bytes to the datacenter cost money: no image leaves before the edge stage has ended, unless the edge cannot "
        "take it.")] = False
    audit_share: Annotated[float, GUARANTEES(
        "Share of images that the reference stage answers too, in the background, to monitor guarantees: up to 0.2 on "
        "suspicion, 0 for none. Without audits, answers from lower stages are not certified.", ge=0.0, le=0.2)] = 0.02
    certificate_max_age_days: Annotated[float, GUARANTEES(
        "Age of the newest image behind a site's certificates from which on nothing is certified by them "
        "(`status_reason: expired`). Shipped certificates have no age.", gt=0.0)] = 90.0
    state_file: Annotated[Path | None, GUARANTEES(
        "SQLite file that keeps the state of streams across restarts. Default: one per task and address below "
        "`$XDG_STATE_HOME/hawkvision` (`~/.local/state/hawkvision`), unless `port` is 0.")] = None
    review_max_bytes: Annotated[int, GUARANTEES(
        "Bytes of the images that are kept for people to label (`/v1/review`): of audits in which the stages differ, "
        "and of a few drawn at random. They lie beside `state_file`, for this user only; the oldest leave first. While "
        "somebody watches (`/v1/status`), as many of the last images are in memory. 0 keeps none.", ge=0)] = 0
    review_max_days: Annotated[float, GUARANTEES(
        "Days after which such an image is deleted; 0 keeps none.", ge=0.0, le=365.0)] = 0.0
    max_streams: Annotated[Count, GUARANTEES(
        "Streams and callers kept in memory, 1 to 10 kB each; the least recently used makes room. As many more are "
        "kept that are suspended.")] = 4096
    policy: Annotated[Word, POLICY(
        "The policy that decides where an image is answered. Others than `hawkvision` come with packages that name "
        "them by an entry point of `hawkvision.policies`; they certify nothing.")] = HAWKVISION


class DatacenterConfig(ServerConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A datacenter tier. File section `[dc]`, variables `HAWKVISION_DC_*`."""

    port: Annotated[Port, LISTENING("TCP port to listen on; 0 takes a free one.")] = 8090
    route_prefix: Annotated[str, LISTENING(
        "Path below which the tier answers, such as `/vision`, for example beside other applications of a cluster. "
        "Edge nodes add it to `datacenter_url`.")] = "/"
    tasks: Annotated[tuple[Word, ...], MODEL(
        "The tasks to serve: folders with a manifest in `models_dir`. The first answers requests that name no task. "
        "Each has its own part of the admission limit. A task that cannot be loaded does not take the others down.",
        min_length=1)] = ("imagenet",)
    variants: Annotated[tuple[Word, ...], MODEL(
        "The stages to serve: variants and ensembles of the manifest, with several tasks each as `TASK:STAGE`. "
        "Default: each manifest's `cascade.dc`.")] = ()
    backend: Annotated[Word, MODEL(
        "What runs the models: auto, int8, onnxruntime or noop. `auto` takes the `int8` kernels for models and "
        "processors that they support, else ONNX Runtime, which gives the same outputs. Packages add backends by an "
        "entry point of `hawkvision.backends`; they certify nothing.")] = "auto"
    min_replicas: Annotated[int, REPLICAS(
        "Fewest replicas of each deployment. `dc deploy` to several machines takes 2 by default.", ge=0, le=1024)] = 1
    max_replicas: Annotated[Count, REPLICAS(
        "Most replicas of each deployment; Ray Serve scales between `min_replicas` and this. `dc deploy` to several "
        "machines takes 2 by default.")] = 1
    target_ongoing_requests: Annotated[float, REPLICAS(
        "Ongoing requests per replica that Ray Serve scales for; at most `max_ongoing_requests`.", gt=0.0)] = 4.0
    max_replicas_per_node: Annotated[int, REPLICAS(
        "Most replicas of one deployment on one machine. Default: as many as fit; with `dc deploy`, as few as the "
        "number of machines allows.", ge=1, le=100)] | None = None
    num_cpus: Annotated[float, REPLICAS(
        "Cores that Ray reserves for each replica, which uses no more threads than that to decode and to infer. "
        "Default: the threads that the group's models can use; with `dc deploy`, no more than the machines have.",
        gt=0.0)] | None = None
    num_gpus: Annotated[float, REPLICAS("Ray's reservation of GPUs per replica.", ge=0.0)] = 0.0
    max_batch_size: Annotated[int, REPLICAS(
        "Most images in one batch. 0 takes 8 on a CPU; with other execution providers each replica measures at its "
        "start which sizes pay, up to 64.", ge=0, le=1_000_000)] = 0
    max_ongoing_requests: Annotated[Count, REPLICAS("Most ongoing requests of one replica.")] = 32
    max_queued_requests: Annotated[int, REPLICAS(
        "Requests that may wait for a replica; further ones are refused with 429; -1 for no bound.", ge=-1)] = 128
    ingress_min_replicas: Annotated[Count, INGRESS(
        "Fewest replicas of the ingress, which takes requests. On one machine there are always this many. `dc deploy` "
        "to several machines takes 2 by default.")] = 1
    ingress_max_replicas: Annotated[Count, INGRESS(
        "Most replicas of the ingress in a cluster; Ray Serve scales between `ingress_min_replicas` and this. "
        "`dc deploy` to several machines takes 2 by default.")] = 1
    survives_head: Annotated[bool, RAY(
        "Whether Ray's head keeps its state in Redis, so that a cluster outlives a head that is restarted. If not, "
        "readiness ends within 5 s after the head is gone, because Ray will end all replicas.")] = False
    app_name: Annotated[str, RAY(
        "Name of the Ray Serve application. Two tiers on one cluster need different names and route prefixes."
    )] = "hawkvision"
    address: Annotated[Word | None, RAY(
        "An existing Ray cluster (`auto`, HOST:PORT or ray://HOST:PORT). Default: Ray is started on this machine."
    )] = None
    ray_network: Annotated[Literal["private", "auto", "shared"], RAY(
        "The network of Ray's own ports: a network namespace (`private`), this machine's (`shared`), or what the "
        "kernel allows (`auto`). With `shared` they are on loopback, except one port of each replica, which requires "
        "a token.")] = "private"
# fmt: on


def default_state_file(config: EdgeConfig) -> Path | None:
    """The default of `state_file`: one file per task and address below `$XDG_STATE_HOME`.

    None if a restarted node could not find it again: with `port` 0, or another policy.

    Raises:
        RuntimeError: if this user has no home folder.
    """
    if config.policy != HAWKVISION or config.port == 0:
        return None
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return home / "hawkvision" / f"edge-{config.task}-{config.host.replace(':', '_')}-{config.port}.sqlite3"
