"""The names that options have in TRL, verl and OpenRLHF: for errors that name the option here, and docs/algorithms.md.

The scripts load this file by its path at an unknown option. tools/refresh.py writes the table into the page.
"""

import difflib
import fnmatch
import re
from typing import NamedTuple

PAGE = "docs/algorithms.md"
HEAD = "| here | TRL | verl | OpenRLHF | |\n|---|---|---|---|---|\n"
RECIPE = "python examples/recipes.py"
SAMPLES = "training samples the policy itself; see --eval_top_p"
ONE_ENGINE = "there is one engine, which samples and trains"
LORA = "adapters are on all linear layers, --lora_rank and --lora_alpha are all that is chosen"


class Names(NamedTuple):
    """A name may be `key=value`, an option with this value; `*` in it stands for anything."""

    here: str  # an option; "" where there is none: then `note` says what to do, or why not
    trl: str = ""  # fields of TRL's configurations (1.16; some of its PPO, before), separated by blanks
    verl: str = ""  # keys of verl's configuration (0.9.0 and before), without `actor_rollout_ref.` in front
    openrlhf: str = ""  # options of OpenRLHF (its PPO at 021d1b0, its DPO at 006cd70)
    note: str = ""  # how the meaning differs


NAMES = [
    # batch
    Names(
        "prompts_per_step",
        "generation_batch_size",
        "data.train_batch_size data.gen_batch_size",
        "rollout_batch_size",
        "prompts of all processes; TRL counts completions",
    ),
    Names("group_size", "num_generations", "rollout.n critic.rollout_n rollout_n", "n_samples_per_prompt"),
    Names("num_epochs", "num_iterations num_ppo_epochs", "actor.ppo_epochs", "max_epochs", "passes over a rollout"),
    Names(
        "num_minibatches",
        "steps_per_generation num_mini_batches",
        "actor.ppo_mini_batch_size",
        "train_batch_size",
        "optimizer steps in such a pass; a size there, a number here",
    ),
    Names(
        "micro_batch_size",
        "per_device_train_batch_size gradient_accumulation_steps per_device_eval_batch_size auto_find_batch_size",
        "actor.ppo_micro_batch_size_per_gpu actor.ppo_micro_batch_size",
        "micro_train_batch_size",
        "completions in one forward, without effect on the gradient; --prompts_per_step is the size of a step",
    ),
    Names(
        "micro_batch_tokens",
        "",
        "actor.ppo_max_token_len_per_gpu actor.use_dynamic_bsz",
        "train_max_tokens_per_gpu use_dynamic_batch",
        "padding included",
    ),
    Names("generate_batch_size", "local_rollout_forward_batch_size", "", "micro_rollout_batch_size", "completions"),
    Names(
        "max_prompt_tokens",
        "max_prompt_length",
        "data.max_prompt_length data.filter_overlong_prompts",
        "prompt_max_len",
        "longer prompts are dropped, not cut",
    ),
    Names(
        "max_new_tokens", "max_completion_length response_length", "data.max_response_length", "generate_max_len"
    ),
    Names("max_length", "", "", "max_len", "of prompt and completion, in dpo.py and reward_model.py"),
    # clip
    Names(
        "clip_low",
        "epsilon cliprange",
        "actor.clip_ratio_low actor.clip_ratio cliprange cliprange_low",
        "eps_clip eps_clip_low_high",
        "--clip_high is the other side",
    ),
    Names("clip_high", "epsilon_high", "actor.clip_ratio_high cliprange_high"),
    Names("dual_clip", "delta", "actor.clip_ratio_c", "", "0: off, the default; delta is it from 1 + epsilon_high on"),
    Names(
        "ratio_level",
        "importance_sampling_level",
        "actor.policy_loss.loss_mode=gspo",
        "policy_loss_type=gspo",
        "the choice of gspo.py; token is GSPO-token",
    ),
    # KL and entropy
    Names(
        "kl_coef",
        "beta",
        "actor.kl_loss_coef actor.use_kl_loss",
        "use_kl_loss",
        "0: no reference is loaded",
    ),
    Names("kl_coef", "init_kl_coef", "algorithm.kl_ctrl.kl_coef", "init_kl_coef", "of ppo.py with --kl_in reward"),
    Names("kl_in", "", "algorithm.use_kl_in_reward", "", "reward or loss"),
    Names("kl_target", "", "algorithm.kl_ctrl.target_kl algorithm.kl_ctrl.type", "", "0: the coefficient is fixed"),
    Names("kl_horizon", "", "algorithm.kl_ctrl.horizon"),
    Names("kl_estimator", "", "actor.kl_loss_type algorithm.kl_penalty", "", "kl is k1, mse k2, low_var_kl k3"),
    Names("", "use_bias_correction_kl", "", "", "no: k3 as in the paper, without the ratio in front"),
    Names("", "sync_ref_model ref_model_*", "", "enable_ema ema_beta", "the reference does not move; dpo.py: --rounds"),
    Names("entropy_coef", "", "actor.entropy_coeff", "entropy_loss_coef"),
    Names("", "use_adaptive_entropy entropy_coef_* entropy_target", "", "", "no: --entropy_coef is constant"),
    # advantage and average
    Names(
        "normalize_std",
        "scale_rewards",
        "algorithm.norm_adv_by_std_in_grpo",
        "no_advantage_std_norm",
        "--no_normalize_std is TRL's `none`; the deviation of a batch, its `batch`, is not here",
    ),
    Names("", "", "algorithm.adv_estimator=gae", "advantage_estimator=gae", "ppo.py, with its critic"),
    Names("", "", "algorithm.adv_estimator=grpo", "advantage_estimator=group_norm", "grpo.py, dapo.py, gspo.py"),
    Names("", "", "algorithm.adv_estimator=rloo", "advantage_estimator=rloo", f"RLOO, {RECIPE} rloo"),
    Names(
        "",
        "",
        "algorithm.adv_estimator=reinforce_plus_plus_baseline",
        "advantage_estimator=reinforce_baseline",
        f"REINFORCE++ with a baseline, {RECIPE} reinforce_pp",
    ),
    Names(
        "",
        "",
        "algorithm.adv_estimator=reinforce_plus_plus",
        "advantage_estimator=reinforce",
        f"not here without the mean of the group; with it {RECIPE} reinforce_pp",
    ),
    Names("", "", "", "advantage_estimator=dr_grpo", "dr_grpo.py"),
    Names("", "", "algorithm.adv_estimator", "advantage_estimator", "the choice of the script, as ppo.py or grpo.py"),
    Names("loss", "loss_type", "", "ipo", "sigmoid, ipo or robust"),
    Names("", "loss_type=grpo", "actor.loss_agg_mode=seq-mean-token-mean", "", "the average of grpo.py"),
    Names("", "loss_type=dapo loss_type=bnpo", "actor.loss_agg_mode=token-mean", "", "the average of dapo.py, ppo.py"),
    Names(
        "",
        "loss_type=dr_grpo",
        "actor.loss_agg_mode=seq-mean-token-sum-norm",
        "",
        "the average of dr_grpo.py; in verl it is a sum over rows, and its divisor is loss_scale_factor",
    ),
    Names("", "", "actor.loss_agg_mode=seq-mean-token-sum", "", f"the average of RLOO, {RECIPE} rloo"),
    Names("", "loss_type=cispo", "actor.policy_loss.loss_mode=cispo", "", f"CISPO, {RECIPE} cispo"),
    Names(
        "",
        "loss_type",
        "actor.loss_agg_mode actor.policy_loss.loss_mode actor.use_token_level_loss",
        "policy_loss_type",
        "the choice of the script, as dapo.py",
    ),
    Names("", "sapo_* vespo_* top_entropy_quantile off_policy_mask_threshold", "", "", "no: a loss that is not here"),
    Names("mask_truncated", "mask_truncated_completions", "", "", "dr_grpo.py; in dapo.py --overlong filter"),
    Names(
        "overlong_cache",
        "",
        "*overlong_buffer.len *overlong_buffer_cfg.len",
        "overlong_buffer_len",
        "dapo.py with --overlong soft",
    ),
    Names(
        "overlong",
        "",
        "*overlong_buffer.enable *overlong_buffer_cfg.enable *overlong_buffer.penalty_factor "
        "*overlong_buffer_cfg.penalty_factor",
        "overlong_penalty_factor",
        "dapo.py: none, filter or soft; the factor is 1",
    ),
    Names(
        "max_sampling_rounds",
        "",
        "algorithm.filter_groups.max_num_gen_batches",
        "",
        "dapo.py: the most rounds of a step",
    ),
    Names("", "", "algorithm.filter_groups.enable", "dynamic_filtering", "dapo.py, which always filters"),
    Names(
        "filter_by", "", "algorithm.filter_groups.metric", "dynamic_filtering_reward_range", "dapo.py: accuracy, reward"
    ),
    # critic
    Names("gae_lambda", "lam", "algorithm.lam", "lambd", "ppo.py; 1 by default"),
    Names("gamma", "", "algorithm.gamma", "", "ppo.py; 1 by default"),
    Names("value_clip", "cliprange_value", "critic.cliprange_value"),
    Names("value_coef", "vf_coef", "", "", "ppo.py"),
    Names("critic_path", "", "critic.model.path", "critic_pretrain", "ppo.py: a reward model"),
    Names("critic_learning_rate", "", "critic.optim.lr"),
    Names("critic_warmup_steps", "", "trainer.critic_warmup", "freezing_actor_steps"),
    # optimizer
    Names("learning_rate", "", "actor.optim.lr", "actor_learning_rate", "of whole rollouts, constant within one"),
    Names("lr_scheduler", "lr_scheduler_type", "actor.optim.lr_scheduler_type actor.optim.warmup_style", "",
          "constant, linear or cosine"),
    Names("", "lr_scheduler_kwargs", "", "", "no: the schedules have no further settings"),
    Names(
        "warmup_steps",
        "warmup_ratio",
        "actor.optim.lr_warmup_steps actor.optim.lr_warmup_steps_ratio",
        "lr_warmup_ratio",
        "in steps",
    ),
    Names("weight_decay", "", "actor.optim.weight_decay", "l2"),
    Names("adam_beta1", "", "actor.optim.betas", "adam_betas", "--adam_beta2 is the other"),
    Names("max_grad_norm", "", "actor.grad_clip actor.optim.clip_grad", "max_norm"),
    Names("", "optim optim_* adam_epsilon", "", "adam_offload", "no: the optimizer is torch's AdamW"),
    # sampling and evaluation
    Names("temperature", "", "rollout.temperature"),
    Names(
        "",
        "top_p top_k min_p repetition_penalty generation_kwargs cache_implementation",
        "rollout.top_p rollout.top_k",
        "",
        SAMPLES,
    ),
    Names("", "use_vllm vllm_* use_transformers_* transformers_continuous_batching_config", "rollout.name", "vllm_*",
          ONE_ENGINE),
    Names(
        "",
        "vllm_importance_sampling_*",
        "algorithm.rollout_correction.* rollout_is rollout_is_threshold",
        "enable_vllm_is_correction vllm_is_truncated_threshold",
        f"{ONE_ENGINE}: TIS has nothing to correct; rollout/logprob_gap is logged",
    ),
    Names("", "max_tool_calling_iterations", "rollout.multi_turn.*", "agent_func_path", f"turns, {RECIPE} calculator"),
    Names("eval_temperature", "", "rollout.val_kwargs.temperature", "", "0: greedy"),
    Names("eval_top_p", "", "rollout.val_kwargs.top_p"),
    Names("eval_samples", "num_generations_eval", "rollout.val_kwargs.n", "eval_n_samples_per_prompt"),
    Names("eval_every", "eval_steps eval_strategy do_eval eval_delay", "trainer.test_freq", "", "steps are rollouts"),
    Names("", "eval_on_start", "trainer.val_before_train", "",
          "every run evaluates before its first step and at its end"),
    # run
    Names("save_every", "save_steps save_strategy", "trainer.save_freq", "", "steps are rollouts"),
    Names("keep_checkpoints", "save_total_limit", "trainer.max_actor_ckpt_to_keep", "max_ckpt_num"),
    Names("max_steps", "num_train_epochs total_episodes", "trainer.total_training_steps trainer.total_epochs",
          "num_episodes max_samples", "steps are rollouts"),
    Names("resume", "resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint",
          "trainer.resume_mode", "load_checkpoint", "without a value; --output_dir names the run"),
    Names("output_dir", "run_name", "trainer.default_local_dir trainer.experiment_name", "save_path ckpt_path"),
    Names("report_to", "project trackio_*", "trainer.logger trainer.project_name", "use_wandb use_tensorboard wandb_*"),
    Names("seed", "data_seed full_determinism shuffle_dataset train_sampling_strategy", "data.shuffle data.seed",
          "full_determinism", "of the data's order too, which is always shuffled"),
    Names("", "logging_* log_* num_completions_to_print disable_tqdm debug include_* skip_memory_metrics",
          "trainer.log_val_generations", "logging_steps",
          "every step is logged, in metrics.jsonl and samples.jsonl"),
    Names("", "push_to_hub hub_*", "", "", "a run writes model/, which `hf upload` takes"),
    Names("", "load_best_model_at_end metric_for_best_model greater_is_better save_only_model save_on_each_node "
          "enable_jit_checkpoint", "", "save_hf_ckpt", "no: see --save_every and --save_model_every"),
    # reward
    Names("reward", "reward_funcs", "*custom_reward_function.path *custom_reward_function.name", "remote_rm_url",
          "file.py:name"),
    Names("", "multi_objective_aggregation", "", "", "parts are summed by --reward_weights, then normalized"),
    Names("", "reward_clip_range", "", "reward_clip_range normalize_reward", "no: what --reward returns is the reward"),
    Names("reward_model_path", "reward_model_name_or_path",
          "reward.reward_model.model_path reward_model.model.path", "reward_pretrain",
          "ppo.py; elsewhere REWARD_MODEL=... --reward examples/model_rewards.py:reward_model"),
    Names("center_coef", "center_rewards_coefficient", "", "", "reward_model.py"),
    # pairs
    Names("nll_coef", "loss_weights rpo_alpha", "", "", "dpo.py: --loss is one, and this adds the NLL"),
    Names("", "precompute_ref_*", "", "ref_pretrain", "dpo.py computes the reference's log-probs once a round"),
    Names("", "truncation_mode", "", "", "--max_length cuts the prompt from the left first, then the completion"),
    Names("", "ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau", "", "",
          "no: a relative of DPO that is not here"),
    # data
    Names("dataset", "dataset_name", "data.train_files", "prompt_data"),
    Names("dataset_split", "dataset_train_split", "", "prompt_split train_split"),
    Names("eval_dataset", "", "data.val_files"),
    Names("eval_split", "dataset_test_split"),
    Names("prompt_column", "", "data.prompt_key", "input_key"),
    Names("answer_column", "", "", "label_key"),
    Names("prompt_template", "", "", "input_template", "it holds {prompt}"),
    Names("", "remove_unused_columns", "", "", "the reward functions get every column"),
    Names("", "dataset_streaming dataset_num_proc dataloader_* length_column_name label_names", "", "",
          "no: each process loads the data whole"),
    Names("", "chat_template_path eos_token pad_token", "", "apply_chat_template",
          "the tokenizer's own, and its chat template if it has one"),
    # model
    Names("model_name_or_path", "sft_model_path", "model.path", "pretrain", "reference and critic start from it too"),
    Names("", "model_init_kwargs model_revision", "", "", "--dtype and --attn_implementation; a revision: its folder"),
    Names("", "trust_remote_code", "model.trust_remote_code", "", "no: code of a hub is never run"),
    Names("", "disable_dropout", "", "", "dropout is always off"),
    Names("lora_rank", "lora_r use_peft", "model.lora_rank", "", "0: off"),
    Names("", "lora_dropout lora_target_* lora_modules_to_save lora_task_type use_rslora use_dora",
          "model.target_modules", "target_modules", LORA),
    Names("", "load_in_8bit load_in_4bit bnb_* use_bnb_nested_quant", "", "load_in_4bit",
          "no: quantised weights are refused"),
    Names("gradient_checkpointing", "gradient_checkpointing_kwargs activation_checkpointing*",
          "model.enable_gradient_checkpointing"),
    Names("", "router_aux_loss_coef", "", "aux_loss_coef", "no: a load-balancing loss is not here"),
    Names("", "cast_lm_head_to_fp32", "", "", "log-probs are float32; the head has the dtype of the weights"),
    Names("", "neftune_noise_alpha label_smoothing_factor", "", "ptx_coef", "no: of fine-tuning, not of these losses"),
    # machine
    Names("", "bf16 fp16", "", "bf16", "accelerate launch --mixed_precision bf16; fp16 is not supported"),
    Names("", "fsdp fsdp_config deepspeed parallelism_config accelerator_config ds3_gather_for_generation ddp_* "
          "local_rank use_cpu", "actor.strategy *n_gpus_per_node *nnodes", "zero_stage",
          "accelerate launch --config_file configs/fsdp2.yaml or zero3.yaml"),
    Names("", "use_liger_kernel liger_kernel_config torch_compile* tf32 padding_free pad_to_multiple_of "
          "activation_offloading torch_empty_cache_steps use_cache", "model.use_remove_padding model.use_liger",
          "packing_samples flash_attn", "no: what is faster and exact is always on"),
    Names("", "batch_eval_metrics bf16_full_eval fp16_full_eval eval_accumulation_steps "
          "eval_do_concat_batches eval_use_gather_object prediction_loss_only do_train do_predict "
          "average_tokens_across_devices ignore_bias_buffers", "", "",
          "no: of another trainer; denominators count all processes, and all metrics are logged"),
]  # fmt: skip


