"""Reading and writing profiles and site certificates.

Each file carries a digest of its own content, which finds accidental changes; it is no signature. A manifest pins the
SHA-256 of the profile that comes with it. Files of other formats are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

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
    return _load(path, Profile, "profile", "calibrate", sha256)


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
    return _load(path, SiteCertificates, "site certificates", "certify")


def _load(path: Path, kind: type[_File], what: str, command: str, sha256: str | None = None) -> _File:
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
        content = msgspec.json.decode(decode_text(data), type=dict[str, Any])
        digest = content.pop(_DIGEST, None)
        document = msgspec.convert(content, kind)
    except FileNotFoundError:
        raise ManifestError(f"{path}: no such {what}; make one with `{command}`") from None
    except MALFORMED as error:
        raise ManifestError(
            f"{path}: {error}; it is damaged or of another version: move it away, and make another with `{command}`"
        ) from None
    except OSError as error:
        raise ManifestError(f"{path}: cannot read: {error.strerror}") from None
    if digest != _digest(content):
        wrong = "has no digest of its content" if digest is None else "was altered: its digest is that of other content"
        raise ManifestError(f"{path}: {wrong}; restore it, or move it away and make another with `{command}`")
    return document


def dump(document: Profile | SiteCertificates) -> bytes:
    """The document as indented JSON with its digest, ending in a newline."""
    content = msgspec.json.decode(msgspec.json.encode(document), type=dict[str, Any])
    whole = {**content, _DIGEST: _digest(content)}
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def _digest(content: dict[str, Any]) -> str:
    """Independent of spacing and the order of keys."""
    return sha256_of(msgspec.json.encode(content, order="sorted"))
