"""Compares answers with the test vectors of cases/.

    python check.py answers.json [--float32] [--only policy/] [--differing]
    python check.py --show policy/grpo

answers.json: {case id: {name: numbers}}, or {case id: {"not_offered": "why"}}. NaN may be null.
It prints a line for each case. Where an answer differs, the line names the convention or mistake
that it follows, or else what differs. The exit code is 1 if a case differs or has no answer, or if
there is no such case or name, and 2 if the answers cannot be read.
"""

import argparse
import json
import math
import os
import pathlib
import sys
from dataclasses import dataclass, field

FOLDER = pathlib.Path(__file__).resolve().parent / "cases"
FORMAT = 1
SAME = "same"
PART = "part"
OTHER = "OTHER"
MISSING = "MISSING"
NOT_OFFERED = "not offered"
FOLLOWS = "it follows: "


# --- files ---


def load_files(folder=FOLDER):
    """The files of cases, as they are."""
    files = []
    for path in sorted(pathlib.Path(folder).glob("*.json")):
        file = json.loads(path.read_text(encoding="utf-8"))
        if file["format"] != FORMAT:
            raise SystemExit(
                f"{path.name} has format {file['format']}, and this program reads {FORMAT}"
            )
        files.append(file)
    return files


def load_cases(folder=FOLDER):
    """All cases, {id: case}, each with its whole `inputs` and its `tolerance`."""
    cases = {}
    for file in load_files(folder):
        for case in file["cases"]:
            case["inputs"] = whole_inputs(case, file)
            case["tolerance"] = case.get("tolerance", file["tolerance"])
            cases[case["id"]] = case
    return cases


def whole_inputs(case, file):
    """The inputs of a case, with the shared ones that it starts from."""
    inputs = case.get("inputs", {})
    if "inputs_from" in case:
        return file["shared_inputs"][case["inputs_from"]] | inputs
    return inputs


def load_answers(path):
    """The answers of a file in UTF-8 or UTF-16, with a byte order mark or without."""
    try:
        answers = json.loads(pathlib.Path(path).read_bytes(), parse_int=float)
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    except (ValueError, RecursionError) as error:
        fail(f"{path} is no whole JSON file: {error}")
    if not isinstance(answers, dict):
        fail(f"{path} is no object {{case id: {{name: numbers}}}}")
    return answers


def fail(problem):
    print(f"check.py: error: {problem}", file=sys.stderr)
    raise SystemExit(2)


# --- numbers ---


def differences(answer, expected, tolerance, place):
    """(size, place, text) of each number of `answer` that is not the expected one.

    What is no number, or has another shape, differs by an infinite size.
    """
    if isinstance(expected, list):
        if not isinstance(answer, list):
            return [(math.inf, place, f"not a list of {len(expected)}")]
        if len(answer) != len(expected):
            return [(math.inf, place, f"a list of {len(answer)} for one of {len(expected)}")]
        result = []
        for i in range(len(expected)):
            result += differences(answer[i], expected[i], tolerance, f"{place}[{i}]")
        return result
    if not isinstance(answer, int | float) or math.isnan(answer):
        return [(math.inf, place, f"{answer} for {expected:.9g}")]
    size = abs(answer - expected)
    if size <= tolerance["atol"] + tolerance["rtol"] * abs(expected):
        return []
    return [(size, place, f"{answer:.9g} for {expected:.9g}")]


def differences_by_name(answer, expected, tolerance):
    """{name: its differences}, of the names that both have."""
    result = {}
    for name in expected:
        if name in answer:
            result[name] = differences(answer[name], expected[name], tolerance, name)
    return result


def flat(numbers):
    """The numbers of a list of lists in one list."""
    if not isinstance(numbers, list):
        return [numbers]
    result = []
    for inner in numbers:
        result += flat(inner)
    return result


def scaled(numbers, factor):
    if isinstance(numbers, list):
        return [scaled(inner, factor) for inner in numbers]
    return factor * numbers


