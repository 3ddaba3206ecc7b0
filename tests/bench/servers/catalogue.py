"""The servers that are compared: what each is made of, how it is started at its best on one core, how it is asked.

One core serves one image at a time, and the model gains nothing from batches there (measured, one thread of a
shared Xeon: 3.99 ms an image alone, 3.97 ms in fours). So the best configuration of each is alike: one worker, no
batching, no access log, the fastest HTTP loop and parser it takes (uvloop, httptools), the JPEG as the raw body
wherever it can be.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from hawkvision.core.errors import ConfigError

Handler: TypeAlias = Literal["same", "documented"]
"""How a server prepares images, as `tests.bench.servers.handlers.work` describes; HawkVision does it in its own
way beside both."""
DOCUMENTED: Final = "-documented"
"""What the name of a peer with that handler ends with."""


def read_index(body: bytes) -> int:
    """The class of `{"index": …}`, which most answer here.

    Raises:
        msgspec.DecodeError, KeyError, TypeError: if that is not what it says.
    """
    return int(msgspec.json.decode(body)["index"])


def read_inferred(body: bytes) -> int:
    """The class of an Open Inference answer: the first number of the first output.

    Raises:
        msgspec.DecodeError, LookupError, TypeError: if there is none.
    """
    return int(msgspec.json.decode(body)["outputs"][0]["data"][0])


@dataclass(frozen=True, slots=True)
class ServerSite:
    """Where a server is started, and with what."""

    python: Path
    """The interpreter of its environment."""
    folder: Path
    """Of its own, empty, where its process starts."""
    port: int
    variant: str


@dataclass(frozen=True, slots=True)
class StartCommand:
    """A command, and what it needs in its environment."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReferenceServer:
    """One server of the comparison."""

    name: str
    title: str
    distribution: str | None
    """The package whose version is stated; None: HawkVision's own."""
    how: str
    """Its configuration and protocol, for the report."""
    start: Callable[[ServerSite], StartCommand]
    path: str
    headers: str = "Content-Type: image/jpeg\r\n"
    frame: Callable[[bytes], bytes] = bytes
    """From a JPEG to the body of its request."""
    index: Callable[[bytes], int] = read_index
    """From the body of a reply to the index of the class."""
    pins: tuple[str, ...] | None = None
    """Of its environment, besides those all share; None: it runs in ours."""
    alone: tuple[str, ...] = ()
    """Packages that are installed without their dependencies."""
    shares: str | None = None
    """The peer whose environment it runs in, if not one of its own."""
    example: str = ""
    """Of classifying images, by its own documentation; `loadgen/README.md` says what it does before the model."""
    handler: Handler = "same"
    python: bool = True
    """Whether its HTTP server is Python: HawkVision is compared with the best of these."""


def _module(name: str, **env: str) -> Callable[[ServerSite], StartCommand]:
    def start(site: ServerSite) -> StartCommand:
        return StartCommand((str(site.python), "-m", f"tests.bench.servers.handlers.{name}"), env)

    return start


def _hawkvision(site: ServerSite, backend: str = "auto") -> StartCommand:
    command = (sys.executable, "-m", "hawkvision.cli", "edge", "up", "--port", str(site.port))
    # Found where this HawkVision is, for a checkout need not be installed.
    return StartCommand(
        (*command, "--variant", site.variant, "--backend", backend),
        {"PYTHONPATH": str(Path(__file__).resolve().parents[3])},
    )


def _bentoml(site: ServerSite) -> StartCommand:
    command = (str(site.python), "-m", "bentoml", "serve", "tests.bench.servers.handlers.bentoml_server:Classifier")
    return StartCommand(
        (*command, "--host", "127.0.0.1", "--port", str(site.port)),
        {"BENTOML_HOME": str(site.folder), "BENTOML_DO_NOT_TRACK": "True"},
    )


TRITON_CONFIG: Final = """\
backend: "python"
max_batch_size: 0
input [{ name: "image", data_type: TYPE_UINT8, dims: [-1] }]
output [{ name: "index", data_type: TYPE_INT32, dims: [1] }]
instance_group [{ kind: KIND_CPU, count: 1 }]
"""
TRITON_HEAD: Final = (
    '{{"inputs":[{{"name":"image","shape":[{0}],"datatype":"UINT8","parameters":{{"binary_data_size":{0}}}}}]}}'
)
TRITON_HEAD_BYTES: Final = len(TRITON_HEAD.format("9" * 9))
"""The JSON before a tensor is padded to one length, so that one header says it for all images."""


