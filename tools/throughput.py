"""Speed and memory of one GRPO step: this project, stock `generate` with a plain loop, and TRL.

    python tools/throughput.py --workload vocab2k                       all three (TRL when it is installed)
    python tools/throughput.py --workload embedded --against stock -o result.json
    python tools/throughput.py --workload gpu --rows 8 32 64 --repetitions 3 --lines turns.jsonl
    python tools/throughput.py --workload gpu --only ours --decode_rows 8 64 512

ours    grpo.py as it is: `rollout`, `compute_rewards`, `compute_advantages`, `update`
stock   the same with `--fast false`, and a plain loop for the update: rows in draw order, each forward
        padded to the longest row of the rollout, logits of all completion positions at once
trl     GRPOTrainer inside its own `train()`, with HF generate, beta 0, loss_type "grpo"; full
        precision and no gradient checkpointing (its defaults are bf16 and checkpointing), so that it
        computes what the others compute

Same for all: model, prompts, stop tokens, cap, rule reward, rows in a forward, one update a rollout,
AdamW, no KL. A step is rollout, rewards, advantages and update with the optimizer's step, without
evaluation and logging. The rollout's time is that of sampling alone. The learning rate is 1e-6, so
that the lengths stay what they are. Weights are random, except in `embedded` and `smollm2`.

Each contestant has a process of its own, and the machine for itself, one after the other. Peak memory
is what the steps add to the loaded model: resident set on CPU, allocated by torch on a GPU. It runs on
Linux; the workload `gpu` needs a GPU.

In its first turn each contestant trains on the first rollout of ours, in its own loop, and must arrive
at the gradient of ours. The second turn warms up, and those that follow are timed. Each turn is a line
of JSON on stderr. What disagrees or fails is printed as a problem, and the exit code is 1.
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

from piped import end_with_the_reader

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # also in the contestants' processes

SPAWN = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
LEARNING_RATE = 1e-6
STD_EPS = 1e-4  # fixed in TRL
CHECK_TURNS = 2  # the common rollout, and a warm-up

SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
}
TINY = SMALL | {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
HALF_BILLION = {  # the shape of Qwen2.5-0.5B
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "tie_word_embeddings": True,
}


@dataclasses.dataclass(frozen=True)
class Workload:
    prompts: int
    group: int  # completions of each prompt
    cap: int  # tokens of a completion
    rows: int  # completions in one forward of the update
    stock_rows: int | None = None  # stock's, instead of `rows`: what fits
    shape: dict | None = None  # of a random model; None: a model that is there, with its data
    vocabulary: int = 0
    mean: int = 0  # of the geometric lengths of a random model, without the cap
    prompt_tokens: int = 0
    shortest_prompt: int = 0  # of a random model's prompts; 0: all have `prompt_tokens`
    folder: str | None = None  # what examples/smollm2.py wrote; None: the embedded model
    dtype: str = "float32"


VOCAB2K = Workload(
    prompts=8,
    group=16,
    cap=256,
    rows=32,
    shape=SMALL,
    vocabulary=2048,
    mean=35,
    prompt_tokens=96,
)
VOCAB32K = dataclasses.replace(VOCAB2K, prompts=4, group=8, cap=128, vocabulary=32768)
SMOLLM2 = Workload(prompts=8, group=8, cap=24, rows=64, folder="runs/smollm2")
WORKLOADS = {
    "embedded": Workload(prompts=32, group=8, cap=64, rows=64),
    "vocab2k": VOCAB2K,
    "vocab32k": VOCAB32K,
    "vocab32k_rows8": dataclasses.replace(VOCAB32K, rows=8),
    "long_prompt": dataclasses.replace(VOCAB2K, group=8, cap=64, mean=16, prompt_tokens=512),
    "smollm2": SMOLLM2,
    "smollm2_256": dataclasses.replace(SMOLLM2, prompt_tokens=256),
    "tiny": Workload(  # to try the program
        prompts=4,
        group=4,
        cap=16,
        rows=8,
        shape=TINY,
        vocabulary=256,
        mean=6,
        prompt_tokens=12,
        shortest_prompt=4,
    ),
    # For 80 GB. A row of 640 tokens keeps 0.95 GB in the layers. Its logits in float32 are 0.31 GB: the
    # plain loop holds them, their softmax and two gradients of them, and 0.16 GB in bfloat16: 2.35 GB a
    # row. The model, its gradient and AdamW's moments are 4 GB: 24 rows take 60 GB. TRL's head runs in
    # tiles: 64 rows take 67 GB.
    "gpu": Workload(
        prompts=64,
        group=8,
        cap=512,
        rows=64,
        stock_rows=24,
        shape=HALF_BILLION,
        vocabulary=151936,
        mean=128,
        prompt_tokens=128,
        shortest_prompt=64,
        dtype="bfloat16",
    ),
}
DEFAULT = ["embedded", "vocab2k", "vocab32k", "vocab32k_rows8", "long_prompt"]


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt as token ids and as text, and its answer."""

    ids: list[int]
    text: str
    answer: str


