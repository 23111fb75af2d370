"""The language part of a model that also sees: its text requests are captured and edited like any other's."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from parity import scenario, zoo

import mia_lab as mia
from mia_lab.points import Point

pytestmark = [pytest.mark.full, pytest.mark.gpu]  # vLLM's CPU build has no torchvision beside it, which it needs to load one


def build(folder: Path, tokenizer: Path) -> Path:
    """A tiny random LLaVA, with a processor, in one folder."""
    path = folder / "llava"
    if not path.exists():
        words = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer)
        words.add_special_tokens({"additional_special_tokens": ["<image>"]})
        image = words.convert_tokens_to_ids("<image>")
        text = transformers.LlamaConfig(vocab_size=384, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                                        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2)
        vision = transformers.CLIPVisionConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                               image_size=28, patch_size=14, projection_dim=64)
        config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=image)
        torch.manual_seed(0)
        model = transformers.LlavaForConditionalGeneration(config).float()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.normal_(0, 0.04)
        model.save_pretrained(path)
        images = transformers.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
        transformers.LlavaProcessor(images, words, patch_size=14, vision_feature_select_strategy="default",
                                    num_additional_image_tokens=1).save_pretrained(path)
    return path


def test_text_of_a_model_that_sees(models: Path) -> None:
    import tiny

    path = build(models, tiny.tokenizer(models))
    session = mia.Session(str(path), points=None, dtype="float32", max_model_len=256, max_num_seqs=8, attention_backend="TRITON_ATTN",
                          kv_cache_memory_bytes=1 << 28, limit_mm_per_prompt={"image": 0},
                          compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]})
    with session:
        model = transformers.LlavaForConditionalGeneration.from_pretrained(path, attn_implementation="eager").double().eval()
        animals = zoo.Zoo(session)
        draw = torch.Generator().manual_seed(0)
        edits = [*animals.edits(Point("resid_post", 1)).values()][:6]
        batch = [scenario.Request([1, *torch.randint(3, 320, (20 + 5 * i,), generator=draw).tolist()], [edit])
                 for i, edit in enumerate(edits)]
        outcomes = scenario.run(session, batch, 8)
        points = tuple(p for p in session.tapped if p.kind in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"))
        row, logprob = scenario.compare(outcomes, model, points)
        print(f"llava: worst row error {row:.2e}, worst log-probability difference {logprob:.2e}")
        assert len(points) == 15
        assert row <= 1e-5
        assert logprob <= 1e-4
