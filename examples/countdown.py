"""Prompts from Countdown's raw columns `nums` and `target`: each row of a .jsonl file gets a prompt.

python examples/countdown.py rows.jsonl > countdown.jsonl
"""

import json
import sys


def with_prompt(row):
    numbers = ", ".join(map(str, row["nums"]))
    text = f"Use each of {numbers} once, with + - * /, to make {row['target']}. End with #### and the expression."
    return row | {"prompt": text}


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        for line in file:
            print(json.dumps(with_prompt(json.loads(line))))
