"""Which devices a run of pytest sees: none but the CPU, unless `-m gpu` asks for the tests of test_gpu.py."""

import argparse
import sys


def asks_for_gpu(arguments):
    """Whether `-m` on a command line of pytest, in any spelling, selects tests because they are marked `gpu`."""
    from _pytest.mark.expression import Expression

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", dest="marks", default="")
    for flag in "qvxsl":  # `-qm gpu`
        parser.add_argument(f"-{flag}", action="store_true")
    marks = parser.parse_known_args(arguments)[0].marks
    try:
        expression = Expression.compile(marks or "False")
    except SyntaxError:  # pytest says what is wrong with it
        return False
    unmarked = expression.evaluate(lambda name, **_: False)  # `not needs` selects nearly all
    return not unmarked and expression.evaluate(lambda name, **_: name == "gpu")


ON_GPU = asks_for_gpu(sys.argv[1:])
if ON_GPU:
    VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # read when cuBLAS starts: with it one input gives one result
else:  # CUDA, ROCm (to which nothing means all), SYCL (which has no word for nothing), CANN
    VARIABLES = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}
    VARIABLES |= {"ONEAPI_DEVICE_SELECTOR": "opencl:cpu", "ASCEND_RT_VISIBLE_DEVICES": ""}
