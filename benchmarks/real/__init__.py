"""Parts of `benchmarks.real`: a pretrained model, and the data that people have."""
