"""The beginning of files whose implementations do something else in each call of `loop`."""

ACTING = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from mha.implementations.loop import implementation as loop

class Bad:
    claims = loop.claims

    def __init__(self, name, act):
        self.name, self.act = name, act

    def build(self, config, weights, *, dtype, device):
        attention = loop.build(config, weights, dtype=dtype, device=device)
        attention.register_forward_pre_hook(lambda *_: self.act())
        return attention
"""
