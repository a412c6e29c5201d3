"""Add a prompt to each row of a .jsonl file with Countdown's raw columns `nums` and `target`.

python examples/countdown.py rows.jsonl > countdown.jsonl
"""

import argparse
import json


def with_prompt(row):
    numbers = ", ".join(map(str, row["nums"]))
    text = f"Use each of {numbers} once, with + - * /, to make {row['target']}."
    return row | {"prompt": f"{text} End with #### and the expression."}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file")
    with open(parser.parse_args().file, encoding="utf-8") as file:
        for line in file:
            print(json.dumps(with_prompt(json.loads(line))))
