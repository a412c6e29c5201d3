"""Look into a run in a browser: its curves and its answers, evaluation by evaluation.

python tools/look.py RUN                write RUN/look.html and open it
python tools/look.py RUN -o FILE        write FILE and open nothing

RUN is the folder of a run, finished or not. The page is one file that loads nothing: the curves of
metrics.jsonl, and the answers to evaluation prompts in samples.jsonl. Its HTML, CSS and JavaScript
are in tools/look/.
"""

import argparse
import json
import pathlib
import sys
import webbrowser
from collections import defaultdict

PARTS = pathlib.Path(__file__).parent / "look"
FILES = {"STYLE": "style.css", "PROGRAM": "page.js"}  # they replace /*STYLE*/ ... in page.html
MAX_CHARACTERS = 3_000_000  # characters of evaluation answers per page
MAX_POINTS = 600  # points per curve
CURVES = {  # {title: {metric: name of its line}}
    "reward": {"reward/mean": "training", "eval/reward": "held-out"},
    "pass@1": {"reward/accuracy": "training", "eval/pass@1": "held-out"},
    "pairs in the right order": {"rewards/accuracy": "training", "eval/accuracy": "held-out"},
    "answer length": {"completion/length": "training", "eval/length": "held-out"},
    "entropy": {"policy/entropy": "training"},
}


class PageError(Exception):
    """Raised for a folder that is not a run, with a one-line message."""


def read_rows(path):
    """Return the rows of a JSONL file, [] if there is none; skip an incomplete last line.

    NaN and infinity, which JSON does not have, become None.
    """
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise PageError(f"{path} is not text") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line, parse_constant=lambda name: None))
        except ValueError:
            if number < len(lines):
                raise PageError(f"{path}, line {number}, is not JSON") from None
    return rows


def as_text(prompt):
    """Return a prompt as text; messages become lines of `role: content`."""
    if isinstance(prompt, str):
        return prompt
    lines = []
    for message in prompt:
        content = message.get("content", "")
        text = content if isinstance(content, str) else json.dumps(content)
        lines.append(f"{message.get('role', '')}: {text}")
    return "\n".join(lines)


def fitting(items, limit, size=lambda item: 1):
    """Drop every second item, but never the ends, until the sizes sum to at most `limit`."""
    while len(items) > 2 and sum(map(size, items)) > limit:
        items = [*items[:-1:2], items[-1]]
    return items


def curves(metrics):
    """Return [{"title", "lines": [{"name", "points": [[step, value]]}]}] of what the run logged."""
    panels = []
    for title, names in CURVES.items():
        lines = []
        for metric, name in names.items():
            rows = [row for row in metrics if isinstance(row.get(metric), (int, float))]
            points = [[row["step"], row[metric]] for row in rows]
            if points:
                lines.append({"name": name, "points": fitting(points, MAX_POINTS)})
        known = [panel["lines"] for panel in panels]  # the reward may be the accuracy
        if lines and lines not in known:
            panels.append({"title": title, "lines": lines})
    return panels


def evaluations(samples):
    """Return the answers to each evaluation prompt over the course of a run.

    [{"prompt", "answer", "evaluations": [{"step", "reward", "answers"}]}], see `evaluation`.
    """
    prompts = defaultdict(lambda: defaultdict(list))  # {prompt: {step: rows}}
    for row in samples:
        if row.get("evaluation"):
            prompts[as_text(row["prompt"])][row["step"]].append(row)
    found = []
    for prompt, by_step in prompts.items():
        steps = [evaluation(step, rows) for step, rows in sorted(by_step.items())]
        kept = fitting(steps, MAX_CHARACTERS / len(prompts), characters)
        first_row = next(iter(by_step.values()))[0]
        found.append({"prompt": prompt, "answer": first_row.get("answer"), "evaluations": kept})
    return found


def evaluation(step, rows):
    """Return one evaluation of a prompt: its mean reward, and its distinct answers with "count"."""
    answers = {}
    for row in rows:
        text, reward, truncated = row["completion"], row["reward"], row["truncated"]
        answer = {"text": text, "reward": reward, "truncated": truncated, "count": 0}
        answers.setdefault((text, reward), answer)["count"] += 1
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    return {"step": step, "reward": mean, "answers": sorted(answers.values(), key=best_first)}


def best_first(answer):
    """Return the place of an answer in the order of a page; those without a reward come last."""
    reward = answer["reward"]
    return reward is None, -(reward or 0), -answer["count"]


def characters(step):
    return sum(len(answer["text"]) for answer in step["answers"])


def collect(folder):
    """Return what the page shows, as page.js reads it."""
    folder = pathlib.Path(folder)
    options = read_options(folder)
    metrics = made_of(folder / "metrics.jsonl", lambda rows: [row for row in rows if "step" in row])
    if not metrics:
        raise PageError(f"{folder / 'metrics.jsonl'} has no row yet")
    return options | {
        "run": folder.resolve().name,
        "step": metrics[-1]["step"],
        "curves": curves(metrics),
        "evaluations": made_of(folder / "samples.jsonl", evaluations),
    }


def read_options(folder):
    """Return what the page shows of args.json."""
    path = folder / "args.json"
    names = ("dataset", "max_steps", "learning_rate", "model_name_or_path")
    try:
        args = json.loads(path.read_text(encoding="utf-8"))
        return {name: args.get(name) for name in names}
    except OSError:
        raise PageError(f"{folder} is not the folder of a run: it has no args.json") from None
    except (ValueError, AttributeError):
        raise PageError(f"{path} is not the args.json of a run") from None


def made_of(path, make):
    """Return `make(rows)` of a file; raise PageError if its rows are not from a run."""
    rows = read_rows(path)
    try:
        return make(rows)
    except (LookupError, TypeError, AttributeError):
        raise PageError(f"{path} has a row that is not a run's") from None


def page(data):
    """Return the HTML. Its JSON has no `<`, so that no completion can end the script.

    The JSON is ASCII, so that incomplete characters can be written.
    """
    text = (PARTS / "page.html").read_text(encoding="utf-8")
    parts = {name: (PARTS / file).read_text(encoding="utf-8") for name, file in FILES.items()}
    text_of_data = json.dumps(data, separators=(",", ":"), allow_nan=False)
    parts["DATA"] = text_of_data.replace("<", "\\u003c")
    for name, part in parts.items():  # data last, so that nothing inside it is replaced
        text = text.replace(f"/*{name}*/", part, 1)
    return text


def main(words=None):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("run", metavar="RUN", type=pathlib.Path)
    parser.add_argument("-o", "--output", metavar="FILE", type=pathlib.Path, help="open nothing")
    options = parser.parse_args(words)
    file = options.output or options.run / "look.html"
    try:
        file.write_text(page(collect(options.run)), encoding="utf-8", newline="\n")
    except (PageError, OSError) as error:
        print(f"look.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"wrote {file}")
    if not options.output:
        webbrowser.open(file.resolve().as_uri())
    return 0


if __name__ == "__main__":
    sys.exit(main())
