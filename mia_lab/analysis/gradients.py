"""Hugging Face's own model of a session's folder, for what needs a gradient: vLLM keeps none."""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import MiaError, UnsupportedError
from ..models import resolve

if TYPE_CHECKING:
    from ..session import Session


def reference_model(session: Session) -> nn.Module:
    """Return the model in float32, with eager attention, none of its weights to be trained. UnsupportedError for a server's model."""
    if session._engine.remote:  # what goes by its name here may be another model
        raise UnsupportedError("this needs gradients, and for them the model's own weights on this machine: give model=, or open a "
                               "mia.Session for it")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve(session.model), dtype=torch.float32, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def blocks_of(model: nn.Module, session: Session) -> nn.ModuleList:
    """Return its list of blocks; MiaError where none is as long as the session's model."""
    found = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == session.n_layers), None)
    if found is None:
        raise MiaError(f"Hugging Face's {type(model).__name__} has no list of {session.n_layers} blocks")
    return found
