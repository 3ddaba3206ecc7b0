"""The float stages on a GPU: speed by batch size and precision, and agreement with the CPU's logits.

Two steps, on two machines. Here, with HawkVision and its models built:

    python -m tests.bench.gpu --pack PACK.npz [--images TASK=IMAGES]

writes the models as lists of operators with their weights, input images, and the logits that our own runtime gives for
them on this machine's CPU: at most 60 MB. On the machine with the GPU, from a checkout, with nothing but PyTorch:

    python tests/bench/gpu.py PACK.npz --out RESULT.json

runs the same operators in PyTorch. A batch counts from its images in pinned memory of the host to its logits there.
Every case has run before it is timed. fp32 is without TF32; fp16 has the layers in float16 and reads pixels in float32,
as `hawkvision.inference.backends.half_precision` does. ONNX Runtime on a GPU is not measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MODELS = ("imagenet:efficientnet_lite2", "cifar10:large")
IMAGES = 128
BATCHES = (1, 2, 4, 8, 16, 32, 64)
PRECISIONS = ("fp32", "tf32", "fp16")
MOST_SECONDS = 420.0
"""Cases that would begin later are left out, and named in the result."""
LEAST_RUNS = 20
QUICK_RUNS = 3
Arrays = Mapping[str, NDArray[Any]]


def _conv(torch: Any, x: Any, weights: Sequence[Any], a: Mapping[str, Any]) -> Any:
    top, left, bottom, right = a.get("pads", (0, 0, 0, 0))
    padding = (top, left)
    if (top, left) != (bottom, right):
        x, padding = torch.nn.functional.pad(x, (left, right, top, bottom)), (0, 0)
    kernel, bias = weights[0], weights[1] if len(weights) > 1 else None
    return torch.nn.functional.conv2d(x, kernel, bias, a.get("strides", (1, 1)), padding, groups=a.get("group", 1))


def _max_pool(torch: Any, x: Any, _: Sequence[Any], a: Mapping[str, Any]) -> Any:
    assert not any(a.get("pads", ())), "the zoo pads no pooling"
    return torch.nn.functional.max_pool2d(x, a["kernel_shape"], a["strides"])


OPERATORS: dict[str, Callable[[Any, Any, Sequence[Any], Mapping[str, Any]], Any]] = {
    "Cast": lambda torch, x, _, a: x.float(),
    "Transpose": lambda torch, x, _, a: x.permute(*a["perm"]),
    "Sub": lambda torch, x, rest, a: x - rest[0],
    "Add": lambda torch, x, rest, a: x + rest[0],
    "Conv": _conv,
    "Relu": lambda torch, x, _, a: torch.relu(x),
    "Clip": lambda torch, x, rest, a: torch.clamp(x, *rest),
    "MaxPool": _max_pool,
    "GlobalAveragePool": lambda torch, x, _, a: x.mean((2, 3), keepdim=True),
    "Flatten": lambda torch, x, _, a: x.flatten(1),
    "Gemm": lambda torch, x, rest, a: torch.nn.functional.linear(x, *rest),
    "Concat": lambda torch, x, rest, a: torch.cat((x, *rest), a["axis"]),
}
_WEIGHTED = ("Conv", "Gemm")


class Network:
    """A packed model on a device; everything from the first layer with weights on is float16 with `half`."""

    def __init__(self, torch: Any, graph: Mapping[str, Any], weights: Arrays, device: str, *, half: bool) -> None:
        self._torch, self._graph, self._half = torch, graph, half
        layers = {name for node in graph["nodes"] if node["op"] in _WEIGHTED for name in node["inputs"][1:]}
        limits = {name for node in graph["nodes"] if node["op"] == "Clip" for name in node["inputs"][1:]}
        self._constants: dict[str, Any] = {}
        for name, value in weights.items():
            if name in limits:
                self._constants[name] = float(value)
                continue
            tensor = torch.from_numpy(np.array(value)).to(device)
            if value.ndim == 4:
                tensor = tensor.contiguous(memory_format=torch.channels_last)
            self._constants[name] = tensor.half() if half and name in layers else tensor

    def __call__(self, images: Any) -> Any:
        """float32 logits (n, classes) of uint8 images (n, height, width, 3)."""
        values = {**self._constants, self._graph["input"]: images}
        for node in self._graph["nodes"]:
            x, *rest = (values[name] for name in node["inputs"])
            if self._half and node["op"] in _WEIGHTED:
                x = x.half()
            values[node["output"]] = OPERATORS[node["op"]](self._torch, x, rest, node["attributes"])
        return values[self._graph["output"]].float()


def runner(torch: Any, network: Network, example: Any, device: str, *, graph: bool) -> Callable[[Any], Any]:
    """A function from images on the host to logits on the host; `graph` records the kernels once (CUDA graphs)."""

    def plain(images: Any) -> Any:
        return network(images.to(device, non_blocking=True)).cpu()

    for _ in range(3):
        plain(example)
    if not graph:
        return plain
    fixed = example.to(device)
    with torch.cuda.stream(torch.cuda.Stream()):
        network(fixed)  # what a stream allocates once may not be recorded
        torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        logits = network(fixed)

    def replayed(images: Any) -> Any:
        fixed.copy_(images, non_blocking=True)
        recorded.replay()
        return logits.cpu()

    replayed(example)
    return replayed


@dataclass(frozen=True)
class Speed:
    """One case: a model in one precision at one batch size."""

    model: str
    precision: str
    batch: int
    cuda_graph: bool
    runs: int
    images_per_s: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Agreement:
    """A model's logits on the device against the CPU's of the pack."""

    model: str
    precision: str
    images: int
    same_class: int
    largest_difference: float
    logits_range: float
    variation: float
    """Largest difference between batch sizes on the device."""


def speed_of(run: Callable[[Any], Any], images: Any, seconds: float) -> tuple[int, float, float, float]:
    """Runs, images a second, P50 and P99 in milliseconds, of batches one after the other; 0 s for a few runs."""
    least = LEAST_RUNS if seconds else QUICK_RUNS
    took: list[float] = []
    ends = time.perf_counter() + seconds
    while len(took) < least or (time.perf_counter() < ends and len(took) < 20_000):
        before = time.perf_counter()
        run(images)
        took.append(time.perf_counter() - before)
    p50, p99 = np.percentile(took, (50, 99)) * 1e3
    return len(took), len(images) * len(took) / sum(took), float(p50), float(p99)


def agreement_of(torch: Any, network: Network, arrays: Arrays, device: str, model: str, precision: str) -> Agreement:
    """Run all packed images in two batch sizes."""
    images, wanted = arrays[f"{model}/images"], arrays[f"{model}/logits"]

    def logits(batch: int) -> NDArray[Any]:
        parts = [torch.from_numpy(images[i : i + batch]).to(device) for i in range(0, len(images), batch)]
        return np.concatenate([network(part).cpu().numpy() for part in parts])

    one, many = logits(1), logits(32)
    return Agreement(
        model,
        precision,
        len(images),
        int((many.argmax(1) == wanted.argmax(1)).sum()),
        float(np.abs(many - wanted).max()),
        float(np.ptp(wanted)),
        float(np.abs(many - one).max()),
    )


class Measurement:
    """Measures case by case until the time is up."""

    def __init__(self, torch: Any, arrays: Arrays, device: str, seconds: float, batches: Sequence[int]) -> None:
        """`seconds` are those of each case."""
        self._torch, self._arrays, self._device, self._seconds, self._batches = torch, arrays, device, seconds, batches
        self._facts = json.loads(arrays["facts"].tobytes())
        self._gpu = device != "cpu"
        self._begun = time.perf_counter()
        self._speeds: list[Speed] = []
        self._agreements: list[Agreement] = []
        self._left_out: list[str] = []

    def run(self) -> dict[str, Any]:
        """All cases, as the result file has them."""
        self._torch.backends.cudnn.benchmark = True
        with self._torch.inference_mode():
            for model in self._facts["models"]:
                for precision in PRECISIONS if self._gpu else ("fp32", "fp16"):
                    self._measure(model, precision)
        return {
            "device": self._torch.cuda.get_device_name(self._device) if self._gpu else processor(),
            "torch": self._torch.__version__,
            "cuda": self._torch.version.cuda if self._gpu else None,
            "cpu_of_the_logits": self._facts["cpu"],
            "models": {model: graph["sha256"] for model, graph in self._facts["models"].items()},
            "seconds": round(time.perf_counter() - self._begun, 1),
            "speed": [asdict(each) for each in self._speeds],
            "agreement": [asdict(each) for each in self._agreements],
            "left_out": self._left_out,
        }

    def _measure(self, model: str, precision: str) -> None:
        torch, arrays, start = self._torch, self._arrays, f"{model}/weights/"
        weights = {key.removeprefix(start): arrays[key] for key in arrays if key.startswith(start)}
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        network = Network(torch, self._facts["models"][model], weights, self._device, half=precision == "fp16")
        self._agreements.append(agreement_of(torch, network, arrays, self._device, model, precision))
        for batch in self._batches:
            for graph in (False, True) if self._gpu else (False,):
                case = f"{model} {precision} {batch}{' graph' if graph else ''}"
                if time.perf_counter() - self._begun > MOST_SECONDS:
                    self._left_out.append(f"{case}: the time was up")
                    continue
                try:
                    self._speeds.append(self._case(network, model, precision, batch, graph))
                except RuntimeError as error:  # out of memory, or kernels that cannot be recorded
                    self._left_out.append(f"{case}: {error}")
                else:
                    print(_line(self._speeds[-1]), flush=True)

    def _case(self, network: Network, model: str, precision: str, batch: int, graph: bool) -> Speed:
        images = self._arrays[f"{model}/images"]
        example = self._torch.from_numpy(np.resize(images, (batch, *images.shape[1:])))
        example = example.pin_memory() if self._gpu else example
        run = runner(self._torch, network, example, self._device, graph=graph)
        return Speed(model, precision, batch, graph, *speed_of(run, example, self._seconds))


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _line(case: Speed) -> str:
    how = "graph" if case.cuda_graph else "eager"
    return (
        f"{case.model:<28}{case.precision:>5}{case.batch:>4} {how}: {case.images_per_s:9.0f} images/s, "
        f"P50 {case.p50_ms:8.2f} ms, P99 {case.p99_ms:8.2f} ms ({case.runs} runs)"
    )


def show(result: Mapping[str, Any]) -> Iterable[str]:
    """Lines about the agreement, and what was left out."""
    for each in result["agreement"]:
        share = each["largest_difference"] / each["logits_range"]
        yield (
            f"{each['model']:<28}{each['precision']:>5}: the CPU's class for {each['same_class']} of {each['images']} "
            f"images, logits within {share:.1e} of their range, {each['variation']:.1e} between batch sizes"
        )
    if result["left_out"]:
        yield f"left out: {', '.join(result['left_out'])}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", help="the pack to measure with")
    parser.add_argument("--pack", type=Path, metavar="OUT", help="write the pack instead")
    parser.add_argument("--model", action="append", metavar="TASK:VARIANT", help=f"default: {', '.join(MODELS)}")
    parser.add_argument("--images", action="append", default=[], metavar="TASK=IMAGES", help="default: photographs")
    parser.add_argument("--count", type=int, default=IMAGES, help="images in the pack, per model")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu, ...")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each case")
    parser.add_argument("--quick", action="store_true", help="two batch sizes, few runs, eight images")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    given = parser.parse_args(words)
    if given.pack is not None:
        images = {task: Path(path) for task, _, path in (word.partition("=") for word in given.images)}
        from tests.bench.gpu_pack import pack

        size = pack(given.pack, given.model or MODELS, images, given.count, OPERATORS)
        print(f"{given.pack}: {size / 1e6:.1f} MB")
        return 0
    if given.file is None:
        parser.error("expected a pack, or --pack OUT to write one")
    with np.load(given.file, allow_pickle=False) as archive:
        arrays = dict(archive)
    if given.quick:
        arrays = {key: value if "/weights/" in key or key == "facts" else value[:8] for key, value in arrays.items()}
    batches, seconds = (BATCHES[:2], 0.0) if given.quick else (BATCHES, given.seconds)
    import torch

    result = Measurement(torch, arrays, given.device, seconds, batches).run()
    print(*show(result), sep="\n")
    if given.out is not None:
        given.out.write_text(json.dumps({"command": sys.argv, **result}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
