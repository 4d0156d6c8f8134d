"""A Llama of transformers as it is, by torch.compile, and converted: the part `converted` of benchmarks.gpu.

python -m benchmarks.gpu.converted          # some two minutes; prints a table, and writes the record
python -m benchmarks.gpu.converted --quick  # fewer rounds, nothing is written
python -m benchmarks.gpu.converted --toy    # tiny sizes on the CPU: does it run at all
"""

from __future__ import annotations

import sys

from benchmarks.gpu.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["--part", "converted", *sys.argv[1:]]))
