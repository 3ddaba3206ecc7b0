"""The command line: `hawkvision …`. Each command imports what it needs when it runs, so `--help` is fast.

Exit status: 0 done, 1 an error that was explained on standard error, 2 a wrong command line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Final

from msgspec import Meta

from hawkvision.cli import certification, classify, servers, status, tools
from hawkvision.cli.models import own, shipped
from hawkvision.cli.options import remember_places
from hawkvision.cli.review import command as review
from hawkvision.core import __version__, command_line, logs
from hawkvision.core.command_line import Group
from hawkvision.core.errors import HawkVisionError
from hawkvision.core.logs import LogFormat, LogLevel
from hawkvision.system.child_server import exit_on_sigterm
from hawkvision.system.graph_limits import in_child
from hawkvision.system.terminal import quiet_without_reader, write_anything

EXTRA_OF: Final = {
    "onnx": "build",
    "safetensors": "build",
    "scipy": "build",
    "ray": "datacenter",
}
"""The extra of this package for each optional library."""


def _before(
    version: Annotated[bool, Meta(description="Print the version.")] = False,
    log_level: Annotated[
        LogLevel,
        Meta(description="Log level of commands, not of servers.", extra={"variable": "HAWKVISION_LOG_LEVEL"}),
    ] = "warning",
    log_format: Annotated[
        LogFormat, Meta(description="Format of log lines.", extra={"variable": "HAWKVISION_LOG_FORMAT"})
    ] = "text",
) -> int | None:
    """Options of every command."""
    logs.configure(log_level, log_format)
    if version:
        print(f"hawkvision {__version__}")
    return 0 if version else None


MODELS: Final = Group(
    "Build, bring, check and list models.",
    {
        "": {
            "build": shipped.models_build,
            "list": shipped.models_list,
            "verify": shipped.models_verify,
            "add": own.models_add,
            "check": own.models_check,
            "quantize": own.models_quantize,
        }
    },
)
KEYS: Final = Group(
    "Manage the key file of a server (--keys-file).",
    {"": {"add": tools.keys_add, "list": tools.keys_list, "remove": tools.keys_remove}},
)
COMMANDS: Final = Group(
    "Modeless vision inference: state the accuracy you need, not the model.",
    {
        "Serve": {"up": servers.up, "demo": tools.demo, "edge": servers.EDGE, "dc": servers.DC},
        "Ask and test": {
            "classify": classify.classify,
            "detect": classify.detect,
            "infer": classify.infer,
            "load": tools.LOAD,
        },
        "Models and guarantees": {
            "models": MODELS,
            "calibrate": certification.calibrate,
            "certify": certification.certify,
            "review": review.review,
            "fpga": tools.FPGA,
        },
        "Operate": {"status": status.status, "keys": KEYS, "doctor": tools.doctor},
    },
    _before,
)
"""Every command of `hawkvision`."""
RUN_GRAPHS: Final = ("models", "calibrate", "certify", "review", "fpga")
"""Commands that load or run users' graphs."""


def main() -> None:
    """Run the command of this process's command line."""
    write_anything()
    with quiet_without_reader():
        exit_on_sigterm()  # so that a compiler started by a command ends, too
        if sys.argv[1:2] and sys.argv[1] in RUN_GRAPHS:
            in_child()
        sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Run a command and give its exit status; errors are explained on standard error.

    Raises:
        SystemExit: after `--help`, and for a wrong command line.
    """
    try:
        return command_line.run(COMMANDS, words, "hawkvision", remember_places)
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        extra = EXTRA_OF.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(f"error: this needs {error.name}: in a checkout, pip install '.[{extra}]'", file=sys.stderr)
    return 1
