"""State at rest and for late joiners: safetensors, atomic, digested, resumable.
Enters: parameters, optimizer state.
Never: training logic."""
