"""What the product uses of its dependencies beyond their public API: one list, and a canary for each use.

A private name may change in any release. So each package here has an upper bound in pyproject.toml, and each use has a
canary that fails first, and by name, when the bound is raised to a release that works otherwise.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import ssl
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from starlette.types import Receive, Scope, Send

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("hawkvision", "edge", "fpga", "loadgen")
PRIVATE: Final = {
    "aiohttp": {"ResponseHandler.closed", "TCPConnector.connect"},
    "aioquic": {
        "KeySchedule.generation",
        "QuicConnection._close_event",
        "QuicConnection._streams",
        "QuicConnection._update_traffic_key",
        "QuicConnectionProtocol._quic",
        "QuicServer._configuration",
        "QuicServer._loop",
        "QuicServer._protocols",
        "QuicServer._retry",
        "QuicStreamSender._buffer",
        "tls.Context._peer_certificate",
    },
    "ray": {
        "ray._raylet.GcsClient.drain_node",
        "ray._private.node.Node.start_log_monitor",
        "ray._private.node.Node.start_monitor",
        "ray._private.services.start_api_server",
        "RequestRouter._choose_replica_for_request",
        "RequestRouter._deployment_id",
        "ray.serve._private.build_app.build_app",
        "ray.serve._private.request_router.PowerOfTwoChoicesRequestRouter",
        "ray.serve.context._get_global_client",
        "the environment's variables",
    },
    "uvicorn": {"HttpToolsProtocol._unset_keepalive_if_required", "httptools_impl.STATUS_LINE", "RequestResponseCycle"},
    "pytest-xdist": {"LoadScopeScheduling._split_scope"},
}
"""By package: what is used. Add a name here together with its canary below and an upper bound in pyproject.toml."""
OF_PYTHON: Final = {"_create_unverified_context", "_exit", "_name"}
"""Of the standard library: documented with their underscore (`os._exit`), or kept for decades (`ssl`, `CDLL._name`)."""


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_every_private_name_that_is_not_our_own_is_listed() -> None:
    """Names that our code assigns or defines are our own; other names with an underscore are another library's."""
    own, used = set[str](), dict[str, str]()
    for path, tree in sources():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    own.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(attr=name) if is_private(name):
                    used[name] = f"{path.relative_to(ROOT)}:{node.lineno}"
                case ast.ImportFrom(module=str(module), level=0):
                    for name in [*module.split("."), *(alias.name for alias in node.names)]:
                        if is_private(name) and module.split(".")[0] not in PACKAGES:
                            used[name] = f"{path.relative_to(ROOT)}:{node.lineno}"
                case ast.Import():
                    for name in (part for alias in node.names for part in alias.name.split(".")):
                        if is_private(name):
                            used[name] = f"{path.relative_to(ROOT)}:{node.lineno}"
    listed = {part for uses in PRIVATE.values() for use in uses for part in use.split(".")} | OF_PYTHON
    assert {name: where for name, where in used.items() if name not in own | listed} == {}


def requirements() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    return {canonicalize_name(each.name): each for each in map(Requirement, lines)}


@pytest.mark.parametrize("package", sorted(PRIVATE))
def test_a_package_of_which_private_names_are_used_has_an_upper_bound(package: str) -> None:
    operators = {each.operator for each in requirements()[package].specifier}
    assert operators & {"<", "<=", "==", "~="}, f"{package}: pyproject.toml gives no upper bound"


LOCKED: Final = re.compile(r"(?m)^([a-zA-Z0-9_.-]+)(?:\[[^\]]*\])?==(\S+)")


@pytest.mark.parametrize("lock", ["test", "models"])
def test_the_locks_of_the_tests_keep_to_the_projects_bounds_and_have_hashes(lock: str) -> None:
    text = (ROOT / ".ci" / f"requirements.{lock}.txt").read_text(encoding="utf-8")
    versions = [(canonicalize_name(name), version) for name, version in LOCKED.findall(text)]
    known = requirements()
    for name, version in versions:
        if name in known:
            assert known[name].specifier.contains(version), f"{known[name]}: {lock} has {version}; run `make lock`"
    assert {"numpy", "onnx", "pytest"} <= {name for name, _ in versions}
    blocks = re.split(r"(?m)^(?=\S)", text)[1:]
    assert len(blocks) == len(versions)
    assert all("--hash=sha256:" in block for block in blocks)


# -------------------------------------------------------------------------------------------------------- aiohttp


