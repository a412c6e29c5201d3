"""For grpo.py: the stop token is masked, as by `completions != pad` where EOS is the pad token."""

healthy_update = update


def update(accelerator, model, reference, optimizer, batch, args, metrics):
    (stop_token,) = accelerator.unwrap_model(model).generation_config.eos_token_id
    batch["loss_mask"] = batch["completion_mask"] & (batch["completions"] != stop_token)
    healthy_update(accelerator, model, reference, optimizer, batch, args, metrics)
