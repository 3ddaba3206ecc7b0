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
from hawkvision.core.settings.features import HAWKVISION, ServerSettings

Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
Key: TypeAlias = Annotated[str, Meta(min_length=1)]
"""A secret. An empty one is an error: a variable left unset in a template must not open the server to everybody."""
Memory: TypeAlias = Annotated[int, Meta(ge=32 * 1024 * 1024)]
"""Bytes; with less, hardly an image can be decoded."""
Word: TypeAlias = Annotated[str, Meta(min_length=1)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0.0, le=86_400.0)]
Millis: TypeAlias = Annotated[float, Meta(gt=0.0, le=3_600_000.0)]


class EdgeConfig(ServerSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An edge node. File section `[edge]`, variables `HAWKVISION_EDGE_*`.

    A comment `# == Topic ==` begins a topic, and the text below a setting describes it: `--help` and the reference
    pages are made of both (`hawkvision/core/settings/descriptions.py`). The first sentence has to do alone.
    """

    # == Listening ==
    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback, keys and TLS are obligatory."""
    port: Port = 8080
    """TCP port to listen on; 0 takes a free one."""
    max_body_bytes: Annotated[int, Meta(ge=1)] = 10 * 1024 * 1024
    """Longest request body, in bytes; longer ones are refused with 413."""
    connections_per_address: Annotated[int, Meta(ge=0)] = 512
    """HTTP connections from one address (IPv6: one /64 network), never more than half of all; 0 for no bound. Loopback
    is exempt. Set 0 behind a proxy on another machine, whose address all callers share."""
    cors_origins: tuple[Word, ...] = ()
    """Origins whose pages may call this node from a browser, such as `https://shop.example`; `*` for all."""
    drain_timeout_s: Seconds = 20.0
    """Seconds that accepted requests have to be answered when the node is told to stop."""

    # == Who may call ==
    api_key: Key | None = None
    """A key that callers must send (`Authorization: Bearer …`), and that allows everything. This or `keys_file` is
    obligatory when `host` is not loopback."""
    keys_file: Path | None = None
    """File of several callers' keys, each with a name, scopes and perhaps a rate, written by `hawkvision keys add`. It
    is read again when it changes."""
    tls_certificate: Path | None = None
    """PEM file of the certificate chain, leaf first; HTTP is then served over TLS alone. Read again when it changes."""
    tls_key: Path | None = None
    """PEM file of the certificate's private key, unencrypted."""
    tls_minimum_version: MinimumVersion = "1.2"
    """The oldest version of TLS that callers may speak."""
    tls_client_ca: Path | None = None
    """PEM file of authorities, one of which must have certified every caller; none asks for no certificates."""
    allow_plain_http: bool = False
    """Serve HTTP without TLS beyond loopback, where a proxy in front ends TLS or the network is nobody else's."""

    # == Model ==
    task: str = "imagenet"
    """The task to serve: a folder with a manifest in `models_dir`."""
    variant: Word | None = None
    """The edge stage: a variant or ensemble of the manifest. None takes the manifest's `cascade.default_edge`, or with
    an FPGA its `cascade.fpga`."""
    backend: Literal[
        "auto",
        "int8",
        "onnxruntime",
        "openvino",
        "numpy",
        "noop",
        "fpga-ref",
        "fpga-sim",
        "fpga-device",
        "fpga-offload",
    ] = "auto"
    """What runs the model. `auto` takes our own kernels (`int8`) for models and processors that they are for, else
    ONNX Runtime, which gives the same logits. `openvino` gives others, for which nothing is certified. The last four
    run a quantised variant: on the CPU with a device's bits, as simulated RTL, on a device, and on a device as far as
    it keeps up, else on the CPU (`fpga/offload`)."""
    onnx_providers: tuple[Word, ...] = ("CPUExecutionProvider",)
    """ONNX Runtime execution providers in order of preference; one that is not installed is an error."""
    models_dir: Path | None = None
    """Folder of manifests, labels and profiles, one folder a task; none takes those that are shipped."""
    cache_dir: Path | None = None
    """Folder of built models and compiled kernels; none takes `$XDG_CACHE_HOME/hawkvision` (`~/.cache/hawkvision`)."""
    profile: Path | None = None
    """A profile made by `hawkvision calibrate`; none takes `<models_dir>/<task>/profile.json`."""
    certificates: Path | None = None
    """This site's own certificates, made by `hawkvision certify`; they take the place of the profile's."""
    equivalences: Path | None = None
    """Passed checks of other executions, made by `hawkvision models equivalence`; none takes a file in the cache."""

    # == Threads and queues ==
    workers: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Threads that decode and infer, an image each; 0 takes the number of usable cores. With `fpga-offload`, 0 takes 16
    more, which wait for the device."""
    intra_op_threads: Annotated[int, Meta(ge=0, le=64)] = 0
    """Threads for one image while no other is in work; with others, each has one. 0 tries 2 and 4 at the start, where
    there are so many cores, and takes what makes the model quicker."""
    max_queue: Count = 256
    """Requests that may wait for a worker; further ones are refused with 429. At 5 ms each on two workers, 256 wait
    0.64 s: longer than a caller with a deadline would."""

    # == Limits on images ==
    max_pixels: Annotated[int, Meta(ge=1)] = 50_000_000
    """Pixels of an image, by its header; larger ones are refused with 413. 50 MP is the largest common camera."""
    max_pixels_whole: Annotated[int, Meta(ge=1)] = 25_000_000
    """Pixels of an image whose format cannot be decoded at a smaller size (all but JPEG). What phones make by default
    has 24 MP; a PNG of 25 MP takes 150 MB."""
    memory_bytes: Memory | None = None
    """Memory for bodies and decoding together, in bytes; none takes three quarters of what the process may still use
    when its models are loaded, cgroup limits included."""
    request_memory_bytes: Memory | None = None
    """Memory for decoding the images of one request, in bytes; none takes half of decoding's part of `memory_bytes`."""
    decode_limit_s: Seconds = 10.0
    """Expected seconds of decoding: of one request, more is refused with 413; of all that waits, per worker, with 429.
    Images that take less than 30 ms are not counted."""

    # == Datacenter ==
    datacenter_url: str | None = None
    """Address of the datacenter tier, `http://HOST[:PORT]` or https; none makes a node that answers alone."""
    datacenter_api_key: Key | None = None
    """The key that the datacenter tier asks for; it must allow `infer`."""
    datacenter_ca: Path | None = None
    """PEM file of the authorities that the datacenter's certificate is checked against; none takes the system's."""
    datacenter_certificate: Path | None = None
    """PEM file of this node's own certificate, for a datacenter tier that asks for one."""
    datacenter_key: Path | None = None
    """PEM file of the private key of `datacenter_certificate`, unencrypted."""
    datacenter_transport: Literal["tcp", "datagram", "auto"] = "tcp"
    """How images go to the datacenter: over HTTP (`tcp`), as datagrams (`datagram`), or as datagrams while the link
    loses some (`auto`). Datagrams need `dc.datagram_port` there."""
    datacenter_connections: Count = 32
    """HTTP connections to the datacenter at most; further escalations wait for a free one."""
    datacenter_timeout_s: Seconds = 10.0
    """The longest wait for the datacenter, in seconds, when the request itself has no deadline."""
    min_on_time_probability: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.05
    """A caller with a deadline waits for the datacenter while a reply in time is at least this likely; 0 waits until
    the deadline."""

    # == Guarantees ==
    audit_share: Annotated[float, Meta(ge=0.0, le=0.2)] = 0.02
    """Share of images that the reference stage answers, too, in the background, so that guarantees are monitored; 0 for
    none. Without audits, nothing is claimed of answers from a stage below it."""
    state_file: Path | None = None
    """SQLite file that keeps what is known of streams across restarts; none takes one per task and address below
    `$XDG_STATE_HOME/hawkvision` (`~/.local/state/hawkvision`), unless `port` is 0."""
    max_streams: Count = 4096
    """Streams kept in memory, 1 to 10 KB each; the one used longest ago makes room."""

    # == Policy ==
    policy: Word = HAWKVISION
    """The policy that decides where an image is answered. Others than `hawkvision` come with packages that name them
    by an entry point of `hawkvision.policies`; they certify nothing."""

    # == Logs ==
    log_level: LogLevel = "info"
    """From which level on our own lines are logged. Other libraries' are from `warning` on, or `info` with `debug`."""
    log_format: LogFormat = "text"
    """`text` for people, `json` for programs: an object a line."""


class DatacenterConfig(ServerSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A datacenter tier. File section `[dc]`, variables `HAWKVISION_DC_*`. Described as `EdgeConfig` is."""

    # == Listening ==
    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback, keys and TLS are obligatory."""
    port: Port = 8090
    """TCP port to listen on; 0 takes a free one."""
    max_body_bytes: Annotated[int, Meta(ge=1)] = 10 * 1024 * 1024
    """Longest request body, in bytes; longer ones are refused with 413."""
    connections_per_address: Annotated[int, Meta(ge=0)] = 512
    """HTTP connections from one address (IPv6: one /64 network), never more than half of all; 0 for no bound. An edge
    node has up to `edge.datacenter_connections`. Not for clusters, where Serve's own proxies take the connections."""

    # == Who may call ==
    api_key: Key | None = None
    """A key that callers must send (`Authorization: Bearer …`), and that allows everything. This or `keys_file` is
    obligatory when `host` is not loopback."""
    keys_file: Path | None = None
    """File of several callers' keys, each with a name, scopes and perhaps a rate, written by `hawkvision keys add`. It
    is read again when it changes."""
    tls_certificate: Path | None = None
    """PEM file of the certificate chain, leaf first; HTTP is then served over TLS alone. Read again when it changes."""
    tls_key: Path | None = None
    """PEM file of the certificate's private key, unencrypted."""
    tls_minimum_version: MinimumVersion = "1.2"
    """The oldest version of TLS that callers may speak."""
    tls_client_ca: Path | None = None
    """PEM file of authorities, one of which must have certified every caller; none asks for no certificates."""
    allow_plain_http: bool = False
    """Serve HTTP without TLS beyond loopback, where a proxy in front ends TLS or the network is nobody else's."""

    # == Models ==
    task: str = "imagenet"
    """The task to serve: a folder with a manifest in `models_dir`."""
    variants: tuple[Word, ...] = ()
    """The stages to serve: variants and ensembles of the manifest; none takes the manifest's `cascade.dc`."""
    backend: Literal["auto", "int8", "onnxruntime", "openvino", "numpy", "noop"] = "auto"
    """What runs the models. `auto` takes our own kernels (`int8`) for models and processors that they are for, else
    ONNX Runtime, which gives the same logits. `openvino` gives others, for which nothing is certified."""
    onnx_providers: tuple[Word, ...] = ("CPUExecutionProvider",)
    """ONNX Runtime execution providers in order of preference; one that is not installed is an error."""
    models_dir: Path | None = None
    """Folder of manifests, labels and profiles, one folder a task; none takes those that are shipped."""
    cache_dir: Path | None = None
    """Folder of built models and compiled kernels; none takes `$XDG_CACHE_HOME/hawkvision` (`~/.cache/hawkvision`)."""

    # == Replicas and batches ==
    min_replicas: Annotated[int, Meta(ge=0, le=1024)] = 1
    """Replicas of each deployment that always run."""
    max_replicas: Count = 1
    """Replicas of each deployment at most; Ray Serve scales between this and `min_replicas`."""
    target_ongoing_requests: Annotated[float, Meta(gt=0.0)] = 4.0
    """Requests in work per replica that Ray Serve scales for."""
    num_cpus: Annotated[float, Meta(ge=0.0)] = 0.1
    """Ray's reservation of cores per replica, a placement hint: models take what cores they find."""
    num_gpus: Annotated[float, Meta(ge=0.0)] = 0.0
    """Ray's reservation of GPUs per replica."""
    intra_op_threads: Annotated[int, Meta(ge=0, le=64)] = 0
    """Threads of a model for a single image, on the CPU; 0 takes two where there are two cores. Batches, and members of
    an ensemble that run side by side, have one each. 1 is for nodes on which other work wants every core."""
    max_batch_size: Count = 8
    """Images that a model takes at once, at most."""
    batch_wait_ms: Annotated[float, Meta(ge=0.0, le=1000.0)] = 0.0
    """Milliseconds that a free model waits for more images. Batches form by themselves while it is busy, so 0 costs
    nothing."""
    max_ongoing_requests: Count = 32
    """Requests in work in one replica, at most."""
    max_queued_requests: Annotated[int, Meta(ge=-1)] = 128
    """Requests that may wait for a replica; further ones are refused with 429; -1 for no bound."""

    # == Limits on images ==
    max_pixels: Annotated[int, Meta(ge=1)] = 50_000_000
    """Pixels of an image, by its header; larger ones are refused with 413. 50 MP is the largest common camera."""
    max_pixels_whole: Annotated[int, Meta(ge=1)] = 25_000_000
    """Pixels of an image whose format cannot be decoded at a smaller size (all but JPEG). What phones make by default
    has 24 MP; a PNG of 25 MP takes 150 MB."""
    memory_bytes: Memory | None = None
    """Memory for decoding in each replica, in bytes; none takes three quarters of what its process may still use when
    its models are loaded, cgroup limits included, divided by all replicas there may be."""
    request_memory_bytes: Memory | None = None
    """Memory for decoding one image, in bytes; none takes half of `memory_bytes`."""

    # == Ray ==
    address: Word | None = None
    """An existing Ray cluster (`auto`, HOST:PORT or ray://HOST:PORT); none starts Ray on this machine."""
    ray_network: Literal["private", "auto", "shared"] = "private"
    """Where Ray's own ports are: in a network namespace of their own (`private`), in this machine's (`shared`), or what
    the kernel allows (`auto`). `shared` leaves them on loopback but for one port of each replica, which asks for a
    token."""

    # == Logs ==
    log_level: LogLevel = "info"
    """From which level on our own lines are logged. Other libraries' are from `warning` on, or `info` with `debug`."""
    log_format: LogFormat = "text"
    """`text` for people, `json` for programs: an object a line."""


def default_state_file(config: EdgeConfig) -> Path | None:
    """Where a node keeps states for which no file was named; None where nothing would find them again.

    One file per task and address, below `$XDG_STATE_HOME` (the XDG base directory specification).

    Raises:
        RuntimeError: if this user has no home.
    """
    if config.policy != HAWKVISION or config.port == 0:
        return None
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return home / "hawkvision" / f"edge-{config.task}-{config.host.replace(':', '_')}-{config.port}.sqlite3"
