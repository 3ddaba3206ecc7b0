"""`python -m loadgen run` as a real process: its record, its page, its reference, and Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import importlib
import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hawkvision.core.command_line import options_of
from hawkvision.system.child_server import ServerProcess
from loadgen.__main__ import COMMANDS, main
from loadgen.analysis.summary import RunSummary, summarise
from loadgen.commands.command_line import stated, words
from loadgen.commands.run_options import missed_goals
from loadgen.workload.record import load
from tests.loadgen.command import against, command
from tests.loadgen.oracle import Oracle, asking, write_set
from tests.loadgen.runs import answer, refusal, run_of
from tests.loadgen.scripted import RecordedRequest, reply, scripted


def test_run_writes_the_record_and_the_page_it_prints(null: ServerProcess, tmp_path: Path) -> None:
    record, page = tmp_path / "run.json.gz", tmp_path / "run.html"
    done = command(
        "run", "--url", null.url, "--arrivals", "constant:50", "--duration-s", "1.2", "--warm-up-s", "0.2",
        "--targets", "quality:fast=1,max_drop:0.01=3", "--deadline-ms", "100", "--processes", "2", "--seed", "7",
        "--json", str(record), "--html", str(page), "--name", "nothing", "--no-noise", "--api-key", "secret",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    run = load(record)
    assert (len(run.outcomes), run.name, run.deadline_ms, run.interrupted) == (60, "nothing", 100.0, False)
    assert [sum(each.target == number for each in run.outcomes) for number in (0, 1)] == [15, 45]
    assert all(each.answered for each in run.outcomes)
    assert "secret" not in run.origin.command
    assert run.server == "", "a server that answers all the same says nothing of itself"
    assert run.origin.seed == 7
    assert "nothing" in page.read_text()
    figures = msgspec.json.decode(gzip.decompress(record.read_bytes()))["summary"]
    assert msgspec.convert(figures, RunSummary) == summarise(run)


def test_a_terminal_shows_rate_p99_and_time_left_while_requests_are_sent(null: ServerProcess) -> None:
    ours, theirs = os.openpty()
    words = ["run", "--url", null.url, "--arrivals", "steps:40:0.6,80:0.6", "--warm-up-s", "0", "--no-noise"]
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    running = subprocess.Popen(
        [sys.executable, "-m", "loadgen", *words], stderr=theirs, stdout=subprocess.PIPE, env=environment
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError), open(ours, "rb", buffering=0) as terminal:  # noqa: PTH123 - it has no path
        while chunk := terminal.read(4096):
            shown += chunk
    assert running.wait() == 0
    assert running.stdout is not None
    running.stdout.close()
    assert re.search(rb"\d+/\d+, [\d.e+]+/s, P99 [\d.]+ ms, [01] s left, \d+ in flight", shown), shown


def referred(oracle: Oracle, folder: Path, images: int, *words: str) -> tuple[int | None, str, str]:
    """Status, output and errors of a run whose record is `run.json`."""
    data = write_set(folder, [i % 7 for i in range(images)])
    return against(asking(oracle), "run", "--no-noise", "--data", str(data), "--json", str(folder / "run.json"), *words)


OPEN = ("--reference", "--targets", "quality:fast", "--arrivals", "constant:50", "--warm-up-s", "0", "--duration-s")


def test_reference_is_asked_of_the_best_stage_once_per_image(tmp_path: Path) -> None:
    oracle = Oracle(wrong_every=4)
    assert referred(oracle, tmp_path, 8, *OPEN, "0.32")[0] == 0
    run = load(tmp_path / "run.json")
    assert run.reference == dict.fromkeys(range(8), True)
    assert sum(asked == "quality=best" for _, asked in oracle.seen) == 8
    assert [each.right for each in sorted(run.outcomes, key=lambda each: each.image)][::2] == [
        image % 4 != 0 for image in range(8)
    ]


@pytest.mark.parametrize(("degraded_times", "status"), [(1, 0), (99, 1)])
def test_reference_is_the_best_stages_or_none(degraded_times: int, status: int, tmp_path: Path) -> None:
    ended, _, said = referred(Oracle(degraded_times=degraded_times), tmp_path, 2, *OPEN, "0.1")
    assert ended == status
    assert ("m (edge) answered below the target" in said) is bool(status)
    assert not (tmp_path / "run.json").exists() if status else load(tmp_path / "run.json").reference == {0: 1, 1: 1}


@pytest.mark.parametrize("options", [(), ("--arrivals", "closed:16", "--processes", "3")])
def test_evaluation_sends_every_image_once_per_target_after_the_reference(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    oracle = Oracle(wrong_every=4)
    targets = ("--evaluate", "--targets", "quality:fast=7,max_drop:0.01")
    status, out, err = referred(oracle, tmp_path, 12, *targets, *options)
    assert (status, err) == (0, "")
    wanted = itertools.product(range(12), ["quality=best", "quality=fast", "max_accuracy_drop=0.01"])
    assert sorted(oracle.seen) == sorted(wanted)
    assert "quality=fast" in out
    fast, drop = summarise(load(tmp_path / "run.json")).classes
    assert (fast.figures.n, fast.figures.escalated, fast.figures.flagged, fast.guaranteed_drop) == (12, 0.0, 0.0, 0.01)
    assert fast.figures.accuracy is not None
    assert fast.figures.accuracy.low < fast.figures.accuracy.value == 0.75 < fast.figures.accuracy.high
    assert drop.drop is not None
    assert drop.drop.low < drop.drop.value == 0.25 < drop.drop.high
    assert drop.kept is not None


def test_evaluation_names_targets_of_its_own_by_default(tmp_path: Path) -> None:
    referred(Oracle(), tmp_path, 2, "--evaluate")
    names = [each.name for each in load(tmp_path / "run.json").targets]
    assert (names[:3], len(names)) == (["quality=best", "quality=balanced", "quality=fast"], 5)


def test_an_evaluation_that_lacks_answers_is_no_success_and_shows_the_others(tmp_path: Path) -> None:
    status, out, err = referred(Oracle(), tmp_path, 4, "--evaluate", "--targets", "quality:fast,min_accuracy:0.99")
    assert (status, err) == (1, "missed: 4 of 8 requests have no answer: target_unreachable 4\n")
    assert "quality=fast" in out


def test_interrupt_stops_sending_and_still_writes_record_and_page(tmp_path: Path) -> None:
    record, page = tmp_path / "run.json", tmp_path / "run.html"
    enough = asyncio.Event()

    async def say(asked: RecordedRequest) -> bytes:
        seen.append(asked.sends)
        if sum(seen) == 5:
            enough.set()
        return reply(b'{"index": 1}')

    seen: list[bool] = []
    status, out, _ = against(
        scripted(say), "run", "--arrivals", "constant:50", "--duration-s", "600", "--warm-up-s", "300", "--no-noise",
        "--json", str(record), "--html", str(page), until=enough,
    )  # fmt: skip
    run = load(record)
    assert (status, run.interrupted) == (130, True)
    assert len(run.counted()) == len(run.outcomes)  # the warm-up was not over: better all than nothing
    assert 5 <= len(run.outcomes) < 30_000
    assert run.duration_s < 600
    assert page.is_file()
    assert "written to" in out


def test_client_processes_do_not_outlive_the_run() -> None:
    async def scenario() -> None:
        first = asyncio.Event()

        async def say(asked: RecordedRequest) -> bytes:
            if asked.sends:
                first.set()
            return reply(b'{"index": 1}')

        async with scripted(say) as server:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "loadgen", "run", "--url", server.url, "--duration-s", "600", "--no-noise",
                "--arrivals", "constant:50",
            )  # fmt: skip
            await first.wait()
            assert not server.left.is_set()
            process.kill()
            await process.wait()
            await server.left.wait()  # the connection ends with the process that held it

    asyncio.run(scenario())


def test_recording_is_replayed_to_its_end(null: ServerProcess, tmp_path: Path) -> None:
    times, record = tmp_path / "times.txt", tmp_path / "run.json"
    times.write_text("100.0\n100.0\n100.25\n")
    words = ["run", "--url", null.url, "--arrivals", f"replay:{times}", "--warm-up-s", "0", "--no-noise"]
    assert main([*words, "--json", str(record)]) == 0
    assert [each.due_s for each in load(record).outcomes] == [0.0, 0.0, 0.25]


SHORT = ("run", "--arrivals", "constant:20", "--duration-s", "0.5", "--warm-up-s", "0", "--no-noise")


def test_a_server_that_refuses_everything_fails_the_test(tmp_path: Path) -> None:
    async def refuse(_: RecordedRequest) -> bytes:
        return reply(b'{"error": "no key", "code": "unauthorized"}', status=401)

    status, _, said = against(scripted(refuse), *SHORT, "--json", str(tmp_path / "run.json"))
    assert (status, said) == (1, "missed: none of 10 requests was answered: unauthorized 10\n")
    assert len(load(tmp_path / "run.json").outcomes) == 10


def test_a_record_that_cannot_be_written_costs_neither_table_nor_page(tmp_path: Path) -> None:
    record, page = tmp_path / "run.json", tmp_path / "run.html"

    async def say(_: RecordedRequest) -> bytes:
        record.mkdir(exist_ok=True)  # after it was found to be writable
        return reply(b'{"index": 1}')

    status, out, err = against(scripted(say), *SHORT, "--json", str(record), "--html", str(page))
    assert (status, err) == (1, f"error: {record}: cannot write: Is a directory\n")
    assert "P99" in out
    assert f"written to {page}" in out
    assert f"written to {record}" not in out
    assert page.is_file()


def test_goals_are_missed_by_what_was_measured() -> None:
    quick = [answer(n / 10, 50.0, image=n) for n in range(90)]
    summary = summarise(run_of([*quick, *(answer(9.0 + n / 10, 150.0, image=90 + n) for n in range(10))]))
    assert missed_goals(summary, None, None) == []
    assert missed_goals(summary, 150.0, 0.9) == []
    assert missed_goals(summary, 149.0, 0.91) == [
        "P99 150.0 ms; expected at most 149 ms",
        "90.0% right and in time; expected at least 91.0%",
    ]
    refused = summarise(run_of([*quick, *(refusal(9.0 + n / 10, 1.0) for n in range(10))]))
    assert missed_goals(refused, 1_000.0, None) == ["P99 ≥ 100.0 ms; expected at most 1000 ms"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--arrivals", "never"], "--arrivals"),
        (["--duration-s", "0"], "--duration-s"),
        (["--arrivals", "poisson:0.001", "--duration-s", "3"], "no request"),
        (["--warm-up-s", "99"], "--warm-up-s"),
        (["--arrivals", "constant:0.001", "--duration-s", "3"], "--warm-up-s 2: none of 1 requests is due after it"),
        (["--json", "/nowhere/run.json"], "no such folder"),
        (["--json", "/"], "/: expected a file to write, got a folder"),
        (["--html", "/"], "/: expected a file to write, got a folder"),
        (["--json", "/tmp/same.x", "--html", "/tmp/../tmp/same.x"], "/tmp/same.x: expected a file of its own"),
        (["--targets", "x"], "--targets"),
        (["--processes", "0"], "--processes"),
        (["--arrivals", "closed:1", "--processes", "2"], "--processes 2"),
        (["--max-in-flight", "0"], "--max-in-flight"),
        (["--timeout-s", "-1"], "--timeout-s"),
        (["--seed", "-1"], "--seed"),
        (["--path", "x"], "--path"),
        (["--path", "/x", "--protocol", "oip"], "--path: expected none with --protocol oip"),
        (["--path", "/x", "--protocol", "datagram"], "--path: expected none with --protocol datagram"),
        (["--reference"], "--reference"),
        (["--evaluate"], "--evaluate: expected labelled images"),
        (["--evaluate", "--arrivals", "poisson:8"], "--arrivals: expected closed:CALLERS with --evaluate"),
        (["--evaluate", "--warm-up-s", "1"], "--warm-up-s: expected none with --evaluate"),
        (["--min-effective", "0.9"], "--min-effective: expected labelled images"),
        (["--min-effective", "90"], "--min-effective"),
        (["--p99-ms", "0"], "--p99-ms"),
        ([], "127.0.0.1:1 cannot be reached"),
        (["--link", "lan"], "127.0.0.1:1 cannot be reached"),
    ],
)
def test_what_does_not_fit_is_named(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--url", "http://127.0.0.1:1", "--no-noise", *options]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["run", "--protocol", "datagram"], ["find-capacity", "--p99-ms", "9"]])
@pytest.mark.parametrize(
    ("url", "key", "said"),
    [
        ("http://user:hidden@127.0.0.1:1", "k", "error: --url: "),
        ("http://127.0.0.1:1", "hid\nden", "error: --api-key: "),
    ],
)
def test_passwords_in_urls_and_keys_that_no_header_carries_are_refused(
    words: list[str], url: str, key: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--url", url, "--api-key", key]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), "hid" in err) == ("", 1, False)
    assert err.startswith(said)


def test_keys_are_not_written_down() -> None:
    before = words.set(["run", "--api-key", "k1", "--api-key=k2", "--url", "u"])
    try:
        assert stated() == "python -m loadgen run --api-key KEY --api-key=KEY --url u"
    finally:
        words.reset(before)


def test_the_command_that_a_record_states_is_one_that_runs(null: ServerProcess, tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    asked = ["hawkvision.cli", "load", *SHORT, "--url", null.url, "--json", str(record)]
    subprocess.run([sys.executable, "-m", *asked], check=True, capture_output=True, timeout=60)
    python, *again = shlex.split(load(record).origin.command)
    assert python == "python"
    record.unlink()
    subprocess.run([sys.executable, *again], check=True, capture_output=True, timeout=60)
    assert len(load(record).outcomes) == 10


def test_what_is_not_installed_is_named_with_its_extra() -> None:
    code = (
        "import sys; sys.modules['scipy'] = None; from loadgen.__main__ import main;"
        "sys.exit(main(['compare', 'a.json', 'b.json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install '.[loadgen]'" in done.stderr


@pytest.mark.parametrize("name", COMMANDS.commands)
def test_every_option_says_what_it_is_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = importlib.import_module(f"loadgen.commands.{name.replace('-', '_')}").run
    assert all(option.description for option in options_of(run))
    assert main([name, "--help"]) == 0
    said = capsys.readouterr().out
    assert "Output" in said or name == "link-proxy"