def common_factor(answer, expected, tolerance):
    """The factor that all numbers are off by, or None; two lists of one shape."""
    given = flat(answer)
    wanted = flat(expected)
    square = sum(number * number for number in wanted)
    if square == 0 or len(wanted) == 1:
        return None
    product = sum(x * y for x, y in zip(given, wanted, strict=True))
    factor = product / square
    if differences(given, scaled(wanted, factor), tolerance, ""):
        return None
    return factor


# --- one answer ---


@dataclass
class Verdict:
    """What is said of an answer. `follows` has what each of the `others` says that explains it."""

    kind: str
    text: str = ""
    follows: list = field(default_factory=list)
    excludes: bool = False  # whether the answer was compared with others, and follows none


def judge(case, answer, precision="float64"):
    """The verdict on the answer to a case, which may be None."""
    if answer is None:
        return Verdict(MISSING)
    expected = case["expected"]
    if not isinstance(answer, dict):
        return Verdict(OTHER, f"not an object with the names {', '.join(expected)}")
    if "not_offered" in answer:
        return Verdict(NOT_OFFERED, str(answer["not_offered"]))
    unknown = [name for name in answer if name not in expected]
    if unknown:
        return Verdict(OTHER, f"no name {', '.join(unknown)}: the names are {', '.join(expected)}")
    left_out = [name for name in expected if name not in answer]
    if not answer:
        return Verdict(MISSING, f"without {', '.join(left_out)}")
    tolerance = case["tolerance"][precision]
    found = differences_by_name(answer, expected, tolerance)
    if any(found.values()):
        rounded = differences_by_name(answer, expected, case["tolerance"]["float32"])
        if not any(rounded.values()):
            return Verdict(OTHER, "right in the tolerance of --float32 alone")
        return explained(case, answer, found, tolerance)
    if left_out:
        return Verdict(PART, f"without {', '.join(left_out)}")
    return Verdict(SAME)


def compare(case, answer, precision="float64"):
    """(kind, text) of the verdict on the answer to a case."""
    verdict = judge(case, answer, precision)
    return verdict.kind, verdict.text


def explained(case, answer, found, tolerance):
    """What an answer follows, or else what is right and what differs. `found` is by name."""
    whole = followed(case, answer, tolerance)
    if whole:
        return Verdict(OTHER, FOLLOWS + "; or ".join(whole), whole)
    wrong = [name for name in found if found[name]]
    says_of = followed_by_name(case, answer, wrong, tolerance)
    texts = [f"in {name} alone, {'; or '.join(says)}" for name, says in says_of.items()]
    texts += [f"{name} is right" for name in found if name not in wrong]
    unexplained = {name: found[name] for name in wrong if name not in says_of}
    texts += explained_by_size(case["expected"], answer, unexplained, tolerance)
    if says_of:
        return Verdict(OTHER, FOLLOWS + "; ".join(texts), flat(list(says_of.values())))
    excludes = "others" in case and all_have_sizes(found)
    return Verdict(OTHER, "; ".join(texts), excludes=excludes)


def followed(case, answer, tolerance):
    """What each of the `others` says that fits all the names of an answer."""
    result = []
    for other in case.get("others", []):
        found = differences_by_name(answer, other["expected"], tolerance)
        if not any(found.values()):
            result.append(other["says"])
    return result


def followed_by_name(case, answer, names, tolerance):
    """{name: what each of the `others` says that fits this name alone}."""
    result = {}
    for other in case.get("others", []):
        expected = other["expected"]
        for name in names:
            if not differences(answer[name], expected[name], tolerance, name):
                earlier = result.get(name, [])
                result[name] = [*earlier, other["says"]]
    return result


def explained_by_size(expected, answer, found, tolerance):
    """The factor that all the names of `found` are off by, or else a text for each name."""
    if len(found) > 1 and all_have_sizes(found):
        numbers = [answer[name] for name in found]
        wanted = [expected[name] for name in found]
        factor = common_factor(numbers, wanted, tolerance)
        if factor is not None:
            return [f"every number of {' and '.join(found)} x {factor:.6g}"]
    texts = []
    for name, differing in found.items():
        texts.append(described(name, answer[name], expected[name], differing, tolerance))
    return texts