def _triton(site: ServerSite) -> StartCommand:
    """The server inside the nvidia-pytriton wheel, without that package's Python, as its own launcher would set it up.

    The Python backend wants the stub that fits the interpreter beside it, and finds libpython by a path.
    """
    packages = site.python.parents[1] / "lib" / _version() / "site-packages"
    server = packages / "pytriton" / "tritonserver"
    stub = server / "python_backend_stubs" / _version().removeprefix("python") / "triton_python_backend_stub"
    if not stub.is_file():
        raise ConfigError(f"{stub}: the wheel has no stub for this Python; expected 3.8 to 3.13 and glibc ≥ 2.35")
    backends = site.folder / "backends" / "python"
    backends.mkdir(parents=True)
    for source in (*(server / "backends" / "python").iterdir(), stub):
        if source.is_file():
            (backends / source.name).symlink_to(source)
    model = site.folder / "repository" / "classify"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(TRITON_CONFIG, encoding="utf-8")
    # The stub reads no PYTHONPATH.
    loader = f"import sys\nsys.path[:0] = {[str(site.folder), str(packages)]}\n"
    loader += "from tests.bench.servers.handlers.triton_server import TritonPythonModel\n"
    (model / "1" / "model.py").write_text(loader, encoding="utf-8")
    (server / "bin" / "tritonserver").chmod(0o755)
    stub.chmod(0o755)
    return StartCommand(
        (
            str(server / "bin" / "tritonserver"),
            *("--model-repository", str(site.folder / "repository")),
            *("--backend-directory", str(site.folder / "backends")),
            *("--http-address", "127.0.0.1", "--http-port", str(site.port), "--http-thread-count", "1"),
            *("--allow-grpc", "false", "--allow-metrics", "false", "--log-verbose", "0"),
        ),
        {"LD_LIBRARY_PATH": os.pathsep.join((str(packages / "nvidia_pytriton.libs"), _library_folder()))},
    )


def _version() -> str:
    return f"python{sys.version_info.major}.{sys.version_info.minor}"


def _library_folder() -> str:
    return str(Path(sys.base_prefix) / "lib")


def _triton_frame(jpeg: bytes) -> bytes:
    """The binary tensor extension: JSON of one length, then the bytes of the one tensor."""
    return TRITON_HEAD.format(len(jpeg)).ljust(TRITON_HEAD_BYTES).encode() + jpeg


def _base64_frame(jpeg: bytes) -> bytes:
    """Open Inference JSON with one BYTES element in base64."""
    return (
        b'{"inputs":[{"name":"image","shape":[1],"datatype":"BYTES","parameters":{"content_type":"base64"},"data":["'
        + base64.b64encode(jpeg)
        + b'"]}]}'
    )


# httptools is not among its dependencies, and uvicorn takes it when it is there.
MLSERVER_PINS: Final = ("mlserver==1.7.1", "httptools")

