"""Log lines: one format, the request in each, and no flood."""

from __future__ import annotations

import asyncio
import contextvars
import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core import logs
from hawkvision.core.logs import FloodGuard, JsonFormatter, TextFormatter, Transitions, bind_request, current_request
from hawkvision.core.trace_context import TraceContext
from hawkvision.system.log_relay import relaying
from tests.clocks import ManualClock
from tests.waiting import until

TRACE = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def record(message: str = "a line", *arguments: object, level: int = logging.INFO, line: int = 1) -> logging.LogRecord:
    return logging.LogRecord("hawkvision.test", level, "/a/file.py", line, message, arguments, None)


@pytest.fixture
def own_loggers() -> Iterator[None]:
    """What `configure` changes is as it was afterwards."""
    names = ("", "hawkvision", "uvicorn", "uvicorn.error", "ray", "ray.serve")
    loggers = [logging.getLogger(name) for name in names]
    before = [(one, one.handlers[:], one.level, one.propagate) for one in loggers]
    yield
    logging.captureWarnings(capture=False)
    for one, handlers, level, propagate in before:
        one.handlers[:] = handlers
        one.setLevel(level)
        one.propagate = propagate


# ------------------------------------------------------------------------------------------------------- lines


def test_a_text_line_has_time_level_logger_request_and_message() -> None:
    async def in_a_request() -> str:
        bind_request("camera-7/0001", TRACE)
        return TextFormatter().format(record("%d of %s", 3, "four", level=logging.WARNING))

    ids = rf"camera-7/0001 trace={TRACE.trace_id}"
    assert re.fullmatch(rf"{TIME} WARNING hawkvision\.test \[{ids}\] 3 of four", asyncio.run(in_a_request()))
    assert re.fullmatch(rf"{TIME} INFO hawkvision\.test \[-\] a line", TextFormatter().format(record()))


def test_a_json_line_says_the_same_to_programs_tracebacks_included() -> None:
    async def in_a_request() -> str:
        bind_request(None, TRACE)
        try:
            raise ValueError("broken\nin two")
        except ValueError:
            return JsonFormatter().format(
                logging.LogRecord("hawkvision.test", logging.ERROR, "", 1, "defect", (), sys.exc_info())
            )

    line = asyncio.run(in_a_request())
    assert "\n" not in line
    found = json.loads(line)
    assert re.fullmatch(TIME, found.pop("time"))
    assert found.pop("exception").endswith("ValueError: broken\nin two")
    assert found == {
        "level": "ERROR",
        "logger": "hawkvision.test",
        "request_id": TRACE.trace_id,
        "trace_id": TRACE.trace_id,
        "message": "defect",
    }


@given(st.text())
def test_what_a_caller_sends_stays_on_its_line(text: str) -> None:
    """Nobody can forge a line by what its message quotes."""
    for form in (TextFormatter(), JsonFormatter()):
        line = form.format(record("no such path %s", text))
        assert len(line.splitlines()) == 1
    assert json.loads(line)["message"].startswith("no such path ")


@given(st.one_of(st.none(), st.text(), st.from_regex(r"[A-Za-z0-9._~:/+=@-]{1,140}", fullmatch=True)))
def test_the_callers_id_is_kept_if_it_is_fit_for_headers_and_else_the_traces_takes_its_place(given_id: Any) -> None:
    kept = contextvars.copy_context().run(bind_request, given_id, TRACE)
    assert re.fullmatch(r"[A-Za-z0-9._~:/+=@-]{1,128}", kept)
    fit = given_id is not None and kept == given_id
    assert fit or kept == TRACE.trace_id
    if given_id and len(given_id) <= 128 and re.fullmatch(r"[A-Za-z0-9._~:/+=@-]+", given_id):
        assert kept == given_id


def test_what_a_request_starts_is_about_it_and_other_tasks_are_not() -> None:
    async def request(name: str) -> tuple[object, object]:
        bind_request(name, TRACE)
        await asyncio.sleep(0)
        return current_request(), await asyncio.to_thread(current_request)

    async def scenario() -> None:
        both = await asyncio.gather(request("one"), request("two"))
        assert [{getattr(found, "request_id", None) for found in pair} for pair in both] == [{"one"}, {"two"}]
        assert current_request() is None

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------------------------- floods


def test_a_place_that_floods_is_cut_short_and_the_next_line_says_how_many_were_left_out() -> None:
    clock = ManualClock()
    guard = FloodGuard(clock.now)
    assert sum(guard.filter(record()) for _ in range(1000)) == logs.LINES_PER_WINDOW
    assert guard.filter(record(line=2)), "another place"
    clock.advance(logs.WINDOW_S)
    late = record()
    assert guard.filter(late)
    assert (
        TextFormatter().format(late).endswith(f"a line ({1000 - logs.LINES_PER_WINDOW} lines like this were left out)")
    )
    after = record()
    assert guard.filter(after)
    assert "left out" not in TextFormatter().format(after)


