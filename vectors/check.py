"""Compare an implementation's answers with the test vectors of cases/.

    python check.py --demo                                             needs no file
    python check.py answers.json [--float32] [--only policy/] [--differing]
    python check.py --show policy/grpo

answers.json holds {case id: {name: numbers}}, or {case id: {"not_offered": "why"}}; NaN may be
null. Each case gets a line. If an answer differs, the line names the convention or mistake that it
follows, or else what differs. The exit code is 1 if an answer differs or is missing, or if there is
no such case or name, and 2 if the answers cannot be read.
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
MISTAKE = "the mean over each micro-batch, then averaged"  # of --demo
WITHOUT_FILE = """\
To check an implementation, make a file with its answers to the {count} cases:
  in Python, call your functions in {adapter}, and run: python {adapter} > answers.json
  in another language, read {folder}/*.json, and write {{"case id": {{"name": numbers}}}}
Then run: python {program} answers.json
An example that needs no file: python {program} --demo"""


# --- files ---


def load_files(folder=FOLDER):
    """Return the content of each file of cases."""
    files = []
    for path in sorted(pathlib.Path(folder).glob("*.json")):
        file = json.loads(path.read_text(encoding="utf-8"))
        if file["format"] != FORMAT:
            fail(f"{path.name} has format {file['format']}, but this program reads format {FORMAT}")
        files.append(file)
    return files


def load_cases(folder=FOLDER):
    """Return {id: case}, each case with all its `inputs` and its `tolerance`."""
    cases = {}
    for file in load_files(folder):
        for case in file["cases"]:
            case["inputs"] = whole_inputs(case, file)
            case["tolerance"] = case.get("tolerance", file["tolerance"])
            cases[case["id"]] = case
    return cases


def whole_inputs(case, file):
    """Return the inputs of a case, merged with the shared ones that it starts from."""
    inputs = case.get("inputs", {})
    if "inputs_from" in case:
        return file["shared_inputs"][case["inputs_from"]] | inputs
    return inputs


def load_answers(path):
    """Return the answers of a JSON file in UTF-8 or UTF-16, with or without a byte order mark."""
    try:
        answers = json.loads(pathlib.Path(path).read_bytes(), parse_int=float)
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    except (ValueError, RecursionError) as error:
        fail(f"{path} is not a complete JSON file: {error}")
    if not isinstance(answers, dict):
        fail(f"{path} is not an object {{case id: {{name: numbers}}}}")
    return answers


def fail(problem):
    print(f"check.py: error: {problem}", file=sys.stderr)
    raise SystemExit(2)


# --- numbers ---


def differences(answer, expected, tolerance, place):
    """Return [(size, place, text)] of the numbers of `answer` that differ.

    The size is infinite where the shape differs or there is no number.
    """
    if isinstance(expected, list):
        if not isinstance(answer, list):
            return [(math.inf, place, f"not a list of {len(expected)}")]
        if len(answer) != len(expected):
            return [(math.inf, place, f"a list of {len(answer)} instead of {len(expected)}")]
        result = []
        for i in range(len(expected)):
            result += differences(answer[i], expected[i], tolerance, f"{place}[{i}]")
        return result
    if not isinstance(answer, int | float) or math.isnan(answer):
        return [(math.inf, place, f"{answer} instead of {expected:.9g}")]
    size = abs(answer - expected)
    if size <= tolerance["atol"] + tolerance["rtol"] * abs(expected):
        return []
    return [(size, place, f"{answer:.9g} instead of {expected:.9g}")]


def differences_by_name(answer, expected, tolerance):
    """Return {name: its differences} for the names that both have."""
    result = {}
    for name in expected:
        if name in answer:
            result[name] = differences(answer[name], expected[name], tolerance, name)
    return result


def flat(numbers):
    """Return the numbers of nested lists as one list."""
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
    """Return the factor between two lists of one shape, or None if there is no single one."""
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
    """The verdict on an answer. `follows` names the `others` that explain it."""

    kind: str
    text: str = ""
    follows: list = field(default_factory=list)
    excludes: bool = False  # the answer was compared with others, and follows none of them


def judge(case, answer, precision="float64"):
    """Return the verdict on the answer to a case; a missing answer is None."""
    if answer is None:
        return Verdict(MISSING)
    expected = case["expected"]
    if not isinstance(answer, dict):
        return Verdict(OTHER, f"not an object with the names {', '.join(expected)}")
    if "not_offered" in answer:
        return Verdict(NOT_OFFERED, str(answer["not_offered"]))
    unknown = [name for name in answer if name not in expected]
    if unknown:
        return Verdict(OTHER, f"unknown {', '.join(unknown)}: the names are {', '.join(expected)}")
    left_out = [name for name in expected if name not in answer]
    if not answer:
        return Verdict(MISSING, f"without {', '.join(left_out)}")
    tolerance = case["tolerance"][precision]
    found = differences_by_name(answer, expected, tolerance)
    if any(found.values()):
        rounded = differences_by_name(answer, expected, case["tolerance"]["float32"])
        if not any(rounded.values()):
            return Verdict(OTHER, "right only in the tolerance of --float32")
        return explained(case, answer, found, tolerance)
    if left_out:
        return Verdict(PART, f"without {', '.join(left_out)}")
    return Verdict(SAME)


def compare(case, answer, precision="float64"):
    """Return (kind, text) of the verdict on the answer to a case."""
    verdict = judge(case, answer, precision)
    return verdict.kind, verdict.text


def explained(case, answer, found, tolerance):
    """Return the verdict on an answer with the differences `found`, {name: differences}."""
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
    """Return what the `others` say that fit all names of an answer."""
    result = []
    for other in case.get("others", []):
        found = differences_by_name(answer, other["expected"], tolerance)
        if not any(found.values()):
            result.append(other["says"])
    return result


def followed_by_name(case, answer, names, tolerance):
    """Return {name: what the `others` say that fit this name alone}."""
    result = {}
    for other in case.get("others", []):
        expected = other["expected"]
        for name in names:
            if not differences(answer[name], expected[name], tolerance, name):
                earlier = result.get(name, [])
                result[name] = [*earlier, other["says"]]
    return result


def explained_by_size(expected, answer, found, tolerance):
    """Return one text with the factor that all names are off by, or else a text per name."""
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
    """Return whether every difference has a size, which takes numbers of the right shape."""
    for differing in found.values():
        if any(math.isinf(size) for size, _, _ in differing):
            return False
    return True


def described(name, answer, expected, found, tolerance):
    """Describe what differs under one name."""
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
    """Print a line per case and a summary; return the exit code."""
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
                print(f"{'':36} {'':12} this case catches: {case['catches']}")
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    if differing:
        print(f"Cases that differ: {len(differing)}. {beginning(differing)}")
    return int(OTHER in counts or MISSING in counts)


def beginning(differing):
    """Say which case of {id: verdict} to look at first: one that follows what most cases follow."""
    counts = {}
    for verdict in differing.values():
        for says in dict.fromkeys(verdict.follows):
            counts[says] = counts.get(says, 0) + 1
    if not counts:
        name, verdict = next(iter(differing.items()))
        return f"Start with {name}: {verdict.text}"
    most = max(counts, key=counts.get)
    name = next(name for name, verdict in differing.items() if most in verdict.follows)
    if counts[most] == 1:
        return f"Start with {name}: {differing[name].text}"
    return f"{counts[most]} of them follow: {most}. Start with {name}"


def demo_answers(cases):
    """Return right answers, but with a mistake in the cases of DAPO's loss that can tell."""
    answers = {}
    for name, case in cases.items():
        answers[name] = case["expected"]
        if name.startswith("splits/dapo-"):
            for other in case["others"]:
                if other["says"] == MISTAKE:
                    answers[name] = other["expected"]
    return answers


def demo(cases):
    print("DAPO's loss is one mean over all tokens of an optimizer step. These answers contain a")
    print(
        "common mistake: a mean over each micro-batch, so that the gradient depends on the split.\n"
    )
    report(cases, demo_answers(cases), "float64", only_differing=True)
    return 0


def how_to_start(cases):
    program = pathlib.Path(sys.argv[0])
    adapter = program.with_name("adapter.py")
    folder = program.with_name("cases")
    print(WITHOUT_FILE.format(count=len(cases), adapter=adapter, folder=folder, program=program))
    return 0


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("answers", nargs="?", help="a JSON file: {case id: {name: numbers}}")
    add("--demo", action="store_true", help="check answers with a common mistake, without a file")
    add("--float32", action="store_true", help="use the tolerance of float32")
    add("--only", default="", metavar="PREFIX", help="check cases such as policy/")
    add("--differing", action="store_true", help="hide cases that are the same or not offered")
    add("--show", metavar="ID", help="print a case with all its inputs")
    add("--version", action="store_true", help="print the version of the cases")
    return parser.parse_args()


def main():
    options = parse_options()
    if options.version:
        print(load_files()[0]["version"])
        return 0
    cases = load_cases()
    if options.demo:
        return demo(cases)
    if options.show:
        if options.show not in cases:
            fail(f"no case {options.show}")
        print(json.dumps(cases[options.show], indent=1))
        return 0
    if options.answers is None:
        return how_to_start(cases)
    answers = load_answers(options.answers)
    chosen = {name: case for name, case in cases.items() if name.startswith(options.only)}
    if not chosen:
        fail(f"no case starts with {options.only}")
    unknown = [name for name in answers if name not in cases]
    for name in unknown:
        print(f"{name:36} no case has this id")
    precision = "float32" if options.float32 else "float64"
    code = report(chosen, answers, precision, options.differing)
    return 1 if unknown else code


def run():
    """Return the exit code of the program, 1 if the reader of its output is gone (`| head`)."""
    sys.stdout.reconfigure(errors="backslashreplace")  # an id may contain a lone surrogate
    try:
        code = main()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(run())
