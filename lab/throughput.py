"""Compare speed and memory of one GRPO step: grpo.py, with and without --fast, and TRL.

    python lab/throughput.py --workload vocab2k             grpo.py against TRL
    python lab/throughput.py --workload vocab2k --fast      grpo.py --fast against both
    python lab/throughput.py --workload embedded --fast --against plain -o result.json

ours    grpo.py: `rollout`, `compute_rewards`, `compute_advantages`, `update`; with --fast if given
plain   the same without --fast
trl     GRPOTrainer inside its own `train()`, in full precision and without gradient checkpointing

All share model, prompts, stop tokens, length limit, rule reward, rows per forward, one update per
rollout and AdamW, without a KL. The learning rate is 1e-6, so that lengths do not drift.
Weights are random, except in `embedded` and `smollm2`. Peak memory is what the steps add to the
loaded model: resident set on a CPU (Linux only), allocated by torch on a GPU.

Each contestant runs in its own process and has the machine to itself. In its first turn it trains
on the first rollout of ours, and must get the same gradient as ours. The second turn is a warm-up,
the rest are timed.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import pathlib
import random
import statistics
import string
import sys
import tempfile
import time
import types

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import grpo
from common.load import EMBEDDED, Prompt, PromptSampler, load_policy, load_prompts, load_tokenizer
from common.masked import Means
from common.rewards import Reward, accuracy_reward, decode_completions
from common.run import make_accelerator

SPAWN = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
LEARNING_RATE = 1e-6
STD_EPS = 1e-4  # fixed in TRL
CHECK_TURNS = 2  # the shared rollout, and a warm-up
ON_GPU = torch.accelerator.is_available()


@dataclasses.dataclass(frozen=True)
class Workload:
    prompts: int
    group: int  # completions per prompt
    cap: int  # tokens of a completion
    rows: int  # completions in one forward of the update
    plain_rows: int = 10**6  # without --fast, if `rows` do not fit
    folder: str | None = None  # from examples/smollm2.py; None: the embedded or a random model
    shape: tuple | None = None  # hidden size, layers, heads, intermediate size of a random model
    tied: bool = False  # embedding and head share a weight
    vocabulary: int = 0
    mean: int = 0  # mean of its geometric completion lengths, before the cap
    prompt_tokens: tuple = (0, 0)  # shortest and longest prompt
    dtype: str = "float32"


SMALL = {"shape": (256, 4, 4, 1024), "mean": 35, "prompt_tokens": (96, 96)}
VOCAB2K = Workload(8, 16, cap=256, rows=32, vocabulary=2048, **SMALL)
VOCAB32K = Workload(4, 8, cap=128, rows=32, vocabulary=32768, **SMALL)
SMOLLM2 = Workload(8, 8, cap=24, rows=64, folder="runs/smollm2")
TINY = {"shape": (64, 2, 4, 128), "mean": 6, "prompt_tokens": (4, 12), "vocabulary": 256}
# The shape of Qwen2.5-0.5B, for 80 GB: 24 rows of a plain loop take 60 GB, 64 rows of TRL 67 GB.
GPU = {"shape": (896, 24, 14, 4864), "tied": True, "vocabulary": 151936, "dtype": "bfloat16"}
GPU |= {"mean": 128, "prompt_tokens": (64, 128)}
WORKLOADS = {
    "embedded": Workload(32, 8, cap=64, rows=64),
    "vocab2k": VOCAB2K,
    "vocab32k": VOCAB32K,
    "vocab32k_rows8": dataclasses.replace(VOCAB32K, rows=8),
    "long_prompt": dataclasses.replace(VOCAB2K, group=8, cap=64, mean=16, prompt_tokens=(512, 512)),
    "smollm2": SMOLLM2,
    "smollm2_256": dataclasses.replace(SMOLLM2, prompt_tokens=(256, 256)),
    "gpu": Workload(64, 8, cap=512, rows=64, plain_rows=24, **GPU),
    "tiny": Workload(4, 4, cap=16, rows=8, **TINY),  # to try the program
}
DEFAULT = ["embedded", "vocab2k", "vocab32k", "vocab32k_rows8", "long_prompt"]


@dataclasses.dataclass(frozen=True)
class Task:
    """The input of a contestant's process."""

    who: str  # ours, plain, trl
    workload: Workload
    fast: bool
    rows: int  # completions in one forward
    model: str  # folder
    prompts: list[Prompt]  # `workload.prompts` of them for each step
    threads: int
    gradient: str  # file for the gradient of the first step
    completions: list[list[int]] | None = None  # all but the first contestant train on them first

    @property
    def steps(self):
        return len(self.prompts) // self.workload.prompts

    @property
    def reward(self):
        return parity if self.workload.shape or self.workload.folder else right

    def of_step(self, step):
        first = step * self.workload.prompts
        return self.prompts[first : first + self.workload.prompts]


