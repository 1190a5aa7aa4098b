"""Content of an export beside its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Content of an export beside its tensors."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Content by name of the files that came with the model, tokenizer.json among them. They are
    written as they are; only config.json may change."""
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    """Text of the special tokens by role ("eos_token")."""
    template: str | None = None
    """Chat template."""
    card: str = ""
    """Model card; "" for none."""
    base: str = ""
    """Name or directory of the model beside which adapters were trained; "" for unknown."""

    @property
    def ids(self) -> dict[str, int | list[int]]:
        """Ids of the roles that exist, as config.json names them."""
        eos: int | list[int] | None = None
        if len(self.eos) > 1:
            eos = list(self.eos)
        elif len(self.eos) == 1:
            eos = self.eos[0]
        found = {"bos_token_id": self.bos, "eos_token_id": eos, "pad_token_id": self.pad}
        return {name: value for name, value in found.items() if value is not None}
