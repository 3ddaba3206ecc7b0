"""What `hawkvision dc config` prints: Serve's config, and what KubeRay and Kubernetes need."""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import ValidationError
from typer.testing import CliRunner

from hawkvision.cli import app
from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.core.settings.load import load_config
from hawkvision.datacenter.deployment.ray_settings import TUNING
from hawkvision.datacenter.manifests.environment import environment
from hawkvision.datacenter.manifests.options import KubernetesOptions, kubernetes_options
from hawkvision.datacenter.manifests.rayservice import rayservice
from hawkvision.datacenter.manifests.serve_yaml import serve_config
from hawkvision.datacenter.manifests.sizing import size_workers
from hawkvision.models.manifest import load_manifest, models_dir
from tests.edge.deploy_files import instructions
from tests.fuzz.examples import examples
from tests.hawkvision.datacenter import kuberay

DIGEST = f"registry.example/hawkvision-datacenter@sha256:{'0' * 64}"
TASKS = ("imagenet", "fashion_mnist")
PLAIN = KubernetesOptions("hawkvision-datacenter:1")
EVERYTHING = KubernetesOptions(DIGEST, "Always", models_claim="models", redis_address="redis.cache:6379")
FIXED = DatacenterConfig(host="0.0.0.0", api_key="secret-key", allow_plain_http=True)
SCALED = msgspec.structs.replace(
    FIXED,
    app_name="vision",
    route_prefix="/vision",
    tasks=TASKS,
    min_replicas=1,
    max_replicas=3,
    num_gpus=0.25,
    keys_file=Path("/etc/hv/keys"),
)
OPTIONS = {"plain": (FIXED, PLAIN), "everything": (SCALED, EVERYTHING)}


@cache
def documents(name: str) -> tuple[dict[str, Any], ...]:
    """The objects that are printed for one of `OPTIONS`."""
    return tuple(yaml.safe_load_all(rayservice(*OPTIONS[name])))


def cluster(name: str) -> dict[str, Any]:
    found: dict[str, Any] = documents(name)[0]["spec"]["rayClusterConfig"]
    return found


def pods(name: str) -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in kuberay.groups(cluster(name))]


def containers(name: str) -> list[dict[str, Any]]:
    return [each for pod in pods(name) for each in (*pod["containers"], *pod.get("initContainers", ()))]


# ----------------------------------------------------------------------------------------------------- schemas


@pytest.mark.parametrize("name", OPTIONS)
def test_kuberay_and_kubernetes_take_every_object_that_is_printed(name: str) -> None:
    for document in documents(name):
        kuberay.check(document)
    assert [document["kind"] for document in documents(name)] == ["RayService", "NetworkPolicy"]


@pytest.mark.parametrize(
    "path", [("spec", "x"), ("spec", "rayClusterConfig", "x"), ("spec", "rayClusterConfig", "headGroupSpec", "x")]
)
def test_a_field_that_kuberay_does_not_know_is_noticed(path: tuple[str, ...]) -> None:
    document = yaml.safe_load(yaml.safe_dump(documents("plain")[0]))
    place = document
    for word in path[:-1]:
        place = place[word]
    place[path[-1]] = "x"
    with pytest.raises(ValidationError, match="'x' was unexpected"):
        kuberay.check(document)


def test_a_wrong_type_in_a_pod_is_noticed() -> None:
    document = yaml.safe_load(yaml.safe_dump(documents("plain")[0]))
    kuberay.groups(document["spec"]["rayClusterConfig"])[1]["template"]["spec"]["containers"][0]["ports"] = "8000"
    with pytest.raises(ValidationError):
        kuberay.check(document)


