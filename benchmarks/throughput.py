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

Each contestant lives in a process of its own. On a CPU they take turns, a step each, while the others sleep: so they
see the same state of the machine, none inherits another's memory, and the peak of a process is its own. On a GPU (or
with --alone) each has the device for itself, one after the other. Peak memory is what the steps add to the loaded
model: resident set on CPU, allocated by torch on a GPU. Ratios are taken turn by turn.

Before a contestant is timed it trains on the first rollout of ours, in its own loop, and must arrive at the gradient of
ours; each further number of --rows does so too. Where ours runs alone, stock takes this one turn.

Every turn is one line of JSON on stderr, and in the file --lines, at once. A contestant without enough memory starts
again with half the rows a forward. SIGTERM, Ctrl-C and --seconds end the run with the tables of what there is.

The random models are nearly uniform over the vocabulary (the final norm is scaled down), and a share 1 / mean of the
vocabulary are stop tokens: lengths are geometric, whoever samples.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import signal
import statistics
import string
import sys
import tempfile
import time
import warnings

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # also in the contestants' processes

SMALL = dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=1024)
TINY = SMALL | dict(hidden_size=64, num_hidden_layers=2, intermediate_size=128)
HALF_BILLION = dict(  # the shape of Qwen2.5-0.5B
    hidden_size=896,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    tie_word_embeddings=True,
)
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
    stock_rows: int | None = None  # of the others, instead of `rows`: what fits
    trl_rows: int | None = None


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
        prompts=64,
        group=8,
        cap=512,
        rows=64,
        prompt_tokens=128,
        shortest_prompt=64,
        mean=128,
        vocabulary=151936,
        shape=HALF_BILLION,
        dtype="bfloat16",
        # For 80 GB. A row of 640 tokens keeps 0.95 GB in the layers. Its logits in float32 are 0.31 GB: the plain loop
        # holds them, their softmax and two gradients of them, and 0.16 GB in bfloat16: 2.35 GB a row. TRL's head runs
        # in tiles. The model, its gradient and AdamW's moments are 4 GB: 24 rows take 60 GB, 64 of TRL's 67.
        stock_rows=24,
        trl_rows=64,
    ),
}
DEFAULT = [name for name, workload in WORKLOADS.items() if name not in ("tiny", "gpu") and not workload.folder]


@dataclasses.dataclass(frozen=True)
class Task:
    """What a contestant's process is given: the workload as files and numbers."""

    workload: Workload
    model: str  # folder
    prompts: list[tuple[list[int], str, str]]  # (ids, text, answer), `workload.prompts` of them for each step
    steps: int
    threads: int
    gradient_checkpointing: bool
    options: tuple[str, ...]  # NAME=VALUE, of grpo.py
    folder: str  # for gradients, and for what a trainer writes
    alone: bool  # no other contestant lives at the same time
    rows: int  # completions in one forward, as the process starts

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

    The model is as transformers makes it: the row of the pad token is zero.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, Qwen2Tokenizer

    letters = string.ascii_letters
    tokens = ["<pad>", "<eos>", *letters, "Ġ", *("Ġ" + letter for letter in letters)]  # Ġ is a space
    tokens += [f"w{i}" for i in range(len(tokens), workload.vocabulary)]  # only ever sampled
    vocabulary, merges = {token: i for i, token in enumerate(tokens)}, [("Ġ", letter) for letter in letters]
    tokenizer = Qwen2Tokenizer(vocabulary, merges, unk_token="<pad>", eos_token="<eos>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2",
        **workload.shape,
        vocab_size=workload.vocabulary,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=1,
    )
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
    from common.harness.command_line import parse_args
    from common.harness.data import PromptSampler, load_prompts
    from common.harness.embedded import EMBEDDED
    from common.harness.loading import load_tokenizer

    args = parse_args(grpo.Args, [])
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


# --- a contestant's side of the game ---


def clock():
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def memory():
    """Bytes in use now and at most since `forget_peak`; on a GPU also what torch holds reserved."""
    if torch.accelerator.is_available():
        now, peak = torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated()
        return dict(now=now, peak=peak, reserved=torch.accelerator.memory_reserved())
    try:
        lines = pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise SystemExit("the memory of a process on CPU is read from /proc, which only Linux has") from None
    names = {"VmRSS:": "now", "VmHWM:": "peak"}
    return {names[line.split()[0]]: int(line.split()[1]) * 1024 for line in lines if line.split()[0] in names}


