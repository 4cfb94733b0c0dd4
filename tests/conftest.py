"""Hypothesis profiles: `dev` by default, `ci` by `HYPOTHESIS_PROFILE=ci`; how Triton runs."""

import os
from pathlib import Path

import torch
from hypothesis import settings

if not torch.cuda.is_available():  # anyone who imports triton first decides for the process
    os.environ.setdefault("TRITON_INTERPRET", "1")

# verdicts about kernels go here, of the programs that tests start too
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / "build" / "cache")

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=300, deadline=None, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
