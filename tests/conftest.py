"""Settings for all tests."""

from hypothesis import settings

# A busy machine must not fail a property that holds; a failure prints the code that repeats it.
settings.register_profile("kvtop", deadline=None, print_blob=True)
settings.load_profile("kvtop")
