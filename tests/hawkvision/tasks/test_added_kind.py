"""A kind is added by one short class outside the package, and keeps the contract of all kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.hawkvision.tasks.added_kind import names_of

NAMES = names_of("grading.py", "test_grading.py")

if TYPE_CHECKING:
    from hawkvision.testing import TaskKindConformance as TestGrading
else:
    TestGrading = NAMES["TestGrading"]


def test_its_loss_is_the_distance_in_grades() -> None:
    kind = TestGrading().make_kind()
    logits = np.array([[9, 0, 0, 0], [0, 0, 0, 9]], np.float32)
    found = [kind.predict(output, 1) for output in kind.outputs({"logits": logits}, 1.0)]
    assert [kind.labels[each.position] for each in found] == ["green", "red"]
    assert [kind.loss(each, 1) for each in found] == [1 / 3, 2 / 3]
