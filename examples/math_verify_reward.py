"""The reward `math_verify`: the package math-verify compares what `accuracy` does not accept.

python grpo.py --dataset openai/gsm8k --dataset_config main \\
    --reward examples/math_verify_reward.py:math_verify

The package's timeouts rely on signals, which cannot interrupt one large power, so the comparison
runs in its own process.
"""

import contextlib
import functools
import importlib.util
import inspect
import json
import logging
import os
import signal
import subprocess
import sys
import threading

from common.answers import MAX_ANSWER, answers_match, extract_answer
from common.run import Exit

SECONDS = 5.0  # a comparison that takes longer counts as wrong
LOCK = threading.Lock()  # of the process's only pipe


def math_verify(completions, gold, truncated, starts_in_thought, **columns):
    """Return 1.0 or 0.0 for each completion, None without a gold answer."""
    values = []
    rows = zip(completions, gold, truncated, starts_in_thought, strict=True)
    for completion, right, is_truncated, in_thought in rows:
        text = completion if isinstance(completion, str) else completion[0]["content"]
        text = "<think>" + text if in_thought else text
        values.append(None if right is None else math_verify_reward(text, right, is_truncated))
    return values


def math_verify_reward(completion: str, answer: str, truncated: bool = False) -> float:
    """Return `accuracy_reward`, or where that is 0.0 the verdict of math-verify.

    Its process ends after `SECONDS`, which counts as wrong and is logged. If something else ended
    the process, the comparison is repeated.
    """
    predicted = extract_answer(completion, truncated)
    if predicted is None or answers_match(predicted, answer):
        return float(predicted is not None)
    if isinstance(answer, list):  # any of them is right
        return max(math_verify_reward(completion, each, truncated) for each in answer)
    gold = extract_answer(answer) or answer
    if answers_match(predicted, gold):
        return 1.0
    if max(len(predicted), len(gold)) > MAX_ANSWER:
        return 0.0
    for _ in range(3):
        with LOCK, contextlib.suppress(BrokenPipeError):
            process = comparing_process(os.getpid())
            print(json.dumps([SECONDS, gold, predicted]), file=process.stdin, flush=True)
            if reply := process.stdout.readline():
                return float(reply)
        comparing_process.cache_clear()
        if process.wait() == -signal.SIGALRM:
            break
    message = "math-verify took over %s s on %.80r, or its process was killed three times: scored 0"
    logging.getLogger(__name__).warning(message, SECONDS, predicted)
    return 0.0


@functools.cache
def comparing_process(parent: int) -> subprocess.Popen:
    """Start the process that compares for `parent`, beyond the reach of signals to the run."""
    if importlib.util.find_spec("math_verify") is None:
        raise Exit("--reward math_verify: pip install 'math-verify[antlr4_13_2]'")
    program = f"import json, logging, signal, sys\n{inspect.getsource(compare)}compare()"
    options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    process = subprocess.Popen([sys.executable, "-P", "-c", program], **options)
    if process.stdout.readline() != "ready\n":
        raise Exit("reward math_verify: its process did not start")
    return process


def compare():
    """Compare pairs from stdin until the parent is gone. This process does not import torch."""
    from math_verify import parse, verify

    logging.disable()  # math-verify warns that its timeouts are off
    replies, sys.stdout = sys.stdout, sys.stderr
    print("ready", file=replies, flush=True)
    for line in sys.stdin:  # until the parent is gone
        seconds, *texts = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends this process
        gold, predicted = (parse(f"${text}$", parsing_timeout=None) for text in texts)
        print(float(verify(gold, predicted, timeout_seconds=None)), file=replies, flush=True)
        signal.setitimer(signal.ITIMER_REAL, 0)
