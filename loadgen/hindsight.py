"""The quickest answer that anybody gave to each request: what choosing with hindsight would have had.

Contenders of one cell are sent the same pictures at the same moments, over links with the same weather. Take of each
request the quickest of their answers: no contender was so quick, and where packets are lost at random it has the best
draw of all. A factor over a rival that even this does not reach, no choice among these contenders would have reached.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadgen.bootstrap import quantiles
from loadgen.compare import same_schedule
from loadgen.counted import counted_of
from loadgen.record import Run


def hindsight_ms(runs: Sequence[Run], level: float) -> float | None:
    """A percentile (0..1) over the counted requests, infinite where nobody answered so many.

    None for a single run, and for those that were not all sent the same requests.

    Raises:
        ConfigError: if no request of a run counts.
    """
    counted = [counted_of(run) for run in runs]
    if len(runs) < 2 or not all(
        same_schedule(runs[0], run, counted[0], each) for run, each in zip(runs[1:], counted[1:], strict=True)
    ):
        return None
    quickest = np.min([np.where(each.answered, each.latency_ms, np.inf) for each in counted], axis=0)
    return float(quantiles(quickest, [level])[0])
