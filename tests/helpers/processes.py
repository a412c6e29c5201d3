"""Run scripts in subprocesses, as a launcher does, without importing torch again in each.

A fork server imports the libraries once; every process forks from it with the environment that `accelerate launch`
would give it. The real launcher is used where it is itself under test (`testbed.run_script`).
"""

import functools
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


@functools.cache
def server():
    """Return a context whose processes fork from a server warmed up by preload.py."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preload"])
    path = os.environ.get("PYTHONPATH")  # Python 3.11 does not hand its sys.path on to the server
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tools"), str(ROOT / "tests" / "helpers")])
    multiprocessing.forkserver.ensure_running()
    del os.environ["PYTHONPATH"]
    if path is not None:
        os.environ["PYTHONPATH"] = path
    return context


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(arguments, rank=0, processes=1, port=0, cwd=ROOT, env=None, output=os.devnull, end=None):
    """Start `python SCRIPT OPTIONS`; its output goes to the files `output`.out and `output`.err.

    An `output` below /dev/ is a device as it stands; a terminal becomes that of the process, with its input.
    """
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | (env or {})
    if processes > 1:
        environment |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"} | (env or {})
    environment = {name: str(value) for name, value in environment.items()}
    target = (list(map(str, arguments)), environment, str(cwd), str(output), end)
    process = server().Process(target=run, args=target)
    process.start()
    return process


def run(arguments, environment, cwd, output, end):
    """Do in the child what the interpreter does for `python SCRIPT OPTIONS`.

    `end` is a barrier at which the processes of one run meet: a fork leaves faster than an interpreter does, and gloo's
    last message to the others would be lost with it.
    """
    os.setsid()  # so that a test can kill it with all it started
    os.environ.update(environment)
    os.chdir(cwd)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may themselves run under nohup
    for stream, suffix in ((1, ".out"), (2, ".err")):
        if output.startswith("/dev/"):
            file = os.open(output, os.O_RDWR)  # the first terminal that such a process opens is its own
        else:
            file = os.open(output + suffix, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream)
        if os.isatty(file):
            os.dup2(file, 0)
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", closefd=False, buffering=1)
    path = ROOT / arguments[0]
    sys.argv = [str(path), *arguments[1:]]
    sys.path[:0] = [str(path.parent), str(ROOT)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as exit:
        if exit.code:
            raise
    if end:
        end.wait()


def run_processes(*arguments, processes=1, cwd=ROOT, env=None, timeout=300, patience=0.5):
    """Run one or several processes to the end; return what `subprocess.run` does, with each exit code in `codes`.

    If one fails, the others are ended `patience` seconds later.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [pathlib.Path(folder) / str(rank) for rank in range(processes)]
        port = free_port() if processes > 1 else 0
        end = server().Barrier(processes) if processes > 1 else None
        running = [start(arguments, i, processes, port, cwd, env, output, end) for i, output in enumerate(outputs)]
        deadline = time.time() + timeout
        while any(process.is_alive() for process in running) and not any(process.exitcode for process in running):
            if time.time() > deadline:
                break
            running[0].join(0.05)
        late = time.time() > deadline
        for process in running:
            if process.is_alive():
                process.join(patience)
                process.kill()
            process.join()
        codes = [process.exitcode for process in running]
        texts = [
            "".join(output.with_suffix(x).read_text(encoding="utf-8") for output in outputs) for x in (".out", ".err")
        ]
    if late:
        raise subprocess.TimeoutExpired(arguments, timeout, *texts)
    code = next((code for code in codes if code), 0)
    if code and not texts[1]:  # killed, or crashed outside Python: only the exit codes are known
        texts[1] = f"no process wrote why; their exit codes, negative for signals: {codes}"
    result = subprocess.CompletedProcess(arguments, 1 if code and processes > 1 else code, *texts)
    result.codes = codes
    return result
