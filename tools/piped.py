"""Programs whose output goes to `head` or `less`."""

import signal


def end_with_the_reader():
    """End without a traceback, as `cat` does, where the reader of the output has gone."""
    if hasattr(signal, "SIGPIPE"):  # Windows has none
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
