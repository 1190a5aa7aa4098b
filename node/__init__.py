"""tutti: the training daemon. One sub-package for each subject; docs/architecture.md has the
layers."""
