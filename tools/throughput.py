"""Speed and memory of one GRPO step: this project, stock `generate` with a plain loop, and TRL's GRPOTrainer.

    python benchmarks/throughput.py --workload vocab2k                  all three (TRL when it is installed)
    python benchmarks/throughput.py --workload embedded --against stock -o result.json
    python benchmarks/throughput.py --workload gpu --rows 8 32 64 --repetitions 3 --lines turns.jsonl
    python benchmarks/throughput.py --workload gpu --only ours --decode_rows 8 64 512

ours    grpo.py as it is: `rollout`, `compute_rewards`, `compute_advantages`, `update`
stock   `generate` with num_return_sequences, then a plain loop: rows in draw order, each forward padded to the longest
        row of the rollout, logits of all completion positions at once
trl     GRPOTrainer inside its own `train()`, with HF generate, beta 0, loss_type "grpo"; full precision and no gradient
        checkpointing (its defaults are bf16 and checkpointing), so that it computes what the others compute

Same for all: model, prompts, stop tokens, cap, rule reward, rows in a forward, one update a rollout, AdamW, no KL. A
step is rollout, rewards, advantages and update with the optimizer's step, without evaluation and logging. The rollout's
time is that of sampling alone. The learning rate is 1e-6, so that the lengths stay what they are.

Each contestant has a process of its own, and the machine for itself, one after the other. Peak memory is what the
steps add to the loaded model: resident set on CPU, allocated by torch on a GPU.

In its first turn each contestant trains on the first rollout of ours, in its own loop, and must arrive at the gradient
of ours. The second turn warms up, and those that follow are timed. Each turn is a line of JSON on stderr.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib.util
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
import traceback
import warnings

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # also in the contestants' processes

SMALL = dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=1024)
TINY = SMALL | dict(hidden_size=64, num_hidden_layers=2, intermediate_size=128)
HALF_BILLION = dict(hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2)
HALF_BILLION |= dict(intermediate_size=4864, tie_word_embeddings=True)  # the shape of Qwen2.5-0.5B
SPAWN = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
LEARNING_RATE, STD_EPS = 1e-6, 1e-4  # the latter is fixed in TRL


@dataclasses.dataclass(frozen=True)
class Workload:
    prompts: int
    group: int
    cap: int  # tokens of a completion
    rows: int  # completions in one forward of the update
    prompt_tokens: int = 0
    shortest_prompt: int = 0  # of a random model's prompts; 0: all have `prompt_tokens`
    mean: int = 0  # of the geometric lengths, without the cap
    vocabulary: int = 0
    shape: dict | None = None  # of a random model; None: a model that is there and its data, the embedded one or ...
    folder: str | None = None  # ... that of examples/smollm2.py, with prompts of `prompt_tokens` at least
    dtype: str = "float32"
    stock_rows: int | None = None  # stock's, instead of `rows`: what fits


WORKLOADS = {
    "embedded": Workload(prompts=32, group=8, cap=64, rows=64),
    "vocab2k": Workload(8, 16, cap=256, rows=32, prompt_tokens=96, mean=35, vocabulary=2048, shape=SMALL),
    "vocab32k": Workload(4, 8, cap=128, rows=32, prompt_tokens=96, mean=35, vocabulary=32768, shape=SMALL),
    "vocab32k_rows8": Workload(4, 8, cap=128, rows=8, prompt_tokens=96, mean=35, vocabulary=32768, shape=SMALL),
    "long_prompt": Workload(8, 8, cap=64, rows=32, prompt_tokens=512, mean=16, vocabulary=2048, shape=SMALL),
    "smollm2": Workload(8, 8, cap=24, rows=64, folder="runs/smollm2"),
    "smollm2_256": Workload(8, 8, cap=24, rows=64, prompt_tokens=256, folder="runs/smollm2"),
    "tiny": Workload(4, 4, cap=16, rows=8, prompt_tokens=12, shortest_prompt=4, mean=6, vocabulary=256, shape=TINY),
    "gpu": Workload(
        64, 8, cap=512, rows=64, prompt_tokens=128, shortest_prompt=64, mean=128, vocabulary=151936,
        shape=HALF_BILLION, dtype="bfloat16",
        # For 80 GB. A row of 640 tokens keeps 0.95 GB in the layers. Its logits in float32 are 0.31 GB: the plain loop
        # holds them, their softmax and two gradients of them, and 0.16 GB in bfloat16: 2.35 GB a row. The model, its
        # gradient and AdamW's moments are 4 GB: 24 rows take 60 GB. TRL's head runs in tiles: 64 rows take 67 GB.
        stock_rows=24,
    ),
}  # fmt: skip
DEFAULT = [name for name, workload in WORKLOADS.items() if name not in ("tiny", "gpu") and not workload.folder]


@dataclasses.dataclass(frozen=True)
class Task:
    """What a contestant's process is given: the workload as files and numbers."""

    name: str
    workload: Workload
    model: str  # folder
    prompts: list[tuple[list[int], str, str]]  # (ids, text, answer), `workload.prompts` of them for each step
    steps: int
    threads: int
    gradient: str  # file for that of the first step
    lines: str | None  # file for what is found
    decode_rows: list[int]
    label: str = ""
    rows: int = 0  # completions in one forward
    completions: list[list[int]] | None = None  # on which all but the first train in the first step

    def of_step(self, step):
        return self.prompts[step * self.workload.prompts : (step + 1) * self.workload.prompts]