REFERENCE_SERVERS: Final = (
    ReferenceServer(
        name="hawkvision",
        title="HawkVision edge",
        distribution=None,
        how="edge node, one worker (its default on one core), quality=fast, JPEG as the body",
        start=_hawkvision,
        path="/v1/classify?quality=fast",
    ),
    ReferenceServer(
        name="hawkvision-onnxruntime",
        title="HawkVision, ONNX Runtime",
        distribution=None,
        how="the same without our own kernels: the runtime and the options that the others have",
        start=partial(_hawkvision, backend="onnxruntime"),
        path="/v1/classify?quality=fast",
    ),
    ReferenceServer(
        name="litserve",
        title="LitServe",
        distribution="litserve",
        how="one worker process, one HTTP thread, default queue (ZeroMQ stalls), uvloop, no batching, JPEG as body",
        start=_module("litserve_server"),
        path="/predict",
        pins=("litserve==0.2.19",),
        example='"ImageClassifierAPI" of its test against FastAPI',
    ),
    ReferenceServer(
        name="mlserver",
        title="MLServer",
        distribution="mlserver",
        how="in process (no parallel workers), uvloop and httptools, gzip off, custom handler: JPEG as the body",
        start=_module("mlserver_server"),
        path="/classify",
        pins=MLSERVER_PINS,
        example='"Content Type Decoding"',
    ),
    ReferenceServer(
        name="mlserver-oip",
        title="MLServer, OIP",
        distribution="mlserver",
        how="as MLServer, through its Open Inference server: JPEG as base64 in JSON, for it takes no binary tensors",
        start=_module("mlserver_server"),
        path="/v2/models/classify/infer",
        headers="Content-Type: application/json\r\n",
        frame=_base64_frame,
        index=read_inferred,
        pins=MLSERVER_PINS,
        shares="mlserver",
        example='"Content Type Decoding"',
    ),
    ReferenceServer(
        name="bentoml",
        title="BentoML",
        distribution="bentoml",
        how="one worker, async method, uvloop and httptools, access log off, no batching, JPEG as the root input",
        start=_bentoml,
        path="/classify",
        pins=("bentoml==1.4.39", "uvloop", "httptools"),
        example='"Serving a ResNet model with BentoML"',
    ),
    ReferenceServer(
        name="kserve",
        title="KServe SDK",
        distribution="kserve",
        how="one worker, no gRPC, uvloop and httptools, logs off, protocol v1 predict: JPEG as the body",
        start=_module("kserve_server"),
        path="/v1/models/classify:predict",
        pins=("kserve==0.21.0",),
        example='custom_model\'s "AlexNetModel"',
    ),
    ReferenceServer(
        name="ray",
        title="Ray Serve",
        distribution="ray",
        how="one replica behind its HAProxy, throughput-optimized, async method, no batching, JPEG as the body",
        start=_module(
            "ray_server",
            RAY_SERVE_THROUGHPUT_OPTIMIZED="1",
            RAY_SERVE_ENABLE_HA_PROXY="1",
            RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S="60",  # by itself 5 s, which a busy core exceeds
            RAY_USAGE_STATS_ENABLED="0",
        ),
        path="/classify",
        example='"Serve ML Models", PyTorch',
    ),
    ReferenceServer(
        name="triton",
        title="Triton",
        distribution="nvidia-pytriton",
        how="Python backend, one instance, one HTTP thread, no batching, OIP v2, JPEG as binary UINT8 tensor",
        start=_triton,
        path="/v2/models/classify/infer",
        headers=f"Inference-Header-Content-Length: {TRITON_HEAD_BYTES}\r\n",
        frame=_triton_frame,
        index=read_inferred,
        pins=(),
        alone=("nvidia-pytriton==0.7.0",),
        example='python_backend\'s "Preprocessing"',
        python=False,
    ),
)


def as_documented(peer: ReferenceServer) -> ReferenceServer:
    """The same server with images prepared as its example does, under a name of its own."""
    return replace(
        peer,
        name=peer.name + DOCUMENTED,
        title=f"{peer.title}, documented",
        how=f"{peer.how}; images by Pillow, as in {peer.example}",
        handler="documented",
        # Where an environment of its own goes by the peer's name.
        shares=peer.shares or peer.name,
    )


def contenders(peers: Sequence[ReferenceServer], handlers: Sequence[Handler]) -> tuple[ReferenceServer, ...]:
    """All that take part: HawkVision, with and without its kernels, once; the others with each handler."""
    found: list[ReferenceServer] = []
    for peer in peers:
        if not peer.example or "same" in handlers:
            found.append(peer)
        if peer.example and "documented" in handlers:
            found.append(as_documented(peer))
    return tuple(found)


def find(names: str) -> tuple[ReferenceServer, ...]:
    """The peers of a comma-separated list, in its order.

    Raises:
        ConfigError: naming what is none of them, and all there are.
    """
    known = {peer.name: peer for peer in REFERENCE_SERVERS}
    asked = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in asked if name not in known]
    if unknown or not asked or len(set(asked)) < len(asked):
        raise ConfigError(f"--names: expected some of {', '.join(known)}, each once; got {names!r}")
    return tuple(known[name] for name in asked)
