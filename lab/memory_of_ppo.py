"""What PPO takes of memory beside GRPO, measured on CPU and computed for one GPU: python lab/memory_of_ppo.py

Measured: the peak of all that torch's CPU allocator gives out in a run of two steps, as the profiler reports it, for a
random model of 15 million weights and as many rows of the same length (some ten minutes of one core). Computed: by the
terms of --dry_run, for the sizes of Qwen2.5. It writes lab/results/memory_of_ppo.json, and report.py the table.
"""

import json
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT, RESULTS = HERE.parent, HERE / "results" / "memory_of_ppo.json"
FOLDER = ROOT / "runs" / "lab" / "memory"
COMMON = "--max_prompt_tokens 64 --max_new_tokens 48 --micro_batch_size 8"
RUN = "--num_minibatches 1 --num_epochs 1 --max_steps 2 --eval_every 0 --eval_prompts 8 --eval_samples 1 --eval_k 1"
PPO = "ppo.py --prompts_per_step 32"
CASES = {
    "PPO with a reward model and a reference": f"{PPO} --kl_coef 0.05 --reward_model_path {{reward}}",
    "PPO with a reference": f"{PPO} --kl_coef 0.05",
    "PPO without": f"{PPO} --kl_coef 0",
    "GRPO with a reference": "grpo.py --prompts_per_step 4 --group_size 8 --kl_coef 0.05",
    "GRPO without": "grpo.py --prompts_per_step 4 --group_size 8 --kl_coef 0",
}


def build():
    """A random model with the tokenizer of the embedded one, and a reward model of its size after one step."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    sys.path[1:1] = [str(ROOT / "tools")]
    import memory

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "common" / "tiny")
    ids = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    config = AutoConfig.for_model("qwen2", **memory.WIDE, **ids)
    AutoModelForCausalLM.from_config(config).save_pretrained(FOLDER / "policy")
    tokenizer.save_pretrained(FOLDER / "policy")
    options = f"--model_name_or_path {FOLDER}/policy --max_steps 1 --pairs_per_step 2 --output_dir {FOLDER}/reward"
    subprocess.run([sys.executable, "reward_model.py", *options.split()], cwd=ROOT, check=True)


def measured(command):
    """The peak in bytes of a run in this process."""
    import importlib

    from torch.profiler import ProfilerActivity, profile

    script, *options = command.split()
    module = importlib.import_module(script.removesuffix(".py"))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        module.main(options)
    live = most = 0
    events = profiled.profiler.kineto_results.events()
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        live += change
        most = max(most, live)
    return most


def computed(command, shape):
    """The peak in bytes of a step on one GPU under mixed precision bf16, by the terms of --dry_run."""
    import importlib

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from common.harness.command_line import parse_args
    from dry_run import Job, Sizes, estimate, peak

    script, *options = command.split()
    module = importlib.import_module(script.removesuffix(".py"))
    args = parse_args(module.Args, options)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **shape))
    policy, other = Sizes(lm), Sizes(lm, head=False)
    scorer = other if "--reward_model_path" in options else None
    return peak(estimate(args, Job(bf16=True), policy, other if script == "ppo.py" else None, scorer))[1]


def main():
    sys.path[1:1] = [str(ROOT), str(ROOT / "tools")]
    if sys.argv[1:]:  # one measurement, in a process of its own
        print(measured(" ".join(sys.argv[1:])))
        return
    import memory

    shutil.rmtree(FOLDER, ignore_errors=True)
    build()
    kept = {}
    for name, command in CASES.items():
        command = command.format(reward=f"{FOLDER}/reward/model")
        run = f"{command} {COMMON} {RUN} --model_name_or_path {FOLDER}/policy --output_dir {FOLDER}/run"
        shutil.rmtree(FOLDER / "run", ignore_errors=True)
        said = subprocess.run([sys.executable, __file__, *run.split()], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        kept[name] = {"measured": int(said.stdout.split()[-1])}
        for size in ("1.5B", "7B"):
            options = "--max_prompt_tokens 256 --max_new_tokens 512 --micro_batch_size 4 --gradient_checkpointing"
            options += " --eval_prompts 32 --generate_batch_size 64"
            kept[name][size] = computed(f"{command} {options}", memory.MODELS[size])
        print(name, kept[name], flush=True)
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
