"""The Kubernetes manifest of edge/deploy."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from typing import Any

from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.settings.load import load_config
from tests.edge.deploy_files import DEPLOY, KEY, kubernetes, pod

# ------------------------------------------------------------------------------------------------- Kubernetes


def test_kubernetes_objects_share_the_namespace_and_labels() -> None:
    objects = kubernetes()
    assert set(objects) == {"Namespace", "DaemonSet", "Service"}
    namespace = objects.pop("Namespace")["metadata"]["name"]
    assert all(found["metadata"]["namespace"] == namespace for found in objects.values())
    spec = objects["DaemonSet"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == objects["Service"]["spec"]["selector"] == labels


def test_kubernetes_probes_ask_a_live_node_what_it_answers(edge: Any) -> None:
    container = pod()["containers"][0]
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        request = container[probe]["httpGet"]
        assert request["port"] in ports
        with urllib.request.urlopen(f"{edge.url}{request['path']}") as response:
            assert response.status == 200


def test_kubernetes_pod_meets_the_restricted_standard() -> None:
    spec = pod()
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*spec["initContainers"], *spec["containers"]):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert {"requests", "limits"} <= set(container["resources"])


def test_kubernetes_keys_come_from_a_secret_and_mounts_from_volumes() -> None:
    spec = pod()
    container = spec["containers"][0]
    from_secret = {v["name"] for v in container["env"] if "secretKeyRef" in v.get("valueFrom", {})}
    assert from_secret == {"HAWKVISION_EDGE_API_KEY", "HAWKVISION_EDGE_DATACENTER_API_KEY"}
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_kubernetes_waits_longer_than_the_node_drains() -> None:
    values = {v["name"]: v.get("value", KEY) for v in pod()["containers"][0]["env"]}
    config = load_config(EdgeConfig, environ={"HAWKVISION_EDGE_HOST": "0.0.0.0"} | values)
    assert config.drain_timeout_s < pod()["terminationGracePeriodSeconds"]


def test_kubernetes_runs_one_node_on_each_labelled_machine_and_sends_its_own_callers_to_it() -> None:
    daemons = kubernetes()["DaemonSet"]["spec"]
    assert "replicas" not in daemons
    assert pod()["nodeSelector"] == {"hawkvision.io/edge": "true"}
    assert pod()["enableServiceLinks"] is False
    assert kubernetes()["Service"]["spec"]["internalTrafficPolicy"] == "Local"
    # A port of the machine is one pod's: the next one cannot come before it is free.
    (port,) = (port for port in pod()["containers"][0]["ports"] if "hostPort" in port)
    assert port["hostPort"] == port["containerPort"] == EdgeConfig().port
    assert daemons["updateStrategy"]["rollingUpdate"]["maxSurge"] == 0


def test_kubernetes_secrets_can_be_read_by_the_user_that_serves() -> None:
    """Volumes of secrets are root's, and the group's that `fsGroup` names."""
    secrets = [volume["secret"] for volume in pod()["volumes"] if "secret" in volume]
    assert secrets
    for secret in secrets:
        assert secret["defaultMode"] & 0o040
    assert pod()["securityContext"]["fsGroup"] == pod()["securityContext"]["runAsGroup"]


def test_kubernetes_keeps_models_and_memory_on_the_machine_and_writes_nowhere_else() -> None:
    paths = {v["name"]: v["hostPath"]["path"] for v in pod()["volumes"] if "hostPath" in v}
    mounts = {m["name"]: m for m in pod()["containers"][0]["volumeMounts"]}
    assert {name: mounts[name]["mountPath"] for name in paths} == paths
    assert mounts["models"]["readOnly"] is True
    text = (DEPLOY / "k3s.yaml").read_text(encoding="utf-8")
    made = re.search(r"install -d -o (\d+) -g (\d+) -m 750 (.*)", text)
    assert made
    assert (int(made[1]), int(made[2])) == (
        pod()["securityContext"]["runAsUser"],
        pod()["securityContext"]["runAsGroup"],
    )
    assert set(made[3].split()) == set(paths.values()), "the folders that its first lines have made"
