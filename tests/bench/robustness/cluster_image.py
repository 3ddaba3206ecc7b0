"""The pods of the RayService, started from the image that the Dockerfile makes, without Kubernetes.

    python -m tests.bench.robustness.cluster_image [--keep FOLDER]

Builds the datacenter image with buildah on a base made by debootstrap (Debian's packages buildah and debootstrap, root,
package registries, some 6 GB below /var/tmp). Then it does what KubeRay and the kubelet would do with the printed
manifest: it runs the init container, the generated `ray start` commands of a head and a worker, the probes, the
operator's deployment, a caller's request, the hook before a stop, and the autoscaler's command. Each pod has a network,
processes and volumes of its own, the root is read-only, and the user is the image's. Prints a line for each step; the
exit status is 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.manifests.options import KubernetesOptions
from hawkvision.datacenter.manifests.rayservice import rayservice
from hawkvision.models.sample_images import photographs
from tests.system.cluster.machines import ADDRESSES, Machine, two_machines

ROOT: Final = Path(__file__).resolve().parents[3]
NAME: Final = "localhost/hawkvision-datacenter"
BASE: Final = "localhost/base"
PACKAGES: Final = "python3,python3-venv,python-is-python3,ca-certificates"
DEBIAN: Final = "http://deb.debian.org/debian"
READY_S: Final = 300.0
CALL_S: Final = 60
PREPARE: Final = r"""
set -e
for place in proc dev sys; do mount --rbind /$place /mnt/$place; done
mount -t tmpfs -o mode=1777 tmpfs /mnt/tmp
mount --bind "$1" "/mnt/$2"
# As the kubelet does.
for file in hosts resolv.conf; do mount --bind /etc/$file /mnt/etc/$file; done
mount -o remount,bind,ro /mnt
ip route add default dev eth0
"""
# As `KubeRay`'s generateRayStartCommand puts it.
START: Final = "ulimit -n 65536; ray start {parameters} --block"


def buildah(scratch: Path, *words: str) -> str:
    """Run buildah with its storage below a folder, and give what it prints."""
    places = ("--root", str(scratch / "store"), "--runroot", str(scratch / "run"))
    done = subprocess.run(["buildah", *places, *words], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def images(scratch: Path) -> list[str]:
    """The images that are built."""
    return buildah(scratch, "images", "--format", "{{.Name}}").split()


def build(scratch: Path) -> None:
    """Build the image `NAME` from the Dockerfile, on a base of Debian's packages."""
    if BASE not in images(scratch):
        base = scratch / "base"
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", base, DEBIAN], check=True
        )
        # How packages are fetched is this machine's affair.
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", base / "etc/ssl/certs")
        (base / "etc/pip.conf").write_text("[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n")
        container = buildah(scratch, "from", "scratch")
        buildah(scratch, "add", "-q", container, str(base), "/")
        buildah(scratch, "commit", "-q", "--rm", container, BASE)
    words = [
        "bud",
        "--isolation",
        "chroot",
        "--network",
        "host",
        "-t",
        NAME,
        "-f",
        str(ROOT / "edge/deploy/Dockerfile"),
    ]
    words += ["--ignorefile", str(ROOT / "edge/deploy/Dockerfile.dockerignore")]
    buildah(scratch, *words, "--build-arg", f"BASE={BASE}", "--build-arg", "EXTRAS=build,datacenter", str(ROOT))


@dataclass
class Pod:
    """A machine with the image's root at /mnt."""

    machine: Machine
    address: str
    variables: Mapping[str, str]
    user: str
    log: Path

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs these words in the pod's container."""
        given = [f"{name}={value}" for name, value in {**self.variables, "POD_IP": self.address}.items()]
        return [
            *self.machine.entering(),
            "chroot",
            f"--userspec={self.user}",
            "/mnt",
            "/usr/bin/env",
            "-i",
            *given,
            *words,
        ]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run these words to their end."""
        return subprocess.run(self.command(words), capture_output=True, text=True, timeout=READY_S)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Run these words and go on; what they print goes to `log`."""
        with self.log.open("wb") as to:
            return subprocess.Popen(self.command(words), stdout=to, stderr=subprocess.STDOUT)

    def ask(self, url: str, *options: str) -> int:
        """The status of an HTTP request from this machine; 0 if there is none."""
        curl = ["curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}", "--max-time", str(CALL_S)]
        done = subprocess.run([*self.machine.entering(), *curl, *options, url], capture_output=True, text=True)
        return int(done.stdout or 0)

    def probe(self, probe: dict[str, Any]) -> bool:
        """Whether a probe of the manifest succeeds within `READY_S`, asked as the kubelet asks."""
        get, until = probe["httpGet"], time.monotonic() + READY_S
        while self.ask(f"http://{self.address}:{get['port']}{get['path']}") != 200:
            if time.monotonic() > until:
                return False
            time.sleep(probe["periodSeconds"] / 5)
        return True


