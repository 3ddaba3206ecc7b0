"""Scheduling priority for what stands for other machines: callers and emulated links.

They share the processors with the servers under test. At ordinary priority a caller waits until the servers leave it a
processor, and that wait would be measured as latency. A link must also keep off the processor on which the server's
event loop last ran: the kernel looks for another one only where processors are idle.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

CALLERS: Final = 1
LINKS: Final = 2
"""Before callers: a wire takes a packet as soon as it is sent."""


def before_others(priority: int = CALLERS) -> bool:
    """Run this process before all ordinary ones (SCHED_FIFO, sched(7)) from now on; False where that is not allowed.

    The kernel keeps 5 % of the time for those (sched_rt_runtime_us), should this one never rest.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
    except (AttributeError, OSError):  # not Linux; not privileged
        return False
    return True


def processor_of(pid: int) -> int:
    """The processor that a process's first thread runs on or ran on last (proc_pid_stat(5), field 39).

    Raises:
        OSError: if there is no such process, or no such file system.
    """
    after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2]
    return int(after_name.split()[36])
