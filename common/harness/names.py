"""The names that options have in TRL and verl, for errors that name the option here."""

from typing import NamedTuple


class Names(NamedTuple):
    here: str  # an option; "" where there is none: then `note` says what to do
    trl: str = ""  # fields of TRL's configurations (1.16), separated by blanks
    verl: str = ""  # keys of verl's configuration (0.9.0 and before), without `actor_rollout_ref.` in front
    note: str = ""  # how the meaning differs


NAMES = [
    Names(
        "prompts_per_step",
        "generation_batch_size",
        "data.train_batch_size",
        "prompts of all processes; TRL counts completions",
    ),
    Names("group_size", "num_generations", "rollout.n"),
    Names("num_epochs", "num_iterations", "actor.ppo_epochs", "passes over a rollout"),
    Names("num_minibatches", "steps_per_generation", "actor.ppo_mini_batch_size", "optimizer steps in such a pass"),
    Names(
        "micro_batch_size",
        "per_device_train_batch_size gradient_accumulation_steps",
        "actor.ppo_micro_batch_size_per_gpu actor.ppo_micro_batch_size",
        "completions in one forward, without effect on the gradient; --prompts_per_step is the size of a step",
    ),
    Names("micro_batch_tokens", "", "actor.ppo_max_token_len_per_gpu actor.use_dynamic_bsz", "padding included"),
    Names("max_prompt_tokens", "max_prompt_length", "data.max_prompt_length", "longer prompts are dropped, not cut"),
    Names("max_new_tokens", "max_completion_length", "data.max_response_length"),
    Names("clip_low", "epsilon", "actor.clip_ratio_low actor.clip_ratio", "--clip_high is the other side"),
    Names("clip_high", "epsilon_high", "actor.clip_ratio_high"),
    Names("dual_clip", "delta", "actor.clip_ratio_c", "0: off, the default; delta is it from 1 + epsilon_high on"),
    Names("kl_coef", "beta", "actor.kl_loss_coef actor.use_kl_loss", "0: no reference is loaded"),
    Names("kl_coef", "", "algorithm.kl_ctrl.kl_coef", "of ppo.py with --kl_in reward"),
    Names("kl_in", "", "algorithm.use_kl_in_reward", "reward or loss"),
    Names("kl_target", "", "algorithm.kl_ctrl.target_kl", "0: the coefficient is fixed"),
    Names("kl_horizon", "", "algorithm.kl_ctrl.horizon"),
    Names("kl_estimator", "", "actor.kl_loss_type algorithm.kl_penalty", "low_var_kl is k3, kl is k1"),
    Names("entropy_coef", "", "actor.entropy_coeff"),
    Names("normalize_std", "scale_rewards", "algorithm.norm_adv_by_std_in_grpo", "--no_normalize_std is TRL's `none`"),
    Names("loss", "loss_type", "", "sigmoid, ipo or robust"),
    Names("", "loss_type", "actor.loss_agg_mode algorithm.adv_estimator", "the choice of the script, as dapo.py"),
    Names("ratio_level", "importance_sampling_level", "actor.policy_loss.loss_mode", "gspo.py"),
    Names("mask_truncated", "mask_truncated_completions", "", "dr_grpo.py; in dapo.py --overlong filter"),
    Names(
        "overlong_cache",
        "",
        "reward.reward_kwargs.overlong_buffer_cfg.len reward_model.reward_kwargs.overlong_buffer_cfg.len",
        "dapo.py with --overlong soft",
    ),
    Names("max_sampling_rounds", "", "algorithm.filter_groups.max_num_gen_batches", "dapo.py, which always filters"),
    Names("gamma", "", "algorithm.gamma"),
    Names("gae_lambda", "", "algorithm.lam"),
    Names("value_clip", "", "critic.cliprange_value"),
    Names("critic_warmup_steps", "", "trainer.critic_warmup"),
    Names("critic_learning_rate", "", "critic.optim.lr"),
    Names("learning_rate", "", "actor.optim.lr", "of whole rollouts, constant within one"),
    Names("lr_scheduler", "lr_scheduler_type", "actor.optim.lr_scheduler_type", "constant, linear or cosine"),
    Names("warmup_steps", "warmup_ratio", "actor.optim.lr_warmup_steps actor.optim.lr_warmup_steps_ratio", "in steps"),
    Names("max_grad_norm", "", "actor.grad_clip actor.optim.clip_grad"),
    Names("temperature", "", "rollout.temperature"),
    Names("eval_temperature", "", "rollout.val_kwargs.temperature", "0: greedy"),
    Names("eval_samples", "num_generations_eval", "rollout.val_kwargs.n"),
    Names("eval_every", "eval_steps eval_strategy", "trainer.test_freq", "steps are rollouts"),
    Names("save_every", "save_steps save_strategy", "trainer.save_freq", "steps are rollouts"),
    Names("keep_checkpoints", "save_total_limit", "trainer.max_actor_ckpt_to_keep"),
    Names("max_steps", "num_train_epochs", "trainer.total_training_steps trainer.total_epochs", "steps are rollouts"),
    Names("resume", "resume_from_checkpoint", "trainer.resume_mode", "without a value; --output_dir names the run"),
    Names("output_dir", "run_name", "trainer.default_local_dir trainer.experiment_name"),
    Names("report_to", "", "trainer.logger"),
    Names("reward", "reward_funcs", "custom_reward_function.path reward.custom_reward_function.path", "file.py:name"),
    Names("reward_model_path", "reward_model_name_or_path", "reward.reward_model.model_path", "ppo.py"),
    Names("dataset", "dataset_name", "data.train_files"),
    Names("dataset_split", "dataset_train_split"),
    Names("eval_dataset", "", "data.val_files"),
    Names("eval_split", "dataset_test_split"),
    Names("prompt_column", "", "data.prompt_key"),
    Names("model_name_or_path", "", "model.path"),
    Names("lora_rank", "lora_r use_peft", "model.lora_rank", "0: off"),
    Names("gradient_checkpointing", "", "model.enable_gradient_checkpointing"),
    Names("center_coef", "center_rewards_coefficient", "", "reward_model.py"),
    Names("", "bf16 fp16", "", "accelerate launch --mixed_precision bf16; fp16 is not supported"),
    Names("", "fsdp deepspeed", "actor.strategy", "accelerate launch --config_file configs/fsdp2.yaml or zero3.yaml"),
    Names("", "use_vllm", "rollout.name", "there is one engine, which samples and trains"),
    Names("", "logging_steps log_completions", "", "every step is logged, in metrics.jsonl and samples.jsonl"),
    Names("", "push_to_hub", "", "a run writes model/, which `hf upload` takes"),
    Names("", "top_p top_k", "rollout.top_p rollout.top_k", "training samples the policy itself; see --eval_top_p"),
]


def name_here(option, fields):
    """What follows an unknown option in an error: its name here if it is one of TRL or verl, or "". `fields` are the
    options of the script."""
    name = option.lstrip("-+").partition("=")[0].replace("-", "_").removeprefix("actor_rollout_ref.")
    rows = [row for row in NAMES if name in f"{row.trl} {row.verl}".split()]
    row = next((row for row in rows if row.here in fields), rows[-1] if rows else None)
    if row is None or not row.here:
        return f": {row.note}" if row else ""
    lacking = "" if row.here in fields else ", which this script does not have"
    return f": here it is --{row.here}{lacking}" + (f"; {row.note}" if row.note else "")
