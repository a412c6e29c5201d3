"""For dpo.py with --dataset of pairs: in every fifth training pair the labels are swapped, as careless judges do it."""

exact_pairs = load_pairs


def load_pairs(args, tokenizer, most_eval=0):
    pairs, eval_pairs, summary = exact_pairs(args, tokenizer, most_eval)
    for i in range(0, len(pairs), 5):
        pairs[i] = pairs[i]._replace(chosen=pairs[i].rejected, rejected=pairs[i].chosen)
    return pairs, eval_pairs, summary
