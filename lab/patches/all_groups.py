"""For dapo.py: no dynamic sampling. A step trains on all groups of one draw, also those that are all right or wrong."""


def dynamic_batch(accelerator, model, tokenizer, reward_functions, train_prompts, sampler, step, args, metrics):
    drawn = sampler.draw(args.prompts_per_step)
    prompts = [train_prompts[i] for i in drawn[accelerator.process_index :: accelerator.num_processes]]
    seed = (args.seed, accelerator.process_index, step, 0)
    batch = rollout(model, prompts, args.group_size, args.temperature, 1.0, seed, args)
    texts = completion_texts(tokenizer, batch)
    rewards, correct, parts = compute_rewards(reward_functions, prompts, texts, batch["truncated"])
    lengths = batch["completion_mask"].sum(dim=1).cpu()
    batch["rewards"] = (rewards + overlong_penalty(lengths, args)).to(batch["completions"].device)
    metrics.add_rollout(batch, None, correct, parts, args.group_size)
    metrics.add("sampling/rounds", 1)
    return batch, len(prompts), int(lengths.sum()), (prompts, texts, rewards, parts)
