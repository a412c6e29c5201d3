"""Speed and memory of one GRPO step: this project, stock `generate` with a plain loop, and TRL's GRPOTrainer.

    python benchmarks/throughput.py --workload vocab2k                  all three (TRL when it is installed)
    python benchmarks/throughput.py --workload embedded --against stock -o result.json

ours    grpo.py as it is: `rollout`, `compute_rewards`, `compute_advantages`, `update`
stock   `generate` with num_return_sequences, then a plain loop: rows in draw order, each forward padded to the longest
        row of the rollout, logits of all completion positions at once
trl     GRPOTrainer inside its own `train()`, with HF generate, beta 0, loss_type "grpo"; full precision and no gradient
        checkpointing (its defaults are bf16 and checkpointing), so that it computes what the others compute

Same for all: model, prompts, stop tokens, cap, rule reward, rows in a forward, one update a rollout, AdamW, no KL. A
step is rollout, rewards, advantages and update with the optimizer's step, without evaluation and logging. The rollout's
time is that of sampling alone. The learning rate is 1e-6, so that the lengths stay what they are.

Each contestant lives in a process of its own and they take turns, a step each, while the others sleep: so they see the
same state of the machine, none inherits another's memory, and the peak of a process is its own. Peak memory is what the
steps add to the loaded model: resident set on CPU, allocated by torch on a GPU. Ratios are taken turn by turn.

Before anything is timed all train on one rollout (ours), each in its own loop, and must arrive at the same gradient.

The random models are nearly uniform over the vocabulary (the final norm is scaled down), and a share 1 / mean of the
vocabulary are stop tokens: lengths are geometric, whoever samples.
"""

import argparse
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
import warnings

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # also in the contestants' processes

SMALL = dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=1024)
HALF_BILLION = dict(  # the shape of Qwen2.5-0.5B
    hidden_size=896,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    tie_word_embeddings=True,
)
LEARNING_RATE, STD_EPS = 1e-6, 1e-4  # the latter is fixed in TRL


@dataclasses.dataclass(frozen=True)
class Workload:
    prompts: int
    group: int
    cap: int  # tokens of a completion
    rows: int  # completions in one forward of the update
    prompt_tokens: int = 0
    mean: int = 0  # of the geometric lengths, without the cap
    vocabulary: int = 0
    shape: dict | None = None  # of a random model; None: a model that is there and its data, the embedded one or ...
    folder: str | None = None  # ... that of examples/smollm2.py, with prompts of `prompt_tokens` at least
    dtype: str = "float32"


WORKLOADS = {
    "embedded": Workload(prompts=32, group=8, cap=64, rows=64),
    "vocab2k": Workload(8, 16, cap=256, rows=32, prompt_tokens=96, mean=35, vocabulary=2048, shape=SMALL),
    "vocab32k": Workload(4, 8, cap=128, rows=32, prompt_tokens=96, mean=35, vocabulary=32768, shape=SMALL),
    "vocab32k_rows8": Workload(4, 8, cap=128, rows=8, prompt_tokens=96, mean=35, vocabulary=32768, shape=SMALL),
    "long_prompt": Workload(8, 8, cap=64, rows=32, prompt_tokens=512, mean=16, vocabulary=2048, shape=SMALL),
    "smollm2": Workload(8, 8, cap=24, rows=64, folder="runs/smollm2"),
    "smollm2_256": Workload(8, 8, cap=24, rows=64, prompt_tokens=256, folder="runs/smollm2"),
    "gpu": Workload(
        64, 8, cap=512, rows=32, prompt_tokens=128, mean=128, vocabulary=151936, shape=HALF_BILLION, dtype="bfloat16"
    ),
}
DEFAULT = [name for name, workload in WORKLOADS.items() if name != "gpu" and not workload.folder]


