"""Reads what a script or a configuration for TRL says. Nothing in the file runs: it is read as text."""

import ast
import contextlib
import dataclasses
import re
import sys
import textwrap
from pathlib import Path

import yaml

from common.errors import InputError, one_line

CONFIGS = ("GRPOConfig", "DPOConfig", "RewardConfig")
# Calls by which a script changes its data.
CHANGES = {"map", "filter", "select", "train_test_split", "rename_column"}
OPERATORS = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: left // right,
}


class Code(str):
    """The text of an expression that is no literal."""


@dataclasses.dataclass
class Source:
    """What a file says: the class of its configuration, {option of TRL: value}, and what is left to do."""

    kind: str | None = None
    given: dict = dataclasses.field(default_factory=dict)
    to_do: list = dataclasses.field(default_factory=list)


def read(path):
    """The `Source` of a file; "-" is standard input."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InputError(f"{path}: {one_line(error)}") from None
    is_python = path.endswith(".py") or any(f"{name}(" in text for name in CONFIGS)
    if not is_python:
        return read_yaml(text, path)
    try:
        tree = ast.parse(textwrap.dedent(text).strip().rstrip(","))
    except SyntaxError as error:
        raise InputError(f"{path}:{error.lineno}: not Python: {error.msg}") from None
    return Script(tree, Path(path).name if path != "-" else "train.py").source()


def read_yaml(text, path):
    try:
        options = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not YAML: {one_line(error)}") from None
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


class Script:
    """A Python file as a syntax tree. Of its names those have a value that are assigned once."""

    def __init__(self, tree, file):
        self.tree = tree
        self.file = file
        self.nodes = list(ast.walk(tree))
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.assigned = {}  # {name: the expressions that it is assigned}
        for node in self.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.assigned.setdefault(node.targets[0].id, []).append(node.value)

    def source(self):
        """The `Source`: configuration, model, data, rewards and adapter."""
        configs = [call for call in self.calls if called(call) in CONFIGS]
        if len(configs) > 1:
            found = ", ".join(f"{called(call)} in line {call.lineno}" for call in configs)
            raise InputError(f"{self.file}: {found}: paste one of them")
        names = {node.id for node in self.nodes if isinstance(node, ast.Name)}
        named = {name for name in CONFIGS if names & {name, name.replace("Config", "Trainer")}}
        source = Source()
        if configs:
            source.kind = called(configs[0])
            source.given |= self.keywords(configs[0]) | self.changed_later(configs[0])
        elif len(named) == 1:  # a parser fills it, or it has no configuration
            source.kind = named.pop()
        trainer = self.first(str(source.kind).replace("Config", "Trainer"))
        if trainer:
            arguments = {word.arg: word.value for word in trainer.keywords}
            self.read_model(source, arguments.get("model", next(iter(trainer.args), None)))
            self.read_rewards(source, arguments.get("reward_funcs"), trainer)
        self.read_adapter(source)
        self.read_data(source)
        return source

    # --- expressions ---

    def value(self, node):
        """The value of an expression of literals and of names of them, else its text as `Code`."""
        try:
            return self.literal(node)
        except (ValueError, TypeError, ZeroDivisionError, RecursionError):
            return Code(ast.unparse(node))

    def literal(self, node):
        """The value of an expression; a ValueError of one that only Python itself could find."""
        if isinstance(node, ast.Name) and len(self.assigned.get(node.id, [])) == 1:
            return self.literal(self.assigned[node.id][0])
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

    def first(self, *names):
        """The first call of one of these names, or None."""
        return next((call for call in self.calls if called(call) in names), None)

    def keywords(self, call):
        """{keyword: value} of a call, with what a dictionary brings by `**`."""
        found = {}
        for word in call.keywords:
            value = self.value(word.value)
            if word.arg is None and isinstance(value, dict):
                found |= value
            else:
                found[word.arg or "**"] = value
        return found

    def changed_later(self, config):
        """{option: value} of lines such as `args.learning_rate = 1e-6`, of what holds the configuration."""
        holders = {name for name, values in self.assigned.items() if config in values}
        found = {}
        for node in self.nodes:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(target, ast.Attribute) and getattr(target.value, "id", None) in holders:
                found[target.attr] = self.value(node.value)
        return found

    # --- what the trainer gets ---

    def read_model(self, source, node):
        """The model: a text, or a name that `from_pretrained` loads."""
        if node is None:
            return
        loaders = []
        for value in self.assigned.get(getattr(node, "id", ""), [node]):
            loaders += [call for call in ast.walk(value) if called(call) == "from_pretrained"]
        if not loaders:
            source.given["model_name_or_path"] = self.value(node)
            return
        words = self.keywords(loaders[0])
        texts = [self.value(argument) for argument in loaders[0].args] or [words.get("model_name")]
        source.given["model_name_or_path"] = texts[0]
        for word in ("dtype", "torch_dtype", "attn_implementation", "load_in_4bit", "load_in_8bit"):
            if word in words:
                source.given[word.removeprefix("torch_")] = words[word]

    def read_adapter(self, source):
        """LoRA, by peft's own configuration, or by a function that takes the same words."""
        call = self.first("LoraConfig") or self.first("get_peft_model")
        if call is None:
            return
        words = self.keywords(call)
        source.given |= {"use_peft": True, "lora_r": words.pop("r", 8)}
        source.given["lora_alpha"] = words.pop("lora_alpha", 8)
        of_model_config = {name: f"lora_{name}" for name in ("target_modules", "modules_to_save")}
        for word, value in words.items():
            if word in ("lora_dropout", "use_rslora", "use_dora", *of_model_config):
                source.given[of_model_config.get(word, word)] = value

    def read_data(self, source):
        """The first `load_dataset`; that of a training split, if there are several."""
        calls = [call for call in self.calls if called(call) == "load_dataset"]
        calls.sort(key=lambda call: "train" not in str(self.keywords(call).get("split", "train")))
        if not calls:
            return
        words = self.keywords(calls[0])
        values = dict(zip(("path", "name"), map(self.value, calls[0].args), strict=False)) | words
        files = values.get("data_files")
        if isinstance(files, dict):
            files = files.get("train")
        if values.get("path") in ("json", "csv", "parquet") and isinstance(files, str):
            values["path"] = files
        source.given["dataset_name"] = values.get("path")
        if "name" in values:
            source.given["dataset_config"] = values["name"]
        split = values.get("split", "")
        if "[" in split and not isinstance(split, Code):
            source.to_do.append(f"split {split}: here a part of a split has to be a file of its own")
            split = split.partition("[")[0]
        if split:
            source.given["dataset_train_split"] = split
        changes = sorted(CHANGES & {called(call) for call in self.calls})
        if changes:
            source.to_do.append(
                f"the script changes its data by {', '.join(changes)}, and nothing of that is moved: "
                "see --prompt_column, --answer_column, --system_prompt and --prompt_template"
            )

    def read_rewards(self, source, node, trainer):
        """--reward of the reward functions, each by the place where it is defined."""
        if node is None:
            return
        if isinstance(node, ast.Name) and len(self.assigned.get(node.id, [])) == 1:
            node = self.assigned[node.id][0]
        parts = node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]
        source.given["reward_funcs"] = [self.reward(source, part, trainer) for part in parts]

    def reward(self, source, node, trainer):
        value = self.value(node)
        if not isinstance(value, Code):
            return f"rm:{value}"  # the name of a model
        name = ast.unparse(node)
        for statement in self.nodes:
            if isinstance(statement, ast.ImportFrom) and name in names_of(statement):
                return f"{statement.module}:{name}"
        if not any(isinstance(part, ast.FunctionDef) and part.name == name for part in self.nodes):
            source.to_do.append(f"write the reward {name} as a function of a file, rewards.py")
            return "rewards.py:" + re.sub(r"\W+", "_", name).strip("_")
        (place,) = (part for part in self.tree.body if trainer in ast.walk(part))
        if isinstance(place, (ast.FunctionDef, ast.If)):
            return f"{self.file}:{name}"
        source.to_do.append(
            f"copy the function {name} into a file rewards.py: {self.file} would train while it is imported"
        )
        return f"rewards.py:{name}"


def names_of(statement):
    """The names that a `from ... import` binds."""
    return {part.asname or part.name for part in statement.names}
