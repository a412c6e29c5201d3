"""For dapo.py: all_groups.py and row_mean.py together."""

from pathlib import Path

for name in ("all_groups", "row_mean"):
    exec(Path(f"docs/claims/patches/{name}.py").read_text(encoding="utf-8"))
