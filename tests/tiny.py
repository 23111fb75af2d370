"""Tiny random models of many families, saved as Hugging Face folders, and a small tokenizer for them."""
from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import transformers
from families import FAMILIES, OTHER, VOCAB, WIDE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors


def config(family: str) -> transformers.PretrainedConfig:
    """The configuration of one family."""
    name, options = (FAMILIES | WIDE | OTHER)[family]
    return getattr(transformers, f"{name}Config")(**options)


def build(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save a random model of `family` under `folder`; return its path."""
    path = folder / f"{family}-{str(dtype).removeprefix('torch.')}"
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config(family)).to(dtype)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim > 1:  # larger than the usual 0.02, so that every branch moves the stream visibly
                    weight.normal_(0, 0.04)
                elif "norm" not in name and "ln" not in name:
                    weight.normal_(0, 0.02)
        model.generation_config = transformers.GenerationConfig(bos_token_id=1, eos_token_id=2)
        model.save_pretrained(path)
    return path


def tokenizer(folder: Path) -> Path:
    """Save a tokenizer of single characters, with a BOS that is always added, in a folder of its own.

    Apart from the model: beside some families' config.json, transformers would read it as another class.
    """
    path = folder / "tokenizer"
    if not path.exists():
        characters = {chr(code): code - 29 for code in range(32, 127)}
        words = {"<pad>": 0, "<s>": 1, "</s>": 2} | characters | {f"w{i}": i for i in range(98, VOCAB)}
        core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
        core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        core.decoder = decoders.Fuse()
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
        fast.save_pretrained(path)
    return path


def load(path: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """The model in Hugging Face, eager attention, for comparison."""
    with _plain_classes(path):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager",
                                                                  experts_implementation="eager")
    return model.eval()


def _plain_classes(path: Path) -> AbstractContextManager:
    """Once vLLM's Transformers backend has run a family, its decorated class asks for a vLLM configuration."""
    if "vllm" not in sys.modules:
        return nullcontext()
    from vllm.config import CompilationConfig, ModelConfig, VllmConfig, set_current_vllm_config

    return set_current_vllm_config(VllmConfig(model_config=ModelConfig(str(path)), compilation_config=CompilationConfig(mode=0)))
