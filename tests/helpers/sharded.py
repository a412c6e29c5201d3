"""Started by `accelerate launch --config_file configs/...` on CPU: sharded.py <script> <options of the script>."""

import sys

from common.run import clean_exit
from testbed import pretend_gpus, script

if __name__ == "__main__":
    pretend_gpus()
    with clean_exit():
        script(sys.argv[1]).main(sys.argv[2:])
