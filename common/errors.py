"""Bad input, signals, and the clean end of a process."""

import contextlib
import errno
import io
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback


class InputError(ValueError):
    """Bad input: the scripts print its message as one line and exit with code 2."""


# --- signals ---

SIGNALS = [signal.SIGINT, signal.SIGTERM]  # Ctrl-C, and the signal of schedulers
if hasattr(signal, "SIGHUP"):  # the terminal has closed; Windows has no such signal
    SIGNALS.append(signal.SIGHUP)


class Process:
    """The handler of `SIGNALS`, with the run of this process once it has one.

    The first signal ends the run after the current step, or at once if no step would be lost. The
    next signal has its default action.
    """

    ECHO = 1.0  # seconds in which a second signal is taken for the first, passed on by a launcher
    run = None
    signal = 0  # the number of the signal that was received

    def __call__(self, number, frame):
        if self.run is None or self.run.first_eval is None:
            set_handlers(signal.SIG_DFL)
            raise KeyboardInterrupt(number)
        set_handlers(signal.SIG_IGN)
        self.signal = number
        if os.environ.get("RANK", "0") == "0":
            name = signal.Signals(number).name
            line = f"\n{name}: stops after this step; a second one ends at once\n"
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, line.encode())  # the signal may have interrupted a print()
        time.sleep(self.ECHO)
        set_handlers(signal.SIG_DFL)


def set_handlers(action):
    """Set the action of `SIGNALS`, and return {signal: its action before}.

    A SIGHUP that is ignored stays ignored. `nohup` has asked for that; and a run that stops already
    has nothing to learn from a terminal that closes, which sends the signal more than once.
    Only the main thread may set an action; any other one sets nothing, and gets {}.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {}
    for number in SIGNALS:
        is_hangup = number not in (signal.SIGINT, signal.SIGTERM)
        if is_hangup and signal.getsignal(number) == signal.SIG_IGN:
            continue
        before[number] = signal.signal(number, action)
    return before


def in_worker(process):
    """Take a worker of a Pool out of the group that Ctrl-C signals, since the step still needs it.

    It ends with the run.
    """

    def end_with_parent():
        multiprocessing.parent_process().join()
        os.killpg(0, signal.SIGKILL)  # also the programs that the worker has started

    set_handlers(signal.SIG_DFL)  # a Pool ends its workers by SIGTERM
    os.setpgid(0, 0)
    threading.Thread(target=end_with_parent, daemon=True).start()


# --- output ---


class LastingOutput(io.FileIO):
    """stdout or stderr. What is written after its reader is gone is lost, and ends nothing.

    A terminal that has closed answers EIO to a write, a pipe that nobody reads answers EPIPE.
    """

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            return len(data)


def lasting(stream):
    """A stream of text as stdout or stderr, whose writes do not fail when the reader is gone."""
    stream.flush()
    file = io.BufferedWriter(LastingOutput(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(
        file,
        encoding=stream.encoding,
        errors="backslashreplace",  # for characters that the encoding of the terminal does not have
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def keep_printing():
    """Let no print end this process because of a character, or since a terminal has closed."""
    if hasattr(sys.stdout, "reconfigure"):  # a notebook has another kind of stdout
        sys.stdout.reconfigure(errors="backslashreplace")
    if not hasattr(signal, "SIGHUP"):  # on Windows a terminal is no file
        return
    if sys.stdout is not None and sys.stdout is sys.__stdout__:
        sys.stdout = lasting(sys.stdout)
    if sys.stderr is not None and sys.stderr is sys.__stderr__:
        sys.stderr = lasting(sys.stderr)


# --- the end of a process ---


@contextlib.contextmanager
def clean_exit():
    """End on an InputError with one line and exit code 2, on a signal after the step."""
    process = Process()
    before = set_handlers(process)
    multiprocessing.util.register_after_fork(process, in_worker)
    keep_printing()
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
    if world_size() > 1:
        # No clean-up: to free a process group that a wrapped model still uses can hang.
        os._exit(code)
    raise SystemExit(code)


def report(error, run):
    """Print why the process ends, and abandon its run, if it has one; returns the exit code."""
    script = os.path.basename(sys.argv[0])
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if world_size() > 1 and not isinstance(error, KeyboardInterrupt):
        # Once the first process is gone, the launcher ends the others before they print.
        time.sleep(1 if is_first else 3)
    when = run.abandon() if run else ""
    if isinstance(error, KeyboardInterrupt):
        number = error.args[0] if error.args else signal.SIGINT
        if is_first:
            name = signal.Signals(number).name
            print(f"{script}: {name} before the first step", file=sys.stderr)
        return 128 + number
    if not isinstance(error, InputError):
        traceback.print_exception(error)
        return 1
    if error.__cause__ is not None:  # the user's own code has failed, and they need to see where
        traceback.print_exception(error.__cause__)
    print(f"{script}: error: {error}{when}", file=sys.stderr)
    return 2


# --- what is told ---


def refuse(args, option, problem):
    """Raise an InputError about the value of an option."""
    raise InputError(f"--{option} {getattr(args, option)}: {problem}") from None


def say(args, option, note):
    """Print a note on the value of an option, on the first process only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"--{option} {getattr(args, option)}: {note}")


def in_short(error):
    """Type and message of a library's exception in one short line.

    Some messages, as that of a KeyError, are a mere name.
    """
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message:.300}"


def one_line(error):
    """The message of a library's exception in one line, or its type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def count(number, noun):
    """A number with its noun: (1, "step") -> "1 step", (2, "pass") -> "2 passes"."""
    if number == 1:
        return f"{number} {noun}"
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number} {noun}{ending}"


def world_size():
    """The number of processes that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", 1))