def forget_peak():
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()
    else:
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the same


class Turns:
    """The contestant's end of the pipe: waits for its turn, measures the step, reports it."""

    def __init__(self, name, task, pipe):
        self.name, self.task, self.pipe = name, task, pipe

    def ready(self, named_parameters, optimizer):
        """Model and optimizer are there. The gradient of a step that is to be compared is written to a file."""
        torch.set_num_threads(self.task.threads)

        def save_gradient(*_):  # for the comparison, in which the weights stay, so that others see the same ones
            if self.message.get("save"):
                gradient = {name.removeprefix("lm."): weight.grad for name, weight in named_parameters}
                torch.save(gradient, f"{self.task.folder}/{self.message['save']}.pt")
                set_rate(0.0)

        def set_rate(rate=LEARNING_RATE):
            for group in optimizer.param_groups:
                group["lr"] = rate

        optimizer.register_step_pre_hook(save_gradient)
        optimizer.register_step_post_hook(lambda *_: set_rate())
        forget_peak()
        self.base = memory()["now"]
        self.pipe.send({"ready": True})

    def wait(self):
        """Block until it is this contestant's turn; returns what to do, None at the end.

        `given` are completions to train on instead of own ones, `rows` those of one forward, `save` names the gradient.
        """
        self.message = self.pipe.recv()
        if torch.accelerator.is_available() and not self.task.alone:
            torch.accelerator.empty_cache()
        self.result = {}
        self.mark("start")
        self.start = self.times["start"]
        return self.message

    def mark(self, name):
        """Note the time and the memory at the end of a part of the step: start, rollout, scored, update."""
        self.times = {} if name == "start" else self.times
        self.times[name] = clock()
        if name != "start":
            self.result |= {f"{name}_{key}_gb": value / 1e9 for key, value in memory().items()}
        forget_peak()

    def done(self, completions, rollout_s=None):
        """Report a step. Its update is what follows the advantages."""
        self.mark("update")
        times, lengths = self.times, [len(ids) for ids in completions]
        seconds = dict(rollout_s=rollout_s or times["rollout"] - times["start"])
        seconds |= dict(update_s=times["update"] - times["scored"], step_s=times["update"] - times["start"])
        peak = max(self.result[f"{name}_peak_gb"] for name in ("rollout", "scored", "update"))
        if torch.accelerator.is_available() and not self.task.alone:
            torch.accelerator.empty_cache()  # the others use the same device
        counts = dict(tokens=sum(lengths), longest=max(lengths), ms_a_token=1000 * seconds["rollout_s"] / max(lengths))
        self.pipe.send(
            seconds | counts | dict(peak_gb=peak - self.base / 1e9) | self.result | dict(completions=completions)
        )


