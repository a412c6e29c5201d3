"""For dapo.py with --overlong filter: the soft punishment on top of it, which dapo.py itself does not combine."""


def overlong_penalty(lengths, args):
    return soft_overlong_punishment(lengths, args.max_new_tokens, args.overlong_cache)
