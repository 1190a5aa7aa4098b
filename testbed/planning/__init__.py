"""Problems of the planners: paths of micro-batches, and groups of cells. Without effects."""
