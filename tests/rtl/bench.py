"""A Verilated module under the hands of a Python test: set inputs, look at outputs, one cycle at a time."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fpga.compiler.emit import MODULES, RTL
from fpga.simulation.verilator import VerilatorDesign, library

ALL: Final = Path(__file__).parent / "hv_all.sv"
PORT: Final = re.compile(r"(input|output)\s+(?:wire|reg)\s+(?:signed\s+)?(?:\[(\d+):0\]\s+)?(\w+)\b", re.ASCII)
DRIVER: Final = """
#include <cstdint>
#include <stdexcept>
#include "Vtop.h"
#include "verilated.h"
void vl_fatal(const char*, int, const char*, const char* message) {{ throw std::runtime_error(message); }}
struct Device {{ VerilatedContext context; Vtop top{{&context}}; }};
extern "C" {{
void* hv_new() {{ return new Device; }}
void hv_free(void* d) {{ delete static_cast<Device*>(d); }}
void hv_settle(void* d) {{ auto& t = static_cast<Device*>(d)->top; t.clk = 0; t.eval(); }}
void hv_rise(void* d) {{ auto& t = static_cast<Device*>(d)->top; t.clk = 1; t.eval(); }}
void hv_set(void* d, int port, uint64_t value) {{
    auto& t = static_cast<Device*>(d)->top;
    switch (port) {{ {setters} }}
}}
uint64_t hv_get(void* d, int port) {{
    auto& t = static_cast<Device*>(d)->top;
    switch (port) {{ {getters} }}
    return 0;
}}
}}
"""


class Bench:
    """One `hv_all`, after a reset."""

    def __init__(self, memories: Mapping[str, tuple[str, bytes]]) -> None:
        ports = [
            (match[1], int(match[2] or 0) + 1, match[3])
            for match in PORT.finditer(ALL.read_text(encoding="utf-8"))
            if match[3] != "clk"
        ]
        self._inputs = {name: number for number, (way, _, name) in enumerate(ports) if way == "input"}
        self._outputs = {name: (number, width) for number, (way, width, name) in enumerate(ports) if way == "output"}
        setters = " ".join(f"case {number}: t.{name} = value; break;" for name, number in self._inputs.items())
        getters = " ".join(f"case {number}: return t.{name};" for name, (number, _) in self._outputs.items())
        sources = {name: (RTL / name).read_bytes() for name in MODULES}
        driver = DRIVER.format(setters=setters, getters=getters).encode()
        path = library(VerilatorDesign("hv_all", {**sources, "hv_all.sv": ALL.read_bytes()}, driver, memories))
        self._code = ctypes.CDLL(str(path))
        self._code.hv_new.restype = ctypes.c_void_p
        self._code.hv_get.restype = ctypes.c_uint64
        self._device = ctypes.c_void_p(self._code.hv_new())
        for name in self._inputs:
            self._set(name, 0)
        for level in (1, 1, 0):
            self.cycle(rst=level)

    def close(self) -> None:
        self._code.hv_free(self._device)

    def _set(self, name: str, value: int) -> None:
        self._code.hv_set(self._device, self._inputs[name], ctypes.c_uint64(value))

    def get(self, name: str) -> int:
        """An output, as an unsigned number, as it stands."""
        number, width = self._outputs[name]
        return int(self._code.hv_get(self._device, number)) & ((1 << width) - 1)

    def offer(self, **inputs: int) -> None:
        """Set inputs and let what depends on them without a clock settle."""
        for name, value in inputs.items():
            self._set(name, value)
        self._code.hv_settle(self._device)

    def rise(self) -> None:
        """The clock's edge."""
        self._code.hv_rise(self._device)

    def cycle(self, **inputs: int) -> None:
        """Set inputs, then the clock's edge."""
        self.offer(**inputs)
        self.rise()


def signed(value: int, bits: int) -> int:
    """A two's complement number of so many bits."""
    value &= (1 << bits) - 1
    return value - (value >> (bits - 1) << bits)


def fields(value: int, bits: int, count: int) -> list[int]:
    """`count` unsigned numbers of so many bits, the first in the low bits."""
    return [value >> bits * i & ((1 << bits) - 1) for i in range(count)]


def joined(values: list[int], bits: int) -> int:
    """The opposite of `fields`; negative numbers in two's complement."""
    return sum((value & ((1 << bits) - 1)) << bits * i for i, value in enumerate(values))
