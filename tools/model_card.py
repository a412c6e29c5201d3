"""The README.md of a saved model: the card that a hub shows, with what is known of the run and no more."""

import dataclasses
import re
import shlex
from pathlib import Path

INHERITED = ("license", "license_name", "license_link", "language")
OWN = ("output_dir", "resume", "reward_changed", "report_to")  # options that no result depends on


def model_card(args, script, step, first_eval, last_eval):
    """The text of a model card: metadata, command, the first and the last evaluation, and the base model's own card.

    Base model and licence are those in the README.md of the base model's folder. A hub id is the base model itself; its
    licence is left for the user to fill in.
    """
    from huggingface_hub import ModelCardData

    folder = Path(args.model_name_or_path).expanduser()
    known = card_of(folder)
    inherited = known.data.to_dict() if known else {}
    on_hub = not folder.exists() and not args.model_name_or_path.startswith("embedded")
    data = ModelCardData(
        base_model=args.model_name_or_path if on_hub else inherited.get("base_model"),
        library_name="peft" if args.lora_rank and not args.lora_merge else "transformers",
        pipeline_tag="text-classification" if script == "reward_model" else "text-generation",
        tags=[script],
        **{name: inherited[name] for name in INHERITED if name in inherited},
    )
    first_eval, last_eval = first_eval or {}, last_eval or {}
    if not {"accuracy", "math_verify"} & set(getattr(args, "reward", ["accuracy"])):  # as in the closing line
        last_eval = {name: value for name, value in last_eval.items() if "/pass@" not in name}
    rows = [f"| {name} | {number(first_eval.get(name))} | {number(value)} |" for name, value in last_eval.items()]
    table = ["", "| | first evaluation | last evaluation |", "|---|---|---|", *rows] if rows else []
    below = re.sub("^(#+ )", r"##\1", known.text.strip(), flags=re.MULTILINE) if known else ""  # its headings, deeper
    origin = ["", "## The base model", "", below] if known else []
    base = str(data.base_model or folder.name).rpartition("/")[2]
    title = [f"# {base} after {script}", "", f"After {step} steps of", "", f"    {command(args, script)}"]
    return f"---\n{data.to_yaml()}\n---\n" + "\n".join([*title, *table, *origin]) + "\n"


def card_of(folder):
    """The model card in a folder; None where there is none, or none that can be read."""
    from huggingface_hub import ModelCard

    try:
        return ModelCard.load(folder / "README.md") if (folder / "README.md").is_file() else None
    except Exception:  # whatever its author wrote, it must not keep a trained model from being saved
        return None


def number(value):
    return "" if value is None else f"{value:.4g}"


def command(args, script):
    """The run as a command, with the options that differ from the script's own values."""
    words = ["accelerate", "launch", f"{script}.py"]
    for field in dataclasses.fields(args):
        value, factory = getattr(args, field.name), field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if value != default and field.name not in OWN:
            words += [f"--{field.name}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)
