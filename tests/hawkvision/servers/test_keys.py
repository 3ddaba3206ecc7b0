"""Keys: what is stored of them, whom they identify, and what their callers may do."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.errors import ConfigError, Forbidden, Overloaded, Unauthorized
from hawkvision.core.server_access import MIN_KEY_CHARACTERS, clean_key, own_key
from hawkvision.servers.keyfile import Scope, add_key, entry_of, read_keys, remove_key
from hawkvision.servers.keys import EITHER, INFER, OBSERVE, OPERATE, Keys, needed_scopes, prove
from tests.clocks import ManualClock

KEY = "0123456789abcdef"
EXPORTER = bytes(range(32))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def bearer(key: str) -> str:
    return f"Bearer {key}"


# ------------------------------------------------------------------------------------------------- as text


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", " \t", "\n\n"])
def test_white_space_at_the_end_is_no_part_of_a_key(end: str) -> None:
    assert own_key(KEY + end, "edge.api_key") == KEY


@pytest.mark.parametrize("text", ["", "\n", "a" * (MIN_KEY_CHARACTERS - 1), "a" * (MIN_KEY_CHARACTERS - 1) + "\r"])
def test_a_short_key_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match=r"edge\.api_key: expected a key") as caught:
        own_key(text, "edge.api_key")
    assert "aaa" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["two words that are long", "Schlüssel-Schlüssel", "0123456789\r\nabcdef", "\x000123456789abcdef"]
)
def test_a_key_that_no_header_can_carry_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"key: expected visible ASCII"):
        clean_key(text, "key")


# ------------------------------------------------------------------------------------------------ in a file


def test_the_file_holds_hashes_and_no_key(path: Path) -> None:
    key = add_key(path, "camera-7", [Scope.INFER, Scope.OBSERVE], rate=50.0)
    text = path.read_text()
    assert key not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    stored = tomllib.loads(text)["keys"]["camera-7"]
    assert stored["sha256"] == hashlib.sha256(key.encode()).hexdigest()
    assert (stored["scopes"], stored["rate"]) == (["infer", "observe"], 50.0)


def test_what_was_added_is_read_again_and_what_was_removed_is_not(path: Path) -> None:
    keys = {name: add_key(path, name, [Scope.OPERATE]) for name in ("b", "a", "c")}
    remove_key(path, "b")
    assert read_keys(path) == {name: entry_of(keys[name], [Scope.OPERATE]) for name in "ac"}


def test_mode_and_owner_of_the_file_stay(path: Path) -> None:
    add_key(path, "a", [Scope.INFER])
    path.chmod(0o640)
    if os.getuid() == 0:
        os.chown(path, 12345, 12345)
    before = path.stat()
    add_key(path, "b", [Scope.INFER])
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert [entry.name for entry in path.parent.iterdir()] == ["keys.toml"]


def test_keys_added_at_once_are_all_there(path: Path) -> None:
    program = "import sys; from pathlib import Path; from hawkvision.servers.keyfile import *\n"
    program += "add_key(Path(sys.argv[1]), sys.argv[2], [Scope.INFER])"
    running = [subprocess.Popen([sys.executable, "-c", program, str(path), f"k{n}"]) for n in range(4)]
    assert [one.wait() for one in running] == [0] * 4
    assert list(read_keys(path)) == ["k0", "k1", "k2", "k3"]


def test_a_link_to_the_file_stays_one(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere.toml"
    add_key(target, "a", [Scope.INFER])
    path.symlink_to(target)
    add_key(path, "b", [Scope.INFER])
    assert path.is_symlink()
    assert len(read_keys(target)) == 2


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda path: add_key(path, "a", [Scope.INFER]), "already"),
        (lambda path: add_key(path, "a b", [Scope.INFER]), "expected a name"),
        (lambda path: add_key(path, "api_key", [Scope.INFER]), "another name"),
        (lambda path: add_key(path, "b", []), "at least one of infer, observe, operate"),
        (lambda path: add_key(path, "b", [Scope.INFER], 0.0), "rate: expected more than 0"),
        (lambda path: add_key(path, "b", [Scope.INFER], float("nan")), "rate: expected more than 0"),
        (lambda path: remove_key(path, "b"), "no key 'b'"),
        (lambda path: add_key(path / "c", "b", [Scope.INFER]), "cannot write the keys"),
    ],
)
def test_a_wrong_edit_changes_nothing_and_says_why(path: Path, wrong: Callable[[Path], object], match: str) -> None:
    add_key(path, "a", [Scope.INFER])
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=match):
        wrong(path)
    assert path.read_bytes() == before


HEX = "ab" * 32


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "cannot read the keys: No such file"),
        ("[keys.a]", r"sha256"),
        (f'[keys.a]\nsha256="{HEX}"\nproof_key="{HEX}"\nscopes=[]', r"scopes"),
        (f'[keys.a]\nsha256="{HEX}"\nproof_key="{HEX}"\nscopes=["admin"]', r"scopes"),
        (f'[keys.a]\nsha256="{HEX}"\nproof_key="{HEX}"\nscopes=["infer"]\nrate=-1', r"rate"),
        (f'[keys.a]\nsha256="{HEX}"\nproof_key="{HEX}"\nscopes=["infer"]\nkey="x"', r"key"),
        (f'[keys."a b"]\nsha256="{HEX}"\nproof_key="{HEX}"\nscopes=["infer"]', r"expected a name"),
        ("[keys", r"keys\.toml: "),
        (b"\xff", r"keys\.toml: "),
        (
            "".join(f'[keys.{n}]\nsha256="{HEX}"\nproof_key="{HEX}"\nscopes=["infer"]\n' for n in "ab"),
            "keys.b and keys.a are the same key",
        ),
        (b"#" * (3 << 20), "at most"),
    ],
)
def test_a_broken_file_is_refused_by_name_and_place(path: Path, text: str | bytes | None, match: str) -> None:
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=match) as caught:
        Keys(keys_file=path)
    assert str(path) in str(caught.value)


# ----------------------------------------------------------------------------------------------- identifying


def test_without_keys_anybody_may_do_anything() -> None:
    keys = Keys()
    caller = keys.authorize(None, OPERATE)
    assert not keys.required
    assert (caller.name, keys.by_proof(b"", EXPORTER)) == ("anybody", caller)
    assert keys.counts() == {("anybody", "accepted"): 1}


def test_the_single_key_may_do_everything() -> None:
    keys = Keys(KEY + "\n")
    for needed in (INFER, OBSERVE, OPERATE, EITHER):
        assert keys.authorize(bearer(KEY), needed).name == "api_key"


@pytest.mark.parametrize(
    "header",
    [None, "", KEY, "Bearer", "Bearer ", bearer(KEY[:-1]), bearer(KEY + "x"), f"Basic {KEY}", "Bearer ÿ", "Bearer €"],
)
def test_whoever_has_not_the_key_is_not_let_in(header: str | None) -> None:
    keys = Keys(KEY)
    with pytest.raises(Unauthorized, match="Authorization: Bearer KEY"):
        keys.authorize(header, INFER)
    assert keys.counts()["unknown", "unauthorized"] == 1


def test_the_schemes_case_and_blanks_around_the_key_do_not_matter() -> None:
    assert Keys(KEY).authorize(f"bEARER   {KEY} ", INFER).name == "api_key"


def test_a_key_may_do_what_its_scopes_say(path: Path) -> None:
    key = add_key(path, "prometheus", [Scope.OBSERVE])
    keys = Keys(KEY, path)
    assert keys.authorize(bearer(key), EITHER).name == "prometheus"
    with pytest.raises(Forbidden, match=r"the key 'prometheus' may observe; this needs a key that may infer"):
        keys.authorize(bearer(key), INFER)
    assert keys.authorize(bearer(KEY), INFER).name == "api_key"
    assert keys.counts() == {
        ("prometheus", "accepted"): 1,
        ("prometheus", "forbidden"): 1,
        ("prometheus", "rate_limited"): 0,
        ("api_key", "accepted"): 1,
        ("api_key", "forbidden"): 0,
        ("api_key", "rate_limited"): 0,
        ("unknown", "unauthorized"): 0,
    }


@pytest.mark.parametrize(
    ("method", "path", "needed"),
    [
        ("POST", "/v1/classify", INFER),
        ("POST", "/v1/infer", INFER),
        ("POST", "/v2/models/imagenet/infer", INFER),
        ("POST", "/v2/models/imagenet/versions/1/infer", INFER),
        ("GET", "/v1/stages", EITHER),
        ("GET", "/v2/models/imagenet", EITHER),
        ("GET", "/v2", EITHER),
        ("POST", "/v2/repository/index", EITHER),
        ("GET", "/metrics", OBSERVE),
        ("GET", "/v1/targets", EITHER),
        ("GET", "/openapi.json", EITHER),
        ("HEAD", "/metrics", OBSERVE),
        ("GET", "/nowhere", OBSERVE),
        ("GET", "/v20", OBSERVE),
        ("POST", "/metrics", OPERATE),
        ("POST", "/v2/repository/models/imagenet/unload", OPERATE),
        ("POST", "/v1/tasks/imagenet/load", OPERATE),
        ("DELETE", "/v1/classify", OPERATE),
        ("OBSERVE", "/anything\nelse", OPERATE),
    ],
)
def test_what_a_request_needs(method: str, path: str, needed: frozenset[Scope]) -> None:
    assert needed_scopes(method, path) == needed


# ----------------------------------------------------------------------------------------------------- rates


def test_a_rate_allows_a_seconds_worth_at_once_and_then_so_many_a_second(path: Path) -> None:
    key = add_key(path, "camera", [Scope.INFER], rate=4.0)
    clock = ManualClock()
    keys = Keys(keys_file=path, clock=clock.now)
    for _ in range(4):
        keys.authorize(bearer(key), INFER)
    with pytest.raises(Overloaded, match="'camera' has used up its 4 requests a second") as caught:
        keys.authorize(bearer(key), INFER)
    assert caught.value.retry_after_s == pytest.approx(0.25)
    clock.advance(caught.value.retry_after_s)
    keys.authorize(bearer(key), INFER)
    with pytest.raises(Overloaded):
        keys.authorize(bearer(key), INFER)
    clock.advance(3600.0)
    for _ in range(4):
        keys.authorize(bearer(key), INFER)
    with pytest.raises(Overloaded):
        keys.authorize(bearer(key), INFER)


def test_what_is_refused_for_its_scope_costs_nothing(path: Path) -> None:
    key = add_key(path, "camera", [Scope.INFER], rate=1.0)
    keys = Keys(keys_file=path, clock=ManualClock().now)
    for _ in range(3):
        with pytest.raises(Forbidden):
            keys.authorize(bearer(key), OPERATE)
    keys.authorize(bearer(key), INFER)


# --------------------------------------------------------------------------------------------------- reloading


def test_a_reload_takes_keys_in_and_puts_others_out(path: Path) -> None:
    old = add_key(path, "old", [Scope.INFER])
    keys = Keys(keys_file=path)
    caller = keys.authorize(bearer(old), INFER)
    new = add_key(path, "new", [Scope.INFER])
    remove_key(path, "old")
    assert keys.identify(new.encode()) is None
    keys.reload()
    assert keys.authorize(bearer(new), INFER).name == "new"
    with pytest.raises(Unauthorized):
        keys.authorize(bearer(old), INFER)
    with pytest.raises(Unauthorized):
        keys.admit(caller, INFER)


def test_a_reload_gives_nobody_a_new_allowance(path: Path) -> None:
    key = add_key(path, "camera", [Scope.INFER], rate=1.0)
    keys = Keys(keys_file=path, clock=ManualClock().now)
    keys.authorize(bearer(key), INFER)
    keys.reload()
    with pytest.raises(Overloaded):
        keys.authorize(bearer(key), INFER)
    assert keys.counts()["camera", "accepted"] == 1


def test_a_broken_file_leaves_the_keys_as_they_were(path: Path) -> None:
    key = add_key(path, "a", [Scope.INFER])
    keys = Keys(keys_file=path)
    path.write_text("[keys")
    with pytest.raises(ConfigError):
        keys.reload()
    assert keys.authorize(bearer(key), INFER).name == "a"


def test_a_file_without_keys_lets_nobody_in(path: Path) -> None:
    add_key(path, "a", [Scope.INFER])
    remove_key(path, "a")
    with pytest.raises(Unauthorized):
        Keys(keys_file=path).authorize(None, EITHER)


# ------------------------------------------------------------------------------------------------------- proofs


def test_a_proof_identifies_its_caller_on_its_own_connection_only(path: Path) -> None:
    key = add_key(path, "camera", [Scope.INFER])
    keys = Keys(keys_file=path)
    proof = prove(key, EXPORTER)
    caller = keys.by_proof(proof, EXPORTER)
    assert caller is not None
    assert caller.name == "camera"
    assert caller == keys.identify(key.encode())
    assert keys.by_proof(proof, EXPORTER[:-1] + b"\xff") is None


def test_the_file_does_not_help_to_make_a_proof(path: Path) -> None:
    key = add_key(path, "camera", [Scope.INFER])
    keys = Keys(keys_file=path)
    (entry,) = read_keys(path).values()
    for guess in (entry.sha256, entry.proof_key, "another-key-of-its-own"):
        made = prove(guess, EXPORTER)
        assert keys.by_proof(made, EXPORTER) is None
        assert keys.by_proof(bytes.fromhex(entry.proof_key) + made[32:], EXPORTER) is None
    assert prove(key, EXPORTER)[:32] == bytes.fromhex(entry.proof_key)


@given(st.binary(max_size=120))
def test_bytes_that_are_no_proof_identify_nobody(proof: bytes) -> None:
    keys = Keys(KEY)
    assert keys.by_proof(proof, EXPORTER) is None
    assert keys.by_proof(prove(KEY, EXPORTER)[:32] + proof[:64].ljust(64, b"\0"), EXPORTER) is None
