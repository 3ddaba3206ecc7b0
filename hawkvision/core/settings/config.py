"""The settings of the edge node and of the datacenter tier, declared: types, defaults and descriptions.

Every setting has a default. `hawkvision.core.settings.load` reads them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

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
Seconds: TypeAlias = Annotated[float, Meta(gt=0.0, le=86_400.0)]
Millis: TypeAlias = Annotated[float, Meta(gt=0.0, le=3_600_000.0)]


class EdgeConfig(ServerSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An edge node. File section `[edge]`, variables `HAWKVISION_EDGE_*`.

    A comment `# == Topic ==` begins a topic, and the text below a setting describes it. `--help` shows the first
    sentence, the reference pages all of it (`hawkvision.core.settings.descriptions`).
    """

    # == Listening ==
    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback, keys and TLS are required."""
    port: Port = 8080
    """TCP port to listen on; 0 takes a free one."""
    max_body_bytes: Annotated[int, Meta(ge=1)] = 10 * 1024 * 1024
    """Longest request body, in bytes; longer ones are refused with 413."""
    connections_per_address: Annotated[int, Meta(ge=0)] = 512
    """Most HTTP connections from one address (IPv6: one /64 network), at most half of all; 0 for no bound. Loopback
    is exempt. Set 0 behind a proxy on another machine, because all callers then share its address."""
    cors_origins: tuple[Word, ...] = ()
    """Origins whose pages may call this node from a browser, such as `https://shop.example`; `*` for all."""
    drain_timeout_s: Seconds = 20.0
    """Seconds to finish accepted requests when the node is stopped."""

    # == Who may call ==
    api_key: Key | None = None
    """A key that callers must send (`Authorization: Bearer …`); it allows everything. This or `keys_file` is required
    when `host` is not loopback."""
    keys_file: Path | None = None
    """File of callers' keys with names, scopes and optional rates, written by `hawkvision keys add`. Read again when it
    changes."""
    tls_certificate: Path | None = None
    """PEM file of the certificate chain, leaf first; HTTP is then served over TLS only. Read again when it changes."""
    tls_key: Path | None = None
    """PEM file of the certificate's private key, unencrypted."""
    tls_minimum_version: MinimumVersion = "1.2"
    """The oldest TLS version that callers may use."""
    tls_client_ca: Path | None = None
    """PEM file of authorities for callers' certificates. Without it, callers need no certificate."""
    allow_plain_http: bool = False
    """Serve HTTP without TLS beyond loopback, behind a proxy that ends TLS or on a private network."""

    # == Model ==
    task: Word = "imagenet"
    """The task to serve: a folder with a manifest in `models_dir`."""
    tasks: tuple[Word, ...] = ()
    """Several tasks to serve at once, in place of `task`. The first answers requests that name no task. They share
    `max_queue` and `memory_bytes` in equal parts; each has its own workers, certificates and streams. A task that
    cannot be loaded does not take the others down."""
    task_settings: tuple[Word, ...] = ()
    """Settings of single tasks, each as `TASK.SETTING=VALUE`, such as `pets.variant=small`. They override the node's
    own for that task."""
    variant: Word | None = None
    """The edge stage: a variant or ensemble of the manifest. Default: the manifest's `cascade.default_edge`, or
    `cascade.fpga` with an FPGA."""
    backend: Literal[
        "auto",
        "int8",
        "onnxruntime",
        "noop",
        "fpga-ref",
        "fpga-sim",
        "fpga-device",
        "fpga-offload",
    ] = "auto"
    """What runs the model. `auto` takes the `int8` kernels for models and processors that they support, else ONNX
    Runtime, which gives the same logits. The last four run a quantised variant: on the CPU with a device's arithmetic,
    as simulated RTL, on a device, and on a device with the CPU taking what the device cannot (`fpga/offload`)."""
    onnx_providers: tuple[Word, ...] = ("CPUExecutionProvider",)
    """ONNX Runtime execution providers in order of preference, such as `TensorrtExecutionProvider`,
    `CUDAExecutionProvider`, `CPUExecutionProvider`. Each takes the layers that those before it cannot run. One that is
    not installed or does not start is an error; so are layers that only the CPU can run, unless it is named."""
    onnx_precision: Literal["model", "fp16"] = "model"
    """Precision of the layers in ONNX Runtime: that of the model files, or half precision (`fp16`) for float models on
    a GPU. Answers in half precision are certified once `hawkvision models equivalence` has passed."""
    models_dir: Path | None = None
    """Folder of manifests, labels and profiles, one folder per task. Default: those that come
    with HawkVision, and the user's own below `~/.local/share/hawkvision/models`."""
    cache_dir: Path | None = None
    """Folder of built models and compiled kernels. Default: `$XDG_CACHE_HOME/hawkvision` (`~/.cache/hawkvision`)."""
    profile: Path | None = None
    """A profile made by `hawkvision calibrate`. Default: `<models_dir>/<task>/profile.json`."""
    certificates: Path | None = None
    """This site's own certificates, made by `hawkvision certify`; they replace those of the profile."""
    equivalences: Path | None = None
    """Passed checks of other executions, made by `hawkvision models equivalence`. Default: a file in the cache."""

    # == Threads and queues ==
    workers: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Threads that decode and infer, one image each; 0 takes the number of usable cores. With `fpga-offload`, 0 adds 16
    threads that wait for the device."""
    intra_op_threads: Annotated[int, Meta(ge=0, le=64)] = 0
    """Threads for one image while no other image is processed; otherwise each image has one. 0 tries 2 and 4 at the
    start, if there are as many cores, and takes the fastest."""
    max_queue: Count = 256
    """Requests that may wait for a worker; further ones are refused with 429. Several tasks have an equal part each."""

    # == Limits on images ==
    max_pixels: Annotated[int, Meta(ge=1)] = 50_000_000
    """Most pixels of an image, by its header; larger ones are refused with 413."""
    max_pixels_whole: Annotated[int, Meta(ge=1)] = 25_000_000
    """Most pixels of an image in a format that cannot be decoded at a smaller size (all but JPEG). A PNG of 25 MP takes
    150 MB."""
    memory_bytes: Memory | None = None
    """Memory for bodies and decoding together, in bytes. Several tasks have an equal part each. Default: three quarters
    of what the process may still use when its models are loaded, cgroup limits included."""
    request_memory_bytes: Memory | None = None
    """Memory for decoding the images of one request, in bytes. Default: half of decoding's part of `memory_bytes`."""
    decode_limit_s: Seconds = 10.0
    """Most expected seconds of decoding: of one request (else 413), and of all that wait, per worker (else 429). Images
    that take less than 30 ms are not counted."""

    # == Datacenter ==
    datacenter_url: str | None = None
    """Address of the datacenter tier, `http://HOST[:PORT][/PATH]` or https; the path is `dc.route_prefix`. Without it
    the node answers alone."""
    datacenter_api_key: Key | None = None
    """The key that the datacenter tier asks for; it must allow `infer`."""
    datacenter_ca: Path | None = None
    """PEM file of the authorities for the datacenter's certificate. Default: the system's."""
    datacenter_certificate: Path | None = None
    """PEM file of this node's own certificate, for a datacenter tier that asks for one."""
    datacenter_key: Path | None = None
    """PEM file of the private key of `datacenter_certificate`, unencrypted."""
    datacenter_transport: Literal["tcp", "datagram", "auto"] = "tcp"
    """Transport to the datacenter: HTTP (`tcp`), datagrams (`datagram`), or datagrams while the link loses packets
    (`auto`). Datagrams need `dc.datagram_port` there."""
    datacenter_connections: Count = 32
    """Most HTTP connections to the datacenter; further escalations wait for a free one."""
    datacenter_timeout_s: Seconds = 10.0
    """Longest wait for the datacenter, in seconds, for requests without a deadline."""
    min_on_time_probability: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.05
    """A request with a deadline waits for the datacenter while a reply in time is at least this likely; 0 waits until
    the deadline."""

    # == Guarantees ==
    audit_share: Annotated[float, Meta(ge=0.0, le=0.2)] = 0.02
    """Share of images that the reference stage answers too, in the background, to monitor guarantees; 0 for none.
    Without audits, answers from lower stages are not certified."""
    state_file: Path | None = None
    """SQLite file that keeps the state of streams across restarts. Default: one per task and address below
    `$XDG_STATE_HOME/hawkvision` (`~/.local/state/hawkvision`), unless `port` is 0."""
    max_streams: Count = 4096
    """Streams kept in memory, 1 to 10 kB each; the least recently used makes room."""

    # == Policy ==
    policy: Word = HAWKVISION
    """The policy that decides where an image is answered. Others than `hawkvision` come with packages that name them
    by an entry point of `hawkvision.policies`; they certify nothing."""

    # == Logs ==
    log_level: LogLevel = "info"
    """Lowest level of our own log lines. Other libraries log from `warning` on, or from `info` with `debug`."""
    log_format: LogFormat = "text"
    """`text` for people; `json` for programs, one object per line."""