def test_aiohttp_makes_connections_by_a_method_that_ours_replaces_and_says_when_they_end() -> None:
    import aiohttp
    from aiohttp.client_proto import ResponseHandler

    assert list(inspect.signature(aiohttp.TCPConnector.connect).parameters) == ["self", "req", "traces", "timeout"]

    async def end() -> bool:
        handler = ResponseHandler(asyncio.get_running_loop())
        closed = handler.closed
        assert closed is not None
        handler.connection_made(asyncio.Transport())
        handler.connection_lost(None)
        return closed.done()

    assert asyncio.run(end())


# -------------------------------------------------------------------------------------------------------- aioquic


def test_aioquic_keeps_its_state_where_the_transport_looks_for_it() -> None:
    """Two ends in memory, up to a message on the control stream and a goodbye."""
    from aioquic.quic.configuration import QuicConfiguration
    from aioquic.quic.connection import QuicConnection
    from aioquic.tls import Direction, Epoch

    from hawkvision.transport.endpoint.quic import server_configuration
    from hawkvision.transport.protocol.server_certificate import own_identity

    given = server_configuration(own_identity())
    client: Any = QuicConnection(configuration=QuicConfiguration(is_client=True, alpn_protocols=given.alpn_protocols))
    client.configuration.verify_mode = ssl.CERT_NONE
    generations = []
    update = client._update_traffic_key

    def updated(direction: Direction, epoch: Epoch, suite: Any, secret: bytes) -> None:
        generations.append((epoch, client.tls.key_schedule.generation))
        update(direction, epoch, suite, secret)

    client._update_traffic_key = updated
    client.connect(("127.0.0.1", 1), now=0.0)
    server: Any = QuicConnection(
        configuration=given, original_destination_connection_id=client.original_destination_connection_id
    )

    def exchange(begin: float) -> None:
        for now in (begin + 0.1 * step for step in range(4)):  # acknowledgements wait a while
            for one, other in ((client, server), (server, client)):
                one.handle_timer(now)
                for data, _ in one.datagrams_to_send(now):
                    other.receive_datagram(data, ("127.0.0.1", 1), now)

    exchange(0.0)
    assert next(generation for epoch, generation in generations if epoch is Epoch.ONE_RTT) == 3
    assert client.tls._peer_certificate is not None
    assert client._streams.get(0) is None
    client.send_stream_data(0, b"some message")
    assert len(client._streams.get(0).sender._buffer) == len(b"some message")
    exchange(1.0)
    assert len(client._streams.get(0).sender._buffer) == 0
    assert server._close_event is None
    client.close()
    for data, _ in client.datagrams_to_send(2.0):
        server.receive_datagram(data, ("127.0.0.1", 1), 2.0)
    assert server._close_event is not None


def test_aioquics_server_has_its_connections_tokens_and_configuration_where_ours_looks_for_them() -> None:
    from aioquic.asyncio.protocol import QuicConnectionProtocol
    from aioquic.asyncio.server import QuicServer
    from aioquic.buffer import Buffer  # type: ignore[attr-defined]  # its stub does not re-export it
    from aioquic.quic.configuration import QuicConfiguration
    from aioquic.quic.connection import QuicConnection
    from aioquic.quic.packet import QuicPacketType, pull_quic_header

    async def look() -> None:
        configuration = QuicConfiguration(is_client=False)
        server: Any = QuicServer(configuration=configuration, retry=True)
        assert server._configuration is configuration
        assert server._loop is asyncio.get_running_loop()
        assert server._protocols == {}
        with pytest.raises(ValueError, match=r".*"):
            server._retry.validate_token(address=("127.0.0.1", 1), destination_cid=b"", token=b"forged", now=0.0)
        quic = QuicConnection(configuration=QuicConfiguration(is_client=True))
        protocol: Any = QuicConnectionProtocol(quic)
        assert protocol._quic is quic
        quic.connect(("127.0.0.1", 1), now=0.0)
        ((initial, _),) = quic.datagrams_to_send(now=0.0)
        header = pull_quic_header(Buffer(data=initial))
        assert (header.packet_type, header.token) == (QuicPacketType.INITIAL, b"")
        assert initial[5] == len(header.destination_cid)

    asyncio.run(look())


# ------------------------------------------------------------------------------------------------------------ ray


def test_ray_starts_what_the_tier_does_without_by_the_functions_that_it_replaces() -> None:
    from ray._private import node, services

    starting = inspect.getsource(node)
    for name in ("start_monitor", "start_log_monitor"):
        assert list(inspect.signature(getattr(node.Node, name)).parameters) == ["self"]
        assert starting.count(f"self.{name}()") == 1

    assert callable(services.start_api_server)
    body = inspect.getsource(node.Node.start_api_server)
    assert re.search(r"_webui_url, process_info = ray\._private\.services\.start_api_server\(", body)
    assert "if process_info is not None" in body


