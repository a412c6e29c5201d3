"""The options of a YAML file, for `--config`: a script loads this file when it is given that option."""

import re

import yaml

from common.errors import InputError, one_line


def arguments(path):
    """The options of a YAML file as arguments of a command line, each word as it is spelled: YAML itself would read 010
    as 8, 1:30 as 90, no as False and 1e-6 as a text. A null is left out."""
    arguments, names = [], ["config"]
    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file, yaml.SafeLoader)
        if root and not isinstance(root, yaml.MappingNode):
            raise ValueError("expected `option: value` lines")
        for key, node in root.value if root else []:
            name, is_list = str(key.value).replace("-", "_"), isinstance(node, yaml.SequenceNode)
            words = [part.value for part in (node.value if is_list else [node])]
            if name in names:
                raise ValueError(f"{name} is given twice, or is no option of a file")
            if any(not isinstance(word, str) or (is_list and re.match(r"-[^\d.]", word)) for word in words):
                raise ValueError(f"{name}: expected a value, or a list of values that are no options")
            names.append(name)
            if words and node.tag != "tag:yaml.org,2002:null":
                arguments += [f"--{name}", *words] if is_list else [f"--{name}={node.value}"]
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"--config {path}: {one_line(error)}") from None
    return arguments