# --- the workloads ---


def parity(completions, **columns):
    """A cheap rule whose values differ within a group, with the signature of TRL's reward functions."""
    return [float(len(completion) % 2) for completion in completions]


def accuracy(completions, answer, **columns):
    from common.rewards import accuracy_reward

    return [accuracy_reward(completion, gold) for completion, gold in zip(completions, answer, strict=True)]


def reward_function(workload):
    return parity if workload.shape or workload.folder else accuracy


def make_random(workload, number, folder):
    """A random Qwen2 with a tokenizer, in `folder`, and `number` random prompts of one letter a token.

    The model is nearly uniform over the vocabulary, and a share 1 / mean of the vocabulary are stop tokens: lengths are
    geometric, whoever samples. The row of the pad token is zero, as transformers makes it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, Qwen2Tokenizer

    letters = string.ascii_letters
    tokens = ["<pad>", "<eos>", *letters, "Ġ", *("Ġ" + letter for letter in letters)]  # Ġ is a space
    tokens += [f"w{i}" for i in range(len(tokens), workload.vocabulary)]  # only ever sampled
    vocabulary, merges = {token: i for i, token in enumerate(tokens)}, [("Ġ", letter) for letter in letters]
    tokenizer = Qwen2Tokenizer(vocabulary, merges, unk_token="<pad>", eos_token="<eos>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = dict(vocab_size=workload.vocabulary, max_position_embeddings=1024, pad_token_id=0, eos_token_id=1)
    config = AutoConfig.for_model("qwen2", **workload.shape, **sizes)
    lm = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, workload.dtype))
    with torch.no_grad():
        lm.base_model.norm.weight.mul_(0.05)  # nearly equal logits, also where the head is tied to the embedding
    stop_tokens = list(range(1, 1 + round(workload.vocabulary / workload.mean)))
    lm.generation_config = GenerationConfig(eos_token_id=stop_tokens, pad_token_id=0)
    lm.save_pretrained(folder)
    draw = random.Random(0)
    most, least = workload.prompt_tokens, workload.shortest_prompt
    lengths = [draw.randint(least, most) if least else most for _ in range(number)]
    texts = [" ".join(draw.choices(letters, k=length)) for length in lengths]
    return [(tokenizer(text).input_ids, text, "") for text in texts]


def make_embedded(number):
    """The embedded model's folder and prompts."""
    import grpo
    from common.harness.data import PromptSampler, load_prompts
    from common.harness.embedded import EMBEDDED
    from common.harness.loading import load_tokenizer

    args = grpo.Args()
    prompts, _, _ = load_prompts(args, load_tokenizer(args), True)
    chosen = [prompts[i] for i in PromptSampler(prompts, 0).draw(number)]
    return str(EMBEDDED), [(prompt.ids, prompt.prompt, prompt.answer) for prompt in chosen]


