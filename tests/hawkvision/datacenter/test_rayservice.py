"""`edge/deploy/rayservice.yaml`, against the schemas of KubeRay, Kubernetes and Ray Serve, and against the product."""

from __future__ import annotations

import importlib.metadata
import math
import re
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.core.settings.load import load_config
from hawkvision.datacenter.deployment.ray_settings import TUNING, environment
from hawkvision.models.manifest import load_manifest, models_dir
from tests.edge.deploy_files import DEPLOY, instructions

TEXT: Final = (DEPLOY / "rayservice.yaml").read_text(encoding="utf-8")
WITH_REDIS: Final = re.sub(r"(?m)^( *)#(\w)", r"\1\2", TEXT)
"""With the settings that are commented out."""
SCHEMA: Final = yaml.safe_load(Path(__file__).with_name("rayservice.schema.yaml").read_text(encoding="utf-8"))
KUBERNETES: Final = "1.34"


def documents(text: str = TEXT) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    service, budget, policy = yaml.safe_load_all(text)
    return service, budget, policy


def cluster(text: str = TEXT) -> dict[str, Any]:
    found: dict[str, Any] = documents(text)[0]["spec"]["rayClusterConfig"]
    return found


def pods() -> list[dict[str, Any]]:
    """The head's and the workers'."""
    return [group["template"]["spec"] for group in (cluster()["headGroupSpec"], *cluster()["workerGroupSpecs"])]


def settings(text: str = TEXT) -> DatacenterConfig:
    """The tier's, as the builder reads them in a pod."""
    args = yaml.safe_load(documents(text)[0]["spec"]["serveConfigV2"])["applications"][0]["args"]
    return load_config(DatacenterConfig, overrides=args, environ={"HAWKVISION_DC_API_KEY": "k" * 32})


def check_service(service: dict[str, Any]) -> None:
    """Raise for what the API server would refuse."""
    Draft202012Validator(SCHEMA).validate(service)
    found = service["spec"]["rayClusterConfig"]
    for group in (found["headGroupSpec"], *found["workerGroupSpecs"]):
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": group["template"]}
        kubernetes_validate.validate(template, KUBERNETES, strict=True)


@pytest.mark.parametrize("text", [TEXT, WITH_REDIS], ids=["plain", "with Redis"])
def test_kuberay_kubernetes_and_serve_take_it(text: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    service, budget, policy = documents(text)
    check_service(service)
    for other in (budget, policy):
        kubernetes_validate.validate(other, KUBERNETES, strict=True)
    serve = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert serve.applications[0].import_path == "hawkvision.datacenter.app:build"
    assert settings(text).survives_head is ("gcsFaultToleranceOptions" in cluster(text)) is (text is WITH_REDIS)


def test_its_versions_variables_and_models_are_the_products() -> None:
    assert cluster()["rayVersion"] == importlib.metadata.version("ray")
    head, worker = pods()
    for pod in (head, worker):
        (container,) = pod["containers"]
        values = {each["name"]: each.get("value") for each in container["env"]}
        assert TUNING.items() <= values.items()
        assert values.keys() >= {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "HAWKVISION_DC_API_KEY", "POD_IP"}
        assert values["RAY_AUTH_MODE"] == cluster()["authOptions"]["mode"] == "token"
    (built,) = worker["initContainers"]
    manifest = load_manifest("imagenet", models_dir())
    needed = {variant.name for stage in manifest.cascade.dc for variant in manifest.members(stage)}
    command = built["command"]
    assert set(command[3 : command.index("--task")]) == needed
    folder = command[-1]
    assert f"HAWKVISION_DC_CACHE_DIR={folder}" in " ".join(rest for kind, rest in instructions() if kind == "ENV")
    assert {"name": "models", "mountPath": folder, "readOnly": True} in worker["containers"][0]["volumeMounts"]


def test_a_worker_has_room_for_a_replica_of_each_deployment() -> None:
    from ray.serve._private.build_app import build_app

    from hawkvision.datacenter.ingress.application import application

    config = settings()
    deployments = build_app(application(config), name="x").deployments
    limits = pods()[1]["containers"][0]["resources"]["limits"]
    assert int(limits["cpu"]) == math.ceil(sum(each.ray_actor_options["num_cpus"] for each in deployments))
    assert limits["memory"] == f"{2 + len(deployments)}Gi"
    (workers,) = cluster()["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (config.min_replicas, config.max_replicas)


def test_a_worker_may_be_lost_and_gets_requests_while_callers_would_be_answered() -> None:
    config, (_, worker) = settings(), pods()
    assert min(config.min_replicas, config.ingress_min_replicas) == 2
    assert config.max_replicas_per_node == documents()[1]["spec"]["maxUnavailable"] == 1
    assert worker["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/readyz"
    (spread,) = worker["topologySpreadConstraints"]
    assert spread["labelSelector"] == documents()[1]["spec"]["selector"]


def test_its_first_lines_make_every_key_of_the_secret() -> None:
    made = set(re.findall(r"--from-literal=([\w-]+)=", WITH_REDIS))
    assert made == set(re.findall(r"\bkey: ([\w-]+)", WITH_REDIS))
    assert cluster()["authOptions"]["secretName"] in TEXT.partition("apiVersion")[0]


def test_every_container_runs_without_rights_and_is_drained_before_it_is_killed() -> None:
    user = next(rest for kind, rest in reversed(instructions()) if kind == "USER").split(":")
    head, worker = pods()
    for pod in (head, worker):
        security = pod["securityContext"]
        assert [str(security["runAsUser"]), str(security["runAsGroup"])] == user
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert (head["automountServiceAccountToken"], worker["automountServiceAccountToken"]) == (True, False)
    command = worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:-1] == ["hawkvision", "dc", "drain", "--limit-s"]
    assert int(command[-1]) < worker["terminationGracePeriodSeconds"]


def test_the_network_policy_leaves_strangers_the_http_port_only() -> None:
    service, _, policy = documents()
    selected = policy["spec"]["podSelector"]
    assert selected["matchLabels"] == service["metadata"]["labels"]
    among, operator, callers = policy["spec"]["ingress"]
    assert among == {"from": [{"podSelector": selected}]}
    assert (callers, operator["ports"]) == ({"ports": [tcp(8000)]}, [tcp(8265)])
    assert cluster()["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "$POD_IP"


def tcp(port: int) -> dict[str, object]:
    return {"protocol": "TCP", "port": port}


def test_the_variables_of_a_new_cluster_hold_rays_settings_and_new_secrets() -> None:
    first, second = (dict(line.split("=") for line in environment().splitlines()) for _ in range(2))
    assert first.keys() == second.keys() == {*TUNING, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "HAWKVISION_DC_API_KEY"}
    assert first["RAY_AUTH_MODE"] == "token"
    secrets = [each[name] for each in (first, second) for name in ("RAY_AUTH_TOKEN", "HAWKVISION_DC_API_KEY")]
    assert len(set(secrets)) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in secrets)
