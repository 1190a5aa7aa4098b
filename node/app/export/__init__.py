"""Export of the trained model: all stages of one version and the files of the run, in a directory.

Enters: an operator's request and the daemon's parts. Leaves: a directory that other tools load.
Never: tensors of two versions in one export.
"""