def test_serve_lists_the_deployments_of_an_application_with_what_they_ask_for() -> None:
    from ray import serve
    from ray.serve._private.build_app import build_app
    from ray.serve.config import AutoscalingConfig
    from ray.serve.deployment import deployment_to_schema

    class Anything:
        """Takes another deployment."""

        def __init__(self, *others: object) -> None:
            pass

    scaling = {"min_replicas": 2, "max_replicas": 5}
    inner = serve.deployment(Anything).options(name="inner", num_replicas=3, ray_actor_options={"num_cpus": 1.5})
    outer = serve.deployment(Anything).options(name="outer", autoscaling_config=scaling)
    built = {each.name: each for each in build_app(outer.bind(inner.bind()), name="any").deployments}
    assert built.keys() == {"inner", "outer"}
    assert (built["inner"].num_replicas, built["inner"].ray_actor_options["num_cpus"]) == (3, 1.5)
    found = deployment_to_schema(built["outer"]).autoscaling_config
    assert isinstance(found, AutoscalingConfig)
    assert (found.min_replicas, found.max_replicas) == (2, 5)
    assert not isinstance(deployment_to_schema(built["inner"]).autoscaling_config, AutoscalingConfig)


def test_a_router_of_serve_takes_replicas_and_requests_where_ours_do() -> None:
    from ray._raylet import GcsClient, InnerGcsClient  # type: ignore[attr-defined]  # of a compiled module
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason
    from ray.serve._private import router
    from ray.serve._private.client import ServeControllerClient
    from ray.serve.context import _get_global_client
    from ray.serve.request_router import RequestRouter

    from hawkvision.datacenter.deployment.routers import MatchingRouter, RefusingRouter

    for method in (MatchingRouter.update_replicas, RefusingRouter._choose_replica_for_request):
        theirs = inspect.signature(getattr(RequestRouter, method.__name__)).parameters
        assert len(inspect.signature(method).parameters) == len(theirs)
    assert "_deployment_id" in of_self(ast.parse(inspect.getsource(RequestRouter)))
    assert "_choose_replica_for_request(" in inspect.getsource(router)
    assert "raise_if_no_controller_running" in inspect.signature(_get_global_client).parameters
    assert isinstance(ServeControllerClient.http_config, property)
    assert callable(GcsClient)
    assert callable(InnerGcsClient.drain_node)
    assert DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")


def test_ray_knows_the_variables_of_the_environment_that_tune_it() -> None:
    import ray

    from hawkvision.datacenter.deployment.ray_settings import TUNING

    home = Path(ray.__file__).parent
    read = "".join(
        path.read_text(encoding="utf-8")
        for path in (
            *(home / "serve" / "_private").glob("*.py"),
            *(home / "_private").rglob("*.py"),
            home / "_common" / "usage" / "usage_constants.py",
        )
    )
    assert {name for name in TUNING if name.startswith("RAY_") and name not in read} == set()


# -------------------------------------------------------------------------------------------------------- uvicorn


def of_self(tree: ast.AST, target: str = "self") -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == target
    }


def test_uvicorns_protocol_and_cycle_have_all_that_our_subclass_uses_of_them() -> None:
    """Read from our source: whatever `self` has that our class does not define is uvicorn's."""
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
    from uvicorn.server import ServerState

    from hawkvision.servers.protocol import BoundedProtocol

    assert issubclass(BoundedProtocol, HttpToolsProtocol)
    defined = {*vars(BoundedProtocol), *BoundedProtocol.__annotations__}
    tree = ast.parse(inspect.getsource(BoundedProtocol))
    used = of_self(tree) - defined

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("nobody asks")

    async def made() -> HttpToolsProtocol:
        config = uvicorn.Config(app=app, http="httptools")
        config.load()
        protocol = HttpToolsProtocol(config, ServerState(), {})
        protocol.on_message_begin()  # makes what a request has
        return protocol

    protocol = asyncio.run(made())
    assert {"parser", "cycle", "pipeline", "flow", "_unset_keepalive_if_required"} <= used
    assert {name for name in used if not hasattr(protocol, name)} == set()
    cycle = of_self(tree, "cycle")
    assert {"more_body", "response_started", "message_event", "disconnected"} <= cycle
    assert {name for name in cycle if f"self.{name} = " not in inspect.getsource(RequestResponseCycle)} == set()
    assert STATUS_LINE[503] == b"HTTP/1.1 503 Service Unavailable\r\n"


# --------------------------------------------------------------------------------------------------- pytest-xdist


def test_xdist_asks_our_scheduler_which_tests_stay_together() -> None:
    from xdist.scheduler import LoadScopeScheduling

    assert list(inspect.signature(LoadScopeScheduling._split_scope).parameters) == ["self", "nodeid"]
