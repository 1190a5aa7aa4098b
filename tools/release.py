"""The files of a release, built from a commit into one directory. Nothing is published.

    python -m tools.release [STEP ...] [--out dist] [--tag v0.2.0] [--without-image]

Enters: the commit that is checked out, never a file that git does not have. Leaves: an sdist and a
wheel, an image, a bill of materials, pins, notes and checksums. Each step is also one of
.github/workflows/release.yml, which publishes the directory at its end.

Imports the standard library alone: it runs in an environment of its own (requirements-release.txt).
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("node/", "protos/")
"""Beginnings of the paths whose files are all in the wheel."""
MODULES = ("cli.py", "tutti.py")
"""Further files that are in the wheel."""
PINS = ("constraints.txt", "hashes.txt", "deploy/overrides.txt")
"""Files of the repository by which a release is installed in the versions it was tested with."""
CHECKSUMS = "SHA256SUMS"
NOTES = "NOTES.md"


class ReleaseError(Exception):
    """A release cannot be made of this commit; the text says why and what helps."""


@dataclass(frozen=True)
class Release:
    """What is released, and where its files go. ``source``: the files of the commit; ``out``: the
    directory of the release; ``tag``: the tag that must name this version, "" for a trial."""

    source: Path
    out: Path
    tag: str = ""
    torch_index: str = ""

    @property
    def version(self) -> str:
        """The version in pyproject.toml."""
        document = tomllib.loads((self.source / "pyproject.toml").read_text(encoding="utf-8"))
        return str(document["project"]["version"])

    @property
    def wheel(self) -> Path:
        """The file of the wheel."""
        return self.out / f"tutti-{self.version}-py3-none-any.whl"

    @property
    def image(self) -> Path:
        """The file of the image, before it is compressed."""
        return self.out / f"tutti-{self.version}-image.tar"

    @property
    def bill(self) -> Path:
        """The file of the bill of materials."""
        return self.out / f"tutti-{self.version}.cdx.json"

    @property
    def names(self) -> set[str]:
        """Names of all files that a release may have."""
        image = f"{self.image.name}.gz"
        sdist = f"tutti-{self.version}.tar.gz"
        pins = {Path(name).name for name in PINS}
        return {self.wheel.name, sdist, image, self.bill.name, NOTES, CHECKSUMS, *pins}


def check_version(release: Release) -> None:
    """Compare the version with the tag and with CHANGELOG.md, as the first step of a release.
    Raises ReleaseError if the tag names another version, if the changelog has no section for a
    version that is tagged, or if the directory of the release has files already: what an earlier
    release left there would be published with this one."""
    left = sorted(file.name for file in release.out.iterdir())
    if left:
        raise ReleaseError(f"{release.out} has {left[0]} already: remove what is there, or --out")
    if not release.tag:
        return
    if release.tag != f"v{release.version}":
        raise ReleaseError(
            f"the tag {release.tag} is not v{release.version}, the version in pyproject.toml"
        )
    notes_of(changelog(release), release.version)


def build_wheel(release: Release) -> None:
    """Build the sdist, and the wheel from the sdist. Raises ReleaseError if a file is missing in
    the wheel."""
    # Without isolation the wheel is built by the setuptools that requirements-release.txt pins.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(release.out)]
    _run([*build, str(release.source)])
    missing = missing_in(release.wheel, release.source)
    if missing:
        raise ReleaseError(
            f"the wheel lacks {', '.join(missing)}: see package-data, pyproject.toml"
        )


def copy_pins(release: Release) -> None:
    """Copy the lists of versions."""
    for name in PINS:
        shutil.copy(release.source / name, release.out)


def build_image(release: Release) -> None:
    """Build the image and write it as a file that ``docker load`` reads."""
    image = f"tutti:{release.version}"
    index = f"TORCH_INDEX={release.torch_index}"
    _run(["docker", "build", "--build-arg", index, "--tag", image, str(release.source)])
    _run(["docker", "save", "--output", str(release.image), image])
    _run(["gzip", "--no-name", "--force", str(release.image)])


def write_bill(release: Release) -> None:
    """Write the software bill of materials of the image, in the format of CycloneDX: every package
    that hashes.txt and the Dockerfile install."""
    pins = (release.source / "hashes.txt").read_text(encoding="utf-8")
    dockerfile = (release.source / "Dockerfile").read_text(encoding="utf-8")
    torch = re.findall(r'"(torch==[^"]+)"', dockerfile)
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "requirements.txt"
        listed.write_text("\n".join([pins, *torch]) + "\n", encoding="utf-8")
        project = release.source / "pyproject.toml"
        command = [sys.executable, "-m", "cyclonedx_py", "requirements", str(listed)]
        options = ["--pyproject", str(project), "--output-reproducible", "--validate"]
        _run([*command, *options, "--output-format", "JSON", "--output-file", str(release.bill)])


def write_notes(release: Release) -> None:
    """Write the notes: the section of CHANGELOG.md for this version, of a trial the unreleased
    one."""
    heading = "Unreleased"
    if release.tag:
        heading = release.version
    text = notes_of(changelog(release), heading)
    (release.out / NOTES).write_text(text, encoding="utf-8")


def write_checksums(release: Release) -> None:
    """Write the SHA-256 of every other file, as ``sha256sum --check`` reads it. Raises ReleaseError
    for a file that is none of this release."""
    foreign = sorted(f.name for f in release.out.iterdir() if f.name not in release.names)
    if foreign:
        raise ReleaseError(f"{foreign[0]} in {release.out} is no file of {release.version}")
    files = sorted(f for f in release.out.iterdir() if f.name != CHECKSUMS)
    lines = [f"{_sha256(file)}  {file.name}\n" for file in files]
    (release.out / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


IMAGE = "image"
STEPS: Mapping[str, Callable[[Release], None]] = {
    "version": check_version,
    "wheel": build_wheel,
    "pins": copy_pins,
    IMAGE: build_image,
    "sbom": write_bill,
    "notes": write_notes,
    "checksums": write_checksums,
}
"""Steps by name, in their order."""


def changelog(release: Release) -> str:
    """Text of CHANGELOG.md."""
    return (release.source / "CHANGELOG.md").read_text(encoding="utf-8")


def notes_of(text: str, heading: str) -> str:
    """The section of a changelog below ``## heading``, without this heading; the headings in it
    move one level up. A heading may go on after a space, with a date. Raises ReleaseError if there
    is no such section, or if it is empty."""
    sections = re.split(r"(?m)^## +", text)[1:]
    for section in sections:
        title, _, body = section.partition("\n")
        if title.split()[:1] == [heading]:
            if not body.strip():
                raise ReleaseError(f"CHANGELOG.md says nothing below ## {heading}")
            return re.sub(r"(?m)^##(#+ )", r"#\1", body).strip() + "\n"
    raise ReleaseError(f"CHANGELOG.md has no section ## {heading}")


def missing_in(wheel: Path, source: Path) -> list[str]:
    """Files below ``source`` that belong into the wheel and are not there with the same bytes."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        return [
            name
            for name in sorted(_belonging(source))
            if name not in names or archive.read(name) != (source / name).read_bytes()
        ]