def run_loop(turns, task, plain):
    """`ours`, or with `plain` the stock contestant, which shares data, rewards and advantages."""
    import grpo
    from common.batches import completion_texts
    from common.harness.command_line import parse_args
    from common.harness.data import Prompt
    from common.harness.distributed import launch
    from common.harness.loading import load_policy, load_tokenizer
    from common.harness.metrics import Metrics
    from common.rewards import Reward

    workload = task.workload
    options = dict(
        model_name_or_path=task.model,
        dtype=workload.dtype,
        prompts_per_step=workload.prompts,
        group_size=workload.group,
        max_new_tokens=workload.cap,
        micro_batch_size=task.rows,
        learning_rate=LEARNING_RATE,
        std_eps=STD_EPS,
        kl_coef=0,
        gradient_checkpointing=task.gradient_checkpointing,
    )
    own = ["rollout=hf"] if plain else task.options
    args = parse_args(grpo.Args, [*(f"--{name}={value}" for name, value in options.items()), *(f"--{x}" for x in own)])
    accelerator = launch(args)
    tokenizer = load_tokenizer(args)
    policy = load_policy(args, tokenizer)
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, weight_decay=args.weight_decay)
    model, optimizer = accelerator.prepare(policy, optimizer)
    function = reward_function(workload)
    reward_functions = [Reward(function.__name__, 1.0, function)]
    turns.ready(list(policy.named_parameters()), optimizer.optimizer)
    while message := turns.wait():
        if "decode" in message:
            prompts = [Prompt(ids, text, answer, {}) for ids, text, answer in task.prompts]
            turns.pipe.send(time_decoding(policy, accelerator, prompts, message["decode"], args))
            continue
        step, args.micro_batch_size = message["step"], message["rows"]
        prompts = [Prompt(ids, text, answer, {"answer": answer}) for ids, text, answer in task.of_step(step)]
        if message["given"]:
            batch = given_batch(policy, prompts, message["given"])
        else:
            with accelerator.autocast():
                batch = grpo.rollout(policy, prompts, args.group_size, 1.0, 1.0, (0, 0, step, 0), args)
        turns.mark("rollout")
        texts = completion_texts(tokenizer, batch)
        rewards, _, _ = grpo.compute_rewards(reward_functions, prompts, texts, batch["truncated"])
        batch["rewards"] = rewards.to(accelerator.device)
        batch["advantages"] = grpo.compute_advantages(rewards, args).to(accelerator.device)
        batch["loss_mask"] = batch["completion_mask"]
        turns.mark("scored")
        if plain:
            plain_update(policy.lm, optimizer, batch, args)
        else:
            grpo.update(accelerator, model, None, optimizer, batch, step + 1, args, Metrics())
        lengths = batch["completion_mask"].sum(dim=1).tolist()
        pairs = zip(batch["completions"].tolist(), lengths, strict=True)
        turns.done([ids[:length] for ids, length in pairs])


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
    tokens = batch["completions"].shape[1]
    found = dict(rows=len(batch["completions"]), tokens=tokens, cold_ms_a_token=1000 * seconds[0] / tokens)
    return found | dict(ms_a_token=1000 * seconds[1] / tokens)


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


def run_trl(turns, task):
    """TRL's trainer in its own `train()`; callbacks at the borders of a step take the turns."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    workload = task.workload
    config = GRPOConfig(
        output_dir=f"{task.folder}/trl",
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
        gradient_checkpointing=task.gradient_checkpointing,
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
            expected = task.of_step(self.state.global_step)
            assert prompt_ids == [ids for ids, _, _ in expected for _ in range(workload.group)], "other prompts"
            result = (self.given, None) if self.given else super()._generate_single_turn(prompt_ids, *args, **kwargs)
            turns.mark("rollout")
            self.completions, self.sampled = result[0], turns.times["rollout"] - start
            return result

        def _generate_and_score_completions(self, inputs):
            result = super()._generate_and_score_completions(inputs)
            turns.mark("scored")
            return result

    class TakeTurns(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            turns.ready(list(trainer.model.named_parameters()), trainer.optimizer.optimizer)

        def on_step_begin(self, *args, **kwargs):
            message = turns.wait()
            if message is None:
                raise SystemExit  # it has no further turn
            assert message["step"] == trainer.state.global_step, "another step"
            trainer.given = message["given"]

        def on_step_end(self, *args, **kwargs):
            turns.done(trainer.completions, trainer.sampled)

    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(task.model, dtype=getattr(torch, workload.dtype)),
        reward_funcs=reward_function(workload),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text, "answer": answer} for _, text, answer in task.prompts]),
        processing_class=AutoTokenizer.from_pretrained(task.model),
        callbacks=[TakeTurns()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def contestant(name, task, pipe):
    """The process of one contestant."""
    import transformers

    warnings.simplefilter("ignore", FutureWarning)  # between the libraries
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(task.threads)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as `launch` does, so for TRL too
    turns = Turns(name, task, pipe)
    try:
        if name == "trl":
            run_trl(turns, task)
        else:
            run_loop(turns, task, plain=name == "stock")
    except torch.OutOfMemoryError as error:
        pipe.send({"out_of_memory": str(error)[:200]})


# --- the game ---


class OutOfMemory(Exception):
    """A contestant had too little memory."""


class Ended(Exception):
    """A contestant's process ended without a result."""


class CutOff(Exception):
    """The run has to end now."""