# --- the workloads ---


def parity(completion_ids, **columns):
    """Return a cheap reward that differs within a group, whatever a text does with stop tokens."""
    return [float(len(ids) % 2) for ids in completion_ids]


def right(completions, answer, **columns):
    return [accuracy_reward(text, gold) for text, gold in zip(completions, answer, strict=True)]


def make_random(workload, number, folder):
    """Write a random Qwen2 and its tokenizer; return [(prompt, "")], one random letter per token.

    The model is nearly uniform over the vocabulary, and a fraction 1 / mean of the tokens are stop
    tokens: lengths are geometric for every sampler.
    """
    tokenizer = letter_tokenizer(workload.vocabulary)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    hidden, layers, heads, intermediate = workload.shape
    config = transformers.Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        intermediate_size=intermediate,
        vocab_size=workload.vocabulary,
        tie_word_embeddings=workload.tied,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=1,
    )
    lm = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, workload.dtype))
    with torch.no_grad():
        lm.base_model.norm.weight.mul_(0.05)  # nearly equal logits, also with a tied head
    stop_tokens = list(range(1, 1 + round(workload.vocabulary / workload.mean)))
    lm.generation_config = transformers.GenerationConfig(eos_token_id=stop_tokens, pad_token_id=0)
    lm.save_pretrained(folder)

    draw = random.Random(0)
    rows = []
    for _ in range(number):
        length = draw.randint(*workload.prompt_tokens)
        rows.append((" ".join(draw.choices(string.ascii_letters, k=length)), ""))
    return rows


