"""The text files of the project as a refresh would leave them: what is written stays in memory until it is saved."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Tree:
    """Paths are texts relative to the root, such as `docs/grpo.md`."""

    def __init__(self, root=ROOT):
        self.root, self.new = pathlib.Path(root), {}

    def read(self, path):
        return self.new[path] if path in self.new else (self.root / path).read_text(encoding="utf-8")

    def write(self, path, text):
        file = self.root / path
        self.new[path] = text
        if file.exists() and file.read_text(encoding="utf-8") == text:
            del self.new[path]

    def exists(self, path):
        return path in self.new or (self.root / path).exists()

    def glob(self, *patterns):
        return sorted({path.relative_to(self.root).as_posix() for p in patterns for path in self.root.glob(p)})

    def save(self):
        """Write what is new; the paths."""
        written, self.new = self.new, {}
        for path, text in written.items():
            (self.root / path).write_text(text, encoding="utf-8", newline="\n")
        return list(written)
