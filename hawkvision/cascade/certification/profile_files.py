"""Reading and writing profiles and site certificates.

Each file carries a digest of its own content, which finds accidental changes; it is no signature. A manifest pins the
SHA-256 of the profile that comes with it. Older formats are read under their old keys (`file_keys`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from hawkvision.cascade.certification.file_keys import in_present_words
from hawkvision.cascade.certification.profile import Profile
from hawkvision.cascade.certification.site_certificates import SiteCertificates
from hawkvision.core.advice import advise
from hawkvision.core.errors import MALFORMED, ManifestError
from hawkvision.core.text_files import decode_text
from hawkvision.models.manifest import Manifest
from hawkvision.system.files import sha256_of

_DIGEST: Final = "digest"
"""The member of a file that holds the digest of all others."""

_File = TypeVar("_File", bound=msgspec.Struct)


def load_profile(path: Path, sha256: str | None = None) -> Profile:
    """Read a profile; `sha256` is that of its file, if a manifest pins it.

    Raises:
        ManifestError: if the file is missing, breaks the schema or was altered; names the file and the key.
    """
    return load_sealed(path, Profile, "profile", "calibrate", sha256)


def load_profile_of(manifest: Manifest, models: Path, own: Path | None) -> Profile:
    """A task's profile: `own`, or the one beside its manifest.

    Raises:
        ManifestError: as `load_profile`, or if it is another task's.
    """
    if own is not None:
        profile = load_profile(own)
        if profile.task != manifest.task:
            raise ManifestError(f"{own}: this is the profile of task {profile.task!r}, not of {manifest.task!r}")
        return profile
    return load_profile(models / manifest.task / "profile.json", manifest.profile_sha256)


def load_site(path: Path) -> SiteCertificates:
    """Read a site's certificates.

    Raises:
        ManifestError: if the file is missing, breaks the schema or was altered; names the file and the key.
    """
    return load_sealed(path, SiteCertificates, "site certificates", "certify")


def load_sealed(path: Path, kind: type[_File], what: str, command: str, sha256: str | None = None) -> _File:
    """Read a document of this kind and check the digest of its content.

    Args:
        path: the file.
        kind: its schema.
        what: its name in errors.
        command: the command that makes one, for `advise`.
        sha256: of the file, if it is pinned.

    Raises:
        ManifestError: if the file is missing, breaks the schema or was altered; names the file and the key.
    """
    task = () if path.name != "profile.json" else ("--task", path.parent.name)
    command = advise(command, *task, "--data", "IMAGES")
    try:
        data = path.read_bytes()
        if sha256 is not None and sha256_of(data) != sha256:
            raise ManifestError(
                f"{path}: this is not the {what} that its manifest pins: expected SHA-256 {sha256}, found "
                f"{sha256_of(data)}; restore it, or name one of your own (`{command}`)"
            )
        content, digest = _taken_apart(data)
        document = msgspec.convert(_in_present_words(content), kind)
    except FileNotFoundError:
        raise ManifestError(f"{path}: no such {what}; make one with `{command}`") from None
    except MALFORMED as error:
        raise ManifestError(f"{path}: {error}; a file of another version is made anew with `{command}`") from None
    except OSError as error:
        raise ManifestError(f"{path}: cannot read: {error.strerror}") from None
    if digest != _digest(content):
        wrong = "has no digest of its content" if digest is None else "was altered: its digest is that of other content"
        raise ManifestError(
            f"{path}: {wrong}; make it anew with `{command}`, or restore it, or vouch for it as it is with "
            f"`hawkvision seal {path}`"
        )
    return document


def dump(document: Profile | SiteCertificates) -> bytes:
    """The document as indented JSON with its digest, ending in a newline."""
    return sealed(msgspec.json.decode(msgspec.json.encode(document), type=dict[str, Any]))


def seal(path: Path) -> bytes:
    """The content of a file with its correct digest, whatever digest the file has.

    Raises:
        ManifestError: if it is missing, or neither a profile nor a site's certificates.
    """
    try:
        content, _ = _taken_apart(path.read_bytes())
        msgspec.convert(_in_present_words(content), SiteCertificates if "as_of" in content else Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: expected a profile or a site's certificates: {error}") from None
    except OSError as error:
        raise ManifestError(f"{path}: cannot read: {error.strerror}") from None
    return sealed(content)


def _taken_apart(data: bytes) -> tuple[dict[str, Any], object]:
    """A file's content, and its digest."""
    content = msgspec.json.decode(decode_text(data), type=dict[str, Any])
    return content, content.pop(_DIGEST, None)


def _in_present_words(content: dict[str, Any]) -> Any:
    newest = 2 if "as_of" in content else 5
    return content if content.get("format") == newest else in_present_words(content)


def sealed(content: dict[str, Any]) -> bytes:
    """A document's values as indented JSON with their digest, ending in a newline."""
    whole = {**content, _DIGEST: _digest(content)}
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def _digest(content: dict[str, Any]) -> str:
    """Independent of spacing and the order of keys."""
    return sha256_of(msgspec.json.encode(content, order="sorted"))
