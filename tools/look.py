"""Look into a run in a browser: its curves, its answers, and what updates did to each token.

python tools/look.py RUN                write RUN/look.html and open it
python tools/look.py RUN -o FILE        write it there and open nothing

RUN is the folder of a run with --record_tokens, also of one that still goes on. The page is one file that
loads nothing. It has the completions of tokens.jsonl, the curves of metrics.jsonl, and the answers to
evaluation prompts of samples.jsonl. tools/look/ has its frame, its style and its program.
"""

import argparse
import json
import pathlib
import sys
import webbrowser
from collections import defaultdict

from piped import end_with_the_reader

PARTS = pathlib.Path(__file__).parent / "look"
FILES = {
    "STYLE": "style.css",
    "PROGRAM": "page.js",
}  # what stands in the place of /*STYLE*/ in page.html
NEEDED = {
    "tokens",
    "reward",
    "truncated",
    "logprob",
    "change",
    "entropy",
}  # of a row of tokens.jsonl
MOST_TOKENS = 150_000  # of tokens.jsonl on a page, about 7 MB
MOST_CHARACTERS = 3_000_000  # of answers to evaluation prompts on a page
MOST_POINTS = 600  # of a curve
CURVES = {  # {title: {metric: what its line is}}
    "reward": {"reward/mean": "training", "eval/reward": "held-out"},
    "pass@1": {"reward/accuracy": "training", "eval/pass@1": "held-out"},
    "answer length": {"completion/length": "training", "eval/length": "held-out"},
    "entropy": {"policy/entropy": "training"},
}


class NoRun(Exception):
    """One line for the user."""


def read_rows(path):
    """The rows of a JSONL file, none if it is not there. A last line that a run is still writing is left out.

    NaN and infinity, which JSON proper does not have, are None.
    """
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise NoRun(f"{path} is no text") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line, parse_constant=lambda name: None))
        except ValueError:
            if number < len(lines):
                raise NoRun(f"{path}, line {number}, is no JSON") from None
    return rows


def as_text(prompt):
    """A prompt as text; of messages the role and the content of each."""
    if isinstance(prompt, str):
        return prompt
    lines = []
    for message in prompt:
        content = message.get("content", "")
        text = content if isinstance(content, str) else json.dumps(content)
        lines.append(f"{message.get('role', '')}: {text}")
    return "\n".join(lines)


def fitting(items, limit, size=lambda item: 1):
    """The items whose sizes sum to at most `limit`.

    Of too many every second is left out, and never the ends.
    """
    while len(items) > 2 and sum(map(size, items)) > limit:
        items = [*items[:-1:2], items[-1]]
    return items


def curves(metrics):
    """[{"title", "lines": [{"name", "points": [[step, value]]}]}] of what the run has logged."""
    panels = []
    for title, names in CURVES.items():
        lines = []
        for metric, name in names.items():
            rows = [row for row in metrics if isinstance(row.get(metric), (int, float))]
            points = [[row["step"], row[metric]] for row in rows]
            if points:
                lines.append({"name": name, "points": fitting(points, MOST_POINTS)})
        known = [panel["lines"] for panel in panels]  # the reward may be the accuracy
        if lines and lines not in known:
            panels.append({"title": title, "lines": lines})
    return panels


def evaluations(samples):
    """The answers to each evaluation prompt along the run, equal ones of one evaluation counted.

    [{"prompt", "answer", "evaluations": [{"step", "reward", "answers"}]}], as `evaluation` has them.
    """
    prompts = defaultdict(lambda: defaultdict(list))  # {prompt: {step: rows}}
    for row in samples:
        if row.get("evaluation"):
            prompts[as_text(row["prompt"])][row["step"]].append(row)
    found = []
    for prompt, by_step in prompts.items():
        steps = [evaluation(step, rows) for step, rows in sorted(by_step.items())]
        kept = fitting(steps, MOST_CHARACTERS / len(prompts), characters)
        first_row = next(iter(by_step.values()))[0]
        found.append({"prompt": prompt, "answer": first_row.get("answer"), "evaluations": kept})
    return found