def make_smollm2(workload, number):
    """The folder of SmolLM2, and sums in its chat template; solved ones stand before the question up to the length."""
    from transformers import AutoTokenizer

    folder = pathlib.Path(workload.folder)
    if not (folder / "model" / "config.json").exists():
        raise SystemExit(f"{folder}/model is not there: python examples/smollm2.py writes it")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line) for line in (folder / "sums" / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    prompts = []
    for i in range(number):
        question, ids, shown = rows[i]["question"], [], 0
        while len(ids) < max(workload.prompt_tokens, 1):
            solved = "".join(f"{row['question']} {row['answer']}\n" for row in rows[number : number + shown])
            messages = [{"role": "user", "content": solved + question}]
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids, shown = tokenizer(text, add_special_tokens=False).input_ids, shown + 1
        prompts.append((ids, text, rows[i]["answer"]))
    return str(folder / "model"), prompts


# --- a contestant ---


def clock():
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def memory():
    """GB in use now, and at most since `forget_peak`."""
    if torch.accelerator.is_available():
        return torch.accelerator.memory_allocated() / 1e9, torch.accelerator.max_memory_allocated() / 1e9
    try:
        lines = pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise SystemExit("the memory of a process on CPU is read from /proc, which only Linux has") from None
    kilobytes = {line.split()[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS:", "VmHWM:"))}
    return kilobytes["VmRSS:"] * 1024 / 1e9, kilobytes["VmHWM:"] * 1024 / 1e9


def forget_peak():
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()
    else:
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the same


def say(task, **found):
    """One line of JSON for what has just been found, on stderr and in the file of --lines."""
    found = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in found.items()}
    line = json.dumps(dict(workload=task.name, contestant=task.label) | found)
    print(line, file=sys.stderr, flush=True)
    if task.lines:
        with open(task.lines, "a", encoding="utf-8", newline="\n") as file:
            file.write(line + "\n")


class Watch:
    """Measures the steps of a contestant; keeps the completions and the gradient of the first one."""

    def __init__(self, task, named_parameters, optimizer):
        self.task, self.turns, self.decoding, self.completions = task, [], [], None

        def save_gradient(*_):
            if not self.turns:
                torch.save({name.removeprefix("lm."): x.grad for name, x in named_parameters}, task.gradient)

        optimizer.register_step_pre_hook(save_gradient)
        forget_peak()
        self.base, _ = memory()

    def start(self):
        self.times = {"start": clock()}
        forget_peak()

    def mark(self, name):
        """Note the time at the end of a part of the step: rollout, scored, update."""
        self.times[name] = clock()

    def done(self, completions, rollout_s=None):
        """The end of a step. Its update is what follows the advantages."""
        self.mark("update")
        times, lengths = self.times, [len(ids) for ids in completions]
        rollout_s = rollout_s or times["rollout"] - times["start"]
        self.completions = self.completions or completions
        self.turns.append(dict(
            rows=self.task.rows,
            rollout_s=rollout_s,
            update_s=times["update"] - times["scored"],
            step_s=times["update"] - times["start"],
            tokens=sum(lengths),
            longest=max(lengths),
            ms_a_token=1000 * rollout_s / max(lengths),
            peak_gb=memory()[1] - self.base,
        ))  # fmt: skip
        say(self.task, turn=["check", "warm-up", "timed"][min(len(self.turns), 3) - 1], **self.turns[-1])


def run_loop(task, plain):
    """`ours`, or with `plain` the stock contestant, which shares data, rewards and advantages; returns its watch."""
    import grpo
    from common.batches import completion_texts
    from common.harness.data import Prompt
    from common.harness.distributed import launch
    from common.harness.loading import load_policy, load_tokenizer
    from common.harness.metrics import Metrics
    from common.rewards import Reward

    workload = task.workload
    args = grpo.Args(
        model_name_or_path=task.model,
        dtype=workload.dtype,
        prompts_per_step=workload.prompts,
        group_size=workload.group,
        max_new_tokens=workload.cap,
        micro_batch_size=task.rows,
        learning_rate=LEARNING_RATE,
        std_eps=STD_EPS,
        kl_coef=0,
        rollout="hf" if plain else "shared",
    )
    accelerator = launch(args)
    tokenizer = load_tokenizer(args)
    policy = load_policy(args, tokenizer)
    torch.set_num_threads(task.threads)  # `load_policy` has chosen its own
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, weight_decay=args.weight_decay)
    model, optimizer = accelerator.prepare(policy, optimizer)
    function = reward_function(workload)
    reward_functions = [Reward(function.__name__, 1.0, function)]
    watch = Watch(task, list(policy.named_parameters()), optimizer.optimizer)
    for step in range(task.steps):
        prompts = [Prompt(ids, text, answer, {"answer": answer}) for ids, text, answer in task.of_step(step)]
        watch.start()
        if step == 0 and task.completions:
            batch = given_batch(policy, prompts, task.completions)
        else:
            with accelerator.autocast():
                batch = grpo.rollout(policy, prompts, args.group_size, 1.0, 1.0, (0, 0, step, 0), args)
        watch.mark("rollout")
        texts = completion_texts(tokenizer, batch)
        rewards, _, _ = grpo.compute_rewards(reward_functions, prompts, texts, batch["truncated"])
        batch["rewards"] = rewards.to(accelerator.device)
        batch["advantages"] = grpo.compute_advantages(rewards, args).to(accelerator.device)
        batch["loss_mask"] = batch["completion_mask"]
        watch.mark("scored")
        if plain:
            plain_update(policy.lm, optimizer, batch, args)
        else:
            grpo.update(accelerator, model, None, optimizer, batch, step + 1, args, Metrics())
        lengths = batch["completion_mask"].sum(dim=1).tolist()
        pairs = zip(batch["completions"].tolist(), lengths, strict=True)
        watch.done([ids[:length] for ids, length in pairs])
    prompts = [Prompt(ids, text, answer, {}) for ids, text, answer in task.prompts]
    for rows in [] if plain else task.decode_rows:
        watch.decoding.append(time_decoding(policy, accelerator, prompts, rows, args))
        say(task, decode=True, **watch.decoding[-1])
    return watch


def time_decoding(policy, accelerator, prompts, rows, args):
    """The milliseconds of a token with this many rows, none of which ends: of two rollouts, the cold one first."""
    import grpo

    n = min(args.group_size, rows)
    args = dataclasses.replace(args, group_size=n, max_new_tokens=min(args.max_new_tokens, 256))
    stop_tokens, policy.stop_tokens = policy.stop_tokens, [policy.lm.config.get_text_config().vocab_size]
    seconds = []
    for step in range(2):
        start = clock()
        with accelerator.autocast():
            batch = grpo.rollout(policy, prompts[: rows // n], n, 1.0, 1.0, (0, 0, step, 1), args)
        seconds.append(clock() - start)
    policy.stop_tokens = stop_tokens
    rows, tokens = batch["completions"].shape
    cold, warm = (1000 * each / tokens for each in seconds)
    return dict(rows=rows, tokens=tokens, cold_ms_a_token=cold, ms_a_token=warm)


def given_batch(policy, prompts, completions):
    """The batch of `grpo.rollout` for completions that are there already."""
    from torch.nn.utils.rnn import pad_sequence

    from common.batches import left_pad
    from common.masked import completion_mask

    ids, mask = left_pad([prompt.ids for prompt in prompts], policy.pad_token, policy.lm.device)
    n = len(completions) // len(prompts)
    batch = {"prompts": ids.repeat_interleave(n, dim=0), "prompt_mask": mask.repeat_interleave(n, dim=0)}
    rows = [torch.tensor(row, device=policy.lm.device) for row in completions]
    batch["completions"] = pad_sequence(rows, batch_first=True, padding_value=policy.pad_token)
    batch["completion_mask"], batch["truncated"] = completion_mask(batch["completions"], policy.stop_tokens)
    return batch


def plain_update(lm, optimizer, batch, args):
    """One optimizer step as a straightforward script writes it."""
    input_ids = torch.cat([batch["prompts"], batch["completions"]], dim=1)  # (R, P + T)
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).long()
    rows, T = batch["completions"].shape
    for start in range(0, rows, args.micro_batch_size):
        part = slice(start, start + args.micro_batch_size)
        tokens, mask, advantages = (batch[name][part] for name in ("completions", "completion_mask", "advantages"))
        outputs = lm(
            input_ids=input_ids[part], attention_mask=attention_mask[part], logits_to_keep=T + 1, use_cache=False
        )
        logits = outputs.logits[:, :-1].float() / args.temperature  # (R, T, V)
        logprobs = logits.log_softmax(dim=-1).gather(-1, tokens[..., None]).squeeze(-1)
        ratio = (logprobs - logprobs.detach()).exp()
        clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
        losses = -torch.minimum(ratio * advantages, clipped * advantages)
        loss = ((losses * mask).sum(dim=1) / mask.sum(dim=1)).sum() / rows
        loss.backward()
    torch.nn.utils.clip_grad_norm_(lm.parameters(), args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()


def run_trl(task):
    """TRL's trainer in its own `train()`, measured by callbacks at the borders of a step; returns its watch."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    workload = task.workload
    config = GRPOConfig(
        output_dir=task.gradient.removesuffix(".pt"),
        max_steps=task.steps,
        per_device_train_batch_size=task.rows,
        gradient_accumulation_steps=workload.prompts * workload.group // task.rows,
        num_generations=workload.group,
        max_completion_length=workload.cap,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        shuffle_dataset=False,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )

    class Trainer(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            start, step = clock(), self.state.global_step
            expected = [ids for ids, _, _ in task.of_step(step) for _ in range(workload.group)]
            assert prompt_ids == expected, "other prompts"
            if step == 0:
                result = task.completions, None
            else:
                result = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            self.watch.mark("rollout")
            self.completions, self.sampled = result[0], self.watch.times["rollout"] - start
            return result

        def _generate_and_score_completions(self, inputs):
            result = super()._generate_and_score_completions(inputs)
            self.watch.mark("scored")
            return result

    class AtBorders(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            trainer.watch = Watch(task, list(trainer.model.named_parameters()), trainer.optimizer.optimizer)

        def on_step_begin(self, *args, **kwargs):
            trainer.watch.start()

        def on_step_end(self, *args, **kwargs):
            trainer.watch.done(trainer.completions, trainer.sampled)

    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(task.model, dtype=getattr(torch, workload.dtype)),
        reward_funcs=reward_function(workload),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text, "answer": answer} for _, text, answer in task.prompts]),
        processing_class=AutoTokenizer.from_pretrained(task.model),
        callbacks=[AtBorders()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.watch


def contestant(who, task):
    """Run one contestant: its turns, the completions of the first one, and the times of decoding."""
    import transformers

    warnings.simplefilter("ignore", FutureWarning)  # between the libraries
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(task.threads)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as `launch` does, so for TRL too
    watch = run_trl(task) if who == "trl" else run_loop(task, plain=who == "stock")
    return watch.turns, watch.completions, watch.decoding


# --- the comparison ---


class Comparison:
    """What was found in one workload: {contestant: its timed turns}, how far gradients differ, and problems."""

    def __init__(self, task):
        self.task, self.check, self.results, self.decoding, self.problems = task, {}, {}, [], []
        self.reference = None  # the gradient of ours

    def run(self, who, rows, label, timed=True):
        """One contestant in a process of its own. If it fails, that is a problem, and the next one goes on."""
        task = dataclasses.replace(self.task, label=label, rows=rows, steps=self.task.steps if timed else 1)
        if who != "ours" and self.reference is None:
            return self.problem(label, "there is no rollout of ours to compare it on")
        try:
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=SPAWN) as process:
                turns, completions, decoding = process.submit(contestant, who, task).result()
        except Exception as error:  # also of a process that was killed
            traceback.print_exception(error)
            return self.problem(label, f"{type(error).__name__}: its traceback is above")
        gradient = torch.load(task.gradient, map_location="cpu")
        if self.reference is None:
            self.reference, self.task = gradient, dataclasses.replace(self.task, completions=completions)
            self.check |= dict(rows=len(completions), tokens=turns[0]["tokens"])
        else:
            self.compare(label, gradient, completions)
        if timed:
            self.results[label] = turns[2:]
            self.decoding = self.decoding or decoding

    def compare(self, label, gradient, completions):
        """Whether it got the gradient of ours (before the optimizer, clipped) from the same tokens."""
        assert completions == self.task.completions, f"{label} has other tokens"
        error = self.check[label] = difference(self.reference, gradient)
        if not error <= tolerance(self.task.workload):  # also where it is NaN
            self.problem(label, f"the gradient differs from ours by {error:.1e} of its norm")

    def problem(self, label, what):
        self.problems.append(f"{label}: {what}")


def compare_all(task, options):
    """Ours with each of --rows, and those that it is compared with."""
    found, workload = Comparison(task), task.workload
    rows = sorted(options.rows or [workload.rows])
    for number in rows:
        found.run("ours", number, f"ours-{number}" if len(rows) > 1 else "ours")
    for who in ["stock"] if options.only else options.against:
        number = rows[-1]
        if who == "stock" and workload.stock_rows:
            number = min(number, workload.stock_rows)
        found.run(who, number, who, timed=not options.only)
    return found


def difference(ours, theirs):
    """How far a gradient {name: tensor} is from ours, as a part of the norm of ours."""
    assert theirs.keys() == ours.keys(), "other weights"
    norm = sum(gradient.double().square().sum() for gradient in ours.values()).sqrt()
    error = sum((theirs[name].double() - ours[name].double()).square().sum() for name in ours).sqrt()
    return float(error / norm)


def tolerance(workload):
    """How far two gradients may differ, of their norm. Rounding to float32 alone moves that of SmolLM2 by 5e-6."""
    if workload.dtype != "float32":
        return 5e-2
    return 1e-4 if workload.folder else 1e-5


def prepare(name, options, folder):
    """The model and the prompts of a workload, with `folder` for what is written."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    workload, steps = WORKLOADS[name], 2 + options.repetitions  # the common rollout, a warm-up, and what is timed
    number = workload.prompts * steps
    if workload.shape:
        model, prompts = folder, make_random(workload, number, folder)
    elif workload.folder:
        model, prompts = make_smollm2(workload, number)
    else:
        model, prompts = make_embedded(number)
    gradient, lines = f"{folder}/gradient.pt", options.lines
    return Task(name, workload, model, prompts, steps, options.threads, gradient, lines, options.decode_rows)


# --- what is printed ---


def spread(values, digits=2):
    """Median and range, if there is one."""
    if min(values) == max(values):
        return f"{values[0]:.{digits}f}"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def rate(key):
    return lambda turn: turn["tokens"] / turn[key]


COLUMNS = {  # title: (value of a turn, digits)
    "rows a forward": (lambda turn: turn["rows"], 0),
    "tokens a step": (lambda turn: turn["tokens"], 0),
    "rollout s": (lambda turn: turn["rollout_s"], 2),
    "rollout tokens/s": (rate("rollout_s"), 0),
    "ms a token": (lambda turn: turn["ms_a_token"], 1),
    "update s": (lambda turn: turn["update_s"], 2),
    "update tokens/s": (rate("update_s"), 0),
    "s a step": (lambda turn: turn["step_s"], 2),
    "peak GB over the model": (lambda turn: turn["peak_gb"], 2),
}


def markdown(header, rows):
    lines = [["", *header], ["---"] * (len(header) + 1), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def ratios(ours, theirs):
    """How many times better ours is: rollout, update, step, and the part of the memory that it takes."""
    pairs = list(zip(ours, theirs, strict=False))  # one whose process ended has fewer turns
    rates = [spread([rate(key)(our) / rate(key)(their) for our, their in pairs]) for key in ("rollout_s", "update_s")]
    step = spread([their["step_s"] / our["step_s"] for our, their in pairs])
    peaks = [max(turn["peak_gb"] for turn in turns) for turns in (theirs, ours)]
    return [*rates, step, f"{peaks[0] / peaks[1]:.2f}" if peaks[1] > 0 else "-"]


def tables(name, found, options):
    """What was found in one workload as lines of Markdown; there may be less of it than was asked for."""
    workload, check, results = found.task.workload, found.check, found.results
    on_gpu = torch.accelerator.is_available()
    device = torch.get_device_module().get_device_name() if on_gpu else f"{options.threads} CPU threads"
    differences = [f"{who} {value:.0e}" for who, value in check.items() if who not in ("rows", "tokens")]
    lines = [
        f"**{name}**: {workload.prompts} prompts x {workload.group}, cap {workload.cap}, {device}, "
        f"{options.repetitions} turns: median (range). Gradient on one rollout of {check.get('rows')} rows, "
        f"{check.get('tokens')} tokens, relative difference from ours: {', '.join(differences) or '-'}.",
        "",
    ]
    rows = []
    for who, turns in results.items():
        rows.append([who, *(spread([value(turn) for turn in turns], digits) for value, digits in COLUMNS.values())])
    lines += markdown(COLUMNS, rows)
    pairs = [(our, who) for our in results if our.startswith("ours") for who in results if who in ("stock", "trl")]
    if pairs:
        rows = [[f"{our} is better than {who} by", *ratios(results[our], results[who])] for our, who in pairs]
        lines += ["", *markdown(["rollout tokens/s", "update tokens/s", "s a step", "peak GB"], rows)]
    if found.decoding:
        rows = []
        for each in found.decoding:
            cold, warm = each["cold_ms_a_token"], each["ms_a_token"]
            rows.append([f"{each['rows']} rows", str(each["tokens"]), f"{cold:.2f}", f"{warm:.2f}"])
        lines += ["", "Decoding with rows that do not end, prefill included:", ""]
        lines += markdown(["tokens", "ms a token, cold", "ms a token"], rows)
    return "\n".join([*lines, *(f"\nPROBLEM: {problem}" for problem in found.problems)])


def parse_options(arguments=None):
    installed = ["stock", "trl"] if importlib.util.find_spec("trl") else ["stock"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=DEFAULT)
    parser.add_argument("--repetitions", type=int, default=5, help="timed turns of each contestant")
    parser.add_argument("--against", nargs="+", choices=["stock", "trl"], default=installed)
    parser.add_argument("--only", choices=["ours"], help="time ours alone; stock computes the gradient to compare with")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of a contestant")
    parser.add_argument("--rows", type=int, nargs="+", help="completions in a forward of the update; ours has each")
    parser.add_argument("--decode_rows", type=int, nargs="+", default=[], help="ours: time a token with so many rows")
    parser.add_argument("--lines", help="file to which the line of each turn is added")
    parser.add_argument("-o", "--output", help="JSON file for the results of every turn")
    options = parser.parse_args(arguments)
    if "gpu" in options.workload and not torch.accelerator.is_available():
        parser.error("--workload gpu needs a GPU")
    if "trl" in options.against and "trl" not in installed:
        parser.error("TRL is not installed: pip install -r benchmarks/requirements.txt")
    return options


def main(arguments=None):
    options = parse_options(arguments)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # read when a contestant's process starts
    everything, problems = {}, []
    for name in options.workload:
        with tempfile.TemporaryDirectory() as folder:
            found = compare_all(prepare(name, options, folder), options)
        print(tables(name, found, options) + "\n", flush=True)
        problems += found.problems
        about = {"workload": dataclasses.asdict(WORKLOADS[name]), "threads": options.threads, "check": found.check}
        everything[name] = about | found.results | ({"decoding": found.decoding} if found.decoding else {})
        if options.output:
            text = json.dumps(everything, indent=2) + "\n"
            pathlib.Path(options.output).write_text(text, encoding="utf-8", newline="\n")
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
