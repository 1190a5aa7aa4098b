"""Shapes of published models: names, shapes and counts of their parameters beside transformers'
models of the same config.json, on the meta device."""

from pathlib import Path

import torch
import transformers

from benchmarks.report import Report
from node.model.export import config_of
from node.model.settings import ModelSettings
from node.model.shapes import SHAPES, all_shapes, count


def rows(report: Report, root: Path) -> None:
    """A row for each."""
    for name, fields in SHAPES.items():
        settings = ModelSettings(**fields)
        config = transformers.AutoConfig.for_model(**config_of(settings))
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(config)
        here = all_shapes(settings)
        there = dict[str, tuple[int, ...]]()
        for parameter, tensor in theirs.named_parameters():
            there[parameter] = tuple(tensor.shape)
        differ = sum(here.get(n) != there.get(n) for n in here.keys() | there.keys())
        report.add(
            f"1 {name}: parameters with another name or shape",
            differ,
            f"of {len(here)}",
            f"transformers, {count(there):,} numbers; here {count(here):,}",
            "0",
            holds=differ == 0 and count(here) == count(there),
        )
