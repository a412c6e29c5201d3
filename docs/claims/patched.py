"""Runs a script with some of its functions replaced: python docs/claims/patched.py PATCH SCRIPT [options of the script]

PATCH is a Python file that is executed inside the script's module, after the script's own code and before `main`. A
function that it defines replaces the script's function of that name, and it can use every name of the script.
"""

import importlib.util
import sys
from pathlib import Path


def load_script(path):
    """The script as a module; its `main` has not run."""
    sys.path.insert(0, str(Path(path).resolve().parent))  # as Python does for a script that it starts
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main():
    patch, script, *options = sys.argv[1:]
    module = load_script(script)
    source = Path(patch).read_text(encoding="utf-8")
    exec(compile(source, patch, "exec"), vars(module))
    with module.clean_exit():
        module.main(options)


if __name__ == "__main__":
    main()