class DatacenterConfig(ServerSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A datacenter tier. File section `[dc]`, variables `HAWKVISION_DC_*`. Described as `EdgeConfig` is."""

    # == Listening ==
    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback, keys and TLS are required."""
    port: Port = 8090
    """TCP port to listen on; 0 takes a free one."""
    route_prefix: str = "/"
    """Path below which the tier answers, such as `/vision`, for example beside other applications of a cluster. Edge
    nodes add it to `datacenter_url`."""
    max_body_bytes: Annotated[int, Meta(ge=1)] = 10 * 1024 * 1024
    """Longest request body, in bytes; longer ones are refused with 413."""
    connections_per_address: Annotated[int, Meta(ge=0)] = 512
    """Most HTTP connections from one address (IPv6: one /64 network), at most half of all; 0 for no bound. An edge
    node has up to `edge.datacenter_connections`. Not for clusters, where Serve's own proxies take the connections."""

    # == Who may call ==
    api_key: Key | None = None
    """A key that callers must send (`Authorization: Bearer …`); it allows everything. This or `keys_file` is required
    when `host` is not loopback."""
    keys_file: Path | None = None
    """File of callers' keys with names, scopes and optional rates, written by `hawkvision keys add`. Read again when it
    changes."""
    tls_certificate: Path | None = None
    """PEM file of the certificate chain, leaf first; HTTP is then served over TLS only. Read again when it changes."""
    tls_key: Path | None = None
    """PEM file of the certificate's private key, unencrypted."""
    tls_minimum_version: MinimumVersion = "1.2"
    """The oldest TLS version that callers may use."""
    tls_client_ca: Path | None = None
    """PEM file of authorities for callers' certificates. Without it, callers need no certificate."""
    allow_plain_http: bool = False
    """Serve HTTP without TLS beyond loopback, behind a proxy that ends TLS or on a private network."""

    # == Models ==
    tasks: Annotated[tuple[Word, ...], Meta(min_length=1)] = ("imagenet",)
    """The tasks to serve: folders with a manifest in `models_dir`. The first answers requests that name no task. Each
    has its own part of the admission limit. A task that cannot be loaded does not take the others down."""
    variants: tuple[Word, ...] = ()
    """The stages to serve: variants and ensembles of the manifest, with several tasks each as `TASK:STAGE`. Default:
    each manifest's `cascade.dc`."""
    backend: Word = "auto"
    """What runs the models: auto, int8, onnxruntime or noop. `auto` takes the `int8` kernels for models and processors
    that they support, else ONNX Runtime, which gives the same logits. Packages add backends by an entry point of
    `hawkvision.backends`; they certify nothing."""
    onnx_providers: tuple[Word, ...] = ("CPUExecutionProvider",)
    """ONNX Runtime execution providers in order of preference, such as `TensorrtExecutionProvider`,
    `CUDAExecutionProvider`, `CPUExecutionProvider`. Each takes the layers that those before it cannot run. One that is
    not installed or does not start is an error; so are layers that only the CPU can run, unless it is named."""
    onnx_precision: Literal["model", "fp16"] = "model"
    """Precision of the layers in ONNX Runtime: that of the model files, or half precision (`fp16`) for float models on
    a GPU. Answers in half precision are certified once `hawkvision models equivalence` has passed."""
    models_dir: Path | None = None
    """Folder of manifests, labels and profiles, one folder per task. Default: those that come
    with HawkVision, and the user's own below `~/.local/share/hawkvision/models`."""
    cache_dir: Path | None = None
    """Folder of built models and compiled kernels. Default: `$XDG_CACHE_HOME/hawkvision` (`~/.cache/hawkvision`)."""

    # == Replicas and batches ==
    min_replicas: Annotated[int, Meta(ge=0, le=1024)] = 1
    """Fewest replicas of each deployment."""
    max_replicas: Count = 1
    """Most replicas of each deployment; Ray Serve scales between `min_replicas` and this."""
    target_ongoing_requests: Annotated[float, Meta(gt=0.0)] = 4.0
    """Ongoing requests per replica that Ray Serve scales for; at most `max_ongoing_requests`."""
    scale_up_after_s: Annotated[float, Meta(ge=0.0, le=86_400.0)] = 30.0
    """Seconds for which a deployment must need more replicas before it gets them."""
    scale_down_after_s: Annotated[float, Meta(ge=0.0, le=86_400.0)] = 600.0
    """Seconds for which a deployment must need fewer replicas before it loses them."""
    max_replicas_per_node: Annotated[int, Meta(ge=1, le=100)] | None = None
    """Most replicas of one deployment on one machine. Default: as many as fit."""
    num_cpus: Annotated[float, Meta(gt=0.0)] | None = None
    """Cores that Ray reserves for each replica, which uses no more threads than that to decode and to infer. Default:
    the threads that the group's models can use."""
    num_gpus: Annotated[float, Meta(ge=0.0)] = 0.0
    """Ray's reservation of GPUs per replica."""
    intra_op_threads: Annotated[int, Meta(ge=0, le=64)] = 0
    """CPU threads of a model for a single image; 0 takes two if there are two cores. Batches, and members of an
    ensemble that run in parallel, have one thread each. `num_cpus` bounds all of them."""
    max_batch_size: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Most images in one batch. 0 takes 8 on a CPU; with other execution providers each replica measures at its start
    which sizes pay, up to 64."""
    batch_wait_ms: Annotated[float, Meta(ge=0.0, le=1000.0)] = 0.0
    """Milliseconds that an idle model waits for more images. Batches form while a model is busy, so 0 is quickest at
    every load."""
    max_ongoing_requests: Count = 32
    """Most ongoing requests of one replica."""
    max_queued_requests: Annotated[int, Meta(ge=-1)] = 128
    """Requests that may wait for a replica; further ones are refused with 429; -1 for no bound."""

    # == Limits on images ==
    max_pixels: Annotated[int, Meta(ge=1)] = 50_000_000
    """Most pixels of an image, by its header; larger ones are refused with 413."""
    max_pixels_whole: Annotated[int, Meta(ge=1)] = 25_000_000
    """Most pixels of an image in a format that cannot be decoded at a smaller size (all but JPEG). A PNG of 25 MP takes
    150 MB."""
    memory_bytes: Memory | None = None
    """Memory for decoding in each replica, in bytes. Default: three quarters of what its process may still use when its
    models are loaded, cgroup limits included, divided by `max_replicas`."""
    request_memory_bytes: Memory | None = None
    """Memory for decoding one image, in bytes. Default: half of `memory_bytes`."""

    # == Ingress ==
    ingress_min_replicas: Count = 1
    """Fewest replicas of the ingress, which takes requests. On one machine there are always this many."""
    ingress_max_replicas: Count = 1
    """Most replicas of the ingress in a cluster; Ray Serve scales between `ingress_min_replicas` and this."""
    ingress_target_ongoing_requests: Annotated[float, Meta(gt=0.0)] = 64.0
    """Ongoing requests per ingress replica that Ray Serve scales for."""
    ingress_num_cpus: Annotated[float, Meta(gt=0.0)] = 1.0
    """Ray's reservation of cores per ingress replica, which has one busy thread."""

    # == Ray ==
    survives_head: bool = False
    """Whether Ray's head keeps its state in Redis, so that a cluster outlives a head that is restarted. If not,
    readiness ends within 5 s after the head is gone, because Ray will end all replicas."""
    app_name: str = "hawkvision"
    """Name of the Ray Serve application. Two tiers on one cluster need different names and route prefixes."""
    address: Word | None = None
    """An existing Ray cluster (`auto`, HOST:PORT or ray://HOST:PORT). Default: Ray is started on this machine."""
    deploy_timeout_s: Seconds = 600.0
    """Seconds that `dc deploy` waits until each stage has a replica. The cluster goes on if they pass."""
    ray_network: Literal["private", "auto", "shared"] = "private"
    """The network of Ray's own ports: a network namespace (`private`), this machine's (`shared`), or what the kernel
    allows (`auto`). With `shared` they are on loopback, except one port of each replica, which requires a token."""

    # == Logs ==
    log_level: LogLevel = "info"
    """Lowest level of our own log lines. Other libraries log from `warning` on, or from `info` with `debug`."""
    log_format: LogFormat = "text"
    """`text` for people; `json` for programs, one object per line."""


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
