"""Reads what a script or a configuration for TRL says, as text: nothing in the file runs."""

import ast
import contextlib
import dataclasses
import re
import sys
import textwrap
from operator import add, floordiv, mul, sub, truediv
from pathlib import Path

import yaml

from harness.errors import InputError, one_line

CONFIGS = ("GRPOConfig", "DPOConfig", "RewardConfig")
# Calls by which a script changes its data.
CHANGES = {"map", "filter", "select", "train_test_split", "rename_column"}
OPERATORS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv, ast.FloorDiv: floordiv}


class Code(str):
    """The text of an expression that is no literal."""


@dataclasses.dataclass
class Source:
    """What a file says: the class of its configuration, {option of TRL: value}, what is to do."""

    kind: str | None = None
    given: dict = dataclasses.field(default_factory=dict)
    to_do: list = dataclasses.field(default_factory=list)


def read(path):
    """The `Source` of a file; "-" is standard input."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        if path.endswith(".py") or any(f"{name}(" in text for name in CONFIGS):
            tree = ast.parse(textwrap.dedent(text).strip().rstrip(","))
            return Script(tree, "train.py" if path == "-" else Path(path).name)
        options = yaml.safe_load(text)
    except SyntaxError as error:
        raise InputError(f"{path}:{error.lineno}: not Python: {error.msg}") from None
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: {one_line(error)}") from None
    if not isinstance(options, dict):
        raise InputError(f"{path}: has no {', '.join(CONFIGS)}, and is no configuration in YAML")
    return Source(given={key: number(value) for key, value in options.items()})


def number(value):
    """A text such as 1e-6, which YAML does not take for a number, as one."""
    with contextlib.suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


def called(node):
    """The last name of what a call calls; "" of anything but a call."""
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", ""))


class Script(Source):
    """A Python file as a syntax tree. Of its names those have a value that are assigned once."""

    def __init__(self, tree, file):
        super().__init__()
        self.tree = tree
        self.file = file
        self.nodes = list(ast.walk(tree))
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.assigned = {}  # {name: the expressions that it is assigned}
        for node in self.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.assigned.setdefault(node.targets[0].id, []).append(node.value)
        configs = [call for call in self.calls if called(call) in CONFIGS]
        if len(configs) > 1:
            found = ", ".join(f"{called(call)} in line {call.lineno}" for call in configs)
            raise InputError(f"{file}: {found}: paste one of them")
        trainer = self.first(*(name.replace("Config", "Trainer") for name in CONFIGS))
        self.kind = called(trainer).replace("Trainer", "Config")
        if configs:  # otherwise a parser fills it, or there is none
            self.kind = called(configs[0])
            self.given |= self.keywords(configs[0]) | self.changed_later(configs[0])
        if trainer:
            arguments = {word.arg: word.value for word in trainer.keywords}
            self.read_model(arguments.get("model", next(iter(trainer.args), None)))
            self.read_rewards(arguments.get("reward_funcs"), trainer)
        self.read_adapter()
        self.read_data()

    def value(self, node):
        """The value of an expression of literals and of names of them, else its text as `Code`."""
        try:
            return self.literal(node)
        except (ValueError, TypeError, ZeroDivisionError, RecursionError):
            return Code(ast.unparse(node))

    def literal(self, node):
        """The value of an expression; a ValueError of one that only Python itself could find."""
        node = self.named(node)
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.literal(part) for part in node.elts]
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            return {self.literal(key): self.literal(value) for key, value in pairs}
        if called(node) == "dict" and not node.args:
            return {word.arg: self.literal(word.value) for word in node.keywords}
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            return node.attr  # a dtype
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self.literal(part)) for part in node.values)
        if isinstance(node, ast.FormattedValue) and node.format_spec is None:
            return self.literal(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](self.literal(node.left), self.literal(node.right))
        return ast.literal_eval(node)

    def named(self, node):
        """The expression that a name stands for; another node as it is."""
        values = self.assigned.get(getattr(node, "id", ""), [])
        return self.named(values[0]) if len(values) == 1 else node

    def first(self, *names):
        """The first call of one of these names, or None."""
        return next((call for call in self.calls if called(call) in names), None)

    def keywords(self, call):
        """{keyword: value} of a call, with what a dictionary brings by `**`."""
        found = {}
        for word in call.keywords:
            value = self.value(word.value)
            is_many = word.arg is None and isinstance(value, dict)
            found |= value if is_many else {word.arg or "**": value}
        return found

    def changed_later(self, config):
        """{option: value} of lines such as `args.beta = 0.1`, where `args` is the configuration."""
        found = {}
        for node in self.nodes:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(target, ast.Attribute) and self.named(target.value) is config:
                found[target.attr] = self.value(node.value)
        return found

    def read_model(self, node):
        """The model: a text, or what `from_pretrained` loads."""
        value = node and self.value(node)
        loaders = [call for call in self.calls if called(call) == "from_pretrained"]
        loaders = [call for call in loaders if "Tokenizer" not in ast.unparse(call.func)]
        if isinstance(value, Code) and loaders:
            words = self.keywords(loaders[0])
            value = words.pop("model_name", None) or self.value(loaders[0].args[0])
            self.given |= words  # as those of model_init_kwargs
        if value:
            self.given["model_name_or_path"] = value

    def read_adapter(self):
        """LoRA, by peft's own configuration, or by a function that takes the same words."""
        call = self.first("LoraConfig") or self.first("get_peft_model")
        if call:
            words = {"use_peft": True, "r": 8, "lora_alpha": 8} | self.keywords(call)
            for word, value in words.items():
                is_own = word.startswith(("lora_", "use_"))
                self.given[word if is_own else f"lora_{word}"] = value

    def read_data(self):
        """The first `load_dataset`; that of a training split, if there are several."""
        calls = [call for call in self.calls if called(call) == "load_dataset"]
        calls.sort(key=lambda call: "train" not in str(self.keywords(call).get("split", "train")))
        if not calls:
            return
        values = dict(zip(("path", "name"), map(self.value, calls[0].args), strict=False))
        values |= self.keywords(calls[0])
        path, split = values.get("path"), values.get("split")
        if path in ("json", "csv", "parquet"):
            files = values.get("data_files")
            path = files.get("train") if isinstance(files, dict) else files
        if isinstance(split, str) and "[" in split:
            self.to_do.append(f"split {split}: here a part of a split is a file of its own")
            split = split.partition("[")[0]
        found = {"dataset_name": path, "dataset_train_split": split}
        found["dataset_config"] = values.get("name")
        self.given |= {name: value for name, value in found.items() if value is not None}
        changes = sorted(CHANGES & {called(call) for call in self.calls})
        if changes:
            names = ", ".join(changes)
            advice = "--prompt_column, --answer_column, --system_prompt and --prompt_template"
            self.to_do.append(f"changes of the data by {names} are not moved: see {advice}")

    def read_rewards(self, node, trainer):
        """--reward of the reward functions, each by the place where it is defined."""
        node = self.named(node)
        if node is not None:
            parts = getattr(node, "elts", [node])
            self.given["reward_funcs"] = found = [self.reward(part, trainer) for part in parts]
            to_copy = [name.partition(":")[2] for name in found if name.startswith("rewards.py:")]
            if to_copy:
                names = ", ".join(to_copy)
                self.to_do.append(f"write a file rewards.py with {names}, and what they use")

    def reward(self, node, trainer):
        value = self.value(node)
        if not isinstance(value, Code):
            return f"rm:{value}"  # the name of a model
        name = ast.unparse(node)
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and name in [part.name for part in node.names]:
                return f"{node.module}:{name}"
        is_here = any(
            isinstance(node, ast.FunctionDef) and node.name == name for node in self.nodes
        )
        (place,) = (node for node in self.tree.body if trainer in ast.walk(node))
        if is_here and isinstance(place, (ast.FunctionDef, ast.If)):
            return f"{self.file}:{name}"
        return "rewards.py:" + re.sub(r"\W+", "_", name).strip("_")  # importing this would train
