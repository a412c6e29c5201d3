"""Compares answers with the test vectors of cases/.

    python check.py answers.json [--float32]

answers.json: {case id: {name: numbers}}, or {case id: {"not_offered": "why"}}. NaN may be null.
It prints a line for each case, and under one that differs the mistake that the case catches.
The exit code is 1 if a case differs or has no answer.
"""

import argparse
import json
import math
import pathlib

FOLDER = pathlib.Path(__file__).resolve().parent / "cases"
SAME, PART, OTHER = "same", "part", "OTHER"
MISSING, NOT_OFFERED = "MISSING", "not offered"


def load_cases(folder=FOLDER):
    """All cases, {id: case}, each with its whole `inputs` and its `tolerance`."""
    cases = {}
    for path in sorted(pathlib.Path(folder).glob("*.json")):
        file = json.loads(path.read_text(encoding="utf-8"))
        if file["format"] != 1:
            raise SystemExit(f"{path.name} has format {file['format']}, and this program reads 1")
        for case in file["cases"]:
            shared = file["shared_inputs"][case["inputs_from"]] if "inputs_from" in case else {}
            case["inputs"] = shared | case.get("inputs", {})
            case.setdefault("tolerance", file["tolerance"])
            cases[case["id"]] = case
    return cases


def differences(answer, expected, tolerance, place):
    """(size, place, text) of each number of `answer` that is not the expected one."""
    if isinstance(expected, list):
        if not isinstance(answer, list) or len(answer) != len(expected):
            return [(math.inf, place, f"not a list of {len(expected)}")]
        found = []
        for i, (inner, number) in enumerate(zip(answer, expected, strict=True)):
            found += differences(inner, number, tolerance, f"{place}[{i}]")
        return found
    if not isinstance(answer, int | float) or math.isnan(answer):
        return [(math.inf, place, f"{answer} for {expected:.9g}")]
    size = abs(answer - expected)
    if size <= tolerance["atol"] + tolerance["rtol"] * abs(expected):
        return []
    return [(size, place, f"{answer:.9g} for {expected:.9g}")]


def compare_names(answer, expected, tolerance):
    """The differences under those names that both have."""
    found = []
    for name in expected:
        if name in answer:
            found += differences(answer[name], expected[name], tolerance, name)
    return found


def compare(case, answer, precision="float64"):
    """(verdict, text) of the answer to a case, which may be None."""
    if answer is None:
        return MISSING, ""
    if "not_offered" in answer:
        return NOT_OFFERED, answer["not_offered"]
    tolerance = case["tolerance"][precision]
    left_out = [name for name in case["expected"] if name not in answer]
    if len(left_out) == len(case["expected"]):
        return MISSING, f"without {', '.join(left_out)}"
    found = compare_names(answer, case["expected"], tolerance)
    if not found and left_out:
        return PART, f"without {', '.join(left_out)}"
    if not found:
        return SAME, ""
    for other in case.get("others", []):
        if not compare_names(answer, other["expected"], tolerance):
            return OTHER, f"it follows: {other['says']}"
    size, place, text = max(found, key=lambda difference: difference[0])
    return OTHER, f"largest difference {size:.3g} at {place}: {text}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("answers", help="a JSON file: {case id: {name: numbers}}")
    parser.add_argument("--float32", action="store_true", help="compare in float32's tolerance")
    options = parser.parse_args()
    answers = json.loads(pathlib.Path(options.answers).read_text(encoding="utf-8"))
    cases = load_cases()
    counts = {}
    for name, case in cases.items():
        precision = "float32" if options.float32 else "float64"
        verdict, text = compare(case, answers.get(name), precision)
        counts[verdict] = counts.get(verdict, 0) + 1
        print(f"{name:36} {verdict:12} {text}".rstrip())
        if verdict == OTHER:
            print(f"{'':36} {'':12} this case catches: {case['catches']}")
    for name in answers:
        if name not in cases:
            print(f"{name:36} no case has this id")
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    raise SystemExit(int(OTHER in counts or MISSING in counts))


if __name__ == "__main__":
    main()