@dataclasses.dataclass(frozen=True)
class Task:
    """What a contestant's process is given: the workload as files and numbers."""

    name: str
    workload: Workload
    model: str  # folder
    questions: list[Question]  # `workload.prompts` of them for each step
    steps: int
    threads: int
    gradient: str  # file for that of the first step
    lines: str | None  # file for what is found
    decode_rows: list[int]
    label: str = ""
    rows: int = 0  # completions in one forward
    completions: list[list[int]] | None = None  # on which all but the first train in the first step

    def of_step(self, step):
        first = step * self.workload.prompts
        return self.questions[first : first + self.workload.prompts]


# --- the workloads ---


def parity(completion_ids, **columns):
    """A cheap rule whose values differ within a group, with the signature of TRL's reward functions.

    It counts tokens: a text has the stop tokens of a random model in TRL, and not in ours.
    """
    return [float(len(ids) % 2) for ids in completion_ids]


def right(completions, answer, **columns):
    from common.rewards import accuracy

    return [
        accuracy(completion, gold) for completion, gold in zip(completions, answer, strict=True)
    ]


def reward_function(workload):
    return parity if workload.shape or workload.folder else right


def make_random(workload, number, folder):
    """A random Qwen2 with a tokenizer, in `folder`, and `number` random questions of one letter a token.

    The model is nearly uniform over the vocabulary, and a share 1 / mean of the vocabulary are stop
    tokens: lengths are geometric, whoever samples. The row of the pad token is zero, as transformers
    makes it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    tokenizer = letter_tokenizer(workload.vocabulary)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=workload.vocabulary,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=1,
        **workload.shape,
    )
    lm = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, workload.dtype))
    with torch.no_grad():
        lm.base_model.norm.weight.mul_(0.05)  # nearly equal logits, also where the head is tied
    stop_tokens = list(range(1, 1 + round(workload.vocabulary / workload.mean)))
    lm.generation_config = GenerationConfig(eos_token_id=stop_tokens, pad_token_id=0)
    lm.save_pretrained(folder)

    draw = random.Random(0)
    longest = workload.prompt_tokens
    shortest = workload.shortest_prompt or longest
    questions = []
    for _ in range(number):
        text = " ".join(draw.choices(string.ascii_letters, k=draw.randint(shortest, longest)))
        questions.append(Question(tokenizer(text).input_ids, text, answer=""))
    return questions


def letter_tokenizer(vocabulary):
    from transformers import Qwen2Tokenizer

    letters = string.ascii_letters
    after_space = ["Ġ" + letter for letter in letters]  # Ġ is a space
    tokens = ["<pad>", "<eos>", *letters, "Ġ", *after_space]
    tokens += [f"w{i}" for i in range(len(tokens), vocabulary)]  # only ever sampled
    ids = {token: i for i, token in enumerate(tokens)}
    merges = [("Ġ", letter) for letter in letters]
    return Qwen2Tokenizer(ids, merges, unk_token="<pad>", eos_token="<eos>", pad_token="<pad>")


def make_embedded(number):
    """The embedded model's folder and questions."""
    import grpo
    from harness.data import EMBEDDED, PromptSampler, load_prompts
    from harness.loading import load_tokenizer

    args = grpo.Args()
    prompts, _ = load_prompts(args, load_tokenizer(args))
    chosen = PromptSampler(prompts, 0).draw(number)
    questions = [Question(prompt.ids, prompt.prompt, prompt.gold) for prompt in chosen]
    return str(EMBEDDED["embedded"]), questions


