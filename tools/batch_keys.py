"""The keys of the batch for tools/side_by_side.py: shapes are declared here, who uses a key is found in the code."""

import ast
import functools

import family

# Variables that hold a batch or some rows of one, and {key: (shape, what it is)}. R rows (prompts x completions), P
# prompt tokens, T completion tokens. Who writes and who reads a key is found in the code.
BATCHES = {"batch", "micro", "part", "filler"}
KEYS = {
    "prompts": ("(R, P)", "token ids, padded on the left"),
    "prompt_mask": ("(R, P)", "true at the tokens of the prompt"),
    "completions": ("(R, T)", "token ids, padded on the right"),
    "completion_mask": ("(R, T)", "true up to the stop token, which is included"),
    "truncated": ("(R,)", "true where there is no stop token"),
    "prompt_index": (
        "(R, 1)",
        "equal for the rows of one prompt; only where a prompt is computed once for all of them, or passes are packed",
    ),
    "packed": ("(R, 1)", "ones; there only where passes are packed, in bfloat16 on a GPU: without padding"),
    "rollout_logprobs": ("(R, T)", "log-probs as the sampling loop computed them, to compare"),
    "rewards": ("(R,)", "NaN in a row that no function scores, 0 after the split"),
    "advantages": ("(R, 1)", "one of a row; ppo.py: (R, T), one of each token"),
    "loss_mask": ("(R, T)", "the tokens that are trained on"),
    "group_tokens": ("(R, 1)", "tokens of the row's group that are trained on; the split moves it into `totals`"),
    "lengths": ("list of R", "(prompt tokens, completion tokens) of each row, known without waiting for a GPU"),
    "groups": ("list of R", "`prompt_index`, known without waiting for a GPU"),
    "totals": ("dict", "tokens, rows and prompts of the whole optimizer step; and `group_tokens` (R, 1) of these rows"),
    "old_logprobs": ("(R, T)", "log-probs before the first update of the rollout"),
    "ref_logprobs": ("(R, T)", "log-probs of the reference; in a batch of pairs summed over the completion, (R,)"),
    "old_values": ("(R, T)", "the critic's values before the first update (ppo.py)"),
    "returns": ("(R, T)", "what the critic learns to predict (ppo.py)"),
}


class Uses(ast.NodeVisitor):
    """Collects {key: {"writes" or "reads": {function: [files]}}} from the code that names a key of a batch."""

    def __init__(self, found, file):
        self.found, self.file, self.names, self.loops = found, file, [], {}

    def add(self, keys, how):
        for key in keys:
            functions = self.found.setdefault(key, {"writes": {}, "reads": {}})[how]
            files = functions.setdefault(".".join(self.names), [])
            if self.file not in files:
                files.append(self.file)

    def visit_FunctionDef(self, node):
        self.names.append(node.name)
        self.generic_visit(node)
        self.names.pop()

    visit_ClassDef = visit_FunctionDef

    def visit_For(self, node):  # `for name, fill in (("completions", 0), ...): batch[name] = ...`
        if isinstance(node.iter, ast.Tuple):
            self.loops |= {n.id: strings(node.iter) for n in ast.walk(node.target) if isinstance(n, ast.Name)}
        self.generic_visit(node)

    def visit_Subscript(self, node):  # batch["rewards"]
        if is_batch(node.value):
            keys = self.loops.get(ast.unparse(node.slice)) or strings(node.slice)
            self.add(keys, "writes" if isinstance(node.ctx, ast.Store) else "reads")
        self.generic_visit(node)

    def visit_Call(self, node):  # batch.get("old_logprobs", ...)
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop") and is_batch(node.func.value):
            self.add([node.args[0].value], "reads")
        self.generic_visit(node)

    def visit_Compare(self, node):  # "prompt_index" in batch
        if is_batch(node.comparators[0]):
            self.add(strings(node.left), "reads")
        self.generic_visit(node)

    def visit_BinOp(self, node):  # batch | {"rewards": ...}
        if is_batch(node.left):
            self.add(top_keys(node.right), "writes")
        self.generic_visit(node)

    def visit_Assign(self, node):  # batch = {"prompts": ...}
        if is_batch(node.targets[0]):
            self.add(top_keys(node.value), "writes")
        self.generic_visit(node)

    def visit_Return(self, node):  # a function that makes a batch
        if "completions" in top_keys(node.value):
            self.add(top_keys(node.value), "writes")
        self.generic_visit(node)


parsed = functools.cache(ast.parse)


def is_batch(node):
    return isinstance(node, ast.Name) and node.id in BATCHES


def strings(node):
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def top_keys(node):
    keys = node.keys if isinstance(node, ast.Dict) else []
    return [key.value for key in keys if isinstance(key, ast.Constant)]


def uses(tree):
    """{key: {"writes" or "reads": {function: [files]}}} of scripts and common/, keys in the order of KEYS."""
    found = {}
    for file in [*family.found(tree), *tree.glob("common/**/*.py")]:
        text = tree.read(file)
        if "completion_mask" in text:  # elsewhere such a variable is not a batch
            Uses(found, file).visit(parsed(text))
    return {key: found[key] for key in [*KEYS, *found] if key in found}


def unknown(tree):
    found = uses(tree)
    new = [f"tools/batch_keys.py: KEYS has no row for the key `{key}` of the batch" for key in found if key not in KEYS]
    return new + [f"tools/batch_keys.py: nothing uses the key `{key}` of KEYS" for key in KEYS if key not in found]
