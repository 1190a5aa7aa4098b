"""Parts of `benchmarks.models`: runs that begin from a model of Hugging Face."""