def _belonging(source: Path) -> Iterator[str]:
    yield from MODULES
    for package in PACKAGES:
        for file in (source / package).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                yield file.relative_to(source).as_posix()


def committed(root: Path, where: Path) -> None:
    """Write the files of the commit that is checked out in ``root`` into ``where``."""
    packed = subprocess.run(
        ["git", "archive", "--format=tar", "HEAD"], cwd=root, capture_output=True, check=True
    )
    # tarfile has filters from Python 3.11.4 on.
    subprocess.run(["tar", "--extract", "--file=-"], cwd=where, input=packed.stdout, check=True)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _run(command: list[str]) -> None:
    """Run a program; its output goes to stderr. Raises ReleaseError if it is missing or fails."""
    print("+", " ".join(command), file=sys.stderr, flush=True)
    try:
        subprocess.run(command, stdout=sys.stderr, check=True)
    except FileNotFoundError as e:
        raise ReleaseError(f"{command[0]} is not installed") from e
    except subprocess.CalledProcessError as e:
        raise ReleaseError(f"{' '.join(command[:4])} … ended with code {e.returncode}") from e


def main(words: list[str] | None = None) -> int:
    """Make the steps that are named, without one all. Returns 1 if a step cannot be made."""
    parser = ArgumentParser(prog="tools.release", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"{', '.join(STEPS)}; none: all")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory of the release")
    parser.add_argument("--tag", default="", help="the tag to release; none: a trial")
    parser.add_argument("--torch-index", default="", help="package index of the image's torch")
    parser.add_argument("--without-image", action="store_true", help="where docker has no engine")
    asked = parser.parse_args(words)
    unknown = [step for step in asked.steps if step not in STEPS]
    if unknown:
        parser.error(f"there is no step {unknown[0]}: there are {', '.join(STEPS)}")
    steps = [step for step in STEPS if not asked.steps or step in asked.steps]
    if asked.without_image:
        steps = [step for step in steps if step != IMAGE]
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        committed(ROOT, source)
        # Archives of the same commit have the same bytes.
        stamp = ["git", "log", "-1", "--format=%ct"]
        os.environ["SOURCE_DATE_EPOCH"] = subprocess.check_output(
            stamp, cwd=ROOT, text=True
        ).strip()
        release = Release(source, asked.out.resolve(), asked.tag, asked.torch_index)
        try:
            for step in steps:
                STEPS[step](release)
        except ReleaseError as e:
            print(f"release: {e}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