def letter_tokenizer(vocabulary):
    letters = string.ascii_letters
    tokens = ["<pad>", "<eos>", *letters, "Ġ", *("Ġ" + letter for letter in letters)]  # Ġ: space
    tokens += [f"w{i}" for i in range(len(tokens), vocabulary)]  # only ever sampled
    ids = {token: i for i, token in enumerate(tokens)}
    special = {"unk_token": "<pad>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return transformers.Qwen2Tokenizer(ids, [("Ġ", letter) for letter in letters], **special)


def sample_embedded(number):
    """Return [(prompt, answer)] of the embedded data."""
    args = grpo.Args()
    tokenizer = load_tokenizer(args.model_name_or_path)
    prompts, _ = load_prompts(args, tokenizer)
    one_process = types.SimpleNamespace(process_index=0, num_processes=1)
    drawn = PromptSampler(prompts, 0, one_process).draw(number)
    return [(tokenizer.decode(prompt.ids), prompt.gold) for prompt in drawn]


def make_sums(workload, number, tokenizer):
    """Return [(prompt, answer)] of sums in SmolLM2's chat template.

    Solved sums are prepended to a question until it has as many tokens as the workload asks for.
    """
    path = pathlib.Path(workload.folder, "sums", "train.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = []
    for row in rows[:number]:
        solved = [f"{each['question']} {each['answer']}\n" for each in rows[number:]]
        for count in range(len(solved)):
            turn = {"role": "user", "content": "".join(solved[:count]) + row["question"]}
            text = tokenizer.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
            if len(tokenizer(text).input_ids) >= workload.prompt_tokens[0]:
                break
        found.append((text, row["answer"]))
    return found


def prepare(name, options, folder):
    """Return the `Task` of ours; `folder` is for what a workload writes."""
    workload = WORKLOADS[name]
    number = workload.prompts * (CHECK_TURNS + options.repetitions)
    if workload.shape:
        model, rows = folder, make_random(workload, number, folder)
    elif workload.folder:
        model = f"{workload.folder}/model"
        rows = make_sums(workload, number, AutoTokenizer.from_pretrained(model))
    else:
        model, rows = str(EMBEDDED["embedded"]), sample_embedded(number)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [
        Prompt(tokenizer(text).input_ids, text, gold, {"answer": gold}) for text, gold in rows
    ]
    in_forward = options.rows or workload.rows
    gradient = f"{folder}/gradient.pt"
    fast = options.fast
    return Task("ours", workload, fast, in_forward, model, prompts, options.threads, gradient)


# --- measuring ---


def clock():
    if ON_GPU:
        torch.accelerator.synchronize()
    return time.perf_counter()


def memory(peak=False):
    """Return the GB in use, or their peak: allocated by torch on a GPU, else resident."""
    if ON_GPU:
        gpu = torch.accelerator
        return (gpu.max_memory_allocated() if peak else gpu.memory_allocated()) / 1e9
    lines = pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM:" if peak else "VmRSS:")]
    return int(line.split()[1]) * 1024 / 1e9


def reset_peak():
    if ON_GPU:
        torch.accelerator.reset_peak_memory_stats()
    else:
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


class Watch:
    """Measures the steps of a contestant; keeps completions and gradient of the first one."""

    def __init__(self, task, named_parameters, optimizer):
        self.task = task
        self.weights = named_parameters
        self.turns = []
        self.completions = None
        self.times = {}
        optimizer.register_step_pre_hook(self.save_gradient)
        reset_peak()
        self.base = memory()

    def save_gradient(self, *hook_arguments):
        if not self.turns:
            torch.save({name: weight.grad for name, weight in self.weights}, self.task.gradient)

    def start(self):
        reset_peak()
        self.times = {"start": clock()}

    def mark(self, name):
        """Record the end of a part of the step: rollout, scored or update."""
        self.times[name] = clock()

    def done(self, completions):
        """Record the end of a step, and print what it took."""
        self.mark("update")
        times = self.times
        self.completions = self.completions or completions
        turn = {
            "rollout_s": times["rollout"] - times["start"],
            "update_s": times["update"] - times["scored"],
            "step_s": times["update"] - times["start"],
            "tokens": sum(map(len, completions)),
            "peak_gb": memory(peak=True) - self.base,
        }
        self.turns.append(turn)
        print(f"{self.task.who}, step {len(self.turns)}: {turn['step_s']:.2f} s", file=sys.stderr)


# --- grpo.py ---


def run_loop(task):
    """Run the functions of grpo.py."""
    workload = task.workload
    args = grpo.Args(
        model_name_or_path=task.model,
        dtype=workload.dtype,
        fast=task.fast,
        prompts_per_step=workload.prompts,
        group_size=workload.group,
        max_new_tokens=workload.cap,
        micro_batch_size=task.rows,
        generate_batch_size=0,
        learning_rate=LEARNING_RATE,
        std_eps=STD_EPS,
        kl_coef=0,
    )
    accelerator = make_accelerator(args)
    tokenizer, lm = load_policy(args, accelerator)
    if args.fast:
        from fast import speed_up

        speed_up(lm, accelerator)
    torch.set_num_threads(task.threads)  # `load_policy` chooses its own number
    fused = accelerator.device.type == "cuda"
    optimizer = torch.optim.AdamW(lm.parameters(), LEARNING_RATE, weight_decay=0.0, fused=fused)
    model, optimizer = accelerator.prepare(lm, optimizer)
    rewards = [Reward("reward", 1.0, task.reward)]
    n = args.group_size
    watch = Watch(task, list(lm.named_parameters()), optimizer.optimizer)
    for step in range(task.steps):
        prompts = task.of_step(step)
        watch.start()
        sampler = given(lm, task.completions, args) if step == 0 and task.completions else lm
        with accelerator.autocast():
            batch = grpo.rollout(sampler, tokenizer, prompts, n, 1.0, 1.0, (0, 0, step), args)
        watch.mark("rollout")
        completions = decode_completions(tokenizer, batch)
        total, _ = grpo.compute_rewards(rewards, prompts, completions, n)
        advantages = grpo.compute_advantages(total, args)
        batch["advantages"] = advantages.float().to(accelerator.device)
        batch["loss_mask"] = batch["completion_mask"]
        watch.mark("scored")
        grpo.update(accelerator, model, None, optimizer, batch, args, Means())
        watch.done([completion.ids for completion in completions])
    return watch


def given(lm, completions, args):
    """Return a stand-in for `lm` that `grpo.rollout` gets these completions from."""
    rows = [torch.tensor(row, device=lm.device) for row in completions]
    rows = pad_sequence(rows, batch_first=True)  # behind a stop token any id will do

    def generate(input_ids, **options):
        return torch.cat([input_ids.repeat_interleave(args.group_size, dim=0), rows], dim=1)

    config = lm.generation_config
    return types.SimpleNamespace(
        generate=generate, generation_config=config, device=lm.device, eval=lm.eval, train=lm.train
    )


# --- TRL ---


def run_trl(task):
    """Run TRL's trainer in its own `train()`, measured by callbacks at the ends of a step."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    workload = task.workload
    config = GRPOConfig(
        output_dir=task.gradient.removesuffix(".pt"),
        max_steps=task.steps,
        per_device_train_batch_size=task.rows,
        gradient_accumulation_steps=workload.prompts * workload.group // task.rows,
        num_generations=workload.group,
        max_completion_length=workload.cap,
        beta=0.0,
        loss_type="grpo",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not ON_GPU,
        dataloader_pin_memory=ON_GPU,
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )

    class Trainer(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            step = self.state.global_step
            expected = [prompt.ids for prompt in task.of_step(step) for _ in range(workload.group)]
            assert prompt_ids == expected, "other prompts"
            result = task.completions, None
            if step > 0:
                result = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            self.watch.mark("rollout")
            self.completions = result[0]
            return result

        def _generate_and_score_completions(self, inputs):
            result = super()._generate_and_score_completions(inputs)
            self.watch.mark("scored")
            return result

    class StepEnds(transformers.TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            weights = list(trainer.model.named_parameters())
            trainer.watch = Watch(task, weights, trainer.optimizer.optimizer)

        def on_step_begin(self, *args, **kwargs):
            trainer.watch.start()

        def on_step_end(self, *args, **kwargs):
            trainer.watch.done(trainer.completions)

    rows = [{"prompt": each.prompt, "answer": each.gold} for each in task.prompts]
    dtype = getattr(torch, workload.dtype)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(task.model, dtype=dtype),
        reward_funcs=task.reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(task.model),
        callbacks=[StepEnds()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer.watch


# --- the comparison ---


def run_contestant(task):
    """Run one contestant; return its turns, and the completions of the first one."""
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(task.threads)
    torch.backends.cuda.enable_cudnn_sdp(False)  # ours turns it off, so turn it off for TRL
    watch = run_trl(task) if task.who == "trl" else run_loop(task)
    return watch.turns, watch.completions


def compare_all(task, others):
    """Run all contestants. Return {who: timed turns}, and what was checked on the shared rollout."""
    results = {}
    check = {}  # its rows and tokens; how far each gradient is from ours, relative to its norm
    for who in ("ours", *others):
        fast = task.fast and who == "ours"
        rows = task.rows if fast or who == "trl" else min(task.rows, task.workload.plain_rows)
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=SPAWN) as process:
            own_task = dataclasses.replace(task, who=who, fast=fast, rows=rows)
            turns, completions = process.submit(run_contestant, own_task).result()
        results[who] = turns[CHECK_TURNS:]
        gradient = torch.load(task.gradient, map_location="cpu")
        if who == "ours":
            reference = gradient
            task = dataclasses.replace(task, completions=completions)
            check |= {"rows": len(completions), "tokens": turns[0]["tokens"]}
            continue
        assert completions == task.completions, f"{who} trained on other tokens"
        check[who] = difference(reference, gradient)
        if not check[who] <= tolerance(task.workload):  # also if it is NaN
            raise SystemExit(f"{who}: its gradient is {check[who]:.1e} of the norm away from ours")
    return results, check


def difference(ours, theirs):
    """Return the distance between two gradients {name: tensor}, relative to the norm of ours."""
    assert theirs.keys() == ours.keys(), "other weights"
    square = sum(gradient.double().square().sum() for gradient in ours.values())
    error = sum((theirs[name].double() - ours[name].double()).square().sum() for name in ours)
    return float((error / square).sqrt())


def tolerance(workload):
    """Return the largest difference of two gradients; rounding moves SmolLM2's by 5e-6."""
    if workload.dtype != "float32":
        return 5e-2
    return 1e-4 if workload.folder else 1e-5


def spread(values):
    """Return median and range as text."""
    return f"{statistics.median(values):,.2f} ({min(values):,.2f}-{max(values):,.2f})"


def speeds(turns, phase):
    """Return the tokens per second of each turn in `rollout` or `update`."""
    return [turn["tokens"] / turn[f"{phase}_s"] for turn in turns]


def table(results):
    """Return the numbers of one workload, and how many times better ours is, as Markdown."""
    lines = ["| | rollout tokens/s | update tokens/s | s a step | peak GB |", "|---" * 5 + "|"]
    for who, turns in results.items():
        columns = [speeds(turns, "rollout"), speeds(turns, "update")]
        columns += [[turn[key] for turn in turns] for key in ("step_s", "peak_gb")]
        lines.append(f"| {who} | {' | '.join(map(spread, columns))} |")
    ours, *others = results
    for who in others:
        columns = []
        for phase in ("rollout", "update"):
            pairs = zip(speeds(results[ours], phase), speeds(results[who], phase), strict=True)
            columns.append([our / their for our, their in pairs])
        pairs = list(zip(results[ours], results[who], strict=True))
        columns.append([their["step_s"] / our["step_s"] for our, their in pairs])
        peak, their_peak = (max(turn["peak_gb"] for turn in results[x]) for x in (ours, who))
        cells = [*map(spread, columns), f"{their_peak / peak:.2f}" if peak > 0 else "-"]
        lines.append(f"| ours is better than {who} by | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(words=None):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--workload", nargs="+", choices=WORKLOADS, default=DEFAULT)
    add("--repetitions", type=int, default=5, help="timed turns of each contestant")
    add("--fast", action="store_true", help="ours is grpo.py --fast")
    add("--against", nargs="+", choices=["plain", "trl"], help="[trl; with --fast also plain]")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads of a contestant")
    add("--rows", type=int, help="completions in one forward of the update")
    add("-o", "--output", type=pathlib.Path, help="JSON file for the results of every turn")
    options = parser.parse_args(words)
    against = options.against or (["plain", "trl"] if options.fast else ["trl"])
    if "plain" in against and not options.fast:
        parser.error("--against plain needs --fast: ours is plain without it")
    everything = {}
    for name in options.workload:
        with tempfile.TemporaryDirectory() as folder:
            results, check = compare_all(prepare(name, options, folder), against)
        print(f"**{name}**, {options.repetitions} turns, median (range)\n")
        print(f"{table(results)}\n\nDistance to the gradient of ours: {check}\n", flush=True)
        facts = {"workload": dataclasses.asdict(WORKLOADS[name]), "threads": options.threads}
        everything[name] = facts | {"check": check, **results}
        if options.output:
            text = json.dumps(everything, indent=2) + "\n"
            options.output.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
