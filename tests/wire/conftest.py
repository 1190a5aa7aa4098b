import torch
from hypothesis import settings

torch.set_num_threads(1)
# A busy machine makes single examples slow; the tests say nothing about time.
settings.register_profile("tutti", deadline=None)
settings.load_profile("tutti")