def variables_of(container: dict[str, Any], image: Mapping[str, str], secret: Mapping[str, str]) -> dict[str, str]:
    """A container's environment: the image's, then the manifest's with the Secret's values."""
    found = dict(image)
    for each in container.get("env", ()):
        if "value" in each:
            found[each["name"]] = each["value"]
        elif "secretKeyRef" in each["valueFrom"]:
            found[each["name"]] = secret[each["valueFrom"]["secretKeyRef"]["key"]]
    return found


def say(step: str, ok: bool, detail: str = "") -> bool:
    """Print a step's outcome."""
    print(f"{'ok    ' if ok else 'FAILED'} {step} {detail}".rstrip(), flush=True)
    return ok


def start_cluster(pods: list[Pod], groups: list[dict[str, Any]]) -> bool:
    """Both pods' init containers, `ray start` and liveness probes, as KubeRay and the kubelet run them."""
    results = []
    head = pods[0]
    for pod, group in zip(pods, groups, strict=True):
        parameters = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
        (container,) = group["template"]["spec"]["containers"]
        if pod is head:
            parameters.append("--head")
        else:
            parameters.append(f"--address={head.address}:6379")
            parameters.append(f"--num-cpus={container['resources']['limits']['cpu']}")
            done = pod.run("ray", "health-check", "--address", f"{head.address}:6379")
            results.append(say("the worker's wait for the head", done.returncode == 0, done.stderr[-300:]))
        pod.start("/bin/bash", "-c", "--", START.format(parameters=" ".join(parameters)))
        results.append(say(f"{container['name']}: ray start, liveness", pod.probe(container["livenessProbe"])))
    (container,) = groups[0]["template"]["spec"]["containers"]
    results.append(say("ray-head: readiness", head.probe(container["readinessProbe"])))
    return all(results)


def deploy_and_ask(pods: list[Pod], groups: list[dict[str, Any]], serve: str, secret: Mapping[str, str]) -> bool:
    """What the operator sends to the dashboard, and what a caller then gets."""
    head, worker = pods
    token = f"x-ray-authorization: Bearer {secret['auth_token']}"
    put = ("-X", "PUT", "-H", "Content-Type: application/json", "--data", json.dumps(yaml.safe_load(serve)))
    url = f"http://{head.address}:8265/api/serve/applications/"
    results = [
        say("a deployment without the token is refused", head.ask(url, *put) in (401, 403)),
        say("the operator's deployment is taken", head.ask(url, *put, "-H", token) == 200),
    ]
    (container,) = groups[1]["template"]["spec"]["containers"]
    results.append(say("ray-worker: readiness", worker.probe(container["readinessProbe"])))
    caller = ("-H", f"Authorization: Bearer {secret['api-key']}")
    service, until = f"http://{worker.address}:8000", time.monotonic() + READY_S
    while (status := worker.ask(f"{service}/readyz")) != 200 and time.monotonic() < until:
        time.sleep(1.0)
    results.append(say("the tier is ready", status == 200, str(status)))
    image = ("-H", "Content-Type: image/jpeg", "--data-binary", f"@{photographs()[0]}")
    results.append(say("a caller without a key is refused", worker.ask(f"{service}/v1/infer", *image) == 401))
    status = worker.ask(f"{service}/v1/infer", *image, *caller)
    results.append(say("a caller gets an answer", status == 200, str(status)))
    return all(results)


def stop(pods: list[Pod], groups: list[dict[str, Any]]) -> bool:
    """The hook before a worker stops, where there is no other worker; and the command of KubeRay's autoscaler."""
    head, worker = pods
    (container,) = groups[1]["template"]["spec"]["containers"]
    words = container["lifecycle"]["preStop"]["exec"]["command"]
    shorter = [*words[:-1], "5"]
    done = worker.run(*shorter)
    found = say(
        "the hook drains, and says that there is no room", "is there room elsewhere?" in done.stderr, done.stderr[-300:]
    )
    scaler = head.run("ray", "kuberay-autoscaler", "--cluster-name", "x", "--cluster-namespace", "y")
    # It reads the account that Kubernetes would mount.
    reached = "serviceaccount" in scaler.stderr + scaler.stdout
    return found & say("the autoscaler's command starts", reached, "" if reached else scaler.stderr[-600:])


