"""One thread for each test process: they share the cores, and two pools on one core wait for each other."""

import torch

torch.set_num_threads(1)
