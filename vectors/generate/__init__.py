"""Derive the test vectors. Run `python -m generate` in the folder above this one.

To add a case, put a `Case` into the `CASES` of a module, and run the generator. Its `others` are
the same operation with other options or inputs. A new operation is a function (inputs, options) ->
(expected, worked) whose name is the operation's.

`FORMAT` (in cases.py) changes if readers have to change. `VERSION` is semantic: patch for words,
minor for new cases or `others`, major for a changed number.
"""