def test_our_part_of_kuberays_schema_is_compared_with_the_whole() -> None:
    ours = kuberay.OUR_PART["properties"]["spec"]
    theirs = copy.deepcopy(ours)
    assert list(kuberay.differences(ours, theirs, "spec")) == []
    theirs["required"] = []
    theirs["properties"]["rayClusterConfig"]["properties"]["rayVersion"]["type"] = "number"
    del theirs["properties"]["rayClusterConfig"]["properties"]["workerGroupSpecs"]["items"]["properties"]["groupName"]
    assert sorted(kuberay.differences(ours, theirs, "spec")) == [
        "spec.rayClusterConfig.rayVersion: type = string, there number",
        "spec.rayClusterConfig.workerGroupSpecs[].groupName: not there",
        "spec: required = ['rayClusterConfig'], there []",
    ]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_serve_config_passes_rays_own_schema(name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    config, _ = OPTIONS[name]
    for text, port in ((serve_config(config), config.port), (documents(name)[0]["spec"]["serveConfigV2"], 8000)):
        schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
        assert schema.applications[0].import_path == "hawkvision.datacenter.app:build"
        assert (schema.http_options.host, schema.http_options.port) == ("0.0.0.0", port)
        assert (schema.applications[0].name, schema.applications[0].route_prefix) == (
            config.app_name,
            config.route_prefix,
        )


# ----------------------------------------------------------------------------------------------------- settings


def chosen_settings() -> st.SearchStrategy[dict[str, Any]]:
    """Settings of several kinds that say something else than their defaults."""
    return st.fixed_dictionaries(
        {"max_replicas": st.integers(4, 9)},
        optional={
            "app_name": st.sampled_from(["vision", "a-1"]),
            "route_prefix": st.sampled_from(["/", "/vision"]),
            "variants": st.sampled_from([("medium",), ("committee",)]),
            "min_replicas": st.integers(0, 3),
            "target_ongoing_requests": st.floats(0.5, 9.0),
            "batch_wait_ms": st.floats(0.0, 9.0),
            "cache_dir": st.just(Path("/models with space")),
            "keys_file": st.just(Path("/etc/hawkvision/keys")),
            "log_format": st.sampled_from(["json", "text"]),
            "memory_bytes": st.integers(2**26, 2**40),
        },
    )


@settings(max_examples=examples(100))
@given(chosen=chosen_settings())
def test_the_builder_gets_the_settings_that_were_chosen(chosen: dict[str, Any], models: Path) -> None:
    config = DatacenterConfig(tasks=("shapes",), models_dir=models, backend="noop", **chosen)
    args = yaml.safe_load(serve_config(config))["applications"][0]["args"]
    assert load_config(DatacenterConfig, overrides=args, environ={}) == config


def test_the_key_is_in_no_file() -> None:
    assert "secret-key" not in serve_config(FIXED) + rayservice(FIXED, PLAIN)


@pytest.mark.parametrize("name", ["Vision", "9", "v" * 39, "a_b", "vision "])
def test_a_name_that_kubernetes_would_refuse_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"dc.app_name = {name!r}: expected at most 38")):
        rayservice(msgspec.structs.replace(FIXED, app_name=name), PLAIN)


def test_no_manifest_guarantees_tls_that_the_proxies_would_not_speak() -> None:
    wanted = msgspec.structs.replace(FIXED, tls_certificate=Path("a.crt"), tls_key=Path("a.key"))
    for make in (serve_config, lambda config: rayservice(config, PLAIN)):
        with pytest.raises(ConfigError, match="allow_plain_http = true"):
            make(wanted)


def test_a_loopback_address_is_refused_for_a_cluster() -> None:
    with pytest.raises(ConfigError, match=r"dc\.host"):
        rayservice(msgspec.structs.replace(FIXED, host="127.0.0.1"), PLAIN)


