"""The same examples on every machine and in every run.

`pytest --hypothesis-profile search` draws new ones, ten times as many where a test names no number.
"""

from hypothesis import settings

# A busy machine makes single examples slow; the tests say nothing about time.
settings.register_profile("tutti", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("tutti")
