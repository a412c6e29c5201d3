"""Models, and rows of prompts or pairs, from the hub or from files."""

import contextlib
import copy
import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers

from common.answers import read_gold
from common.run import Exit, error_context, print0

transformers.logging.disable_progress_bar()

HERE = Path(__file__).parent
EMBEDDED = {
    "embedded": HERE / "tiny",
    "embedded-hard": HERE / "tiny_hard",
    "embedded-pairs": HERE / "tiny" / "pairs",
}
SMALL_MODEL = 3e6  # parameters; smaller models are slower with several CPU threads

# --- models ---


def model_path(name):
    """Return the folder or hub id of a model."""
    path = os.path.expanduser(EMBEDDED.get(name, name))
    if os.path.isfile(os.path.join(path, "args.json")):
        raise Exit(f"model {name}: that is the folder of a run; its model is {name}/model")
    if name.startswith((".", os.sep)) and not os.path.isdir(path):
        raise Exit(f"model {name}: there is no such folder")
    return path


def load_tokenizer(name):
    """Load a tokenizer; pad with EOS if it has no pad token."""
    path = model_path(name)
    with error_context(f"model {name}: no tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    if tokenizer.eos_token_id is None:
        raise Exit(f"model {name}: its tokenizer has no EOS token to end completions with")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_lm(name, args, model_class, new_weights=(), **settings):
    """Load a model in eval mode, without dropout; `settings` override its config.

    Return it and the names of the weights that the checkpoint lacks, all of them `new_weights`.
    """
    transformers.logging.set_verbosity_error()  # missing weights are an error below
    with error_context(f"model {name}: cannot be loaded"):
        config = transformers.AutoConfig.from_pretrained(model_path(name))
        config.update(settings)
        text = config.get_text_config()
        for key, value in text.to_dict().items():
            if re.search("drop|jitter", key) and isinstance(value, float):
                setattr(text, key, 0.0)  # with dropout the first ratio would not be 1
        attention = args.attn_implementation
        if getattr(text, "attn_logit_softcapping", None):
            attention = "eager"  # other implementations may ignore it
        lm, info = model_class.from_pretrained(
            model_path(name),
            config=config,
            dtype=getattr(torch, args.dtype),
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    missing = set(info["missing_keys"])
    wrong = missing - set(new_weights) | {weight for weight, *_ in info["mismatched_keys"]}
    if wrong:  # they would be random
        names = ", ".join(sorted(wrong)[:3])
        raise Exit(f"model {name}: weights are missing or have other shapes: {names}")
    if args.gradient_checkpointing:
        method = "activation_checkpointing_enable"  # the only name in transformers 6
        enable = getattr(lm, method, None) or lm.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    torch.set_num_threads(1 if lm.num_parameters() < SMALL_MODEL else share)
    return lm.eval(), missing


def load_policy(args, accelerator):
    """Return the tokenizer and the language model to train, with adapters if --lora_rank is set.

    The tokens that end a completion are in `lm.generation_config.eos_token_id`, a list.
    """
    name = args.model_name_or_path
    tokenizer = load_tokenizer(name)
    lm, _ = load_lm(name, args, transformers.AutoModelForCausalLM)
    if any("Classification" in kind for kind in lm.config.architectures or ()):  # a tied head loads
        raise Exit(f"model {name}: a {lm.config.architectures[0]} is no language model")
    eos = lm.generation_config.eos_token_id
    eos = eos if isinstance(eos, list) else [eos]
    stop_tokens = sorted({tokenizer.eos_token_id, end_token(tokenizer), *eos} - {None})
    print0(f"stop tokens: {' '.join(tokenizer.convert_ids_to_tokens(stop_tokens))}")
    if not args.fast and name not in EMBEDDED:
        print0("without --fast: sampling and updates take more time and memory (docs/run.md)")
    if args.lora_rank:
        lm = add_adapters(lm, args)
        accelerator.register_save_state_pre_hook(drop_frozen_weights)
    if not accelerator.is_fsdp2:  # `prepare` moves shards
        lm.to(accelerator.device)
    lm.original_generation_config = lm.generation_config  # for model/
    # `generate` fills unset fields of its config from the model's: top_k, penalties.
    lm.generation_config = transformers.GenerationConfig(eos_token_id=stop_tokens)
    return tokenizer, lm.train()


def add_adapters(lm, args):
    """Return `lm` with LoRA adapters (arXiv 2106.09685); peft freezes all other weights."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise Exit("--lora_rank needs peft: pip install peft") from None
    targets = args.lora_targets
    # peft takes names as a list, all-linear and a regular expression as a string.
    if len(targets) == 1 and not re.fullmatch(r"[\w.]+", targets[0]):
        targets = targets[0]
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    with error_context(f"--lora_targets {' '.join(args.lora_targets)}"):
        adapted = get_peft_model(lm, config)
    ends = (lm.get_input_embeddings(), lm.get_output_embeddings())
    if any(hasattr(layer, "base_layer") for layer in ends):
        raise Exit("--lora_targets: the embedding and the head cannot have adapters")
    return adapted


def drop_frozen_weights(models, states, folder):
    """Leave frozen weights out of a checkpoint; a hook of Accelerate."""
    for model, state in zip(models, states, strict=True):
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
        for name in set(state) - trained:
            del state[name]


def load_reference(lm, args, accelerator):
    """Return the initial policy, frozen: a copy, or `lm` without its adapters; None if unused."""
    if not args.kl_coef:
        return None
    if args.lora_rank:

        def reference(**inputs):
            with lm.disable_adapter():
                return lm(**inputs)

        return reference
    reference = copy.deepcopy(lm).requires_grad_(False).eval().to(accelerator.device)
    if accelerator.is_fsdp2 and accelerator.mixed_precision == "bf16":
        for weight in reference.parameters():  # the dtype that FSDP2 gathers the policy in
            weight.data = weight.data.to(torch.bfloat16)
    return reference


@contextlib.contextmanager
def gathered_weights(model):
    """Gather the full weights of an FSDP2 model on every process, to sample with."""
    shards = [x for x in model.modules() if isinstance(x, torch.distributed.fsdp.FSDPModule)]
    if shards:  # FSDP2 takes the first module that runs for the root, which may be a part of it
        model.run_first = lambda: None
        torch.distributed.fsdp.register_fsdp_forward_method(model, "run_first")
        model.run_first()
        del model.run_first
    for shard in shards:
        shard.set_reshard_after_forward(False, recurse=False)
        shard.unshard()
    yield
    for shard in shards:
        shard.reshard()
        shard.set_reshard_after_forward(shard is not model, recurse=False)


def save_model(accelerator, model, tokenizer, folder, prefix=""):
    """Write model/ (with LoRA: the adapters) for `from_pretrained`, completely or not at all.

    `prefix` is the name of the language model inside `model`, such as "lm.".
    """
    weights = accelerator.get_state_dict(model)  # unsharded
    if accelerator.is_main_process:
        lm = accelerator.unwrap_model(model)
        lm = lm.get_submodule(prefix.removesuffix("."))
        weights = {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
        if hasattr(lm, "original_generation_config"):
            lm.generation_config = lm.original_generation_config
        temporary = folder / "model.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        lm.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        shutil.rmtree(folder / "model", ignore_errors=True)
        os.replace(temporary, folder / "model")
    accelerator.wait_for_everyone()


# --- rows and splits ---

# TRL and verl, GSM8K, MATH, fine-tuning data
PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
ANSWER_COLUMNS = ("answer", "reward_model", "ground_truth", "solution")


@dataclass(frozen=True)
class Prompt:
    ids: list[int]  # token ids that the model sees
    prompt: str | list[dict]  # text or messages, as in the data
    gold: str | list[str] | None  # final answer, or several accepted ones
    columns: dict = field(default_factory=dict)  # other columns of the row
    starts_in_thought: bool = False  # ends with <think>: the completion starts inside a thought


def load_prompts(args, tokenizer):
    """Return the training prompts and the evaluation prompts, two lists of `Prompt`."""
    prompts, eval_prompts = load_data(read_prompts, args, tokenizer)
    check_positions(max(len(x.ids) for x in prompts + eval_prompts) + args.max_new_tokens, args)
    samples = args.eval_samples if args.eval_temperature else 1
    print0(f"an evaluation samples {len(eval_prompts)} prompts x {samples} completions")
    print0(f"first prompt: {tokenizer.decode(prompts[0].ids[-500:])!r}")
    return prompts, eval_prompts


def check_positions(longest, args):
    """Raise Exit if the longest row of `longest` tokens exceeds the positions of the model."""
    config = transformers.AutoConfig.from_pretrained(model_path(args.model_name_or_path))
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit and longest > limit:
        rows = f"rows of {longest} tokens are longer than its {limit} positions"
        raise Exit(f"model {args.model_name_or_path}: {rows} (--max_new_tokens, --max_length)")


def load_data(read, args, tokenizer, read_eval=None):
    """Return the training examples and the evaluation examples, two lists.

    `read(rows, args, tokenizer)` returns a list of examples and a summary; so does `read_eval`.
    Without evaluation data, 5 % of the training prompts are held out, but at least 32 (or half of
    them) and at most 512.
    """
    train_rows, eval_rows = load_rows(args)
    train, summary = read(train_rows, args, tokenizer)
    if eval_rows is None:
        train, evaluation = hold_out(train, args.seed)
        summary, eval_summary = f"{len(train)} of {summary}", f"{len(evaluation)} held out"
    else:
        evaluation, eval_summary = (read_eval or read)(eval_rows, args, tokenizer)
    if not train or not evaluation:
        raise Exit(f"not enough data: training: {summary}; evaluation: {eval_summary}")
    trained = {repr(prompt_ids(example)) for example in train}
    if shared := sum(repr(prompt_ids(example)) in trained for example in evaluation):
        eval_summary += f", {shared} of them also in training"
    if args.eval_prompts and args.eval_prompts < len(evaluation):
        evaluation = pick(evaluation, args.eval_prompts, args.seed)
        eval_summary += f", {len(evaluation)} of them"
    print0(f"training: {summary}; evaluation: {eval_summary}")
    return train, evaluation


def prompt_ids(example):
    """Return the token ids of the prompt of a `Prompt` or a `Pair`."""
    return example.ids if isinstance(example, Prompt) else example.prompt


def load_rows(args):
    """Return the training rows, and the evaluation rows or None."""
    splits = load_splits("--dataset", args.dataset, args.dataset_config)
    is_same = args.eval_dataset in (None, args.dataset)
    eval_splits = splits if is_same else load_splits("--eval_dataset", args.eval_dataset)
    if args.eval_split:
        names = [args.eval_split]
    elif args.eval_dataset:
        names = ["test", "validation", "train"]
    else:
        names = [name for name in ("test", "validation") if name != args.dataset_split]
    eval_name = next((name for name in names if name in eval_splits), None)
    if args.dataset_split not in splits:
        raise Exit(f"--dataset_split {args.dataset_split}: not one of {', '.join(splits)}")
    if eval_name is None and (args.eval_split or args.eval_dataset):
        raise Exit(f"--eval_split {names[0]}: not one of {', '.join(eval_splits)}")
    return splits[args.dataset_split], eval_splits.get(eval_name)


def load_splits(option, name, config=None):
    """Return {split: rows} of a file, a folder or a hub id."""
    path = Path(EMBEDDED.get(name, name)).expanduser()
    with error_context(f"{option} {name}: cannot be read"):
        if path.suffix in (".jsonl", ".json"):
            return {"train": read_json(path)}
        if path.suffix == ".csv":
            raise ValueError("write it as .jsonl, where text and numbers differ")
        if files := sorted(path.glob("*.jsonl")):
            return {file.stem: read_json(file) for file in files}
        import datasets  # takes a second

        datasets.disable_progress_bars()
        if path.suffix == ".parquet":
            return {"train": datasets.Dataset.from_parquet(str(path))}
        if Path(path, "dataset_dict.json").is_file() or Path(path, "state.json").is_file():
            saved = datasets.load_from_disk(path)
            return saved if isinstance(saved, dict) else {"train": saved}
        return datasets.load_dataset(str(path), config)


def read_json(path):
    """Return the rows of a file of JSON lines, or of one JSON list.

    `datasets` would turn the text 2024-01-01 into a timestamp, and round large integers.
    """
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = []
        for number, line in enumerate(text.split("\n"), 1):
            with error_context(f"line {number}", ValueError):
                rows += [json.loads(line)] if line.strip() else []
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("expected objects {column: value}")
    return rows


def hold_out(examples, seed):
    """Split examples into training and evaluation examples that share no prompt."""
    prompts = list(dict.fromkeys(repr(example.prompt) for example in examples))
    count = max(len(prompts) // 20, min(32, len(prompts) // 2))
    held_out = set(pick(prompts, min(512, count), seed))
    train = [example for example in examples if repr(example.prompt) not in held_out]
    return train, [example for example in examples if repr(example.prompt) in held_out]


def pick(items, count, seed):
    """Return `count` random items, in their original order."""
    indices = np.random.default_rng(seed).permutation(len(items))[:count]
    return [items[i] for i in sorted(indices)]


def summarize(total, counts):
    """Return `total` and the non-zero counts {text: count}: "5 prompts (95 repeated ...)"."""
    details = ", ".join(f"{count} {text}" for text, count in counts.items() if count)
    return f"{total} ({details})" if details else total


# --- prompts ---


def read_prompts(rows, args, tokenizer):
    """Return the prompts of at most --max_prompt_tokens tokens, and a summary.

    Duplicate rows are merged: DAPO-Math-17k on the hub repeats each row a hundred times.
    """
    examples = {}
    number = from_prose = 0
    for number, row in enumerate(rows, 1):
        with error_context(f"row {number}", ValueError):
            prompt, answer, columns = split_columns(row, args)
            gold, is_prose = read_gold(answer)
            if gold is None and "accuracy" in args.reward:
                raise Exit(f"no answer in {[*row]} for --reward accuracy: set --answer_column")
            # Without a gold answer a reward may depend on any column.
            names = TEMPLATE_COLUMNS if gold is not None else [*columns]
            key = repr([prompt, gold, [row.get(name) for name in names]])
            if key not in examples:
                text = dialogue_text(prompt, columns, args, tokenizer)
                ids = encode_prompt(text, tokenizer)
                in_thought = text.rstrip().endswith("<think>")
                examples[key] = Prompt(ids, prompt, gold, columns, in_thought)
                from_prose += is_prose
    prompts = [x for x in examples.values() if len(x.ids) <= args.max_prompt_tokens]
    unknown = [prompt for prompt in prompts if tokenizer.unk_token_id in prompt.ids]
    if unknown and (len(unknown) == len(prompts) or args.model_name_or_path in EMBEDDED):
        first = tokenizer.decode(unknown[0].ids)
        raise Exit(f"the tokenizer cannot write {len(unknown)} prompts, such as {first!r}")
    counts = {
        "repeated rows merged": number - len(examples),
        "longer than --max_prompt_tokens dropped": len(examples) - len(prompts),
        "gold answers read from prose": from_prose,
        "with characters that the tokenizer does not know": len(unknown),
    }
    return prompts, summarize(f"{len(prompts)} prompts", counts)


def split_columns(row, args):
    """Return the prompt of a row, its answer or None, and its other columns {name: value}."""
    column, prompt = read_prompt(row, args)
    answer_column = args.answer_column or next((name for name in ANSWER_COLUMNS if name in row), "")
    if answer_column and answer_column not in row:
        raise Exit(f"no column {answer_column} in {[*row]}: set --answer_column")
    answer = row.get(answer_column)
    if column is None and {"chosen", "rejected"} <= {*row}:
        prompt, *_ = split_row(row, args)  # what both completions begin with
    if not has_text(prompt):
        raise Exit(f"no prompt in {[*row]}: set --prompt_column")
    if column == "messages" and prompt[-1]["role"] == "assistant" and not args.answer_column:
        *prompt, last = prompt  # fine-tuning data: the last turn is the answer
        answer = last["content"]
    return prompt, answer, {name: value for name, value in row.items() if name != column}


def split_row(row, args):
    """Return the prompt of a row, and its chosen and rejected completions as messages.

    The prompt may also stand in front of both completions: in dialogues, or as in hh-rlhf.
    """
    if not {"chosen", "rejected"} <= {*row}:
        raise Exit(f"no columns chosen and rejected in {[*row]}")
    chosen = read_text(row["chosen"], "chosen")
    rejected = read_text(row["rejected"], "rejected")
    column, prompt = read_prompt(row, args)
    if isinstance(chosen, list) and len(chosen) > 1 and not isinstance(prompt, list):
        prompt = chosen[:-1]
    elif column is None and isinstance(chosen, str) and isinstance(rejected, str):
        is_same = [a == b for a, b in zip(chosen, rejected, strict=False)]
        shared = chosen[: [*is_same, False].index(False)]
        before, turn, _ = shared.rpartition("\n\nAssistant:")
        prompt = before + turn  # Anthropic's hh-rlhf
    if not has_text(prompt):
        raise Exit(f"no prompt in {[*row]}: set --prompt_column")
    if chosen[: len(prompt)] == prompt == rejected[: len(prompt)]:
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return prompt, as_answer(chosen), as_answer(rejected)


def as_answer(completion):
    """Return a completion of a prompt, text or messages, as one assistant message."""
    if isinstance(completion, str):
        return {"role": "assistant", "content": completion}
    roles = [message["role"] for message in completion]
    if roles != ["assistant"]:
        raise Exit(f"expected one assistant turn after the prompt, found {roles}")
    return completion[0]


def read_prompt(row, args):
    """Return the name of a row's prompt column and the prompt in it; None without a column."""
    found = (name for name in PROMPT_COLUMNS if row.get(name) is not None)
    column = args.prompt_column or next(found, None)
    if column is None:
        return None, None
    if column not in row:
        raise Exit(f"no column {column} in {[*row]}: set --prompt_column")
    return column, read_text(row[column], column)


class PromptSampler:
    """Draws prompts in an order that is reshuffled every epoch and depends on `seed` alone."""

    def __init__(self, prompts, seed, accelerator):
        self.prompts = prompts
        self.seed = seed
        self.shard = slice(accelerator.process_index, None, accelerator.num_processes)
        self.drawn = 0

    def draw(self, count):
        """Return this process's shard of the next `count` prompts, which may span epochs."""
        indices = []
        while len(indices) < count:
            epoch, start = divmod(self.drawn + len(indices), len(self.prompts))
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts))
            indices += order[start : start + count - len(indices)].tolist()
        self.drawn += count
        return [self.prompts[i] for i in indices[self.shard]]

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


