"""tutti: the training daemon. One package, one room a sub-package; see docs/architecture.md for the
floors."""