def names(row):
    return f"{row.trl} {row.verl} {row.openrlhf}".split()


def rows_of(name):
    """The rows that have this name: whole, else as the end of a longer one, as `clip_ratio_c` is."""
    whole = [row for row in NAMES if any(name == key for key in names(row))]
    alike = [row for row in NAMES if any(fnmatch.fnmatchcase(name, key) for key in names(row))]
    return whole or alike or [row for row in NAMES if any(key.endswith(f".{name}") for key in names(row))]


def name_here(name, value, fields):
    """What is said of an unknown option: its name here if it is one of other projects, what it may be if it is
    misspelt, or "". `fields` are the options of the script."""
    name = name.lstrip("-+").replace("-", "_").removeprefix("actor_rollout_ref.")
    rows = rows_of(f"{name}={value}") or rows_of(name) or [row for row in NAMES if row.here == name]
    row = next((row for row in rows if row.here in fields), rows[-1] if rows else None)
    if row is None:
        others = [key for row in NAMES for key in names(row) if not re.search(r"[.*=]", key)]
        close = difflib.get_close_matches(name, [*fields, *(f"no_{field}" for field in fields), *others], 1, 0.8)
        if not close:
            return ""
        here = name_here(close[0], value, fields)[1:] if close[0] in others else ""
        return f": did you mean --{close[0]}?{here}"
    if not row.here:
        return f": {row.note}"
    lacking = "" if row.here in fields else ", which this script does not have"
    return f": here it is --{row.here}{lacking}" + (f"; {row.note}" if row.note else "")


def answer(unknown, fields):
    """All unknown words of a command line in one line: each option, with what is known of it. A word that follows one
    is its value."""
    found, words = [], list(unknown)
    while words:
        name, equals, value = words.pop(0).partition("=")
        shown = name + equals + value
        if not equals and words and not re.match(r"[-+]+[a-zA-Z]|[\w.]+=", words[0]):
            value = words.pop(0)
        found.append(f"option {shown}{name_here(name, value, fields)}")
    return "unknown " + ". Unknown ".join(found).replace("?. ", "? ")


def code(names):
    return " ".join(f"`{name}`" for name in names.split())


def table():
    """Without the options that are not here at all: of these the command line says why."""
    shown = (row for row in NAMES if row.here or not row.note.startswith("no: "))
    rows = (" | ".join((code(row.here), code(row.trl), code(row.verl), code(row.openrlhf), row.note)) for row in shown)
    return HEAD + "".join(f"| {row} |\n" for row in rows)


def refresh(tree):
    tree.write(PAGE, re.sub(rf"{re.escape(HEAD)}(?:\|.*\n)*", lambda _: table(), tree.read(PAGE)))
    return []
