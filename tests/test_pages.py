"""`pytest -m pages`: every command in a ```bash block of a page runs.

A page's commands run in their order in one copy of the project, made small by options behind them. A command that
needs a network, a GPU or another machine is listed in NOT_RUN with its reason; test_docs.py looks at its options. A
renamed option, file or flag fails here.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [*ROOT.glob("README*.md"), *ROOT.glob("CONTRIBUTING.md"), *sorted(ROOT.glob("docs/*.md"))]
PAGES += sorted(ROOT.glob("vectors/*.md")) + sorted(ROOT.glob("lab/**/*.md"))
PAGES = [page for page in PAGES if "```bash" in page.read_text(encoding="utf-8")]
PAGES.sort(key=lambda page: page.name != "fork.md")  # the slowest one first
SCRIPT = r"(?:python|accelerate launch)\b[^|]*?\b(\w+)\.py"
NOT_RUN = {  # {pattern: reason}; the first that is found in a command counts
    r"\bpip install|python3 -m venv": "downloads packages",
    r"\bpytest\b": "the suite itself",
    r"^ruff": "ruff is in no requirements file",
    r"--config_file configs/|--multi_gpu": "several processes, of which test_distributed.py starts some",
    r"Qwen/|Anthropic/|openai/|\b(MODEL|DATA|DIR|FILE|PAIRS|SFT\w*)\b| \.\.\.": "a model or data of one's own, or of the hub",
    r"\btrl\.|smollm2|reasoning_gym|trackio|wandb|tensorboard": "an extra package",
    r"lab/throughput\.py": "minutes, and TRL",
    r"lab/gsm8k\.py data|lab/make_runs\.py": "GSM8K, and hours",
    r"same_bits\.py COMMIT": "a commit of one's own",
    r"^nohup": "goes on in the background",
    r"tools/plot\.py": "matplotlib",
}
PACKAGES = {r"--lora_rank": "peft", r"lab/check\.py": "scipy"}  # run where the package is installed
SMALL = "--max_steps 1 --eval_prompts 4"


def commands(page):
    """Return the commands of a page without comments, with continued lines joined."""
    found = []
    for block in re.findall(r"^ *```bash\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        text = re.sub(r" *\\\n\s*", " ", block)
        lines = re.split(r"\n(?=(?:[^\"]*\"[^\"]*\")*[^\"]*$)", text)  # not within quotes
        for line in lines:
            line = re.sub(r"(^| )#.*", "", line.strip())
            if line:
                found.append(line.strip())
    return found


def files(page):
    """Return {name: text} of the ```python blocks whose first line is a comment with a file name."""
    blocks = re.findall(
        r"^```python\n# (\w+\.py)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return dict(blocks)


def small(command):
    """Make a command train for one step; `accelerate launch` becomes `python`."""
    if re.search(rf"{SCRIPT}\b.*--help", command):
        return command.replace("accelerate launch", "python")
    if "recipes.py run" in command:
        return f"{command} {SMALL}"
    name = re.search(SCRIPT, command)
    if not name or not takes_steps(name[1]):
        return command
    command = re.sub(r"accelerate launch (?:--\S+ (?!\w+\.py)\S+ )*", "python ", command)
    return re.sub(r"( [|>].*)?$", lambda rest: f" {SMALL}{rest[0]}", command, count=1)


def takes_steps(name):
    """Return whether a script trains: the eight scripts, recipes and `recipes.py run`."""
    folders = (ROOT, ROOT / "examples/recipes")
    return name == "mine" or any((folder / f"{name}.py").exists() for folder in folders)


def execute(command, folder):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "BROWSER": "true"}
    environment["PATH"] = f"{pathlib.Path(sys.executable).parent}:{environment['PATH']}"
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)


@pytest.mark.pages
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_commands_run(page, tmp_path):
    folder = tmp_path / "project"
    tracked = execute(["git", "ls-files"], ROOT).stdout.splitlines()
    for name in tracked:
        if not name.startswith("lab/results/") or "lab/" in page.read_text(encoding="utf-8"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for name, text in files(page).items():
        (folder / name).write_text(text, encoding="utf-8")
    for command in commands(page):
        lacks = [pattern for pattern, package in PACKAGES.items() if not importlib.util.find_spec(package)]
        if any(re.search(pattern, command) for pattern in [*NOT_RUN, *lacks]):
            continue
        result = execute(["bash", "-c", small(command)], folder)
        allowed = (0, 1) if command.startswith("diff") else (0,)
        shown = f"{small(command)}\n{result.stdout[-1000:]}\n{result.stderr[-2000:]}"
        assert result.returncode in allowed, shown


def test_exceptions_are_needed():
    every = [command for page in PAGES for command in commands(page)]
    assert [pattern for pattern in NOT_RUN if not any(re.search(pattern, command) for command in every)] == []
