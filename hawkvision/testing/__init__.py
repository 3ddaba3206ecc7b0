"""The contracts of backends and of kinds of tasks as tests for pytest: subclass one and say what it is about.

    class TestMyBackend(BackendConformance):
        @pytest.fixture
        def make_backend(self) -> Callable[[], Backend]:
            return lambda: MyBackend("model.bin")

    class TestMyKind(TaskKindConformance):
        def make_kind(self) -> TaskKind:
            return MyKind(("no", "yes"), {})
        ...

For those who write backends and kinds; the only modules of the library that import pytest and hypothesis.
"""

from hawkvision.testing.backends import BackendConformance as BackendConformance
from hawkvision.testing.backends import assert_same as assert_same
from hawkvision.testing.backends import random_images as random_images
from hawkvision.testing.task_kinds import TaskKindConformance as TaskKindConformance
