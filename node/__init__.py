"""tutti: the training daemon. One sub-package for each subject; see docs/architecture.md for the
floors."""
