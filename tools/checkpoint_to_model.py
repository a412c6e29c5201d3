"""Convert a checkpoint to a model folder, like the model/ that a finished run writes.

python tools/checkpoint_to_model.py runs/mine/checkpoints/step-00000020 models/step-20

`from_pretrained` loads the folder; with LoRA it is a PEFT adapter. The base model must still be
where args.json says. For DeepSpeed, zero_to_fp32.py inside the checkpoint gathers the weights.
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

from harness.errors import InputError, clean_exit, one_line  # noqa: E402
from harness.loading import load_policy, load_tokenizer, save_model  # noqa: E402
from harness.reward_models import add_pad_token, load_reward_model  # noqa: E402


def read_weights(checkpoint):
    """Return the weights {name: tensor} of a checkpoint, named as in a policy without a critic."""
    with tempfile.TemporaryDirectory() as folder:
        shards = checkpoint / "pytorch_model_fsdp_0"
        if shards.is_dir():  # FSDP2
            merge_fsdp_weights(str(shards), folder)
        source = Path(folder) if shards.is_dir() else checkpoint
        weights = load_file(source / "model.safetensors")
    weights = {name.removeprefix("module."): weight for name, weight in weights.items()}  # DDP
    weights = {name.removeprefix("policy."): weight for name, weight in weights.items()}
    return {name: weight for name, weight in weights.items() if name.startswith("lm.")}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 2:
        raise InputError(f"expected CHECKPOINT FOLDER, got {len(argv)} words")
    checkpoint, folder = map(Path, argv)
    try:
        text = (checkpoint.resolve().parents[1] / "args.json").read_text(encoding="utf-8")
        weights = read_weights(checkpoint)
    except Exception as error:
        raise InputError(f"{checkpoint} is not a checkpoint: {one_line(error)}") from None
    if folder.exists():
        raise InputError(f"{folder} exists already")
    args = SimpleNamespace(**json.loads(text) | {"fast": False})
    accelerator = Accelerator(cpu=True)
    tokenizer = load_tokenizer(args)
    if args.script == "reward_model":
        model = load_reward_model(args.model_name_or_path, args, new_head=True)
        add_pad_token(model.lm, tokenizer)
    else:
        model = load_policy(args, tokenizer, accelerator)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(parameters[name]) for name in weights if name in parameters}
    trained = {id(weight) for weight in model.parameters() if weight.requires_grad}
    if not trained <= loaded:
        raise InputError(f"{checkpoint} lacks weights of {args.model_name_or_path}")
    model.load_state_dict(weights, strict=False)  # tied weights are stored once
    save_model(accelerator, model, model, tokenizer, folder)
    print(f"{folder}: step {int(checkpoint.name.removeprefix('step-'))} of {args.script}.py")


if __name__ == "__main__":
    with clean_exit():
        main()
