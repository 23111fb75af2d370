"""Captures and edits stay right beside vLLM's other features: each request is compared with Hugging Face or arithmetic."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from parity import reference, zoo
from safetensors.torch import save_file

import mia_lab as mia
from mia_lab.errors import UnsupportedError
from mia_lab.points import Point

pytestmark = pytest.mark.full
CUDA = torch.cuda.is_available()
PLAIN = dict(max_model_len=256, max_num_batched_tokens=256, max_num_seqs=8, enforce_eager=not CUDA)
IDS = [1, *range(40, 60)]


@pytest.fixture
def session(open_tiny: Callable[..., Any]) -> mia.Session:
    return open_tiny("llama", points=None, **PLAIN)


@pytest.fixture
def model(models: Path) -> Any:
    return tiny.load(tiny.build("llama", models)).double()


def edit(session: mia.Session, seed: int = 0, **rest: Any) -> mia.Edit:
    return zoo.Zoo(session, seed).edits(Point("resid_post", 1), **rest)["add"]


def check_rows(session: mia.Session, model: Any, cache: mia.ActivationCache, edits: list[mia.Edit]) -> None:
    """Compare everything in a cache with Hugging Face: each row in float32, the whole of a point in 16 bits."""
    for i, tokens in enumerate(cache.tokens):
        points = list(map(cache._batch.point, cache.keys()))
        _, theirs = reference.run(model, list(tokens), points, edits, cache.n_prompt[i], session._submit.model.shapes)
        for p in points:
            ours = cache[p][i, : len(tokens)].float().flatten(1)
            if session.dtype == torch.float32:
                assert reference.row_errors(ours, theirs[p]).max() <= 1e-5, p
            else:
                assert (ours - theirs[p])[1:].norm() / reference.centred(theirs[p])[1:].norm() <= 3.2e-2, p


def chosen_logprobs(model: Any, ids: list[int], tokens: list[int], edits: list[mia.Edit]) -> torch.Tensor:
    logits, _ = reference.run(model, [*ids, *tokens[:-1]], (), edits, len(ids))
    return logits.log_softmax(-1)[len(ids) - 1 :][torch.arange(len(tokens)), torch.tensor(tokens)]


def test_structured_output(session: mia.Session, model: Any) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    ours = edit(session)
    rule = StructuredOutputsParams(regex="(ab|cd)[0-9]{3}x")
    _, cache = session.run_with_cache(IDS, max_tokens=12, edits=[ours], structured_outputs=rule)
    text = session.generate(IDS, max_tokens=12, edits=[ours], structured_outputs=rule)
    assert text[:2] in ("ab", "cd") and text[2:5].isdigit() and text[5] == "x"
    check_rows(session, model, cache, [ours])


def test_several_samples_of_an_edited_prompt(session: mia.Session, model: Any) -> None:
    ours = edit(session)
    output = session.completions(IDS, max_tokens=6, temperature=1.0, n=3, logprobs=1, edits=[ours], ignore_eos=True)
    assert len(output.outputs) == 3
    for sample in output.outputs:
        tokens = list(sample.token_ids)
        theirs = chosen_logprobs(model, IDS, tokens, [ours])
        found = torch.tensor([step[t].logprob for step, t in zip(sample.logprobs, tokens)])
        assert (found - theirs.cpu()).abs().max() <= 1e-4


def test_prompt_log_probabilities(session: mia.Session, model: Any) -> None:
    ours = edit(session, where=mia.window(5))
    output = session.completions(IDS, max_tokens=1, prompt_logprobs=1, edits=[ours])
    theirs = reference.run(model, IDS, (), [ours], len(IDS))[0].log_softmax(-1)
    for i, step in enumerate(output.prompt_logprobs[1:]):
        assert abs(step[IDS[i + 1]].logprob - float(theirs[i, IDS[i + 1]])) <= 1e-4


def test_stop_strings_end_the_capture(session: mia.Session, model: Any) -> None:
    ours = edit(session)
    whole = session.generate(IDS, max_tokens=24, edits=[ours], ignore_eos=True)
    stop = whole[9:11]
    _, cache = session.run_with_cache(IDS, max_tokens=24, edits=[ours], stop=[stop], ignore_eos=True)
    assert len(IDS) + 1 <= len(cache.tokens[0]) < len(IDS) + 23
    check_rows(session, model, cache, [ours])


def test_penalties_and_bad_words_do_not_touch_the_rows(session: mia.Session, model: Any) -> None:
    ours = edit(session)
    _, cache = session.run_with_cache(IDS, max_tokens=10, edits=[ours], presence_penalty=1.5, frequency_penalty=0.5, top_p=0.9,
                                      temperature=0.7, seed=3)
    check_rows(session, model, cache, [ours])


def lora(folder: Path) -> Path:
    """A rank-4 adapter of every projection of the tiny llama, in the common folder format."""
    draw, weights = torch.Generator().manual_seed(0), {}
    path = folder / "adapter"
    if not path.exists():
        path.mkdir()
        shapes = {"self_attn.q_proj": (128, 128), "self_attn.v_proj": (64, 128), "self_attn.o_proj": (128, 128),
                  "mlp.down_proj": (128, 128)}
        for layer in range(4):
            for name, (rows, columns) in shapes.items():
                stem = f"base_model.model.model.layers.{layer}.{name}"
                weights[f"{stem}.lora_A.weight"] = torch.randn(4, columns, generator=draw) * 0.1
                weights[f"{stem}.lora_B.weight"] = torch.randn(rows, 4, generator=draw) * 0.1
        save_file(weights, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps({
            "peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": "",
            "target_modules": [name.rpartition(".")[2] for name in shapes]}))
    return path


def merge(model: Any, path: Path) -> Any:
    from safetensors.torch import load_file

    weights = load_file(path / "adapter_model.safetensors")
    with torch.no_grad():
        for name, a in weights.items():
            if ".lora_A." in name:
                target = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
                target.weight += 2.0 * (weights[name.replace("lora_A", "lora_B")].double() @ a.double())
    return model


def test_lora(open_tiny: Callable[..., Any], model: Any, models: Path) -> None:
    from vllm.lora.request import LoRARequest

    # vLLM's CUDA kernels for LoRA take 16-bit values only.
    options = dict(points=["resid_pre", "resid_post"], dtype="bfloat16") if CUDA else dict(points=None)
    session = open_tiny("llama", enable_lora=True, max_lora_rank=8, **options, **PLAIN)
    path = lora(models)
    adapter = LoRARequest("one", 1, str(path))
    ours = edit(session)
    _, base = session.run_with_cache(IDS, max_tokens=5, edits=[ours])
    _, cache = session.run_with_cache(IDS, max_tokens=5, edits=[ours], lora_request=adapter)
    check_rows(session, model, base, [ours])
    assert (cache["resid_post", 3][0, 1:21] - base["resid_post", 3][0, 1:21]).abs().max() > 0.01
    check_rows(session, merge(model, path), cache, [ours])


@pytest.mark.parametrize(("option", "reason"), [
    (dict(speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}), "draft tokens|not yet support"),
    (dict(tensor_parallel_size=2), "tensor parallelism|World size|CPU"),
    (dict(kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"}), "KV connector"),
])
def test_what_is_refused_says_why(models: Path, option: dict[str, Any], reason: str) -> None:
    with pytest.raises((UnsupportedError, ValueError, RuntimeError), match=reason):
        mia.Session(str(tiny.build("llama", models)), tokenizer=str(tiny.tokenizer(models)), dtype="float32", **PLAIN, **option)


def four_bit(source: Path, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Round the blocks' projections of a model to 4 bits in GPTQ's format; return the folder and what the weights became."""
    from safetensors.torch import load_file

    path, group = folder / "gptq", 32
    weights, rounded = load_file(source / "model.safetensors"), {}
    out = {name: tensor.bfloat16() for name, tensor in weights.items() if "_proj" not in name}
    shifts = torch.arange(0, 32, 4)
    for name in weights.keys() - out.keys():
        w = weights[name].float().T  # [in out]
        scales = (w.unflatten(0, (-1, group)).abs().amax(1) / 7).bfloat16()
        q = (w / scales.float().repeat_interleave(group, 0)).round().clamp(-8, 7)
        rounded[name] = (q * scales.float().repeat_interleave(group, 0)).T
        packed = ((q + 8).long().unflatten(0, (-1, 8)) << shifts[None, :, None]).sum(1)
        zeros = (torch.full((len(scales), w.shape[1] // 8, 8), 7) << shifts).sum(-1)
        stem = name.removesuffix(".weight")
        out |= {f"{stem}.qweight": packed.to(torch.int64).bitwise_and(0xFFFFFFFF).to(torch.uint32).view(torch.int32),
                f"{stem}.qzeros": zeros.to(torch.int64).to(torch.uint32).view(torch.int32), f"{stem}.scales": scales,
                f"{stem}.g_idx": torch.arange(len(w), dtype=torch.int32) // group}
    path.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in out.items()}, path / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16", "quantization_config": {
        "quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}}
    (path / "config.json").write_text(json.dumps(config))
    return path, rounded


@pytest.mark.skipif(CUDA, reason="its CUDA kernels need wider layers")
def test_four_bit_weights(models: Path, model: Any) -> None:
    """Against Hugging Face with the rounded weights written out."""
    path, rounded = four_bit(tiny.build("llama", models), models)
    with torch.no_grad():
        for name, weight in rounded.items():
            model.get_parameter(name).copy_(weight)
    with mia.Session(str(path), points=None, tokenizer=str(tiny.tokenizer(models)), dtype="bfloat16", **PLAIN) as session:
        ours = edit(session)
        _, cache = session.run_with_cache(IDS, max_tokens=5, edits=[ours])
        check_rows(session, model, cache, [ours])


@pytest.mark.gpu
def test_sleep_and_wake(open_tiny: Callable[..., Any], model: Any) -> None:
    session = open_tiny("llama", points=None, enable_sleep_mode=True, **PLAIN)
    ours = edit(session)
    for _ in range(2):
        _, cache = session.run_with_cache(IDS, max_tokens=5, edits=[ours])
        check_rows(session, model, cache, [ours])
        session._engine.llm.sleep(level=1)
        session._engine.llm.wake_up()


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["fp8"])
def test_quantised_weights(open_tiny: Callable[..., Any], quantization: str) -> None:
    """Against the same quantised model: the stream's own sums, and an edit after the last block read off the log-probabilities."""
    session = open_tiny("llama", points=None, quantization=quantization, **PLAIN | dict(dtype="bfloat16"))
    logits, cache = session.run_with_cache(IDS)
    h = {p: cache[p][0].float() for p in map(cache._batch.point, cache.keys())}
    for layer in range(session.n_layers):
        total = h[Point("resid_pre", layer)] + h[Point("attn_out", layer)] + h[Point("mlp_out", layer)]
        assert ((total - h[Point("resid_post", layer)]).norm(dim=-1) / total.norm(dim=-1)).max() < 2e-2
    vector = torch.randn(session.d_model, generator=torch.Generator().manual_seed(0)) * h[Point("resid_post", 3)].norm(dim=-1).mean() / 10
    top = mia.Add(vector, 1.0, layers=[session.n_layers - 1], where=mia.everywhere())
    steered, after = session.run_with_cache(IDS, edits=[top])
    moved = after["resid_post", 3][0].float() - h[Point("resid_post", 3)]
    assert ((moved - vector).norm(dim=-1) / vector.norm()).max() < 5e-2
    output = session.completions(IDS, max_tokens=1, logprobs=1, edits=[top])
    token, found = next(iter(output.outputs[0].logprobs[0].items()))
    assert abs(found.logprob - float(steered[0, -1].log_softmax(-1)[token])) < 2e-2
    assert (steered[0, -1] - logits[0, -1]).abs().max() > 0.05