def run(root: Path, scratch: Path, image: Mapping[str, Any]) -> bool:
    """All steps, in the image's root."""
    config = DatacenterConfig(host="0.0.0.0", allow_plain_http=True, api_key="x", min_replicas=1, max_replicas=2)
    text = rayservice(config, KubernetesOptions(NAME))
    service = next(yaml.safe_load_all(text))["spec"]
    groups = [service["rayClusterConfig"]["headGroupSpec"], *service["rayClusterConfig"]["workerGroupSpecs"]]
    secret = {"auth_token": secrets.token_hex(32), "api-key": secrets.token_hex(32)}
    # Container engines set the home folder of the user, which is /tmp in the image.
    base = {**dict(line.partition("=")[::2] for line in image["Env"]), "HOME": "/tmp"}
    models = scratch / "models"
    models.mkdir(exist_ok=True)
    os.chown(models, 10001, 10001)
    (init,) = groups[1]["template"]["spec"]["initContainers"]
    mount = next(each["mountPath"] for each in init["volumeMounts"] if each["name"] == "models").lstrip("/")
    built = build_models(root, init["command"], base, models, mount, image["User"])
    with two_machines(root) as machines:
        pods = []
        for machine, address, group in zip(machines.values(), ADDRESSES, groups, strict=True):
            machine.run("bash", "-c", PREPARE, "prepare", str(models), mount)
            (container,) = group["template"]["spec"]["containers"]
            variables = variables_of(container, base, secret) | {"RAY_ADDRESS": f"{ADDRESSES[0]}:6379"}
            pods.append(Pod(machine, address, variables, image["User"], scratch / f"{container['name']}.log"))
        started = built and start_cluster(pods, groups)
        return started and deploy_and_ask(pods, groups, service["serveConfigV2"], secret) & stop(pods, groups)


def build_models(
    root: Path, command: Sequence[str], image: Mapping[str, str], models: Path, mount: str, user: str
) -> bool:
    """The init container, which reaches the package registries, on a read-only root."""
    script = r"""
set -e
mount --bind "$1" "$1"
for place in proc dev; do mount --rbind /$place "$1/$place"; done
mount -t tmpfs -o mode=1777 tmpfs "$1/tmp"
mount --bind "$2" "$1/$3"
for file in resolv.conf hosts; do mount --bind /etc/$file "$1/etc/$file"; done
mount -o remount,bind,ro "$1"
root=$1 user=$4; shift 4
exec chroot --userspec="$user" "$root" /usr/bin/env -i "$@"
"""
    for name in ("resolv.conf", "hosts"):
        (root / "etc" / name).touch()
    given = [f"{name}={value}" for name, value in image.items()]
    words = ["unshare", "--mount", "sh", "-c", script, "init", str(root), str(models), mount, user, *given, *command]
    done = subprocess.run(words, capture_output=True, text=True)
    return say("the init container builds the models", done.returncode == 0, (done.stdout + done.stderr)[-300:])


def main() -> int:
    """Build, run, and say what failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--keep", type=Path, help="a folder for the image, which is built there unless it is there already"
    )
    arguments = parser.parse_args()
    scratch = arguments.keep or Path(tempfile.mkdtemp(dir="/var/tmp", prefix="hawkvision-image-"))
    scratch.mkdir(exist_ok=True)
    try:
        if NAME not in images(scratch):
            begin = time.monotonic()
            build(scratch)
            say("the Dockerfile's steps", True, f"{time.monotonic() - begin:.0f} s")
        container = buildah(scratch, "from", NAME)
        image = json.loads(buildah(scratch, "inspect", "--type", "image", NAME))["OCIv1"]["config"]
        root = Path(buildah(scratch, "mount", container))
        try:
            return 0 if run(root, scratch, image) else 1
        finally:
            buildah(scratch, "umount", container)
            buildah(scratch, "rm", container)
    finally:
        if arguments.keep is None:
            shutil.rmtree(scratch)


if __name__ == "__main__":
    sys.exit(main())
