"""Values to bytes and back, pure: tensor frames.
Enters: tensors, byte chunks.
Never: a socket."""