class Player:
    """The process of a contestant, as the game sees it."""

    def __init__(self, who, task, deadline):
        self.deadline = deadline
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=contestant, args=(who, task, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def turn(self, **message):
        """What the contestant answers to this message; without one, that it is ready."""
        try:
            if message:
                self.pipe.send(message)
            if not self.pipe.poll(self.deadline and max(0, self.deadline - time.monotonic())):
                raise CutOff("the seconds of --seconds are over")
            answer = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise Ended("its process ended; its traceback is above") from None
        if "out_of_memory" in answer:
            raise OutOfMemory(answer["out_of_memory"])
        return answer

    def close(self):
        """End the process, which has a minute for it unless the run is cut off."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        if not isinstance(sys.exception(), CutOff | GeneratorExit | KeyboardInterrupt):
            self.process.join(timeout=60)
        self.process.kill()
        self.process.join()


class Game:
    """One workload: who plays, in how many rows a forward, and what has been found so far."""

    def __init__(self, name, workload, options, task, deadline=None):
        self.name, self.workload, self.options = name, workload, options
        self.task, self.deadline = task, deadline
        self.check, self.results, self.decoding, self.problems = {}, {}, [], []
        self.common = None  # the completions of the first rollout, on which all train once

    def rows_of(self, who):
        """The numbers of rows in one forward with which this contestant plays."""
        rows = self.options.rows or [self.workload.rows]
        if who == "ours":
            return sorted(set(rows))
        chosen, own = getattr(self.options, f"{who}_rows"), getattr(self.workload, f"{who}_rows")
        return [chosen or own or rows[0]]

    def play(self):
        """All turns of all contestants."""
        timed = self.options.only or ["ours", *self.options.against]
        players = ["ours", *(who for who in ("stock", "trl") if who in timed)]
        if players == ["ours"]:
            players.append("stock")  # whose gradient is compared
        games = [self.turns(who, who in timed) for who in players]
        try:
            for _ in itertools.chain(*games) if self.task.alone else itertools.zip_longest(*games):
                pass
        finally:
            for game in games:
                game.close()

    def turns(self, who, timed):
        """The turns of one contestant; each `next` is one. Without memory it starts again with half the rows."""
        if who != "ours" and self.common is None:
            return self.problem(who, "there is no rollout of ours to compare it on")
        waiting, finished, several = self.rows_of(who), [], len(self.rows_of(who)) > 1
        while waiting:
            rows = waiting[0]
            try:
                with contextlib.closing(self.start(who, rows)) as player:
                    for rows in waiting:
                        self.compare(who, f"{who}-{rows}" if several else who, rows, player)
                        yield
                    for i, rows in enumerate(waiting if timed else []):
                        yield from self.time_steps(player, f"{who}-{rows}" if several else who, rows, warm_up=i == 0)
                        finished.append(rows)
                    for number in self.options.decode_rows if who == "ours" and timed else []:
                        self.decoding.append(player.turn(decode=number))
                        self.say("ours", decode=True, **self.decoding[-1])
                        yield
                return
            except OutOfMemory as error:
                self.say(who, rows=rows, out_of_memory=str(error))
                smaller = {*(x for x in waiting if x < rows), rows // 2} - {0}  # more rows would not fit either
                waiting = sorted(smaller - set(finished))
                if rows == 1:
                    self.problem(who, "has too little memory for one row a forward")
            except Ended as error:
                self.problem(who, str(error))
                return

    def start(self, who, rows):
        began = time.monotonic()
        player = Player(who, dataclasses.replace(self.task, rows=rows), self.deadline)
        try:
            player.turn()
        except BaseException:
            player.close()
            raise
        self.say(who, rows=rows, started_s=time.monotonic() - began)
        return player

    def compare(self, who, label, rows, player):
        """Whether all get the same gradient (before the optimizer, clipped) from the same tokens: the first of ours."""
        found = player.turn(step=0, rows=rows, given=self.common, save=label)
        completions, path = found.pop("completions"), f"{self.task.folder}/{{}}.pt".format
        if self.common is None:
            self.common, self.reference = completions, label
            self.check |= dict(rows=len(completions), tokens=found["tokens"])
        else:
            assert completions == self.common, f"{label} has other tokens"
            ours, theirs = (torch.load(path(name), map_location="cpu") for name in (self.reference, label))
            assert theirs.keys() == ours.keys(), f"{label} has other weights"
            norm = sum(gradient.double().square().sum() for gradient in ours.values()).sqrt()
            error = sum((theirs[name].double() - ours[name].double()).square().sum() for name in ours).sqrt() / norm
            found["gradient_differs"] = self.check[label] = float(error)
            if label != self.reference:
                os.remove(path(label))
            if not error <= tolerance(self.workload):  # also where there is no gradient, or a NaN
                self.problem(label, f"the gradient differs from ours by {error:.1e} of its norm")
        self.say(label, turn="check", rows=rows, **found)

    def time_steps(self, player, label, rows, warm_up):
        self.results[label] = []
        for repetition in range(-1 if warm_up else 0, self.options.repetitions):
            result = dict(rows=rows) | player.turn(step=2 + repetition, rows=rows, given=None, save=None)
            del result["completions"]
            self.say(label, turn=repetition if repetition >= 0 else "warm-up", **result)
            if repetition >= 0:
                self.results[label].append(result)
            yield

    def say(self, label, **found):
        """One line for what has just been found, on stderr and in the file of --lines."""
        found = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in found.items()}
        line = json.dumps(dict(workload=self.name, contestant=label) | found)
        print(line, file=sys.stderr, flush=True)
        if self.options.lines:
            with open(self.options.lines, "a", encoding="utf-8", newline="\n") as file:
                file.write(line + "\n")

    def problem(self, label, what):
        self.problems.append(f"{label}: {what}")
        self.say(label, problem=what)


def prepare(workload, options, folder):
    """The model and the prompts of a workload, with `folder` for what is written."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    number = workload.prompts * (2 + options.repetitions)  # the common rollout, a warm-up, and what is timed
    if workload.shape:
        model, prompts = folder, make_random(workload, number, folder)
    elif workload.folder:
        model, prompts = make_smollm2(workload, number)
    else:
        model, prompts = make_embedded(number)
    return Task(
        workload,
        model,
        prompts,
        steps=2 + options.repetitions,
        threads=options.threads,
        gradient_checkpointing=options.gradient_checkpointing,
        options=tuple(options.grpo),
        folder=folder,
        alone=options.alone or torch.accelerator.is_available(),
        rows=workload.rows,
    )


def tolerance(workload):
    """How far two gradients may differ, of their norm. Rounding to float32 alone moves that of SmolLM2 by 5e-6."""
    if workload.dtype != "float32":
        return 5e-2
    return 1e-4 if workload.folder else 1e-5


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
MEMORY = {  # what a GPU adds: title: key of a turn
    "after the rollout: allocated": "rollout_now_gb",
    "its peak": "rollout_peak_gb",
    "reserved": "rollout_reserved_gb",
    "before the update: allocated": "scored_now_gb",
    "reserved ": "scored_reserved_gb",
    "after the update: allocated": "update_now_gb",
    "its peak ": "update_peak_gb",
    "reserved  ": "update_reserved_gb",
}


def markdown(header, rows):
    lines = [["", *header], ["---"] * (len(header) + 1), *rows]
    return ["| " + " | ".join(cell.strip() for cell in line) + " |" for line in lines]


def ratios(ours, theirs):
    """How many times better ours is: rollout, update, step, and the part of the memory that it takes."""
    pairs = list(zip(ours, theirs, strict=False))  # a run that was cut off has turns without a partner
    rates = [spread([rate(key)(our) / rate(key)(their) for our, their in pairs]) for key in ("rollout_s", "update_s")]
    step = spread([their["step_s"] / our["step_s"] for our, their in pairs])
    peaks = [max(turn["peak_gb"] for turn in turns) for turns in (theirs, ours)]
    return [*rates, step, f"{peaks[0] / peaks[1]:.2f}" if peaks[1] > 0 else "-"]


def tables(game):
    """What was found in one workload as lines of Markdown; there may be less of it than was asked for."""
    workload, options, check = game.workload, game.options, game.check
    results = {who: turns for who, turns in game.results.items() if turns}
    on_gpu = torch.accelerator.is_available()
    device = torch.get_device_module().get_device_name() if on_gpu else f"{options.threads} CPU threads"
    differences = [f"{who} {value:.0e}" for who, value in check.items() if who not in ("rows", "tokens")]
    shape = f"{workload.prompts} prompts x {workload.group}, cap {workload.cap}"
    lines = [
        f"**{game.name}**: {shape}, {device}, {options.repetitions} turns: median (range). Gradient on one rollout of "
        f"{check.get('rows')} rows, {check.get('tokens')} tokens, relative difference from ours: "
        f"{', '.join(differences) or '-'}.",
        "",
    ]
    rows = [
        [who, *(spread([value(turn) for turn in turns], digits) for value, digits in COLUMNS.values())]
        for who, turns in results.items()
    ]
    lines += markdown(COLUMNS, rows)
    ours, others = ([w for w in results if w.startswith("ours") == mine] for mine in (True, False))
    if ours and others:
        header = ["rollout tokens/s", "update tokens/s", "s a step", "peak GB"]
        pairs = [(our, who) for our in ours for who in others]
        rows = [[f"{our} is better than {w} by", *ratios(results[our], results[w])] for our, w in pairs]
        lines += ["", *markdown(header, rows)]
    if on_gpu:
        rows = [[w, *(f"{max(t[key] for t in turns):.2f}" for key in MEMORY.values())] for w, turns in results.items()]
        lines += ["", "Memory of the device in GB, the model included, the most of all turns:", ""]
        lines += markdown(MEMORY, rows)
    if game.decoding:
        header = ["tokens", "ms a token, cold", "ms a token"]
        keys = [("tokens", 0), ("cold_ms_a_token", 2), ("ms_a_token", 2)]
        rows = [[f"{found['rows']} rows", *(f"{found[k]:.{digits}f}" for k, digits in keys)] for found in game.decoding]
        lines += ["", "Decoding with rows that do not end, prefill included:", "", *markdown(header, rows)]
    return "\n".join([*lines, *(f"\nPROBLEM: {problem}" for problem in game.problems)])


def parse_options():
    installed = ["stock", "trl"] if importlib.util.find_spec("trl") else ["stock"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=DEFAULT)
    parser.add_argument("--repetitions", type=int, default=5, help="timed turns of each contestant")
    parser.add_argument("--against", nargs="*", choices=["stock", "trl"], default=installed)
    parser.add_argument("--only", nargs="+", choices=["ours", "stock", "trl"], help="time only these")
    parser.add_argument("--alone", action="store_true", help="one contestant after the other, as on a GPU")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of a contestant")
    parser.add_argument(
        "--rows", type=int, nargs="+", help="completions in one forward of the update; of several, ours runs with each"
    )
    parser.add_argument(
        "--stock_rows", type=int, help="those of stock, instead of the workload's or the first of --rows"
    )
    parser.add_argument("--trl_rows", type=int, help="those of TRL, likewise; must divide the completions of a step")
    parser.add_argument("--decode_rows", type=int, nargs="+", default=[], help="ours: time a token with so many rows")
    parser.add_argument(
        "--grpo", nargs="+", default=[], metavar="NAME=VALUE", help="further options of grpo.py, for ours"
    )
    parser.add_argument("--gradient_checkpointing", action="store_true", help="for all contestants")
    parser.add_argument("--seconds", type=float, help="end after so many, with what there is")
    parser.add_argument("--lines", help="file to which the line of each turn is added")
    parser.add_argument("-o", "--output", help="JSON file for the results of every turn")
    options = parser.parse_args()
    if "gpu" in options.workload and not torch.accelerator.is_available():
        parser.error("--workload gpu needs a GPU")
    if "trl" in (options.only or options.against) and "trl" not in installed:
        parser.error("TRL is not installed: pip install -r benchmarks/requirements.txt")
    return options


def cut_off(*_):
    raise CutOff("SIGTERM")


def main():
    options = parse_options()
    deadline = options.seconds and time.monotonic() + options.seconds
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # read when a contestant's process starts
    signal.signal(signal.SIGTERM, cut_off)
    everything, problems = {}, []
    for name in options.workload:
        workload, cut = WORKLOADS[name], None
        if options.rows:
            workload = dataclasses.replace(workload, rows=options.rows[0])
        with tempfile.TemporaryDirectory() as folder:
            try:
                game = Game(name, workload, options, prepare(workload, options, folder), deadline)
                game.play()
            except (CutOff, KeyboardInterrupt) as error:
                cut = f"cut off: {str(error) or 'Ctrl-C'}"
        print(tables(game) + "\n", flush=True)
        found = {"workload": dataclasses.asdict(workload), "threads": options.threads, "check": game.check}
        everything[name] = found | game.results | ({"decoding": game.decoding} if game.decoding else {})
        if options.output:
            text = json.dumps(everything, indent=2) + "\n"
            pathlib.Path(options.output).write_text(text, encoding="utf-8", newline="\n")
        problems += game.problems
        if cut:
            problems.append(cut)
            break
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