def evaluation(step, rows):
    """One evaluation of a prompt: its mean reward, and its distinct answers with "count".

    The best and most frequent are the first.
    """
    answers = {}
    for row in rows:
        text, reward, truncated = row["completion"], row["reward"], row["truncated"]
        answer = {"text": text, "reward": reward, "truncated": truncated, "count": 0}
        answers.setdefault((text, reward), answer)["count"] += 1
    best_first = sorted(answers.values(), key=lambda answer: (-answer["reward"], -answer["count"]))
    mean = sum(row["reward"] for row in rows) / len(rows)
    return {"step": step, "reward": mean, "answers": best_first}


def characters(step):
    return sum(len(answer["text"]) for answer in step["answers"])


def token_steps(rows):
    """What tokens.jsonl has of each step, [{"step", "rows"}], and how many steps the page leaves out."""
    by_step = defaultdict(list)
    for row in rows:
        if NEEDED - row.keys():
            raise KeyError
        by_step[row["step"]].append(row)
    steps = [{"step": step, "rows": rows} for step, rows in sorted(by_step.items())]
    kept = fitting(steps, MOST_TOKENS, lambda step: sum(len(row["tokens"]) for row in step["rows"]))
    return kept, len(steps) - len(kept)


def collect(folder):
    """What the page shows, as page.js reads it."""
    folder = pathlib.Path(folder)
    facts = read_facts(folder)
    metrics = made_of(folder / "metrics.jsonl", lambda rows: [row for row in rows if "step" in row])
    if not metrics:
        raise NoRun(f"{folder / 'metrics.jsonl'} has no row yet")
    steps, left_out = made_of(folder / "tokens.jsonl", token_steps)
    if not steps:
        raise NoRun(
            f"{folder / 'tokens.jsonl'} has no row: run with --record_tokens, which writes it"
        )
    return facts | {
        "run": folder.resolve().name,
        "step": metrics[-1]["step"],
        "curves": curves(metrics),
        "steps": steps,
        "left_out": left_out,
        "evaluations": made_of(folder / "samples.jsonl", evaluations),
    }


def read_facts(folder):
    """What the page tells of args.json."""
    path = folder / "args.json"
    try:
        args = json.loads(path.read_text(encoding="utf-8"))
        facts = {
            name: args.get(name) for name in ("script", "dataset", "max_steps", "learning_rate")
        }
        facts["model"] = args.get("model_name_or_path")
    except OSError:
        raise NoRun(f"{folder} is not the folder of a run: there is no args.json in it") from None
    except (ValueError, AttributeError):
        raise NoRun(f"{path} is not the args.json of a run") from None
    if "pairs_per_step" in args:
        nothing = "there are no tokens to show; tools/plot.py draws its curves"
        raise NoRun(
            f"{folder} is a run of {args.get('script')}.py, which trains on pairs: {nothing}"
        )
    return facts


def made_of(path, make):
    """What `make` makes of the rows of a file. A NoRun names a file with other rows than those of a run."""
    rows = read_rows(path)
    try:
        return make(rows)
    except (LookupError, TypeError, AttributeError):
        raise NoRun(f"{path} has a row that is none of a run") from None


def page(data):
    """The HTML. Its JSON has no `<`, so that no completion ends the script.

    It is ASCII, so that half a character is no error.
    """
    text = (PARTS / "page.html").read_text(encoding="utf-8")
    parts = {name: (PARTS / file).read_text(encoding="utf-8") for name, file in FILES.items()}
    text_of_data = json.dumps(data, separators=(",", ":"), allow_nan=False)
    parts["DATA"] = text_of_data.replace("<", "\\u003c")
    for (
        name,
        part,
    ) in parts.items():  # the data are last: what stands in them is replaced by nothing
        text = text.replace(f"/*{name}*/", part, 1)
    return text


def main(words=None):
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("run", metavar="RUN", type=pathlib.Path)
    parser.add_argument("-o", "--output", metavar="FILE", type=pathlib.Path)
    options = parser.parse_args(words)
    file = options.output or options.run / "look.html"
    try:
        file.write_text(page(collect(options.run)), encoding="utf-8", newline="\n")
    except (NoRun, OSError) as error:
        print(f"look.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"written: {file}")
    if not options.output:
        webbrowser.open(file.resolve().as_uri())
    return 0


if __name__ == "__main__":
    end_with_the_reader()
    sys.exit(main())
