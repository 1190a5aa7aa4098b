from hypothesis import settings

# A busy machine makes single examples slow; the tests say nothing about time.
settings.register_profile("tutti", deadline=None)
settings.load_profile("tutti")
