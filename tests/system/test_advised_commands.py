"""Commands that `models add`, `models check`, `calibrate`, `doctor` and `edge up` advise, as printed: all lead on."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from hawkvision.core.types import Pixels
from hawkvision.system.child_server import ended
from hawkvision.tasks.class_scores import softmax
from tests.hawkvision.model_zoo.own.exports import as_torch_takes, save_torch_style
from tests.hawkvision.model_zoo.own.small_cnn import LABELS, SIDE, Array, SmallCnn, shape_images, write_folder
from tests.system import pages

pytestmark = pytest.mark.slow

HEIGHT, WIDTH = 20, 28
ADVISED = re.compile(r"`(hawkvision [^`]+)`|(?:next:|→) (hawkvision .+)$", re.MULTILINE)
FACTS = {
    "LABELS": "images", "SCALE": "1/255", "MEAN": "0.485,0.456,0.406", "STD": "0.229,0.224,0.225", "ORDER": "rgb",
    "FIT": "letterbox", "METHOD": "opencv_bilinear",
}  # fmt: skip
"""What the owner says of the model; only `FIT` is wrong."""
FILES = {"IMAGES": "images", "PREDICTIONS.csv": "predictions.csv"}


@dataclass(frozen=True)
class Owner:
    """A folder with an owner's files, in which commands run."""

    folder: Path
    environment: Mapping[str, str]

    def run(self, command: str) -> tuple[int, str]:
        """The exit status, and what was printed. A server ends once it is ready, by Ctrl-C."""
        with subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            printed = ""
            for line in process.stdout:
                printed += line
                if line.startswith("ready: http"):
                    process.send_signal(signal.SIGINT)
            return ended(process), printed  # type: ignore[arg-type]

    def done(self, command: str) -> str:
        """What a command printed that must work."""
        code, printed = self.run(command)
        assert code == 0, f"{command}\n{printed}"
        return printed

    def follow(self, command: str) -> dict[str, str]:
        """Run a command and what it advises until it works, and give what the latter printed; none is advised twice."""
        seen: dict[str, str] = {}
        while True:
            code, printed = self.run(command)
            if code == 0:
                return seen
            found = advised(printed)
            assert found, f"{command}\n{printed}"
            assert not seen.keys() & set(found), f"{command}\n{printed}"
            seen |= {each: self.done(each) for each in found}


def advised(printed: str) -> list[str]:
    """The commands in a text, with the owner's files in place of the words in capitals."""
    commands = ["".join(found) for found in ADVISED.findall(printed)]
    return [shlex.join(FILES.get(word, word) for word in shlex.split(each)) for each in dict.fromkeys(commands)]


def template(printed: str, facts: Mapping[str, str]) -> str:
    """The command line that ends a text, completed."""
    return shlex.join(facts.get(word, word) for word in shlex.split(printed.splitlines()[-1]))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, labelled images, and the owner's predictions of some, whose program stretches images."""
    root = tmp_path_factory.mktemp("files")
    net = SmallCnn((4, 8), len(LABELS))

    def taken(images: Pixels) -> Array:
        return as_torch_takes(np.stack([cv2.resize(each, (SIDE, SIDE)) for each in images]))

    images, labels = shape_images(500, 0, HEIGHT, WIDTH)
    net.train(taken(images), labels, 3)
    save_torch_style(net, root / "pets.onnx", SIDE)
    write_folder(root / "images", *shape_images(100, 1, HEIGHT, WIDTH))
    paths = sorted((root / "images").rglob("*.png"))[::9]
    rows = softmax(net.logits(taken(np.stack([np.asarray(Image.open(path)) for path in paths]))))
    lines = [
        f"{p.relative_to(root)},{LABELS[row.argmax()]},{row.max():.6f}" for p, row in zip(paths, rows, strict=True)
    ]
    (root / "predictions.csv").write_text("\n".join(["file,label,probability", *lines]) + "\n")
    return root


def test_every_advised_command_leads_on(files: Path, tmp_path: Path) -> None:
    models, cache = tmp_path / "my models", tmp_path / "built"
    options = f" --models-dir {shlex.quote(str(models))} --cache-dir {cache}"
    settings = {"TASK": "pets", "PORT": "0", "MODELS_DIR": str(models), "CACHE_DIR": str(cache)}
    environment = pages.shell_environment(tmp_path) | {f"HAWKVISION_EDGE_{k}": each for k, each in settings.items()}
    owner = Owner(files, environment)

    code, asked = owner.run(f"hawkvision models add pets.onnx --task pets{options}")
    assert code == 1
    check, calibrate = advised(owner.done(template(asked, FACTS)))
    code, compared = owner.run(check)
    assert code == 1
    better = re.search(r"with (--.+) the mean difference", " ".join(compared.split()))
    assert better is not None, compared
    assert advised(owner.done(f"{template(asked, FACTS)} {better[1]}")) == [check, calibrate]
    owner.done(check)

    followed = owner.follow(f"hawkvision edge up --task pets{options}")  # there is no profile
    (up,) = advised(followed[calibrate])
    assert shlex.split(up) == shlex.split(f"hawkvision up --task pets{options}")
    assert (models / "pets" / "profile.json").is_file()
    owner.done(f"{template(asked, FACTS)} --name pets")  # the profile is of another preparation
    shutil.rmtree(cache / "models")
    owner.follow("hawkvision doctor")
    owner.done(f"hawkvision edge up --task pets{options}")
