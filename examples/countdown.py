"""Prompts from Countdown's raw columns `nums` and `target`: each row of a .jsonl file gets a prompt.

python examples/countdown.py rows.jsonl > countdown.jsonl
"""

import argparse
import json


def with_prompt(row):
    numbers = ", ".join(map(str, row["nums"]))
    text = f"Use each of {numbers} once, with + - * /, to make {row['target']}. End with #### and the expression."
    return row | {"prompt": text}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file")
    with open(parser.parse_args().file, encoding="utf-8") as file:
        for line in file:
            print(json.dumps(with_prompt(json.loads(line))))
