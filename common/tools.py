"""Files of tools/ that a run loads when an option asks for one; all else runs without them."""

import importlib.util
import os
import shlex
import sys
from pathlib import Path

from common.errors import InputError


def load_tool(cls, name, needed_by=None):
    """The module tools/NAME.py beside the script whose options are `cls`.

    Where there is no such file the result is None, or an InputError that names the option
    `needed_by`.
    """
    path = tool_path(cls, name)
    if not path.is_file():
        if needed_by:
            raise InputError(f"{needed_by} needs tools/ (beside the script)")
        return None
    # It is loaded from its path: another package may have the name `tools`.
    spec = importlib.util.spec_from_file_location(f"tools.{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tool_path(cls, name):
    """The path of tools/NAME.py beside the script whose options are `cls`; there may be no such file."""
    script = getattr(sys.modules[cls.__module__], "__file__", "")
    return Path(script).parent / "tools" / f"{name}.py"


def tool_command(cls, name, folder):
    """`python tools/NAME.py FOLDER` for a shell in the working directory; None where there is no such tool."""
    path = tool_path(cls, name).resolve()
    if not path.is_file():
        return None
    try:
        path = Path(os.path.relpath(path))
    except ValueError:  # another drive of Windows
        pass
    return shlex.join(["python", path.as_posix(), Path(folder).as_posix()])
