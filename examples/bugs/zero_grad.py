"""For grpo.py: the gradients are never zeroed, so they add up over all steps."""

healthy_update = update


def update(accelerator, model, reference, optimizer, batch, args, metrics):
    optimizer.zero_grad = lambda: None  # as if the line were not there
    healthy_update(accelerator, model, reference, optimizer, batch, args, metrics)
