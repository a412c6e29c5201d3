"""Hide all devices but the CPU from pytest, unless `-m gpu` selects test_gpu.py."""

import argparse
import sys


def asks_for_gpu(arguments):
    """Return whether `-m`, in any spelling, selects the tests marked `gpu`."""
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
    VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # read when cuBLAS starts; makes it deterministic
else:  # CUDA, ROCm (empty means all), SYCL (has no value for none), CANN
    VARIABLES = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}
    VARIABLES |= {"ONEAPI_DEVICE_SELECTOR": "opencl:cpu", "ASCEND_RT_VISIBLE_DEVICES": ""}
