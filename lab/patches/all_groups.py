"""For dapo.py: no dynamic sampling. A step trains on all groups of one draw, also those that are all right or wrong."""


def dynamic_batch(accelerator, sample, sampler, step, args, metrics):
    drawn = sampler.draw(args.prompts_per_step)
    prompts = [sampler.rows[i] for i in drawn[accelerator.process_index :: accelerator.num_processes]]
    batch, _, shown = sample(prompts, (args.seed, accelerator.process_index, step, 0), args, metrics)
    metrics.add("sampling/rounds", 1)
    G = args.group_size
    groups = [(prompt, pack_group(batch, slice(i * G, (i + 1) * G))) for i, prompt in enumerate(prompts)]
    return groups, int(batch["completion_mask"].sum()), shown
