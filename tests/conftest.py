"""Settings for all tests."""

import signal

from hypothesis import settings

# A busy machine must not fail a property that holds; a failure prints the code that repeats it.
settings.register_profile("kvtop", deadline=None, print_blob=True)
settings.load_profile("kvtop")

# A shell starts what it runs in the background with SIGINT ignored, and children inherit that: programs that
# the tests interrupt must be interruptible wherever the tests run.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
