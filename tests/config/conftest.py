"""A manifest that tests of a stage's memory share."""

WIDE = {
    "model.d_model": 512,
    "model.d_ff": 2048,
    "model.seq_len": 16,
    "pipeline.micro_batch": 1,
}
"""Changes of the demo's manifest: few tokens and large weights, so that copies of the weights in 16
bits take more memory than activations in 16 bits save."""
MIXED = {"training.mixed_precision": True}
"""The change of a manifest that lets a processor compute in 16 bits."""
