"""Bad input, signals, and the clean end of a process."""

import contextlib
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback


class InputError(ValueError):
    """Bad input: the scripts print its message as one line and exit with code 2."""


class Process:
    """The handler of SIGINT (Ctrl-C) and SIGTERM, with the run of this process once it has one. The first signal ends
    the run after the current step, or at once if no step would be lost; the next one has its default action."""

    ECHO = 1.0  # seconds in which a second signal is taken for the first one, passed on by a launcher
    run, signal = None, 0  # the number of the signal received

    def __call__(self, number, frame):
        if self.run is None or self.run.first_eval is None:
            set_handlers(signal.SIG_DFL)
            raise KeyboardInterrupt(number)
        set_handlers(signal.SIG_IGN)
        self.signal = number
        if os.environ.get("RANK", "0") == "0":  # not by print(), which the signal may have interrupted
            name = signal.Signals(number).name
            os.write(2, f"\n{name}: stops after this step; a second one ends at once\n".encode())
        time.sleep(self.ECHO)
        set_handlers(signal.SIG_DFL)


def set_handlers(action):
    """Set the action of SIGINT and SIGTERM; returns {signal: the one before}, empty outside of the main thread."""
    main = threading.current_thread() is threading.main_thread()
    return {number: signal.signal(number, action) for number in (signal.SIGINT, signal.SIGTERM) if main}


def in_worker(process):
    """Take a Pool's worker out of the group that Ctrl-C signals, as the step still needs it; it ends with the run."""

    def end_with_parent():
        multiprocessing.parent_process().join()
        os.killpg(0, signal.SIGKILL)  # with the programs that it started

    set_handlers(signal.SIG_DFL)  # a Pool ends its workers by SIGTERM
    os.setpgid(0, 0)
    threading.Thread(target=end_with_parent, daemon=True).start()


@contextlib.contextmanager
def clean_exit():
    """End on an InputError with its message as one line and exit code 2, on a signal after the step (`Process`)."""
    process = Process()
    before = set_handlers(process)
    multiprocessing.util.register_after_fork(process, in_worker)  # in the workers that fork
    if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
        sys.stdout.reconfigure(errors="backslashreplace")  # a sample may hold what the terminal's encoding does not
    try:
        yield
        return
    except (Exception, KeyboardInterrupt) as error:
        set_handlers(signal.SIG_DFL)
        code = report(error, process.run)
    finally:
        for number, action in before.items():
            signal.signal(number, action)
    sys.stdout.flush()
    sys.stderr.flush()
    if world_size() > 1:  # without clean-up: to free a process group that a wrapped model still uses can hang
        os._exit(code)
    raise SystemExit(code)


def report(error, run):
    """Print why the process ends, and abandon its run, unless that is None; returns the exit code."""
    name, first = os.path.basename(sys.argv[0]), os.environ.get("LOCAL_RANK", "0") == "0"
    if world_size() > 1 and not isinstance(error, KeyboardInterrupt):
        time.sleep(1 if first else 3)  # once it is gone, the launcher ends the others before they print
    when = run.abandon() if run else ""
    if isinstance(error, KeyboardInterrupt):
        (number,) = error.args or (signal.SIGINT,)
        if first:
            print(f"{name}: {signal.Signals(number).name} before the first step", file=sys.stderr)
        return 128 + number
    if not isinstance(error, InputError):
        traceback.print_exception(error)
        return 1
    if error.__cause__ is not None:  # the user's own code failed: they need to see where
        traceback.print_exception(error.__cause__)
    print(f"{name}: error: {error}{when}", file=sys.stderr)
    return 2


def refuse(args, option, problem):
    """Raise an InputError about what an option names."""
    raise InputError(f"--{option} {getattr(args, option)}: {problem}") from None


def say(args, option, note):
    """Print a note on what an option names, on the first process only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"--{option} {getattr(args, option)}: {note}")


def in_short(error):
    """Type and message of a library's exception in one short line; the message alone may be a mere name."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}"


def one_line(error):
    """The message of a library's exception in one line, or its type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def world_size():
    """The number of processes that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", 1))
