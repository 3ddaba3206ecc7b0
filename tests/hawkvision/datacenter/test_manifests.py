from __future__ import annotations

import http.client
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import yaml

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.cluster_manifests import rayservice, serve_config
from tests.hawkvision.datacenter.conftest import ROOT, START_LIMIT_S, free_port, image


def in_cluster(config: DatacenterConfig) -> DatacenterConfig:
    return msgspec.structs.replace(config, host="0.0.0.0", api_key="secret-key", max_replicas=3)


def test_the_serve_config_passes_rays_own_schema(config: DatacenterConfig) -> None:
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(yaml.safe_load(serve_config(config)))
    assert schema.applications[0].import_path == "hawkvision.datacenter.app:build"
    assert schema.http_options.port == config.port


def test_no_manifest_guarantees_tls_that_the_proxies_would_not_speak(config: DatacenterConfig) -> None:
    wanted = msgspec.structs.replace(in_cluster(config), tls_certificate=Path("a.crt"), tls_key=Path("a.key"))
    for make in (serve_config, lambda config: rayservice(config, "hawkvision:1")):
        with pytest.raises(ConfigError, match="allow_plain_http = true"):
            make(wanted)


def test_the_key_is_in_no_file(config: DatacenterConfig) -> None:
    secret = in_cluster(config)
    assert "secret-key" not in serve_config(secret) + rayservice(secret, "hawkvision:1")


def documents(config: DatacenterConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The RayService and its NetworkPolicy."""
    service, policy = yaml.safe_load_all(rayservice(in_cluster(config), "hawkvision:1"))
    assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    return service, policy


def pods(service: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = service["spec"]["rayClusterConfig"]
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_every_pod_of_the_rayservice_takes_rays_token_from_the_secret(config: DatacenterConfig) -> None:
    service, _ = documents(config)
    assert service["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token", "secretName": "hawkvision-dc"}
    for pod in pods(service):
        (container,) = pod["spec"]["containers"]
        environment = {its["name"]: its for its in container["env"]}
        secret = environment["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert environment["RAY_AUTH_MODE"]["value"] == "token"
        assert secret == {"name": "hawkvision-dc", "key": "auth_token"}


def test_rays_dashboard_listens_at_the_pods_own_address_and_is_probed_there(config: DatacenterConfig) -> None:
    service, _ = documents(config)
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    (container,) = head["template"]["spec"]["containers"]
    assert head["rayStartParams"]["dashboard-host"] == "$POD_IP"
    assert {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in container["env"]
    assert {container[its]["httpGet"]["port"] for its in ("readinessProbe", "livenessProbe")} == {8265}


def test_the_network_policy_leaves_strangers_the_http_port_only(config: DatacenterConfig) -> None:
    service, policy = documents(config)
    selected = policy["spec"]["podSelector"]["matchLabels"]
    assert all(selected.items() <= pod["metadata"]["labels"].items() for pod in pods(service))
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    among, operator, callers = policy["spec"]["ingress"]
    assert among == {"from": [{"podSelector": {"matchLabels": selected}}]}
    assert callers == {"ports": [{"protocol": "TCP", "port": 8000}]}
    assert operator["ports"] == [{"protocol": "TCP", "port": 8265}]
    assert operator["from"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay-operator"}


def test_the_rayservice_runs_the_image_with_the_tuned_settings(config: DatacenterConfig) -> None:
    document, _ = documents(config)
    cluster = document["spec"]["rayClusterConfig"]
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", "RayService")
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        container = group["template"]["spec"]["containers"][0]
        assert container["image"] == "hawkvision:1"
        assert {"name": "RAY_SERVE_USE_GRPC_BY_DEFAULT", "value": "1"} in container["env"]


def test_the_rayservice_scales_with_the_replicas(config: DatacenterConfig) -> None:
    cluster = documents(config)[0]["spec"]["rayClusterConfig"]
    workers = cluster["workerGroupSpecs"][0]
    assert cluster["enableInTreeAutoscaling"] is True
    assert (workers["minReplicas"], workers["maxReplicas"]) == (1, 3)


def test_the_rayservice_holds_a_valid_serve_config(config: DatacenterConfig) -> None:
    from ray.serve.schema import ServeDeploySchema

    document, _ = documents(config)
    schema = ServeDeploySchema.model_validate(yaml.safe_load(document["spec"]["serveConfigV2"]))
    assert schema.applications[0].args["max_replicas"] == 3


def test_a_loopback_address_is_refused_for_a_cluster(config: DatacenterConfig) -> None:
    with pytest.raises(ConfigError, match=r"dc\.host"):
        rayservice(config, "hawkvision:1")


def answers(url: str, path: str, body: bytes | None = None) -> int:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.request("POST" if body else "GET", path, body)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


@pytest.mark.slow
def test_the_generated_serve_config_serves_on_a_real_ray(config: DatacenterConfig, tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "serve.yaml"
    file.write_text(serve_config(msgspec.structs.replace(config, port=port, variants=("medium",))))
    environment = {
        **os.environ,
        "RAY_ADDRESS": "local",  # a Ray of its own, or it would join any that runs on this machine
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    serve = Path(sys.executable).with_name("serve")
    process = subprocess.Popen(
        [serve, "run", file],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A test run in the background inherits an ignored SIGINT, and `serve run` would then never stop.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        url, ends = f"http://127.0.0.1:{port}", time.monotonic() + START_LIMIT_S
        while answers(url, "/readyz") != 200:
            assert process.poll() is None
            assert time.monotonic() < ends
            selectors.DefaultSelector().select(0.1)
        assert answers(url, "/v1/infer", image()) == 200
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(90)
