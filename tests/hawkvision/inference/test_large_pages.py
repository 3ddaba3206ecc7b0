"""Memory in large pages: what the kernel says of it afterwards, in processes of their own."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
BEGIN = """
import mmap
from pathlib import Path
from hawkvision.inference.large_pages import take_large_pages

MB = 2**20

def kilobytes(name):
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
"""


def said(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", BEGIN + program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def has_large_pages() -> bool:
    release = tuple(int(number) for number in platform.release().split("-")[0].split(".")[:2])
    return sys.platform == "linux" and SIZE.is_file() and release >= (6, 1)


needs_large_pages = pytest.mark.skipif(not has_large_pages(), reason="this kernel moves nothing into large pages")


@needs_large_pages
def test_memory_in_use_moves_into_large_pages_and_keeps_what_it_holds() -> None:
    moved, found, same = said("""
memory = mmap.mmap(-1, 64 * MB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
held = bytes(range(256)) * (MB // 256)
for start in range(0, 64 * MB, MB):
    memory[start:start + MB] = held
moved = take_large_pages()
print(moved, kilobytes("AnonHugePages"), all(memory[at:at + MB] == held for at in range(0, 64 * MB, MB)))
""")
    assert int(moved) >= 60 * 2**20
    assert int(found) >= 60 * 2**10
    assert same == "True"


@needs_large_pages
def test_memory_that_is_hardly_used_stays_as_small_as_it_is() -> None:
    before, after = said("""
memory = mmap.mmap(-1, 256 * MB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for start in range(0, 256 * MB, MB):
    memory[start] = 1
before = kilobytes("Rss")
take_large_pages()
print(before, kilobytes("Rss"))
""")
    assert int(after) < int(before) + 32 * 1024


def test_kernel_without_large_pages_is_left_alone() -> None:
    before, after, moved = said("""
import hawkvision.inference.large_pages as large_pages
large_pages._SIZE = Path("/proc/self/no-such-file")
memory = bytearray(64 * MB)
before = kilobytes("AnonHugePages")
moved = take_large_pages()
print(before, kilobytes("AnonHugePages"), moved)
""")
    assert moved == "0"
    assert before == after
