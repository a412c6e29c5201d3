"""Files of tools/ that a run loads when an option asks for one; all else runs without them."""

import importlib.util
import sys
from pathlib import Path

from common.errors import InputError


def load_tool(cls, name, needed_by=None):
    """The module tools/NAME.py beside the script whose options are `cls`.

    Where there is no such file the result is None, or an InputError that names the option
    `needed_by`.
    """
    script = getattr(sys.modules[cls.__module__], "__file__", "")
    path = Path(script).parent / "tools" / f"{name}.py"
    if not path.is_file():
        if needed_by:
            raise InputError(f"{needed_by} needs tools/ (beside the script)")
        return None
    # It is loaded from its path: another package may have the name `tools`.
    spec = importlib.util.spec_from_file_location(f"tools.{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
