"""Where the weights of a variant come from, as manifests state it."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta

from hawkvision.core.errors import ManifestError
from hawkvision.models.input_spec import ManifestStruct

Sha256: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class PackageSource(ManifestStruct, frozen=True, tag_field="kind", tag="package"):
    """A weight file inside a pinned package of the Python registry."""

    package: str
    version: str
    member: str
    sha256: Sha256
    """SHA-256 of the member."""
    archive_sha256: Sha256 | None = None
    """SHA-256 of the archive. An sdist needs it, because pip runs its set-up code unless a hash refuses it."""
    reader: Literal["torch", "numpy_pickle"] = "torch"

    def __str__(self) -> str:
        return f"{self.package}=={self.version}:{self.member}"


class NpmSource(ManifestStruct, frozen=True, tag_field="kind", tag="npm"):
    """A TensorFlow.js graph model inside a pinned package of the npm registry."""

    npm: Annotated[str, Meta(pattern=r"^(@[a-z0-9][\w.-]*/)?[a-z0-9][\w.-]*$", max_length=214)]
    """The package's name. It cannot be taken for an option of npm, a path or an address."""
    version: Annotated[str, Meta(pattern=r"^\d[\w.+-]*$", max_length=64)]
    member: str
    """The model's `model.json` in the archive; its shards lie beside it."""
    archive_sha256: Sha256

    @property
    def sha256(self) -> str:
        """SHA-256 of the archive, since a model has several files."""
        return self.archive_sha256

    @property
    def reader(self) -> Literal["tfjs"]:
        """The format."""
        return "tfjs"

    @property
    def package(self) -> str:
        """The package's name as a part of file names, as `npm pack` writes it."""
        return self.npm.removeprefix("@").replace("/", "-")

    def __str__(self) -> str:
        return f"{self.npm}@{self.version}:{self.member}"


class FileSource(ManifestStruct, frozen=True, tag_field="kind", tag="file"):
    """A weight file beside the manifest, committed with it."""

    file: Annotated[str, Meta(pattern=r"^(\w[\w.-]*/)*\w[\w.-]*\.(safetensors|onnx)$", max_length=128)]
    """A path below `models/<task>/`. No part begins with a dot, so it cannot leave that folder."""
    sha256: Sha256

    @property
    def reader(self) -> Literal["safetensors", "onnx"]:
        """The format by the file name: float weights, or a network in ONNX.

        The latter is QONNX for the precisions of integer networks, else the model as it is run.
        """
        return "onnx" if self.file.endswith(".onnx") else "safetensors"

    def __str__(self) -> str:
        return self.file


WeightSource: TypeAlias = PackageSource | NpmSource | FileSource
"""The source of a variant's weights. In TOML, its key `package`, `npm` or `file` says which it is."""

_KINDS: Final = ("file", "npm", "package")


def tag_source(source: dict[str, Any], place: str) -> None:
    """Tag a source with its kind, which follows from its keys; `place` names it in errors.

    Raises:
        ManifestError: if it is of two kinds, or names its kind itself.
    """
    if "kind" in source:
        raise ManifestError(f"{place}: unknown field `kind`; `file`, `npm` or `package` says which kind it is")
    named = [kind for kind in _KINDS if kind in source]
    others = {"version", "member", "archive_sha256", "reader"} if named[:1] == ["file"] else set()
    foreign = sorted(source.keys() & {*named[1:], *others})
    if foreign:
        raise ManifestError(
            f"{place}: expected either `file` or `package` or `npm`, got `{named[0]}` together with {foreign}"
        )
    source["kind"] = named[0] if named else "package"
