"""Convert a checkpoint to a model folder, like the model/ that a finished run writes.

python tools/checkpoint_to_model.py runs/mine/checkpoints/step-00000020 models/step-20

`from_pretrained` loads the folder; with LoRA it is a PEFT adapter. The base model must still be
where args.json says.
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import merge_fsdp_weights  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from common.load import load_policy, load_tokenizer  # noqa: E402
from common.run import Exit, clean_exit, one_line  # noqa: E402
from reward_model import add_pad_token, load_reward_model  # noqa: E402


def read_weights(checkpoint):
    """Return the weights {name: tensor} of a checkpoint, without a critic's."""
    with tempfile.TemporaryDirectory() as folder:
        shards = checkpoint / "pytorch_model_fsdp_0"
        if shards.is_dir():  # FSDP2
            merge_fsdp_weights(str(shards), folder)
        source = Path(folder) if shards.is_dir() else checkpoint
        weights = load_file(source / "model.safetensors")
    weights = {name.removeprefix("module."): weight for name, weight in weights.items()}  # DDP
    prefix = "lm." if any(name.startswith("lm.") for name in weights) else ""  # or the model itself
    return {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 2:
        raise Exit(f"expected CHECKPOINT FOLDER, got {len(argv)} words")
    checkpoint, folder = map(Path, argv)
    if (checkpoint / "args.json").is_file():
        found = ", ".join(sorted(path.name for path in checkpoint.glob("checkpoints/step-*")))
        raise Exit(f"{checkpoint} is a run; its checkpoints: {found or 'none'}")
    try:
        text = (checkpoint.resolve().parents[1] / "args.json").read_text(encoding="utf-8")
        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        script = state["settings"]["script"]
        weights = read_weights(checkpoint)
    except Exception as error:
        raise Exit(f"{checkpoint} is not a checkpoint: {one_line(error)}") from None
    if folder.exists():
        raise Exit(f"{folder} exists already")
    args = SimpleNamespace(**json.loads(text))
    if script == "reward_model":
        tokenizer = load_tokenizer(args.model_name_or_path)
        lm = load_reward_model(args.model_name_or_path, args, new_head=True).lm
        add_pad_token(lm, tokenizer)
    else:
        tokenizer, lm = load_policy(args, Accelerator(cpu=True))
        lm.generation_config = lm.original_generation_config
    parameters = dict(lm.named_parameters(remove_duplicate=False))
    loaded = {id(parameters[name]) for name in weights if name in parameters}
    trained = {id(weight) for weight in lm.parameters() if weight.requires_grad}
    if not trained <= loaded:
        raise Exit(f"{checkpoint} lacks weights of {args.model_name_or_path}")
    lm.load_state_dict(weights, strict=False)  # tied weights are stored once
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: step {state['step']} of {script}.py")


if __name__ == "__main__":
    with clean_exit():
        main()
