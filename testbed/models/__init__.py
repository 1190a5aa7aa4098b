"""Small models in one process: their directories, visits of a stage, owners of its parts."""