def test_places_that_are_remembered_are_bounded() -> None:
    guard = FloodGuard(ManualClock().now)
    for line in range(3 * logs.MAX_PLACES):
        assert guard.filter(record(line=line))
    assert len(guard._places) == logs.MAX_PLACES


# -------------------------------------------------------------------------------------------------- transitions


def test_a_state_is_reported_once_and_again_when_it_has_changed(caplog: pytest.LogCaptureFixture) -> None:
    reported = Transitions(logging.getLogger("hawkvision.test"), {"known": "fine"})
    with caplog.at_level(logging.INFO):
        for state in ("fine", "fine", "ill", "ill", "fine"):
            reported.note("known", state, logging.WARNING, "it is %s", state)
        for state in ("up", "up", "down"):
            reported.note("new", state, logging.INFO, "new: %s", state)
    assert [r.getMessage() for r in caplog.records] == ["it is ill", "it is fine", "new: up", "new: down"]
    assert {r.filename for r in caplog.records} == {Path(__file__).name}


def test_what_keeps_changing_is_reported_a_few_times_and_then_summarised(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        reported = Transitions(logging.getLogger("hawkvision.test"), window_s=0.05)
        for n in range(501):
            reported.note("link", n % 2, logging.WARNING, "link %s", ("lost", "back")[n % 2])
        assert len(caplog.records) == logs.TRANSITIONS_PER_WINDOW
        await until(lambda: len(caplog.records) > logs.TRANSITIONS_PER_WINDOW)
        reported.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    more = 501 - logs.TRANSITIONS_PER_WINDOW - 1
    assert [r.getMessage() for r in caplog.records][-1] == f"link lost (after {more} more changes)"
    assert len(caplog.records) == logs.TRANSITIONS_PER_WINDOW + 1


def test_what_was_held_back_is_reported_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        reported = Transitions(logging.getLogger("hawkvision.test"))
        for n in range(10):
            reported.note("link", n, logging.INFO, "link %d", n)
        reported.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    assert caplog.records[-1].getMessage() == "link 9 (after 3 more changes)"


# -------------------------------------------------------------------------------------------------------- set-up


@pytest.mark.usefixtures("own_loggers")
def test_all_loggers_of_a_process_write_the_same_lines_at_their_levels() -> None:
    written = io.StringIO()
    serve = logging.getLogger("ray.serve")
    serve.addHandler(logging.NullHandler())
    serve.propagate = False
    ray = logging.getLogger("ray")
    ray.handlers[:], ray.propagate = [], True  # another test may have imported Ray, which sets up its own
    logs.configure("info", "json", logging.StreamHandler(written))
    for name in ("ray.serve", "uvicorn", "uvicorn.error"):  # another test may have had uvicorn set up its own
        logs.adopt(name)
    for name in ("hawkvision.edge", "uvicorn.error", "ray.serve", "somebody.else"):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING):
            logging.getLogger(name).log(level, "at %d", level)
    found = [json.loads(line) for line in written.getvalue().splitlines()]
    assert [(line["logger"], line["level"]) for line in found] == [
        ("hawkvision.edge", "INFO"),
        ("hawkvision.edge", "WARNING"),
        ("uvicorn.error", "WARNING"),
        ("ray.serve", "WARNING"),
        ("somebody.else", "WARNING"),
    ]


WORKER = """
import logging, sys
from hawkvision.system.log_relay import configure_worker
sys.stderr = open("/dev/null", "w")  # as Ray Serve does
configure_worker("info", "json")
logging.getLogger("hawkvision.test").info("from process %s", "two")
"""


@pytest.mark.usefixtures("own_loggers")
def test_lines_of_other_processes_come_to_the_launchers_standard_error(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 25)  # sockets' names have 107 bytes
    folder.mkdir()
    written = io.StringIO()

    async def scenario() -> None:
        (folder / "log.socket").touch()  # as a process leaves it that was killed
        with relaying(folder, written):
            worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER)
            assert await worker.wait() == 0
            await until(lambda: bool(written.getvalue()))

    asyncio.run(scenario())
    assert json.loads(written.getvalue())["message"] == "from process two"
    assert list(folder.iterdir()) == []


def test_a_worker_whose_launcher_is_gone_writes_on_its_own(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WORKER],
        env={"HAWKVISION_LOG_SOCKET": str(tmp_path / "log"), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stderr)["message"] == "from process two"
