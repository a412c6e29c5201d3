"""Ask TRL, verl and OpenRLHF for answers to the test vectors, and print tables of them.

    pip install trl==1.16.0
    pip install --no-deps --target runs/packages verl==0.9.1 openrlhf==0.11.2
    python vectors/libraries/report.py runs/packages --write vectors/conventions.md

Without --write it prints the tables, each difference with its reason, and why a library does not
offer a case. verl and OpenRLHF are not imported, so their requirements are not needed. The exit
code is 1 if a difference has no reason in reasons.toml or a reason no difference, or if the
settings in settings.toml compute something else or are not all needed.
"""

import argparse
import importlib
import pathlib
import sys
import tomllib
from collections import defaultdict

import torch

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

import settings  # noqa: E402
from library import NO_FUNCTION  # noqa: E402
from vectors import check  # noqa: E402

LIBRARIES = ["trl", "verl", "openrlhf"]
BEGIN = "<!-- {} from report.py -->"  # with "the answers" or "the settings"
END = "<!-- to here -->"
SAME = "same"
SAME32 = "same32"  # the same in float32
PART = "part"
OTHER = "other"
NONE = "-"


def adapter_of(library, packages):
    return importlib.import_module(f"ask_{library}").Adapter(packages)


def verdict_of(case, answer):
    """Return (verdict, text) in float64, or else in the tolerance of float32."""
    if "not_offered" in answer:
        return NONE, answer["not_offered"]
    verdict, text = check.compare(case, answer)
    if verdict != check.OTHER:
        return verdict, text
    verdict, text = check.compare(case, answer, "float32")
    if verdict == check.OTHER:
        return OTHER, text
    return (SAME32 if verdict == check.SAME else PART), text


def verdicts_of(adapter, cases):
    torch.set_num_threads(1)
    return {name: verdict_of(case, adapter.answer(case)) for name, case in cases.items()}


def is_right(adapter, case):
    """Return whether what an adapter answers to a case is right."""
    verdict, _ = verdict_of(case, adapter.answer(case))
    return verdict in (SAME, SAME32, PART)


# --- reasons ---


def entries_of(library):
    """Return the entries of reasons.toml: `cases`, `reason`, and `where` its code says so."""
    return tomllib.loads((HERE / "reasons.toml").read_text(encoding="utf-8"))[library]


def unexplained(library, verdicts):
    """Return the cases that differ without a reason, or that have a reason without differing."""
    differing = {case for case, (verdict, _) in verdicts.items() if verdict == OTHER}
    explained = set()
    for entry in entries_of(library):
        explained.update(entry["cases"])
    return sorted(differing ^ (explained & set(verdicts)))


# --- Markdown ---


def totals(names, verdicts):
    lines = [
        "| library | same | same32 | part | other | not offered |",
        "|---|---|---|---|---|---|",
    ]
    for library, name in names.items():
        given = [verdict for verdict, _ in verdicts[library].values()]
        counts = [str(given.count(kind)) for kind in (SAME, SAME32, PART, OTHER, NONE)]
        lines.append(f"| {name} | " + " | ".join(counts) + " |")
    return lines


def differences(names, verdicts):
    """Return a section per library: a line per reason, with its cases and the checker's words.

    Of the checker's words, the numbers that differ are left out where a reason explains them.
    """
    lines = []
    for library, name in names.items():
        lines += ["", f"#### {name}", ""]
        for entry in entries_of(library):
            cases = [case for case in entry["cases"] if case in verdicts[library]]
            texts = dict.fromkeys(verdicts[library][case][1] for case in cases)
            follows = [text for text in texts if text.startswith(check.FOLLOWS)]
            said = follows if entry["reason"] else texts
            words = "; ".join(said).replace(check.FOLLOWS, "")
            text = f"{words}. {entry['reason']}".removeprefix(". ").strip()
            listed = ", ".join(f"`{case}`" for case in cases)
            lines.append(f"- {listed}: {text[0].lower()}{text[1:]} ({entry['where']})")
    return lines[1:]


def not_offered(names, verdicts):
    """Return a table of the reasons that adapters give for refusals, with libraries and cases."""
    refusals = defaultdict(list)  # {(reason, cases): libraries}
    for library, name in names.items():
        by_reason = defaultdict(list)
        for case, (verdict, text) in verdicts[library].items():
            if verdict == NONE and text != NO_FUNCTION:
                by_reason[text].append(f"`{case}`")
        for reason, cases in by_reason.items():
            refusals[reason, ", ".join(cases)].append(name.split()[0])
    lines = ["| why | library | cases |", "|---" * 3 + "|"]
    for (reason, cases), libraries in refusals.items():
        lines.append(f"| {reason} | {', '.join(libraries)} | {cases} |")
    return lines


def write(page, texts):
    """Put texts {name: text} between the marks with their names on a page."""
    content = page.read_text(encoding="utf-8")
    for name, text in texts.items():
        begin = BEGIN.format(name)
        before, _, rest = content.partition(begin)
        _, _, after = rest.partition(END)
        content = f"{before}{begin}\n\n{text}\n{END}{after}"
    page.write_text(content, encoding="utf-8", newline="\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", type=pathlib.Path, help="the folder with verl and OpenRLHF")
    parser.add_argument(
        "--write", type=pathlib.Path, metavar="PAGE", help="write the tables into PAGE"
    )
    options = parser.parse_args()
    cases = check.load_cases()
    names = {}
    verdicts = {}
    problems = []
    for library in LIBRARIES:
        adapter = adapter_of(library, options.packages)
        names[library] = adapter.name
        verdicts[library] = verdicts_of(adapter, cases)
        for case in unexplained(library, verdicts[library]):
            problems.append(f"{library}: {case} differs without a reason, or no longer differs")
        if library in settings.LIBRARIES:
            for problem in settings.problems(library, adapter, cases, is_right):
                problems.append(f"{library}: {problem}")
    texts = {
        "the answers": "\n".join(totals(names, verdicts)) + "\n",
        "the settings": "\n".join(settings.table()) + "\n",
    }
    if options.write:
        write(options.write, texts)
    else:
        reasons = differences(names, verdicts)
        print("\n".join([*texts.values(), *reasons, "", *not_offered(names, verdicts)]))
    for problem in problems:
        print(problem, file=sys.stderr)
    raise SystemExit(int(bool(problems)))


if __name__ == "__main__":
    main()
