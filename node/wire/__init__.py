"""Values to bytes and back, pure: tensor frames, and bounds of messages.
Enters: tensors, byte chunks, raw messages.
Never: a socket."""
