"""Run parts of a library's source file without the rest of the library.

A trainer is one class with many dependencies, and computes its denominators in the middle of a
method. To test such a line, its statements are cut out of the file and run with stand-ins for the
names that they use.
"""

import __future__

import ast
import functools
import importlib.metadata
import textwrap
from types import SimpleNamespace

import torch


def version_in(folder, package):
    """Return the version of a package installed in `folder`."""
    (found,) = importlib.metadata.distributions(name=package, path=[str(folder)])
    return found.version


def run(code, **names):
    """Run code with torch and `names`, and return the names that it leaves."""
    names = {"torch": torch, **names}
    exec(code, names)
    return SimpleNamespace(**names)


class Source:
    """One file of a library, at `path`."""

    def __init__(self, path):
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)

    def compiled(self, text, part):
        # Annotations stay text, since they name classes that are not there.
        flags = __future__.annotations.compiler_flag
        return compile(text, f"{self.path.name}: {part}", "exec", flags)

    def whole(self, without, **names):
        """Return what the file defines, given `names` in place of its imports from `without`."""
        kept = [node for node in self.tree.body if not imports_any(node, without)]
        return run(self.compiled(ast.unparse(ast.Module(kept, [])), "file"), **names)

    def definitions(self, *wanted, **names):
        """Return the top-level functions, classes and constants `wanted`, given `names`."""
        kept = [node for node in self.tree.body if defines_any(node, wanted)]
        found = run(self.compiled(ast.unparse(ast.Module(kept, [])), "definitions"), **names)
        missing = [name for name in wanted if not hasattr(found, name)]
        if missing:
            raise LookupError(f"{self.path} does not define {missing}")
        return found

    def function(self, name):
        """Return the definition of a function or method, without its decorators."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return node
        raise LookupError(f"{self.path} has no function {name}")

    def method(self, name):
        """Return a method as a function."""
        node = self.function(name)
        text = textwrap.dedent(self.lines(node.lineno, node.end_lineno))
        return getattr(run(self.compiled(text, name)), name)

    def lines(self, first, last):
        return "".join(self.text.splitlines(keepends=True)[first - 1 : last])

    def statements(self, function, first, last=None):
        """Return statements of a function, from the one that starts with `first` to `last`.

        The result is a function of the names that they read, and returns the names that they leave.
        With None for the function, the statements are those of the file itself.
        """
        body = self.function(function) if function else self.tree
        nodes = [node for node in ast.walk(body) if isinstance(node, ast.stmt)]
        nodes.sort(key=lambda node: node.lineno)
        begin = self.statement(nodes, first)
        later = [node for node in nodes if node.lineno >= begin.lineno]
        end = self.statement(later, last) if last else begin
        text = textwrap.dedent(self.lines(begin.lineno, end.end_lineno))
        return functools.partial(run, self.compiled(text, function or "program"))

    def statement(self, nodes, start):
        for node in nodes:
            if self.lines(node.lineno, node.end_lineno).lstrip().startswith(start):
                return node
        raise LookupError(f"no statement of {self.path} begins with {start!r}")


def imports_any(node, packages):
    """Return whether a statement imports from one of the packages, or relatively."""
    if isinstance(node, ast.ImportFrom):
        return node.level > 0 or node.module.split(".")[0] in packages
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] in packages for alias in node.names)
    return False


def defines_any(node, names):
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id in names for target in node.targets)
    return getattr(node, "name", None) in names
