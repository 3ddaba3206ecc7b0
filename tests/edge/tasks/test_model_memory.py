"""Nodes with real models and too little memory for all of them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest

from hawkvision.system.child_server import ServerProcess, running
from tests.edge.conftest import Caller
from tests.images import encoded

TASKS = ("imagenet", "coco")
"""Both large: what one takes is measured to a megabyte or two."""
PATHS = {"imagenet": "/v1/classify", "coco": "/v1/detect"}


@contextmanager
def node(*words: str, tasks: Sequence[str] = TASKS) -> Iterator[tuple[ServerProcess, Caller]]:
    with (
        running("edge", "--port", "0", "--tasks", ",".join(tasks), *words) as server,
        closing(Caller(server)) as caller,
    ):
        yield server, caller


def states(caller: Caller) -> dict[str, str]:
    return {each["task"]: each["status"] for each in caller.get("/v1/tasks").json["tasks"]}


def metric(caller: Caller, name: str) -> float:
    found = re.search(rf"(?m)^hawkvision_{re.escape(name)} (\S+)$", caller.get("/metrics").body.decode())
    assert found is not None, name
    return float(found[1])


def asked(caller: Caller, task: str) -> Any:
    return caller.send("POST", f"{PATHS[task]}?task={task}&quality=fast", encoded())


@pytest.fixture(scope="module")
def too_little() -> int:
    """Bytes that do not suffice for the models of both tasks."""
    with node("--model-memory-bytes", str(1 << 40)) as (_, caller):
        assert states(caller) == dict.fromkeys(TASKS, "ready")
        assert metric(caller, "model_bytes") <= metric(caller, "model_memory_bytes")
        sizes = [int(each["model_bytes"]) for each in caller.get("/v1/tasks").json["tasks"]]
        return sum(sizes) - min(sizes) // 2


COUNT_READS = """
import sys
from edge.factory import load_tasks
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.settings.load import settings_of_tasks

read = []
sys.addaudithook(lambda event, args: read.append(str(args[0])) if event == "open" else None)
budget = int(sys.argv[1]) if len(sys.argv) > 1 else None
config = EdgeConfig(tasks=("cifar10", "fashion_mnist"), model_memory_bytes=budget, intra_op_threads=1)
load_tasks(settings_of_tasks(config))
print(sum(name.endswith(".onnx") for name in read))
"""


@pytest.mark.parametrize(("budget", "reads"), [((), 2), ((str(1 << 40),), 4)])
def test_models_of_a_start_are_opened_once_and_twice_where_they_are_measured_for_a_budget(
    budget: tuple[str, ...], reads: int
) -> None:
    ran = subprocess.run([sys.executable, "-c", COUNT_READS, *budget], capture_output=True, text=True, check=True)
    assert int(ran.stdout.split()[-1]) == reads


@pytest.mark.slow
def test_tasks_take_turns_where_memory_suffices_for_one(too_little: int) -> None:
    with node("--model-memory-bytes", str(too_little)) as (_, caller):
        assert states(caller) == {"imagenet": "ready", "coco": "unloaded"}
        assert caller.get("/readyz").status == 200
        assert [caller.get(f"/readyz?task={task}").status for task in TASKS] == [200, 503]
        first = asked(caller, "imagenet").json
        for _ in range(3):
            assert asked(caller, "coco").status == 200
            assert states(caller) == {"imagenet": "unloaded", "coco": "ready"}
            again = asked(caller, "imagenet")
            assert (again.status, again.json["top_k"]) == (200, first["top_k"])
            assert states(caller) == {"imagenet": "ready", "coco": "unloaded"}
        assert metric(caller, "model_bytes") <= too_little
        assert metric(caller, 'model_unloads_total{task="coco",variant="ssdlite_mobilenet_v2_int8"}') == 3.0


@pytest.mark.slow
def test_pinned_tasks_stay_and_what_never_fits_is_said_at_the_start(too_little: int) -> None:
    with node("--model-memory-bytes", str(too_little), "--pinned-tasks", "coco") as (server, caller):
        assert states(caller) == {"imagenet": "failed", "coco": "ready"}
        assert "those of pinned tasks" in server.output()
        assert asked(caller, "coco").status == 200
        assert asked(caller, "imagenet").status == 503


@pytest.mark.slow
def test_an_operator_loads_and_unloads_tasks_and_requests_load_them_too() -> None:
    with node("--backend", "noop", "--pinned-tasks", "cifar10", tasks=("imagenet", "cifar10")) as (_, caller):
        listed = caller.send("POST", "/v1/tasks/imagenet/unload").json["tasks"]
        assert [each["status"] for each in listed] == ["unloaded", "ready"]
        assert [each["models"] for each in caller.get("/v1/status").json["tasks"]] == ["unloaded", "ready"]
        assert caller.get("/v2/models/imagenet/ready").status == 503
        assert caller.send("POST", "/v1/tasks/imagenet/load").status == 200
        assert caller.get("/v2/models/imagenet/ready").status == 200
        assert caller.send("POST", "/v2/repository/models/imagenet/unload").status == 200
        assert (asked(caller, "imagenet").status, states(caller)["imagenet"]) == (200, "ready")
        refused = {path: caller.send("POST", f"/v1/tasks/{path}") for path in ("cifar10/unload", "dogs/load")}
        assert {path: reply.status for path, reply in refused.items()} == {"cifar10/unload": 400, "dogs/load": 404}
        assert "pinned_tasks" in refused["cifar10/unload"].json["error"]
