"""A user's graph that never ends, or wants all memory, ends its command with an error; and so does a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from hawkvision.system.child_server import running
from hawkvision.system.graph_limits import RUN_CPU_S
from tests.waiting import wait_until

SIDE = 16
FACTS = ["--scale", "1/255", "--mean", "0", "--std", "1", "--channel-order", "rgb", "--fit", "stretch",
         "--interpolation", "bilinear", "--output-meaning", "logits"]  # fmt: skip
SOON = "import sys; from hawkvision.system import graph_limits as limits; limits.RUN_CPU_S, limits.MORE_CPU_S = 1, 0; "
RUN = "from hawkvision.cli import main; main()"


def save(path: Path, nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray]) -> Path:
    """A classifier of five classes: `p`, of (n, 5), becomes `y`."""
    value = helper.make_tensor_value_info
    constants = {"b0": np.array([0]), "b5": np.array([5]), "ax": np.array([1]), **constants}
    first = [helper.make_node("Flatten", ["x"], ["f"]), helper.make_node("Slice", ["f", "b0", "b5", "ax"], ["p"])]
    graph = helper.make_graph(
        [*first, *nodes], "g", [value("x", TensorProto.FLOAT, ["N", 3, SIDE, SIDE])],
        [value("y", TensorProto.FLOAT, ["N", 5])],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return path


def loop_above(path: Path, level: float) -> Path:
    """A graph that never ends if the mean of an image, in 0 to 1, is above this."""
    value = helper.make_tensor_value_info
    same = [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Identity", ["v"], ["w"])]
    kinds = (TensorProto.INT64, TensorProto.BOOL, TensorProto.FLOAT)
    takes = [value(name, kind, None if name == "v" else []) for name, kind in zip("icv", kinds, strict=True)]
    gives = [value("d", TensorProto.BOOL, []), value("w", TensorProto.FLOAT, None)]
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], keepdims=0),
        helper.make_node("Greater", ["m", "level"], ["more"]),
        helper.make_node("Loop", ["", "more", "p"], ["y"], body=helper.make_graph(same, "b", takes, gives)),
    ]
    return save(path, nodes, {"level": np.array(level, np.float32)})


def huge(path: Path) -> Path:
    """A graph that takes 16 TB."""
    nodes = [
        helper.make_node("ConstantOfShape", ["many"], ["z"]),
        helper.make_node("ReduceSum", ["z", "b0"], ["s"], keepdims=0),
        helper.make_node("Add", ["p", "s"], ["y"]),
    ]
    return save(path, nodes, {"many": np.array([1 << 42])})


def add(folder: Path, model: Path) -> list[str]:
    (folder / "labels.txt").write_text("a\nb\nc\nd\ne\n")
    places = ["--models-dir", str(folder / "m"), "--cache-dir", str(folder / "c")]
    return ["models", "add", str(model), "--task", "own", "--labels", str(folder / "labels.txt"), *FACTS, *places]


def outcome(words: list[str], before: str = SOON) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", before + RUN, *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(("make", "said"), [
    (lambda path: loop_above(path, -1), "was stopped at its limit of processor time: 1 s"),
    (huge, "the graph does not run: "),
])  # fmt: skip
def test_a_graph_beyond_a_limit_is_not_added(make: object, said: str, tmp_path: Path) -> None:
    assert callable(make)
    status, text = outcome(add(tmp_path, make(tmp_path / "odd.onnx")))
    assert status == 1
    assert text.startswith(f"error: {tmp_path / 'odd.onnx'}: ")
    assert said in text
    assert "Traceback" not in text
    assert not (tmp_path / "m" / "own").exists()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Where the task of a graph is that never ends for white images."""
    folder = tmp_path_factory.mktemp("own")
    assert outcome(add(folder, loop_above(folder / "odd.onnx", 0.9)), "")[0] == 0
    return ["--task", "own", "--models-dir", str(folder / "m"), "--cache-dir", str(folder / "c")]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "calibrate", "quantize"])
def test_a_graph_that_never_ends_for_some_images_ends_its_command(
    command: str, places: list[str], tmp_path: Path
) -> None:
    for label in "abcde":
        (tmp_path / "images" / label).mkdir(parents=True)
        for index in range(50):
            white = np.random.default_rng(ord(label) * 99 + index).integers(240, 256, (SIDE, SIDE, 3), np.uint8)
            assert cv2.imwrite(str(tmp_path / "images" / label / f"{index}.png"), white)
    (tmp_path / "mine.csv").write_text("file,label\na/0.png,a\n")
    data = ["--data", str(tmp_path / "images")]
    words = {
        "check": ["models", "check", "--reference", str(tmp_path / "mine.csv"), *data],
        "calibrate": ["calibrate", *data],
        "quantize": ["models", "quantize", "odd", *data],
    }[command]
    status, text = outcome([*words, *places])
    assert (status, "odd: loading or running the graph was stopped at its limit" in text) == (1, True), text


@pytest.mark.slow
def test_a_node_whose_thread_never_ends_is_ended_by_a_signal(places: list[str], tmp_path: Path) -> None:
    for index in range(300):
        dark = np.random.default_rng(index).integers(0, 200, (SIDE, SIDE, 3), np.uint8)
        folder = tmp_path / "images" / "abcde"[int(dark[0, :5, 2].argmax())]
        folder.mkdir(parents=True, exist_ok=True)
        assert cv2.imwrite(str(folder / f"{index}.png"), dark)
    assert outcome(["calibrate", "--data", str(tmp_path / "images"), *places], "")[0] == 0
    command = ("hawkvision", "edge", "up", *places, "--port", "0", "--drain-timeout-s", "1",
               "--state-file", str(tmp_path / "state.db"))  # fmt: skip
    with running(*command) as node:
        white = cv2.imencode(".png", np.full((SIDE, SIDE, 3), 255, np.uint8))[1].tobytes()
        with pytest.raises(OSError, match="timed out"):
            urllib.request.urlopen(f"{node.url}/v1/classify", data=white, timeout=2)
        assert node.stop() == 1
        assert "a graph that never ends" in node.output()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_command_whose_graph_runs(sent: signal.Signals, tmp_path: Path) -> None:
    words = add(tmp_path, loop_above(tmp_path / "odd.onnx", -1))
    process = subprocess.Popen([sys.executable, "-c", RUN, *words], stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: children.read_text() != "")
    child = int(children.read_text())
    used = Path(f"/proc/{child}/stat")
    wait_until(lambda: int(used.read_text().rsplit(")")[1].split()[11]) > RUN_CPU_S / 8 * os.sysconf("SC_CLK_TCK"))
    process.send_signal(sent)
    assert process.wait(60) in (128 + signal.SIGTERM, 1, -signal.SIGINT)
    assert not used.exists()