@pytest.mark.parametrize(
    ("image", "options", "said"),
    [
        ("Not an image", {}, "--rayservice"),
        ("hv@sha256:12", {}, "--rayservice"),
        ("hv:1", {"image_pull_policy": "sometimes"}, "--image-pull-policy = 'sometimes': expected one of Always"),
        ("hv:1", {"models_claim": "a/b"}, "--models-claim"),
        ("hv:1", {"redis_address": "redis"}, "--redis-address = 'redis': expected HOST:PORT"),
    ],
)
def test_an_option_that_kubernetes_would_refuse_is_explained(image: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        kubernetes_options(image, options)


def test_an_option_of_the_rayservice_is_refused_without_it() -> None:
    ran = CliRunner().invoke(app, ["dc", "config", "--models-claim", "models"])
    assert isinstance(ran.exception, ConfigError)
    assert str(ran.exception).startswith("--models-claim belongs to --rayservice IMAGE")


def test_the_variables_of_a_new_cluster_hold_rays_settings_and_new_secrets() -> None:
    first, second = (dict(line.split("=") for line in environment().splitlines()) for _ in range(2))
    assert first.keys() == second.keys() == {*TUNING, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "HAWKVISION_DC_API_KEY"}
    assert first["RAY_AUTH_MODE"] == "token"
    for secret in ("RAY_AUTH_TOKEN", "HAWKVISION_DC_API_KEY"):
        assert re.fullmatch("[0-9a-f]{64}", first[secret])
    assert len({each[name] for each in (first, second) for name in ("RAY_AUTH_TOKEN", "HAWKVISION_DC_API_KEY")}) == 4


# ----------------------------------------------------------------------------------------------------- security


@pytest.mark.parametrize("name", OPTIONS)
def test_every_pod_takes_rays_token_and_the_key_from_the_secret(name: str) -> None:
    called = documents(name)[0]["metadata"]["name"]
    assert cluster(name)["authOptions"] == {"mode": "token", "secretName": called}
    for pod in pods(name):
        (container,) = pod["containers"]
        environment = {its["name"]: its for its in container["env"]}
        assert environment["RAY_AUTH_MODE"]["value"] == "token"
        secret = environment["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert secret == {"name": called, "key": "auth_token"}


def test_the_comment_names_every_key_of_the_secret_that_pods_take() -> None:
    for config, options in OPTIONS.values():
        text = rayservice(config, options)
        said = set(re.findall(r"--from-(?:literal|file)=([\w-]+)=", text))
        keys = set(re.findall(r"(?m)^ *(?:- )?key: ([\w-]+)$", text))
        assert keys == said


@pytest.mark.parametrize("name", OPTIONS)
def test_every_container_runs_without_rights_and_writes_only_to_volumes(name: str) -> None:
    user = next(rest for kind, rest in reversed(instructions()) if kind == "USER").split(":")
    for pod in pods(name):
        security = pod["securityContext"]
        assert [str(security["runAsUser"]), str(security["runAsGroup"])] == user
        assert security["runAsNonRoot"] is True
    for container in containers(name):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_only_a_head_that_asks_for_pods_may_speak_to_kubernetes() -> None:
    may = {name: [pod["automountServiceAccountToken"] for pod in pods(name)] for name in OPTIONS}
    assert may == {"plain": [False, False], "everything": [True, False]}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_network_policy_leaves_strangers_the_http_port_only(name: str) -> None:
    policy = documents(name)[1]["spec"]
    selected = policy["podSelector"]["matchLabels"]
    labels = [group["template"]["metadata"]["labels"] for group in kuberay.groups(cluster(name))]
    assert all(selected.items() <= each.items() for each in labels)
    assert policy["policyTypes"] == ["Ingress"]
    among, operator, callers = policy["ingress"]
    assert among == {"from": [{"podSelector": {"matchLabels": selected}}]}
    assert callers == {"ports": [{"protocol": "TCP", "port": 8000}]}
    assert operator["ports"] == [{"protocol": "TCP", "port": 8265}]
    assert operator["from"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay-operator"}


@pytest.mark.parametrize("name", OPTIONS)
def test_rays_dashboard_listens_at_the_pods_own_address(name: str) -> None:
    head = cluster(name)["headGroupSpec"]
    (container,) = head["template"]["spec"]["containers"]
    assert head["rayStartParams"]["dashboard-host"] == "$POD_IP"
    assert {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in container["env"]


# ------------------------------------------------------------------------------------- what the pods are made of


@pytest.mark.parametrize("name", OPTIONS)
def test_every_container_runs_the_image_with_the_tuned_settings(name: str) -> None:
    _, options = OPTIONS[name]
    for container in containers(name):
        assert (container["image"], container["imagePullPolicy"]) == (options.image, options.pull_policy)
    for pod in pods(name):
        assert {"name": "RAY_SERVE_USE_GRPC_BY_DEFAULT", "value": "1"} in pod["containers"][0]["env"]


def test_models_of_every_task_are_built_where_the_replicas_look_for_them() -> None:
    _, worker = pods("everything")
    for task, built in zip(TASKS, worker["initContainers"], strict=True):
        start, command = built["command"][:3], built["command"][3:]
        assert start == ["hawkvision", "models", "build"]
        manifest = load_manifest(task, models_dir())
        needed = {variant.name for stage in manifest.cascade.dc for variant in manifest.members(stage)}
        assert set(command[: command.index("--task")]) == needed
        assert command[command.index("--task") + 1] == task
        folder = command[command.index("--cache-dir") + 1]
        assert f"HAWKVISION_DC_CACHE_DIR={folder}" in " ".join(rest for kind, rest in instructions() if kind == "ENV")
        assert {"name": "models", "mountPath": folder} in built["volumeMounts"]
        assert {"name": "models", "mountPath": folder, "readOnly": True} in worker["containers"][0]["volumeMounts"]


def test_a_task_that_cannot_be_loaded_is_in_no_manifest() -> None:
    with pytest.raises(ConfigError, match=r"dc\.tasks: 'nowhere' cannot be loaded"):
        serve_config(msgspec.structs.replace(FIXED, tasks=("imagenet", "nowhere")))


def test_a_claim_holds_the_models_of_all_pods_and_a_tier_without_models_builds_none(config: DatacenterConfig) -> None:
    _, worker = pods("everything")
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "models"}} in worker["volumes"]
    document = yaml.safe_load(
        rayservice(msgspec.structs.replace(config, host="0.0.0.0"), PLAIN).partition("\n---\n")[0]
    )
    without = document["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    assert "initContainers" not in without
    assert {volume["name"] for volume in without["volumes"]} == {"tmp"}


def test_a_file_of_keys_is_mounted_where_the_setting_says() -> None:
    for pod in pods("everything"):
        (container,) = pod["containers"]
        assert {"name": "keys", "mountPath": "/etc/hv", "readOnly": True} in container["volumeMounts"]
        (volume,) = (each for each in pod["volumes"] if each["name"] == "keys")
        assert volume["secret"]["items"] == [{"key": "keys", "path": "keys"}]
        assert "HAWKVISION_DC_API_KEY" not in {each["name"] for each in container["env"]}


def test_redis_keeps_rays_state_if_it_is_asked_for() -> None:
    assert "gcsFaultToleranceOptions" not in cluster("plain")
    assert cluster("everything")["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis.cache:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "vision-dc", "key": "redis-password"}}},
    }


def test_the_tier_knows_whether_it_outlives_the_head() -> None:
    for name, survives in (("plain", False), ("everything", True)):
        document = yaml.safe_load(documents(name)[0]["spec"]["serveConfigV2"])
        assert document["applications"][0]["args"].get("survives_head", False) is survives


def test_a_worker_that_stops_is_drained_before_kubernetes_kills_it() -> None:
    _, worker = pods("plain")
    command = worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:3] == ["hawkvision", "dc", "drain"]
    assert int(command[command.index("--limit-s") + 1]) < worker["terminationGracePeriodSeconds"]


# ----------------------------------------------------------------------------------------------------- sizing


def test_workers_have_the_cores_that_the_deployments_of_the_application_ask_for() -> None:
    from ray.serve._private.build_app import build_app

    from hawkvision.datacenter.app import application

    config = msgspec.structs.replace(SCALED, num_cpus=1.5)
    asked = [each.ray_actor_options["num_cpus"] for each in build_app(application(config), name="x").deployments]
    workers = size_workers(config)
    assert sum(asked) <= workers.cpus < sum(asked) + 1
    assert workers.gpus == 1


def test_workers_scale_with_the_replicas() -> None:
    scaled, fixed = (cluster(name)["workerGroupSpecs"][0] for name in ("everything", "plain"))
    assert (scaled["minReplicas"], scaled["maxReplicas"]) == (1, 3)
    assert (fixed["minReplicas"], fixed["maxReplicas"]) == (1, 1)
    assert cluster("everything")["enableInTreeAutoscaling"] is True
    assert cluster("plain")["enableInTreeAutoscaling"] is False


def test_a_replica_that_reserves_no_core_is_refused_because_the_head_has_no_models() -> None:
    with pytest.raises(ConfigError, match=r"dc\.num_cpus: the replicas of 'committee' reserve no core"):
        size_workers(msgspec.structs.replace(FIXED, num_cpus=0.0))
