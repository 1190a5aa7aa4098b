"""The single-device model and its cut into ends and block stages; Hugging Face names.
Enters: tokens, hidden states.
Never: a network."""