def make_smollm2(workload, number):
    """The folder of SmolLM2, and sums in its chat template.

    Solved sums stand before a question until it has as many tokens as the workload says.
    """
    from transformers import AutoTokenizer

    folder = pathlib.Path(workload.folder)
    if not (folder / "model" / "config.json").exists():
        raise SystemExit(f"{folder}/model is not there: python examples/smollm2.py writes it")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    lines = (folder / "sums" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    questions = []
    for row in rows[:number]:
        ids = []
        shown = 0
        while len(ids) < max(workload.prompt_tokens, 1):
            solved = rows[number : number + shown]
            examples = "".join(f"{other['question']} {other['answer']}\n" for other in solved)
            messages = [{"role": "user", "content": examples + row["question"]}]
            text = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
            ids = tokenizer(text, add_special_tokens=False).input_ids
            shown += 1
        questions.append(Question(ids, text, row["answer"]))
    return str(folder / "model"), questions


def prepare(name, options, folder):
    """The model and the questions of a workload, with `folder` for what is written."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    workload = WORKLOADS[name]
    steps = CHECK_TURNS + options.repetitions
    number = workload.prompts * steps
    if workload.shape:
        model = folder
        questions = make_random(workload, number, folder)
    elif workload.folder:
        model, questions = make_smollm2(workload, number)
    else:
        model, questions = make_embedded(number)
    return Task(
        name=name,
        workload=workload,
        model=model,
        questions=questions,
        steps=steps,
        threads=options.threads,
        gradient=f"{folder}/gradient.pt",
        lines=options.lines,
        decode_rows=options.decode_rows,
    )


# --- what is measured ---


def clock():
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def memory_in_use():
    """GB allocated by torch on a GPU, or resident in memory."""
    if torch.accelerator.is_available():
        return torch.accelerator.memory_allocated() / 1e9
    return resident("VmRSS:")


def peak_memory():
    """The most of `memory_in_use` since `forget_peak`."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated() / 1e9
    return resident("VmHWM:")


def forget_peak():
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()
    else:
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the same


def resident(field):
    """GB of this process by a line of /proc/self/status."""
    try:
        lines = pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise SystemExit(
            "the memory of a process on CPU is read from /proc, which only Linux has"
        ) from None
    (line,) = [line for line in lines if line.startswith(field)]
    return int(line.split()[1]) * 1024 / 1e9


def say(task, **found):
    """One line of JSON for what has just been found, on stderr and in the file of --lines."""
    line = {"workload": task.name, "contestant": task.label}
    for name, value in found.items():
        line[name] = float(f"{value:.4g}") if isinstance(value, float) else value
    print(json.dumps(line), file=sys.stderr, flush=True)
    if task.lines:
        with open(task.lines, "a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(line) + "\n")


class Watch:
    """Measures the steps of a contestant; keeps the completions and the gradient of the first one."""

    def __init__(self, task, named_parameters, optimizer):
        self.task = task
        self.weights = named_parameters
        self.turns = []
        self.decoding = []
        self.completions = None
        self.times = {}
        optimizer.register_step_pre_hook(self.save_gradient)
        forget_peak()
        self.base = memory_in_use()

    def save_gradient(self, *of_the_hook):
        if not self.turns:
            gradient = {name.removeprefix("lm."): weight.grad for name, weight in self.weights}
            torch.save(gradient, self.task.gradient)

    def start(self):
        self.times = {"start": clock()}
        forget_peak()

    def mark(self, name):
        """Note the time at the end of a part of the step: rollout, scored, update."""
        self.times[name] = clock()

    def done(self, completions, rollout_s=None):
        """The end of a step. Its update is what follows the advantages."""
        self.mark("update")
        lengths = [len(ids) for ids in completions]
        longest = max(lengths)
        rollout_s = rollout_s or self.times["rollout"] - self.times["start"]
        if self.completions is None:
            self.completions = completions
        turn = {
            "rows": self.task.rows,
            "rollout_s": rollout_s,
            "update_s": self.times["update"] - self.times["scored"],
            "step_s": self.times["update"] - self.times["start"],
            "tokens": sum(lengths),
            "longest": longest,
            "ms_a_token": 1000 * rollout_s / longest,
            "peak_gb": peak_memory() - self.base,
        }
        self.turns.append(turn)
        kind = ["check", "warm-up", "timed"][min(len(self.turns), 3) - 1]
        say(self.task, turn=kind, **turn)


# --- ours and stock ---


def run_loop(task, plain):
    """Ours, or with `plain` the stock contestant, which shares data, rewards and advantages."""
    import grpo
    from common.batches import decode_completions
    from harness.launch import make_accelerator
    from harness.loading import load_policy, load_tokenizer
    from harness.metrics import Metrics
    from harness.optimization import adamw
    from harness.reward_functions import FunctionReward

    workload = task.workload
    args = grpo.Args(
        model_name_or_path=task.model,
        dtype=workload.dtype,
        fast=not plain,
        prompts_per_step=workload.prompts,
        group_size=workload.group,
        max_new_tokens=workload.cap,
        micro_batch_size=task.rows,
        learning_rate=LEARNING_RATE,
        std_eps=STD_EPS,
        kl_coef=0,
    )
    accelerator = make_accelerator(args)
    tokenizer = load_tokenizer(args)
    policy = load_policy(args, tokenizer, accelerator)
    torch.set_num_threads(task.threads)  # `load_policy` has chosen its own
    model, optimizer = accelerator.prepare(policy, adamw(policy, args))
    function = reward_function(workload)
    reward_functions = [FunctionReward(function.__name__, 1.0, function)]
    watch = Watch(task, list(policy.named_parameters()), optimizer.optimizer)
    for step in range(task.steps):
        prompts = prompts_of(task.of_step(step))
        watch.start()
        if step == 0 and task.completions:
            batch = given_rollout(policy, prompts, task.completions, args.group_size)
        else:
            with accelerator.autocast():
                batch = grpo.rollout(policy, prompts, args.group_size, 1.0, 1.0, (0, 0, step), args)
        watch.mark("rollout")
        completions = decode_completions(tokenizer, batch)
        rewards, _ = grpo.compute_rewards(reward_functions, prompts, completions, args.group_size)
        batch["advantages"] = grpo.compute_advantages(rewards, args).to(accelerator.device)
        batch["loss_mask"] = batch["completion_mask"]
        watch.mark("scored")
        if plain:
            plain_update(policy.lm, optimizer, batch, args)
        else:
            grpo.update(accelerator, model, None, optimizer, batch, args, Metrics())
        watch.done([completion.ids for completion in completions])
    if not plain:
        prompts = prompts_of(task.questions)
        for rows in task.decode_rows:
            watch.decoding.append(time_decoding(policy, accelerator, prompts, rows, args))
            say(task, decode=True, **watch.decoding[-1])
    return watch


def prompts_of(questions):
    from harness.data import Prompt

    prompts = []
    for question in questions:
        columns = {"answer": question.answer}
        prompts.append(Prompt(question.ids, question.text, question.answer, columns))
    return prompts


def given_rollout(policy, prompts, completions, n):
    """The batch of `grpo.rollout` for completions that are there already."""
    from types import SimpleNamespace

    from torch.nn.utils.rnn import pad_sequence

    from common.batches import rollout_batch
    from common.sampling import prompt_inputs

    inputs, _ = prompt_inputs(policy, prompts, n)
    rows = [torch.tensor(row, device=policy.lm.device) for row in completions]
    rows = pad_sequence(rows, batch_first=True, padding_value=policy.pad_token)
    ids = inputs["input_ids"].repeat_interleave(n, dim=0)
    output = SimpleNamespace(sequences=torch.cat([ids, rows], dim=1))
    return rollout_batch(policy, inputs, [output], n)


def plain_update(lm, optimizer, batch, args):
    """One optimizer step as a straightforward script writes it."""
    input_ids = torch.cat([batch["prompts"], batch["completions"]], dim=1)  # (R, P + T)
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).long()
    rows, width = batch["completions"].shape
    for start in range(0, rows, args.micro_batch_size):
        part = slice(start, start + args.micro_batch_size)
        tokens = batch["completions"][part]
        mask = batch["completion_mask"][part]
        advantages = batch["advantages"][part]
        outputs = lm(
            input_ids=input_ids[part],
            attention_mask=attention_mask[part],
            logits_to_keep=width + 1,
            use_cache=False,
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


def time_decoding(policy, accelerator, prompts, rows, args):
    """The milliseconds of a token with this many rows, none of which ends: of a cold and a warm rollout."""
    import grpo

    n = min(args.group_size, rows)
    args = dataclasses.replace(args, group_size=n, max_new_tokens=min(args.max_new_tokens, 256))
    stop_tokens = policy.stop_tokens
    policy.stop_tokens = [policy.lm.config.get_text_config().vocab_size]
    seconds = []
    for step in range(2):
        start = clock()
        with accelerator.autocast():
            batch = grpo.rollout(policy, prompts[: rows // n], n, 1.0, 1.0, (1, 0, step), args)
        seconds.append(clock() - start)
    policy.stop_tokens = stop_tokens
    rows, tokens = batch["completions"].shape
    return {
        "rows": rows,
        "tokens": tokens,
        "cold_ms_a_token": 1000 * seconds[0] / tokens,
        "ms_a_token": 1000 * seconds[1] / tokens,
    }


# --- TRL ---


def run_trl(task):
    """TRL's trainer in its own `train()`, measured by callbacks at the borders of a step."""
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
            start = clock()
            step = self.state.global_step
            expected = []
            for question in task.of_step(step):
                expected += [question.ids] * workload.group
            assert prompt_ids == expected, "other prompts"
            if step == 0:
                result = task.completions, None
            else:
                result = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            self.watch.mark("rollout")
            self.completions = result[0]
            self.sampled_s = self.watch.times["rollout"] - start
            return result

        def _generate_and_score_completions(self, inputs):
            result = super()._generate_and_score_completions(inputs)
            self.watch.mark("scored")
            return result

    class AtBorders(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            weights = list(trainer.model.named_parameters())
            trainer.watch = Watch(task, weights, trainer.optimizer.optimizer)

        def on_step_begin(self, *args, **kwargs):
            trainer.watch.start()

        def on_step_end(self, *args, **kwargs):
            trainer.watch.done(trainer.completions, trainer.sampled_s)

    rows = [{"prompt": question.text, "answer": question.answer} for question in task.questions]
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(
            task.model, dtype=getattr(torch, workload.dtype)
        ),
        reward_funcs=reward_function(workload),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(task.model),
        callbacks=[AtBorders()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.watch


# --- the comparison ---


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


class Comparison:
    """What was found in one workload."""

    def __init__(self, task):
        self.task = task
        self.reference = None  # the gradient of ours
        self.check = {}  # rows and tokens of the common rollout, and how far gradients are from ours
        self.results = {}  # {contestant: its timed turns}
        self.decoding = []
        self.problems = []

    def run(self, who, rows, label, timed=True):
        """One contestant in a process of its own. If it fails, that is a problem, and the next goes on."""
        if who != "ours" and self.reference is None:
            return self.problem(label, "there is no rollout of ours to compare it on")
        steps = self.task.steps if timed else 1
        task = dataclasses.replace(self.task, label=label, rows=rows, steps=steps)
        try:
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=SPAWN) as process:
                turns, completions, decoding = process.submit(contestant, who, task).result()
        except Exception as error:  # also of a process that was killed
            traceback.print_exception(error)
            return self.problem(label, f"{type(error).__name__}: its traceback is above")
        gradient = torch.load(task.gradient, map_location="cpu")
        if self.reference is None:
            self.reference = gradient
            self.task = dataclasses.replace(self.task, completions=completions)
            self.check["rows"] = len(completions)
            self.check["tokens"] = turns[0]["tokens"]
        else:
            self.compare(label, gradient, completions)
        if timed:
            self.results[label] = turns[CHECK_TURNS:]
            self.decoding = self.decoding or decoding

    def compare(self, label, gradient, completions):
        """Whether it got the gradient of ours (before the optimizer, clipped) from the same tokens."""
        assert completions == self.task.completions, f"{label} has other tokens"
        error = difference(self.reference, gradient)
        self.check[label] = error
        if not error <= tolerance(self.task.workload):  # also where it is NaN
            self.problem(label, f"the gradient differs from ours by {error:.1e} of its norm")

    def problem(self, label, what):
        self.problems.append(f"{label}: {what}")


def compare_all(task, options):
    """Ours with each of --rows, and those that it is compared with."""
    found = Comparison(task)
    rows = sorted(options.rows or [task.workload.rows])
    for number in rows:
        found.run("ours", number, f"ours-{number}" if len(rows) > 1 else "ours")
    for who in ["stock"] if options.only else options.against:
        number = rows[-1]
        if who == "stock" and task.workload.stock_rows:
            number = min(number, task.workload.stock_rows)
        found.run(who, number, who, timed=not options.only)
    return found


def difference(ours, theirs):
    """How far a gradient {name: tensor} is from ours, as a part of the norm of ours."""
    assert theirs.keys() == ours.keys(), "other weights"
    square = 0.0
    error = 0.0
    for name, gradient in ours.items():
        square += gradient.double().square().sum()
        error += (theirs[name].double() - gradient.double()).square().sum()
    return float((error / square).sqrt())


def tolerance(workload):
    """How far two gradients may differ, of their norm.

    Rounding to float32 alone moves that of SmolLM2 by 5e-6.
    """
    if workload.dtype != "float32":
        return 5e-2
    return 1e-4 if workload.folder else 1e-5


# --- what is printed ---


def spread(values, digits=2):
    """Median and range, if there is one."""
    median = f"{statistics.median(values):.{digits}f}"
    if min(values) == max(values):
        return median
    return f"{median} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def tokens_a_second(turn, phase):
    return turn["tokens"] / turn[f"{phase}_s"]


COLUMNS = [
    "rows a forward",
    "tokens a step",
    "rollout s",
    "rollout tokens/s",
    "ms a token",
    "update s",
]
COLUMNS += ["update tokens/s", "s a step", "peak GB over the model"]


def cells(turns):
    """The cells of COLUMNS for the turns of a contestant."""

    def of(name, digits):
        return spread([turn[name] for turn in turns], digits)

    def speed(phase):
        return spread([tokens_a_second(turn, phase) for turn in turns], 0)

    return [
        of("rows", 0),
        of("tokens", 0),
        of("rollout_s", 2),
        speed("rollout"),
        of("ms_a_token", 1),
        of("update_s", 2),
        speed("update"),
        of("step_s", 2),
        of("peak_gb", 2),
    ]


def ratios(ours, theirs):
    """How many times better ours is: rollout, update, step, and the part of the memory that it takes."""
    pairs = list(zip(ours, theirs, strict=False))  # one whose process ended has fewer turns
    result = []
    for phase in ("rollout", "update"):
        speeds = [
            tokens_a_second(our, phase) / tokens_a_second(their, phase) for our, their in pairs
        ]
        result.append(spread(speeds))
    result.append(spread([their["step_s"] / our["step_s"] for our, their in pairs]))
    peak = max(turn["peak_gb"] for turn in ours)
    their_peak = max(turn["peak_gb"] for turn in theirs)
    result.append(f"{their_peak / peak:.2f}" if peak > 0 else "-")
    return result


def markdown(header, rows):
    lines = [["", *header], ["---"] * (len(header) + 1), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def tables(name, found, options):
    """What was found in one workload as Markdown; there may be less of it than was asked for."""
    lines = [summary(name, found, options), ""]
    lines += markdown(COLUMNS, [[who, *cells(turns)] for who, turns in found.results.items()])
    rows = []
    for our, turns in found.results.items():
        for who in ("stock", "trl"):
            if our.startswith("ours") and who in found.results:
                rows.append([f"{our} is better than {who} by", *ratios(turns, found.results[who])])
    if rows:
        lines += [
            "",
            *markdown(["rollout tokens/s", "update tokens/s", "s a step", "peak GB"], rows),
        ]
    if found.decoding:
        rows = []
        for times in found.decoding:
            milliseconds = [f"{times[key]:.2f}" for key in ("cold_ms_a_token", "ms_a_token")]
            rows.append([f"{times['rows']} rows", str(times["tokens"]), *milliseconds])
        lines += ["", "Decoding with rows that do not end, prefill included:", ""]
        lines += markdown(["tokens", "ms a token, cold", "ms a token"], rows)
    lines += [f"\nPROBLEM: {problem}" for problem in found.problems]
    return "\n".join(lines)


def summary(name, found, options):
    """The workload, the machine, and how far the gradients differ, in words."""
    workload = found.task.workload
    check = dict(found.check)
    rows = check.pop("rows", None)
    tokens = check.pop("tokens", None)
    device = f"{options.threads} CPU threads"
    if torch.accelerator.is_available():
        device = torch.get_device_module().get_device_name()
    differences = ", ".join(f"{who} {value:.0e}" for who, value in check.items()) or "-"
    return (
        f"**{name}**: {workload.prompts} prompts x {workload.group}, cap {workload.cap}, {device}, "
        f"{options.repetitions} turns: median (range). Gradient on one rollout of {rows} rows, "
        f"{tokens} tokens, relative difference from ours: {differences}."
    )


def parse_options(arguments=None):
    installed = ["stock", "trl"] if importlib.util.find_spec("trl") else ["stock"]
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--workload", nargs="+", choices=WORKLOADS, default=DEFAULT)
    add("--repetitions", type=int, default=5, help="timed turns of each contestant")
    add("--against", nargs="+", choices=["stock", "trl"], default=installed)
    add(
        "--only",
        choices=["ours"],
        help="time ours alone; stock computes the gradient to compare with",
    )
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads of a contestant")
    add("--rows", type=int, nargs="+", help="completions in a forward of the update; ours has each")
    add(
        "--decode_rows",
        type=int,
        nargs="+",
        default=[],
        help="ours: time a token with so many rows",
    )
    add("--lines", help="file to which the line of each turn is added")
    add("-o", "--output", help="JSON file for the results of every turn")
    options = parser.parse_args(arguments)
    if "gpu" in options.workload and not torch.accelerator.is_available():
        parser.error("--workload gpu needs a GPU")
    if "trl" in options.against and "trl" not in installed:
        parser.error("TRL is not installed: pip install trl==1.16.0")
    return options


def main(arguments=None):
    options = parse_options(arguments)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # read when a contestant's process starts
    everything = {}
    problems = []
    for name in options.workload:
        with tempfile.TemporaryDirectory() as folder:
            found = compare_all(prepare(name, options, folder), options)
        print(tables(name, found, options) + "\n", flush=True)
        problems += found.problems
        everything[name] = {
            "workload": dataclasses.asdict(WORKLOADS[name]),
            "threads": options.threads,
            "check": found.check,
            **found.results,
        }
        if found.decoding:
            everything[name]["decoding"] = found.decoding
        if options.output:
            text = json.dumps(everything, indent=2) + "\n"
            pathlib.Path(options.output).write_text(text, encoding="utf-8", newline="\n")
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    end_with_the_reader()
    main()
