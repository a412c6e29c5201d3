"""Where the two embedded tasks lie: a small model, its problems and, of the first one, pairs of completions."""

from pathlib import Path

EMBEDDED = Path(__file__).parents[1] / "tiny"
EMBEDDED_PAIRS = EMBEDDED / "pairs"
EMBEDDED_FOLDERS = {"embedded": EMBEDDED, "embedded-hard": EMBEDDED.with_name("tiny_hard")}
