"""Checks of the network: the ports to listen on, and the datacenter with its key, its models and its clock."""

from __future__ import annotations

import datetime
import email.utils
import errno
import http.client
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from hawkvision.core.advice import advise
from hawkvision.core.escalation_api import INFER_PATH, STAGES_PATH, StageList
from hawkvision.doctor.findings import Finding, ok, problem, warning
from hawkvision.models.fingerprints import CertifiedVersions

TIMEOUT_S: Final = 5.0
MAX_ERROR_BYTES: Final = 4096
MAX_LISTING_BYTES: Final = 2**20
SKEW_S: Final = 30.0
"""Difference of clocks beyond which log lines and dates of certificates are hard to compare."""


def port(host: str, number: int, kind: socket.SocketKind, setting: str, prefix: str = "") -> Finding:
    """Whether a server can listen on an address, or listens there already and answers below `prefix`."""
    name = f"port {number}" if kind is socket.SOCK_STREAM else f"UDP port {number}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, number, type=kind)[0]
        with socket.socket(family, kind) as trial:
            if kind is socket.SOCK_STREAM:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            if kind is socket.SOCK_STREAM:
                trial.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and kind is socket.SOCK_STREAM and _is_ours(host, number, prefix):
            return ok(name, f"{host}:{number} is a HawkVision server's, which runs")
        advice = f"stop what listens there (ss -ltnup shows it), or set {setting}"
        if isinstance(error, PermissionError):
            advice = f"set {setting} to a number from 1024 on, or allow this user lower ones (CAP_NET_BIND_SERVICE)"
        elif isinstance(error, socket.gaierror):
            advice = f"{host!r} is no address of this machine: set another host"
        return problem(name, f"{host}:{number} cannot be listened on: {error.strerror or error}", advice)
    return ok(name, f"{host}:{number} is free")


def _is_ours(host: str, number: int, prefix: str) -> bool:
    """Whether any HawkVision server listens there."""
    shown = f"[{host}]" if ":" in host else {"0.0.0.0": "127.0.0.1"}.get(host, host)  # noqa: S104
    unverified = ssl._create_unverified_context()  # noqa: S323 - nothing is told or believed
    for scheme in ("http", "https"):
        try:
            asked = f"{scheme}://{shown}:{number}{prefix}/healthz"
            with urllib.request.urlopen(asked, timeout=TIMEOUT_S, context=unverified) as response:  # noqa: S310
                return response.read(64) in (b'{"status":"alive"}', b"ok")
        except (OSError, http.client.HTTPException):
            continue
    return False


def datacenter(
    url: str,
    key: str | None,
    expected: Mapping[str, str],
    context: ssl.SSLContext | None = None,
    *,
    task: str | None = None,
) -> Iterator[Finding]:
    """Whether the datacenter replies, accepts the key, serves the certified models, and has the same time.

    Args:
        url: of the ingress.
        key: that it asks for.
        expected: fingerprint of each stage.
        context: for TLS; None is the system's.
        task: that it must serve; None is its first.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    query = "" if task is None else f"?{urllib.parse.urlencode({'task': task})}"
    # http or https, by the settings
    request = urllib.request.Request(f"{url.rstrip('/')}{STAGES_PATH}{query}", headers=headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as response:  # noqa: S310
            listing = msgspec.json.decode(response.read(MAX_LISTING_BYTES), type=StageList)
            date = response.headers.get("Date")
    except urllib.error.HTTPError as error:
        yield _refused(url, error)
        return
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLError):
            advice = "set edge.datacenter_ca to the authority that certified the datacenter, and mind the clocks"
        else:
            advice = "start it; mind edge.datacenter_url, firewalls and routes (curl -v shows the step that fails)"
        yield problem("datacenter", f"{url} cannot be reached: {error.reason}", advice)
        return
    except (OSError, http.client.HTTPException) as error:
        yield problem(
            "datacenter", f"{url} broke off: {error}", "look whether it is a datacenter tier that listens there"
        )
        return
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        advice = "set edge.datacenter_url to a datacenter tier; something in between answers, or another server"
        yield problem("datacenter", f"{url} does not answer as a datacenter tier does: {error}", advice)
        return
    yield _key_taken(url, headers, context) if key else ok("datacenter", f"{url} answers, and asks for no key")
    yield _certified(url, listing, expected)
    yield clock(url, date, datetime.datetime.now(datetime.UTC))


def _key_taken(url: str, headers: Mapping[str, str], context: ssl.SSLContext | None) -> Finding:
    """Whether the key allows inference, tested with an empty body."""
    asking = urllib.request.Request(f"{url.rstrip('/')}{INFER_PATH}", b"", headers)  # noqa: S310 - as above
    try:
        with urllib.request.urlopen(asking, timeout=TIMEOUT_S, context=context):  # noqa: S310
            pass
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return _refused(url, error)
        error.close()
    except (OSError, http.client.HTTPException) as error:
        advice = "look into its log"
        return problem("datacenter", f"{url} lists what it serves, and does not answer {INFER_PATH}: {error}", advice)
    return ok("datacenter", f"{url} answers, and takes the key")


def _refused(url: str, error: urllib.error.HTTPError) -> Finding:
    with error:
        if error.code in (401, 403):
            advice = "set HAWKVISION_EDGE_DATACENTER_API_KEY to a key that the datacenter takes, with the scope infer"
            return problem("datacenter", f"{url} does not take the key (HTTP {error.code})", advice)
        said = error.read(MAX_ERROR_BYTES)
        if error.code == 503:
            found = f"{url} is not ready (HTTP 503){_reason(said)}"
            return warning("datacenter", found, "wait for it, or look into its log")
        advice = "set edge.datacenter_url to the datacenter tier's address, with dc.route_prefix as its path"
        if _reason(said):
            advice += ", and edge.task or edge.tasks to what it serves (dc.tasks)"
        return problem("datacenter", f"{url} answers HTTP {error.code} at {STAGES_PATH}{_reason(said)}", advice)


def _reason(body: bytes) -> str:
    """The reason that a HawkVision server gives; empty for another server's body."""
    try:
        return f": {msgspec.json.decode(body, type=dict[str, Any])['error']}"
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
        return ""


def _certified(url: str, listing: StageList, expected: Mapping[str, str]) -> Finding:
    versions = CertifiedVersions(expected)
    served = {stage.name: stage.ran for stage in listing.stages}
    others = [name for name in expected if not versions.holds(name, served.get(name))]
    if not others:
        return ok("certificates", f"{url} serves what they are about: {', '.join(expected)}")
    missing = [name for name in others if name not in served]
    what = f"does not serve {', '.join(missing)}" if missing else f"runs another {', '.join(others)} than certified"
    advice = (
        f"build the same models on both sides ({advise('models build')}), or certify what is served "
        f"({advise('certify', '--data', 'IMAGES')})"
    )
    return problem("certificates", f"{url} {what}: no guarantee holds", advice)


def clock(url: str, date: str | None, now: datetime.datetime) -> Finding:
    """The difference of clocks in whole seconds, from the header `Date`."""
    try:
        there = None if date is None else email.utils.parsedate_to_datetime(date)
    except ValueError:
        there = None
    if there is None or there.tzinfo is None:
        return ok("clock", f"{url} does not say what time it is there: not compared")
    skew_s = (now - there).total_seconds()
    found = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} {url}"
    if abs(skew_s) > SKEW_S:
        advice = (
            "set it by NTP (timedatectl set-ntp true): log lines of both tiers and dates of certificates are compared"
        )
        return warning("clock", found, advice)
    return ok("clock", found)
