"""For dapo.py with --overlong filter: the soft penalty on top of it, which dapo.py itself does not combine."""


def overlong_penalty(lengths, args):
    return ((args.max_new_tokens - args.overlong_cache - lengths.double()) / args.overlong_cache).clamp(-1, 0)
