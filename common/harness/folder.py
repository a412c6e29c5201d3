"""The folder of a run: one run alone uses it, and everything in it is written whole."""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import shutil

import filelock

from common.errors import refuse
from common.harness.checkpoints import find_checkpoints, put_in_place, writing
from common.harness.distributed import on_first

FILES = "args.json metrics.jsonl samples.jsonl tokens.jsonl pairs-round-*.jsonl checkpoints model model-step-*".split()


class RunFolder:
    """The folder of a run, which it locks until it ends; docs/running.md lists the files. The first process writes."""

    def __init__(self, accelerator, args, script):
        self.args = args
        self.script = script
        self.is_main_process = accelerator.is_main_process
        self.lock = None
        self.is_new = False
        self.path = on_first(accelerator, self.claim)

    def claim(self):
        """Make the folder if it is not there, and lock it; returns its path. An InputError if another run uses it."""
        name = self.args.output_dir or f"runs/{self.script}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
        path = pathlib.Path(name).expanduser()
        with writing("the folder of the run"):
            self.check(path)
            self.is_new = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            # One object a file: a run of this process that ended with an exception does not keep the next one out.
            self.lock = filelock.FileLock(path / "lock", blocking=False, is_singleton=True)
            try:
                self.lock.acquire()
            except filelock.Timeout:
                refuse(self.args, "output_dir", "another run is using it")
            self.check(path)  # again: that run may have ended between the first look and the lock
        return path

    def check(self, path):
        """Refuse a folder with other files of a run's names, with a run but no --resume, or with a finished run."""
        names = []
        for pattern in FILES:
            names += sorted(file.name for file in path.glob(pattern))
        if names and "args.json" not in names:
            refuse(self.args, "output_dir", f"is not the folder of a run and holds {', '.join(names)}")
        if names and not self.args.resume:
            refuse(self.args, "output_dir", "already holds a run: add --resume, or take another folder")
        if "model" in names and not find_checkpoints(path):
            refuse(self.args, "output_dir", "holds a finished run without checkpoints: nothing to resume from")

    def write_args(self):
        """Write args.json: the script and the options of the run."""
        with writing("the folder of the run"):
            text = json.dumps({"script": self.script, **dataclasses.asdict(self.args)}, indent=2)
            (self.path / "args.json").write_text(text + "\n", encoding="utf-8")

    def write_rows(self, name, rows, mode="a"):
        """Add rows to a JSONL file, "w": replace it. What JSON cannot hold, such as a date, is written as text."""
        if not self.is_main_process:
            return
        path = self.path / name
        with writing(path), open(path, mode, encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps(row, default=str) + "\n" for row in rows)

    def sizes(self, names):
        """{name: bytes} of files; one that is not there has 0."""
        paths = {name: self.path / name for name in names}
        return {name: path.stat().st_size if path.exists() else 0 for name, path in paths.items()}

    def cut_back(self, sizes):
        """Cut files to their `sizes` {name: bytes}: what a crash has left after the last checkpoint is gone.

        tokens.jsonl is not begun here, since not every run writes it.
        """
        with writing("the folder of the run"):
            for name, size in sizes.items():
                if name == "tokens.jsonl" and not (self.path / name).exists():
                    continue
                with open(self.path / name, "ab") as file:
                    file.truncate(min(size, file.tell()))

    def put_model(self, temporary, name):
        """Put the complete model in the folder `temporary` in the place of the folder `name`."""
        final = self.path / name
        shutil.rmtree(final, ignore_errors=True)  # that of the run before this resume
        put_in_place(temporary, final)

    def release(self):
        """Let other runs have the folder."""
        if self.lock:
            self.lock.release(force=True)

    def abandon(self):
        """Release the folder of a failed run, and remove it if this run has made it and it is empty."""
        self.release()
        with contextlib.suppress(OSError):
            if self.is_new and set(os.listdir(self.path)) <= {"lock"}:
                (self.path / "lock").unlink(missing_ok=True)
                self.path.rmdir()
