"""Merge a file of recipes/, solutions/ or bugs/ into a script, function by function.

python examples/recipes.py --list                                list the files by what they change
python examples/recipes.py rloo                                  write rloo.py, based on grpo.py
python examples/recipes.py vapo                                  write vapo.py, based on ppo.py
python examples/recipes.py rloo dapo.py                          write rloo.py, based on dapo.py
python examples/recipes.py run kl_sign grpo.py --kl_coef 0.2     run it without writing a script

These files are Python. Their definitions are merged into the script by name:

- A function replaces the script's function of that name, defined or imported.
- `script_update = update` keeps the script's own function under a new name, for the new one to
  call.
- An option in `class Args` replaces the script's option of that name; `del` in that class removes
  options.
- Functions, constants and options that the script does not have are added. The file itself must use
  them.
- `LINES = {"a line of the script": "its replacement"}` replaces single lines, for example in
  `main`. The line must occur in the script exactly once.
- The file may use whatever the script defines or imports, without importing it.
- The docstring becomes the script's.
"""

import ast
import builtins
import signal
import sys
import textwrap
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

KINDS = {  # what a recipe changes
    "advantage": (
        "reinforce",
        "mean_baseline",
        "rloo",
        "reinforce_pp",
        "lite_ppo",
        "gdpo",
        "maxrl",
        "length_penalty",
        "vapo",
    ),
    "loss": (
        "cispo",
        "sapo",
        "gmpo",
        "dppo",
        "dual_clip",
        "off_policy_mask",
        "entropy_bonus",
        "kl_cov",
    ),
    "weights": ("tis", "high_entropy", "token_mean", "luspo"),
    "sampler": ("keep_mask", "curriculum", "calculator"),
    "ppo": ("ppo_penalty", "ppo_adaptive_kl", "critic_warmup"),
    "dpo": ("online_dpo",),
    "teacher": ("distill", "distill_topk", "sdpo"),
}
SCRIPTS = {  # all others are based on grpo.py
    "vapo": "ppo.py",
    "ppo_penalty": "ppo.py",
    "ppo_adaptive_kl": "ppo.py",
    "critic_warmup": "ppo.py",
    "online_dpo": "dpo.py",
    "tis": "dapo.py",
    "keep_mask": "dapo.py",
    "high_entropy": "dapo.py",
    "kl_cov": "dapo.py",
    "gmpo": "gspo.py",
    "luspo": "gspo.py",
}


MAX_LINE = 100  # characters of a line


def files():
    """Return {name: path} of the files that can be merged into a script."""
    folders = [HERE / folder for folder in ("recipes", "solutions", "bugs")]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.py"))}