def all_have_sizes(found):
    """Whether every difference has a size: an answer of another shape, or no number, has none."""
    for differing in found.values():
        if any(math.isinf(size) for size, _, _ in differing):
            return False
    return True


def described(name, answer, expected, found, tolerance):
    """What differs under one name."""
    size, place, text = max(found, key=lambda difference: difference[0])
    if math.isinf(size):
        return f"{place} is {text}"
    count = len(flat(expected))
    if count == 1:
        return f"{name} differs by {size:.3g}: {text}"
    factor = common_factor(answer, expected, tolerance)
    if factor is not None:
        return f"every number of {name} x {factor:.6g}"
    return f"{name} differs at {len(found)} of {count}, by up to {size:.3g} at {place}: {text}"


# --- all answers ---


def report(cases, answers, precision, only_differing=False):
    """A line for each case, and lines that gather them. Returns the exit code."""
    counts = {}
    differing = {}
    for name, case in cases.items():
        verdict = judge(case, answers.get(name), precision)
        counts[verdict.kind] = counts.get(verdict.kind, 0) + 1
        if only_differing and verdict.kind in (SAME, NOT_OFFERED):
            continue
        print(f"{name:36} {verdict.kind:12} {verdict.text}".rstrip())
        if verdict.kind == OTHER:
            differing[name] = verdict
            if not verdict.follows and not verdict.excludes:
                print(f"{'':36} {'':12} this case was made for: {case['catches']}")
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    if differing:
        print(f"Cases that differ: {len(differing)}. {beginning(differing)}")
    return int(OTHER in counts or MISSING in counts)


def beginning(differing):
    """Which case of {id: verdict} to begin with: the first that follows what most cases follow."""
    counts = {}
    for verdict in differing.values():
        for says in dict.fromkeys(verdict.follows):
            counts[says] = counts.get(says, 0) + 1
    if not counts:
        name, verdict = next(iter(differing.items()))
        return f"Begin with {name}: {verdict.text}"
    most = max(counts, key=counts.get)
    name = next(name for name, verdict in differing.items() if most in verdict.follows)
    if counts[most] == 1:
        return f"Begin with {name}: {differing[name].text}"
    return f"{counts[most]} of them follow: {most}. Begin with {name}"


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("answers", nargs="?", help="a JSON file: {case id: {name: numbers}}")
    parser.add_argument("--float32", action="store_true", help="compare in float32's tolerance")
    parser.add_argument("--only", default="", metavar="BEGINNING", help="cases such as policy/")
    parser.add_argument(
        "--differing", action="store_true", help="leave out what is the same or not offered"
    )
    parser.add_argument("--show", metavar="ID", help="print a case with its whole inputs")
    parser.add_argument("--version", action="store_true", help="print the version of the cases")
    return parser.parse_args()


def main():
    options = parse_options()
    if options.version:
        print(load_files()[0]["version"])
        return 0
    cases = load_cases()
    if options.show:
        if options.show not in cases:
            fail(f"no case {options.show}")
        print(json.dumps(cases[options.show], indent=1))
        return 0
    if options.answers is None:
        fail("no file of answers: python check.py answers.json")
    answers = load_answers(options.answers)
    chosen = {name: case for name, case in cases.items() if name.startswith(options.only)}
    if not chosen:
        fail(f"no case begins with {options.only}")
    unknown = [name for name in answers if name not in cases]
    for name in unknown:
        print(f"{name:36} no case has this id")
    precision = "float32" if options.float32 else "float64"
    code = report(chosen, answers, precision, options.differing)
    return 1 if unknown else code


def run():
    """The exit code of the program; 1 where its reader has gone, as `head` does."""
    sys.stdout.reconfigure(errors="backslashreplace")  # an id may have half a character
    try:
        code = main()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes once more at its end, into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(run())
