"""Running before what is tested, so that a test does not measure how long its own instruments wait for a processor.

Links and callers are other machines, whose work costs the servers nothing. Where all of it shares a few cores, a caller
that an answer comes for must wait until the servers leave one to it, by milliseconds if they infer on all of them.

Nor may they stand in a server's way. A link that brings a picture on the processor on which the server's loop last ran
keeps it from beginning before the last packet: the kernel looks for another one only where processors are idle, and
with `--prevent-cpu-idle` none is. On two cores of an EPYC, a node asked over `lan` every 125 ms has a P50 of 3.24 ms
on the processor of the link, 3.01 on the other (means of six runs of 150 requests each, 3.14 to 3.45 and 2.89 to 3.11).
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
