"""Hypothesis profiles: `dev` by default, `ci` by `HYPOTHESIS_PROFILE=ci`; how Triton runs."""

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():  # whoever imports triton first decides for the process
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=300, deadline=None, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