@dataclasses.dataclass(frozen=True)
class Task:
    """What a contestant's process is given: the workload as files and numbers."""

    workload: Workload
    model: str  # folder
    prompts: list[tuple[list[int], str, str]]  # (ids, text, answer), `workload.prompts` of them for each step
    steps: int
    threads: int
    gradient_checkpointing: bool
    folder: str  # for gradients, and for what a trainer writes

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
    """A random Qwen2 with a tokenizer, in `folder`, and `number` random prompts of one letter a token."""
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
    texts = [" ".join(draw.choices(letters, k=workload.prompt_tokens)) for _ in range(number)]
    return [(tokenizer(text).input_ids, text, "") for text in texts]


def make_embedded(number):
    """The embedded model's folder and prompts."""
    import grpo
    from common.harness.command_line import parse_args
    from common.harness.data import EMBEDDED, PromptSampler, load_prompts
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


def memory(peak=False):
    """Bytes in use now, or at most so far."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated() if peak else torch.accelerator.memory_allocated()
    try:
        lines = pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise SystemExit("the memory of a process on CPU is read from /proc, which only Linux has") from None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:" if peak else "VmRSS:"))


class Turns:
    """The contestant's end of the pipe: waits for its turn, reports the step."""

    def __init__(self, name, task, pipe):
        self.name, self.task, self.pipe = name, task, pipe

    def ready(self, named_parameters, optimizer):
        """Model and optimizer are there. The gradient of the first step is written to a file for the comparison."""
        torch.set_num_threads(self.task.threads)
        hook = None

        def save_gradient(*_):
            gradient = {name.removeprefix("lm."): weight.grad for name, weight in named_parameters}
            torch.save(gradient, f"{self.task.folder}/{self.name}.pt")
            hook.remove()

        hook = optimizer.register_step_pre_hook(save_gradient)
        if torch.accelerator.is_available():
            torch.accelerator.reset_peak_memory_stats()
        else:
            pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the same
        self.base = memory()
        self.pipe.send("ready")

    def wait(self):
        """Block until it is this contestant's turn; returns given completions to train on instead of own ones."""
        given = self.pipe.recv()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        self.start = clock()
        return given

    def done(self, sampled, scored, completions):
        """Report a step: seconds of the rollout, the moment the advantages were there, and the token ids."""
        end = clock()
        result = dict(rollout_s=sampled, update_s=end - scored, step_s=end - self.start, completions=completions)
        result |= dict(tokens=sum(map(len, completions)), peak_gb=(memory(peak=True) - self.base) / 1e9)
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()  # the others use the same device
        self.pipe.send(result)


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
        micro_batch_size=workload.rows,
        rollout="hf" if plain else "shared",
        learning_rate=LEARNING_RATE,
        std_eps=STD_EPS,
        kl_coef=0,
        gradient_checkpointing=task.gradient_checkpointing,
    )
    args = parse_args(grpo.Args, [f"--{name}={value}" for name, value in options.items()])
    accelerator = launch(args)
    tokenizer = load_tokenizer(args)
    policy = load_policy(args, tokenizer)
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, weight_decay=args.weight_decay)
    model, optimizer = accelerator.prepare(policy, optimizer)
    function = reward_function(workload)
    reward_functions = [Reward(function.__name__, 1.0, function)]
    turns.ready(list(policy.named_parameters()), optimizer.optimizer)
    for step in range(task.steps):
        prompts = [Prompt(ids, text, answer, {"answer": answer}) for ids, text, answer in task.of_step(step)]
        given = turns.wait()
        if given:
            batch = given_batch(policy, prompts, given)
        else:
            with accelerator.autocast():
                batch = grpo.rollout(policy, prompts, args.group_size, 1.0, 1.0, (0, 0, step, 0), args)
        sampled = clock() - turns.start
        texts = completion_texts(tokenizer, batch)
        rewards, _, _ = grpo.compute_rewards(reward_functions, prompts, texts, batch["truncated"])
        batch["rewards"] = rewards.to(accelerator.device)
        batch["advantages"] = grpo.compute_advantages(rewards, args).to(accelerator.device)
        batch["loss_mask"] = batch["completion_mask"]
        scored = clock()
        if plain:
            plain_update(policy.lm, optimizer, batch, args)
        else:
            grpo.update(accelerator, model, None, optimizer, batch, step + 1, args, Metrics())
        lengths = batch["completion_mask"].sum(dim=1).tolist()
        pairs = zip(batch["completions"].tolist(), lengths, strict=True)
        turns.done(sampled, scored, [ids[:length] for ids, length in pairs])


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
        per_device_train_batch_size=workload.rows,
        gradient_accumulation_steps=workload.prompts * workload.group // workload.rows,
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
            self.completions, self.sampled = result[0], clock() - start
            return result

        def _generate_and_score_completions(self, inputs):
            result = super()._generate_and_score_completions(inputs)
            self.scored = clock()
            return result

    class TakeTurns(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            turns.ready(list(trainer.model.named_parameters()), trainer.optimizer.optimizer)

        def on_step_begin(self, *args, **kwargs):
            trainer.given = turns.wait()

        def on_step_end(self, *args, **kwargs):
            turns.done(trainer.sampled, trainer.scored, trainer.completions)

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
    if name == "trl":
        run_trl(turns, task)
    else:
        run_loop(turns, task, plain=name == "stock")


# --- the game ---


def compete(name, workload, against, options):
    """Run one workload; returns {"check": ..., contestant: [the results of each timed turn]}."""
    steps = 2 + options.repetitions  # the common rollout, a warm-up, and what is timed
    with tempfile.TemporaryDirectory() as folder:
        if workload.shape:
            model, prompts = folder, make_random(workload, workload.prompts * steps, folder)
        elif workload.folder:
            model, prompts = make_smollm2(workload, workload.prompts * steps)
        else:
            model, prompts = make_embedded(workload.prompts * steps)
        task = Task(workload, model, prompts, steps, options.threads, options.gradient_checkpointing, folder)
        spawn, pipes, processes = multiprocessing.get_context("spawn"), {}, []
        try:
            for who in ("ours", *against):
                pipes[who], theirs = spawn.Pipe()
                processes.append(spawn.Process(target=contestant, args=(who, task, theirs), daemon=True))
                processes[-1].start()
                theirs.close()
                pipes[who].recv()
            first = {"ours": turn(pipes["ours"])}
            for who in against:
                first[who] = turn(pipes[who], first["ours"]["completions"])
            check = compare(first, folder, tolerance(workload))
            results = {who: [] for who in pipes}
            for repetition in range(-1, options.repetitions):
                for who, pipe in pipes.items():
                    result = turn(pipe)
                    del result["completions"]
                    if repetition >= 0:
                        results[who].append(result)
                    print(f"{name} {repetition} {who}: {result['step_s']:.2f} s", file=sys.stderr)
            for process in processes:
                process.join(timeout=60)
        finally:
            for process in processes:
                process.kill()
    return {"check": check, **results}


def tolerance(workload):
    """How far two gradients may differ, of their norm. Rounding to float32 alone moves that of SmolLM2 by 5e-6."""
    if workload.dtype != "float32":
        return 5e-2
    return 1e-4 if workload.folder else 1e-5


def turn(pipe, given=None):
    try:
        pipe.send(given)
        return pipe.recv()
    except (EOFError, BrokenPipeError):
        raise SystemExit("a contestant's process ended; its traceback is above") from None


def compare(first, folder, tolerance):
    """Stop unless all have trained on the same tokens and have the same gradient (before the optimizer, clipped)."""
    ours = torch.load(f"{folder}/ours.pt", map_location="cpu")
    norm = sum(gradient.double().square().sum() for gradient in ours.values()).sqrt()
    assert norm > 0, "no gradient: nothing is compared"
    check = {"rows": len(first["ours"]["completions"]), "tokens": first["ours"]["tokens"]}
    for who in list(first)[1:]:
        theirs = torch.load(f"{folder}/{who}.pt", map_location="cpu")
        assert first[who]["completions"] == first["ours"]["completions"], f"{who} has other tokens"
        assert theirs.keys() == ours.keys(), f"{who} has other weights"
        error = sum((theirs[name].double() - ours[name].double()).square().sum() for name in ours).sqrt() / norm
        check[who] = float(error)
        if not error <= tolerance:
            raise SystemExit(f"the gradient of {who} differs from ours by {error:.1e} of its norm")
    return check


def spread(values, digits=2):
    """Median and range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def table(name, workload, results, options):
    """The results of one workload as lines of Markdown."""
    check, results = results["check"], {who: turns for who, turns in results.items() if who != "check"}
    on_gpu = torch.accelerator.is_available()
    device = torch.get_device_module().get_device_name() if on_gpu else f"{options.threads} CPU threads"
    differences = ", ".join(f"{who} {check[who]:.0e}" for who in results if who != "ours")
    shape = f"{workload.prompts} prompts x {workload.group}, cap {workload.cap}, {workload.rows} rows a forward"
    lines = [
        f"**{name}**: {shape}, {device}, {options.repetitions} turns: median (range). Gradient on one rollout of "
        f"{check['rows']} rows, {check['tokens']} tokens, relative difference from ours: {differences or '-'}.",
        "",
        "| | tokens a step | rollout tokens/s | update tokens/s | s a step | peak GB over the model |",
        "|---|---|---|---|---|---|",
    ]
    for who, turns in results.items():
        rates = [spread([turn["tokens"] / turn[f"{phase}_s"] for turn in turns], 0) for phase in ("rollout", "update")]
        tokens, seconds = spread([turn["tokens"] for turn in turns], 0), spread([turn["step_s"] for turn in turns])
        lines.append(f"| {who} | {tokens} | {rates[0]} | {rates[1]} | {seconds} | {turns[-1]['peak_gb']:.2f} |")
    for who, turns in results.items():
        if who != "ours":
            pairs = list(zip(results["ours"], turns, strict=True))
            cells = [
                *(
                    spread([our["tokens"] / our[key] / (their["tokens"] / their[key]) for our, their in pairs])
                    for key in ("rollout_s", "update_s")
                ),
                spread([their["step_s"] / our["step_s"] for our, their in pairs]),
                f"{turns[-1]['peak_gb'] / results['ours'][-1]['peak_gb']:.2f}",
            ]
            lines.append(f"| ours is better than {who} by a factor of | | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    installed = ["stock", "trl"] if importlib.util.find_spec("trl") else ["stock"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=DEFAULT)
    parser.add_argument("--repetitions", type=int, default=5, help="timed turns of each contestant")
    parser.add_argument("--against", nargs="*", choices=["stock", "trl"], default=installed)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of a contestant")
    parser.add_argument("--rows", type=int, help="completions in one forward of the update, instead of the workload's")
    parser.add_argument("--gradient_checkpointing", action="store_true", help="for all contestants")
    parser.add_argument("-o", "--output", help="JSON file for the results of every turn")
    options = parser.parse_args()
    if "gpu" in options.workload and not torch.accelerator.is_available():
        parser.error("--workload gpu needs a GPU")
    if "trl" in options.against and "trl" not in installed:
        parser.error("TRL is not installed: pip install -r benchmarks/requirements.txt")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # read when a contestant's process starts
    everything = {}
    for name in options.workload:
        workload = WORKLOADS[name]
        if options.rows:
            workload = dataclasses.replace(workload, rows=options.rows)
        results = compete(name, workload, options.against, options)
        everything[name] = {"workload": dataclasses.asdict(workload), "threads": options.threads, **results}
        print(table(name, workload, results, options) + "\n", flush=True)
        if options.output:
            pathlib.Path(options.output).write_text(
                json.dumps(everything, indent=2) + "\n", encoding="utf-8", newline="\n"
            )


if __name__ == "__main__":
    main()
