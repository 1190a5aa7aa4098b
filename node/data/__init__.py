"""Text to micro-batches: sources, tokenizers, packing, the resumable sampler.
Enters: files, seeds.
Never: a peer."""
