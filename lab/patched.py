"""Runs a script with some of its functions replaced:

python lab/patched.py lab/patches/PATCH.py ... SCRIPT [options of the script]

The patches are executed inside the script's module, one after the other, after the script's own code and before `main`.
A function that one defines replaces the script's function of that name, and it can use every name of the script.
"""

import importlib.util
import itertools
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
    patches = list(itertools.takewhile(lambda word: Path(word).parent.name == "patches", sys.argv[1:]))
    script, *options = sys.argv[1 + len(patches) :]
    module = load_script(script)
    for patch in patches:
        source = Path(patch).read_text(encoding="utf-8")
        exec(compile(source, patch, "exec"), vars(module))
    with module.clean_exit():
        module.main(options)


if __name__ == "__main__":
    main()