# --- messages, chat templates and token ids ---

TEMPLATE_COLUMNS = ("system", "tools", "chat_template_kwargs")  # columns that templates read


def read_text(value, column):
    """Return text, or messages whose content is text.

    Text parts are joined, and a missing content is empty:
    [{"role": "user", "content": [{"text": "1"}, {"text": "+1"}]}] -> the content "1+1"
    """
    if isinstance(value, str) and column != "messages":
        return value
    if not isinstance(value, list) or not value:
        raise Exit(f"column {column}: expected text or a list of messages")
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Exit(f"column {column}: expected messages with 'role' and 'content'")
        message = {"content": ""} | without_none(message)
        parts = message["content"]
        if isinstance(parts, list) and all(isinstance(x, dict) and "text" in x for x in parts):
            message["content"] = "".join(part["text"] for part in parts)
        if not isinstance(message["content"], str):
            raise Exit(f"column {column}: the content of a message is not text")
        messages.append(message)
    return messages


def without_none(value):
    """Return a value without None entries, which Arrow adds for keys that other rows have."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value


def has_text(prompt):
    """Return whether a prompt, text or messages, contains anything but whitespace."""
    texts = [x["content"] for x in prompt] if isinstance(prompt, list) else [prompt or ""]
    return bool("".join(texts).strip())


def dialogue_text(prompt, columns, args, tokenizer, answer=None):
    """Render a prompt, or a prompt with its `answer` message, as the text the model reads.

    Without a chat template, join the contents. `columns` holds the columns of the prompt's row; the
    template gets its `tools` and `chat_template_kwargs`.
    """
    messages = prompt_messages(prompt, columns, args)
    continues = messages[-1]["role"] == "assistant"  # ends with a partial answer (prefill)
    with error_context("chat_template_kwargs: expected a JSON object"):
        kwargs = json.loads(args.chat_template_kwargs or "{}")
        kwargs = kwargs | (without_none(columns.get("chat_template_kwargs")) or {})
    if tools := without_none(columns.get("tools")):
        kwargs["tools"] = tools
    if not tokenizer.chat_template:
        if "tools" in kwargs:
            raise Exit("tools need a chat template")
        text = "\n\n".join(message["content"] for message in messages)
        return text + answer["content"] if answer else text
    if not answer:
        kwargs |= dict(add_generation_prompt=not continues, continue_final_message=continues)
    elif continues:
        content = messages[-1]["content"] + answer["content"]
        messages[-1] = messages[-1] | answer | {"content": content}
    else:
        messages.append(answer)
    with error_context("chat template"):
        return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)


def prompt_messages(prompt, columns, args):
    """Return the messages of a prompt, with its system message and --prompt_template."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if args.prompt_template and users:
        last = messages[users[-1]]
        text = args.prompt_template.replace("{prompt}", last["content"])  # keeps other braces
        messages[users[-1]] = last | {"content": text}
    system = args.system_prompt or columns.get("system")
    if system:  # templates accept only one
        if not isinstance(system, str):
            raise Exit("column system: expected text")
        others = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": system}, *others]
    return messages


def encode_prompt(text, tokenizer):
    """Return the token ids of a prompt. A chat template has already added special tokens."""
    plain = not tokenizer.chat_template
    ids = tokenizer(text, add_special_tokens=plain, verbose=False)["input_ids"]
    if plain and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:  # would end the prompt
        del ids[-1]
    if plain and len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:  # also in text
        del ids[0]
    if not ids:
        raise Exit(f"the tokenizer returns no tokens for the prompt {text!r}")
    return ids


def end_token(tokenizer):
    """Return the id that ends a completion: what the chat template adds to an answer, or EOS."""
    if not tokenizer.chat_template:
        return tokenizer.eos_token_id
    answer = "Elephants are grey."  # appears in no system prompt
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    with error_context("chat template"):
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    ending = text.partition(answer)[2].lstrip()  # empty if the template leaves answers out
    ids = tokenizer(ending, add_special_tokens=False)["input_ids"]
    added = set(tokenizer.added_tokens_decoder) - {tokenizer.unk_token_id}
    return ids[0] if ids and ids[0] in added else tokenizer.eos_token_id
