"""Adapters merged into the weights beside which they were trained.

Enters: the weights of a stage, its adapters, the settings. Leaves: whole weights under the names of
the model without adapters. Never: the tensors that were given, changed.
"""

from collections.abc import Mapping

from torch import Tensor

from node.core.errors import UsageFault
from node.model.settings import ModelSettings
from node.model.stages import base_of, build


def merge_adapters(
    base: Mapping[str, Tensor], adapters: Mapping[str, Tensor], settings: ModelSettings
) -> dict[str, Tensor]:
    """Add alpha / rank * B A to every matrix that has adapters, in fp32, and return all tensors in
    the number format of ``base``. Raises UsageFault for adapters of a matrix that is not there."""
    merged = dict(base)
    scale = settings.adapter_alpha / settings.adapter
    for name, down in adapters.items():
        path, found, _ = name.rpartition(".lora_A.weight")
        if not found:
            continue
        up = adapters[f"{path}.lora_B.weight"]
        target = f"{path}.weight"
        if target not in merged:
            raise UsageFault(f"adapters of {target}, which the weights do not have", "see the run")
        weight = merged[target]
        change = up.float() @ down.float()
        merged[target] = (weight.float() + scale * change).to(weight.dtype)
    return merged


def drawn_base(
    settings: ModelSettings, stages: int, stage: int, parameters: str
) -> dict[str, Tensor]:
    """The weights of a stage of a run that begins from drawn weights."""
    return base_of(build(settings, stages, stage, parameters))
