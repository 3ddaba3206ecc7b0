"""Running before what is tested, so that a test does not measure how long its own instruments wait for a processor.

Links and callers are other machines, whose work costs the servers nothing. Where all of it shares a few cores, a caller
that an answer comes for must wait until the servers leave one to it, by milliseconds if they infer on all of them.
"""

from __future__ import annotations

import os


def before_others() -> bool:
    """Run this process before all ordinary ones (SCHED_FIFO, sched(7)) from now on; False where that is not allowed.

    The kernel keeps 5 % of the time for those (sched_rt_runtime_us), should this one never rest.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except (AttributeError, OSError):  # not Linux; not privileged
        return False
    return True