class Source:
    """A script or a file to merge into it: its text, its definitions, and edits."""

    def __init__(self, text):
        self.lines = text.splitlines()
        self.edits = []  # (first line from 0, end line, new text)
        self.tree = ast.parse(text)
        self.docstring, *self.statements = self.tree.body
        self.functions, self.imports, self.args = {}, [], []
        for node in self.statements:
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = node
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                self.imports.append(node)
            elif isinstance(node, ast.ClassDef) and node.name == "Args":
                self.args = node.body
        self.new_lines = {}  # {line of the script: its replacement}
        for node in self.statements:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LINES":
                self.new_lines = ast.literal_eval(node.value)
        self.imported = {alias.name for node in self.imports for alias in node.names}
        self.options = {
            node.target.id: node for node in self.args if isinstance(node, ast.AnnAssign)
        }

    def line_trees(self):
        """Return the syntax trees of the replacement lines."""
        return [parse_lines(textwrap.dedent(text)) for text in self.new_lines.values()]

    def names(self):
        """Return the names that the code reads, also attributes (`teacher` in `args.teacher`)."""
        found = set()
        for node in nodes_of([self.tree, *self.line_trees()]):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
        return found

    def defined(self):
        """Return the names of its functions, classes, constants and imports."""
        found = set(self.imported)
        for node in self.statements:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Assign):
                found.update(map(ast.unparse, node.targets))
        return found

    def local_functions(self):
        """Return the names of arguments, nested functions and imports, which may be callable."""
        nodes = list(nodes_of(self.functions.values()))
        inner = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.alias)}
        return inner | {node.arg for node in nodes if isinstance(node, ast.arg)}

    def called(self):
        """Return the names of the functions that its functions and replacement lines call."""
        found = set()
        for node in nodes_of([*self.functions.values(), *self.line_trees()]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found.add(node.func.id)
        return found

    def place(self, node):
        """Return the first line (from 0) and the end line of a statement with its decorators."""
        decorators = getattr(node, "decorator_list", [])
        return min(part.lineno for part in (node, *decorators)) - 1, node.end_lineno

    def text(self, node):
        first, end = self.place(node)
        return "\n".join(self.lines[first:end])

    def replace(self, node, text):
        self.edits.append((*self.place(node), text))

    def insert(self, line, text):
        self.edits.append((line, line, text))

    def rename(self, node, old, new):
        """Replace `old` by `new` in the first line of a node."""
        line = node.lineno - 1
        self.edits.append((line, line + 1, self.lines[line].replace(old, new)))

    def result(self):
        # Edit from the last line up, so that the line numbers above stay valid. Insert the last of
        # several texts for one place first, so that they end up in the order of the file.
        edits = sorted(reversed(self.edits), key=lambda edit: edit[:2], reverse=True)
        for first, end, text in edits:
            self.lines[first:end] = text.splitlines()
        return "\n".join(self.lines) + "\n"


def parse_lines(text):
    """Return the syntax tree of lines: statements, or else entries of a dict."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.parse(f"{{{text}\n}}")


def nodes_of(trees):
    for tree in trees:
        yield from ast.walk(tree)


def put(patch, script):
    """Return the text of a script merged with that of a file.

    Raise ValueError for names that the script lacks, because they were renamed or because the file
    is made for another script. What it defines would do nothing, and what it calls would be
    missing.
    """
    new, script = Source(patch), Source(script)
    known = new.defined() | script.defined() | set(dir(builtins))
    known |= new.local_functions() | script.local_functions()
    for function in sorted(new.called()):
        must_have(known, function, "function")
    script.replace(script.docstring, new.text(new.docstring))
    put_options(new, script)
    put_functions(new, script)
    put_lines(new, script)
    return with_imports(script.result(), new)


def put_options(new, script):
    end = max(node.end_lineno for node in script.options.values())
    for node in new.args:
        if isinstance(node, ast.Delete):
            for target in node.targets:
                must_have(script.options, target.id, "option")
                script.replace(script.options[target.id], "")
        elif node.target.id in script.options:
            script.replace(script.options[node.target.id], new.text(node))
        else:
            must_have(new.names(), node.target.id, "option")
            script.insert(end, new.text(node))


def put_functions(new, script):
    kept, waiting = {}, ""  # new code goes before the next function that the script has
    for node in new.statements:
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in script.functions:
            kept[ast.unparse(node.value)] = node.targets[0].id
        elif isinstance(node, ast.Assign) and node.targets[0].id != "LINES":
            if isinstance(node.value, ast.Name):
                must_have(script.imported, node.value.id, "function")
            waiting += f"{new.text(node)}\n\n\n"
        elif isinstance(node, ast.FunctionDef) and node.name in script.functions:
            own = script.functions[node.name]
            if node.name in kept:
                script.rename(own, f"def {node.name}(", f"def {kept[node.name]}(")
                script.insert(own.end_lineno, f"\n\n{waiting}{new.text(node)}")
            else:
                script.replace(own, waiting + new.text(node))
            waiting = ""
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name != "Args":
            must_have(script.imported | new.names(), node.name, "function")
            waiting += f"{new.text(node)}\n\n\n"
    script.insert(script.place(script.functions["main"])[0], waiting)


def put_lines(new, script):
    for line, text in new.new_lines.items():
        places = [place for place, own in enumerate(script.lines) if own.strip() == line]
        if len(places) != 1:
            raise ValueError(f"the script has {len(places)} lines `{line}`, and not one")
        (place,) = places
        indent = script.lines[place].removesuffix(line)
        text = textwrap.indent(textwrap.dedent(text).strip("\n"), indent)
        script.edits.append((place, place + 1, text))


def must_have(names, name, kind):
    if name not in names:
        raise ValueError(f"the script has no {kind} `{name}`")


def with_imports(text, new):
    """Return the script with the imports of the file, and without those that are now unused."""
    script = Source(text)
    replaced = script.functions.keys() - new.names()  # by functions of the same name
    unused = replaced | (script.imported - script.names())
    added = {
        node.module: names_of(node) - script.imported
        for node in new.imports
        if isinstance(node, ast.ImportFrom)
    }
    for node in script.imports:
        if isinstance(node, ast.ImportFrom):
            names = (names_of(node) | added.pop(node.module, set())) - unused
            if names != names_of(node):
                script.replace(node, import_line(node.module, names))
    for node in new.imports:
        if isinstance(node, ast.Import) or added.get(node.module):
            script.insert(import_place(node, script), new.text(node))
    return script.result()


def import_place(node, script):
    """Return the line of an import: of the standard library sorted, else above `import torch`."""
    is_ours = module_of(node).split(".")[0] not in sys.stdlib_module_names
    for own in script.imports:
        if is_ours and ast.unparse(own) == "import torch":
            return script.place(own)[0]
        if not is_ours and import_key(own) > import_key(node):
            return script.place(own)[0]
    return script.place(script.imports[-1])[1]


def import_key(node):
    """Return the sort key of an import: plain ones of the standard library first."""
    module = module_of(node)
    is_ours = module.split(".")[0] not in sys.stdlib_module_names
    return is_ours, isinstance(node, ast.ImportFrom), module


def module_of(node):
    return node.module if isinstance(node, ast.ImportFrom) else node.names[0].name


def names_of(node):
    return {alias.name for alias in node.names}


def import_line(module, names):
    """Return the import of these names, in several lines where one would be too long."""
    lines = []
    for name in sorted(names, key=import_order):
        if lines and len(f"{lines[-1]}, {name}") <= MAX_LINE:
            lines[-1] += f", {name}"
        else:
            lines.append(f"from {module} import {name}")
    return "\n".join(lines)


def import_order(name):
    """Return the sort key of ruff: constants, then classes, then functions."""
    return not name.isupper(), not name[0].isupper(), name


def load(text, name):
    """Return a script as a module, without running its `main`."""
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = str(ROOT / f"{name}.py")  # it stands beside grpo.py
    exec(compile(text, module.__file__, "exec"), vars(module))
    return module


def made(name, script=None):
    """Return the text of a script [the default for the file] merged with a file, both by name."""
    script = script or SCRIPTS.get(name, "grpo.py")
    if name not in files():
        raise ValueError(f"no file {name}: --list has the files")
    if not (ROOT / script).is_file():
        raise ValueError(f"no script {script}: it is a file beside grpo.py")
    path = files()[name]
    try:
        return put(path.read_text(encoding="utf-8"), (ROOT / script).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.relative_to(ROOT)} cannot be put into {script}: {error}") from None


def kind_of(name):
    """Return what a recipe changes, or the folder of another file."""
    for kind, names in KINDS.items():
        if name in names:
            return kind
    return files()[name].parent.name


def show_list():
    if hasattr(signal, "SIGPIPE"):  # `--list | head` ends without a traceback
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    names = [name for kind in KINDS.values() for name in kind]
    names += [name for name in files() if name not in names]
    shown = None
    for name in names:
        if kind_of(name) != shown:
            shown = kind_of(name)
            print(shown)
        docstring = ast.get_docstring(ast.parse(files()[name].read_text(encoding="utf-8")))
        made_of = f" (based on {SCRIPTS[name]})" if name in SCRIPTS else ""
        print(f"  {name:14} {docstring.splitlines()[0]}{made_of}")


def write(text, name):
    path = ROOT / f"{name}.py"
    if path.exists():
        raise SystemExit(f"{path} exists already: remove it first")
    path.write_text(text, encoding="utf-8", newline="\n")
    print(f"wrote {path}")


def run(text, name, options):
    sys.path.insert(0, str(ROOT))
    module = load(text, name)
    with module.run.clean_exit():
        module.main(options)


def main(words):
    if words == ["--list"]:
        return show_list()
    if words in (["--help"], ["-h"]):
        return print(__doc__)
    running = words[:1] == ["run"]
    if running:
        words = words[1:]
    names = [word for word in words[:2] if not word.startswith("-")]
    options = words[len(names) :]
    if not names or (options and not running):
        raise SystemExit(__doc__)
    try:
        text = made(*names)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if running:
        run(text, names[0], options)
    else:
        write(text, names[0])


if __name__ == "__main__":
    main(sys.argv[1:])
