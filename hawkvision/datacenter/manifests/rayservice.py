"""A KubeRay `RayService`, with the `NetworkPolicy` that opens its HTTP port to callers and hardly anything else.

The pods (`pods.py`) start from the image alone. Models come from a claim, or each pod builds them in an init container.
Keys and Ray's token come from a Secret. All objects are called after the application: `hawkvision-dc` by default.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any, Final

import msgspec

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.access import is_loopback
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.manifests.options import KubernetesOptions
from hawkvision.datacenter.manifests.pods import (
    DASHBOARD_PORT,
    LOCKED,
    SERVE_PORT,
    TMP,
    head_pod,
    labels_of,
    worker_pod,
)
from hawkvision.datacenter.manifests.serve_yaml import load_all, serve_document, yaml_of
from hawkvision.datacenter.manifests.sizing import size_workers

_NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,39}[a-z0-9])?")
"""KubeRay's names: it appends to them for objects of its own, whose names may have 63 characters."""
_OPERATOR: Final = {"app.kubernetes.io/name": "kuberay-operator"}
"""The labels of the operator's pods, as its Helm chart sets them."""
_OBJECT_STORE_BYTES: Final = 200_000_000
"""Images travel by gRPC, so the store holds only Ray's own small objects. It would take 30 % of a pod's memory."""


def rayservice(config: DatacenterConfig, options: KubernetesOptions) -> str:
    """The YAML of a `RayService` (`ray.io/v1`) and of its `NetworkPolicy`.

    KubeRay scales the workers to what the replicas need. Its Service `NAME-serve-svc` listens on port 8000.

    Raises:
        ConfigError: as `serve_config`, or if `host` is loopback, which no other pod could reach.
    """
    if is_loopback(config.host):
        raise ConfigError(f"dc.host = {config.host!r}: pods reach one another over the network; set 0.0.0.0")
    name = f"{config.app_name}-dc"
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"dc.app_name = {config.app_name!r}: expected at most 38 of a-z, 0-9 and -, first a letter")
    survives_head = config.survives_head or options.redis_address is not None
    serve = serve_document(msgspec.structs.replace(config, port=SERVE_PORT, survives_head=survives_head))
    service = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": name, "labels": labels_of(name)},
        "spec": {
            "serveConfigV2": yaml_of(serve),
            "excludeHeadPodFromServeSvc": True,
            "rayClusterConfig": _ray_cluster(name, config, options),
        },
    }
    return f"{_first_lines(name, config, options)}{yaml_of(service)}---\n{yaml_of(_network_policy(name))}"


def _ray_cluster(name: str, config: DatacenterConfig, options: KubernetesOptions) -> dict[str, Any]:
    workers = size_workers(config)
    cluster: dict[str, Any] = {
        # The image has this machine's version, from one lock. KubeRay asks for it when a token is required.
        "rayVersion": importlib.metadata.version("ray"),
        "authOptions": {"mode": "token", "secretName": name},
        "enableInTreeAutoscaling": workers.scale,
    }
    if workers.scale:
        cluster["autoscalerOptions"] = {
            "imagePullPolicy": options.pull_policy,
            "securityContext": LOCKED,
            "volumeMounts": [TMP],
        }
    if options.redis_address is not None:
        password = {"valueFrom": {"secretKeyRef": {"name": name, "key": "redis-password"}}}
        cluster["gcsFaultToleranceOptions"] = {"redisAddress": options.redis_address, "redisPassword": password}
    store = {"object-store-memory": str(_OBJECT_STORE_BYTES)}
    cluster["headGroupSpec"] = {
        # KubeRay's shell fills in the address, which the operator and the probe use.
        "rayStartParams": {"dashboard-host": "$POD_IP", "num-cpus": "0", **store},
        "template": head_pod(name, config, options, scales=workers.scale),
    }
    cluster["workerGroupSpecs"] = [
        {
            "groupName": "replicas",
            "replicas": workers.least,
            "minReplicas": workers.least,
            "maxReplicas": workers.most,
            "rayStartParams": store,
            "template": worker_pod(name, config, options, load_all(config), workers),
        }
    ]
    return cluster


def _first_lines(name: str, config: DatacenterConfig, options: KubernetesOptions) -> str:
    random = '"$(openssl rand -hex 32)"'
    literals = [f"--from-literal=auth_token={random}"]
    literals.append(
        f"--from-literal=api-key={random}" if config.keys_file is None else "--from-file=keys=FILE_OF_HAWKVISION_KEYS"
    )
    if options.redis_address is not None:
        literals.append("--from-literal=redis-password=PASSWORD_OF_REDIS")
    lines = ["Needs KubeRay 1.6 or later, and once, before this:", f"  kubectl create secret generic {name} \\"]
    lines += [f"    {literal} \\" for literal in literals[:-1]] + [f"    {literals[-1]}"]
    if config.backend != "noop":
        lines.append("Init containers build the models; they need PyPI, unless the files are there already.")
    return "".join(f"# {line}\n" for line in lines)


def _network_policy(name: str) -> dict[str, Any]:
    """Who may connect to the pods. Ray's ports also ask for its token, the HTTP port for the API key."""

    def tcp(port: int) -> list[dict[str, Any]]:
        return [{"protocol": "TCP", "port": port}]

    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {
            "podSelector": {"matchLabels": labels_of(name)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": labels_of(name)}}]},
                {
                    "from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": _OPERATOR}}],
                    "ports": tcp(DASHBOARD_PORT),
                },
                {"ports": tcp(SERVE_PORT)},
            ],
        },
    }
