"""The model in one piece, as the swarm's stages would be if nobody had cut it."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from node.model.documents import ends_of
from node.model.settings import ModelSettings
from node.model.stages import Blocks, Ends


class Unsplit(nn.Module):
    """The whole model in one process, made of one Ends without layers and one Blocks with all of
    them, which share their modules with it."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        ends = Ends(replace(settings, ends_layers=0))
        blocks = Blocks(settings, range(settings.layers))
        self.settings = settings
        self.model = nn.Module()
        self.model.embed_tokens, self.model.norm = ends.model.embed_tokens, ends.model.norm
        self.model.layers, self.lm_head = blocks.model.layers, ends.lm_head
        # In a tuple, because torch would register a module attribute and list every parameter
        # twice.
        self._parts = (ends, blocks)

    @property
    def ends(self) -> Ends:
        return self._parts[0]

    @property
    def blocks(self) -> Blocks:
        return self._parts[1]

    def logits(self, tokens_BT: Tensor, document_ends: Sequence[int] = ()) -> Tensor:
        """Token ids [B, T] to fp32 logits [B, T, V]."""
        return self.ends.logits(self.blocks(self.ends.embed(tokens_BT), document_ends))

    forward = logits

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, int]:
        """As :meth:`Ends.loss`, from token ids; documents are kept apart where targets are
        missing."""
        h_BTD = self.blocks(self.ends.embed(tokens_BT), ends_of(targets_BT))
        return self.ends.loss(h_BTD, targets_BT)
