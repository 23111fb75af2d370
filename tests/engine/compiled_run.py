"""One engine in a process of its own, under the compile pipeline that GPUs use:
`python compiled_run.py MODEL TOKENIZER tapped|bare|kernels|stream-kernels|bare-kernels`.

The CPU platform swaps vLLM's backend for plain Inductor, where no artefact is ever reloaded; this puts it back.
"""
from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


def use_vllm_backend() -> None:
    """Undo the CPU platform's choice of compile mode: split graphs, vLLM's pass manager, reloaded artefacts."""
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        original(cls, vllm_config)
        compilation = vllm_config.compilation_config
        compilation.mode, compilation.compile_sizes = CompilationMode.VLLM_COMPILE, []
        compilation.splitting_ops = ["vllm::unified_attention_with_output", "vllm::unified_kv_cache_update"]

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    FixFunctionalizationPass.__call__ = lambda self, graph: None  # it names operators that only CUDA builds have


def collect_code() -> list[str]:
    """Return a list to which all code that Inductor generates will be added."""
    from torch._inductor.codecache import PyCodeCache

    found: list[str] = []
    write = PyCodeCache.write.__func__

    def noting(cls: type, source_code: str, *args: Any, **kwargs: Any) -> Any:
        found.append(source_code)
        return write(cls, source_code, *args, **kwargs)

    PyCodeCache.write = classmethod(noting)
    return found


def count(code: list[str]) -> str:
    """Return how many kernels the generated code calls, how many taps, and how many clones and copies."""
    calls = [line.strip() for text in set(code) for line in text.splitlines() if not line.lstrip().startswith(("#", "def ", "import"))]
    kernels = sum(bool(re.match(r"(cpp|triton)_\w+(\.run)?\(", line)) or ".run(" in line for line in calls)
    taps = sum("torch.ops.mia_lab." in line for line in calls)
    moved = sum(bool(re.search(r"aten\.(clone|copy_)|\w+_clone_\w*(\.run)?\(|\.copy_\(", line)) for line in calls)
    return f"kernels {kernels} taps {taps} copies {moved}"


def main(model: str, tokenizer: str, kind: str) -> None:
    """Run the parity scenario, or the model without taps, and print what is compared."""
    use_vllm_backend()
    code = collect_code() if "kernels" in kind else []
    import tiny
    from parity import scenario

    import mia_lab as mia
    from mia_lab.running.launch import bare_engine

    options = dict(tokenizer=tokenizer, dtype="float32", **scenario.TIGHT)
    if kind.startswith("bare"):
        options.pop("max_captured_tokens")
        print("bare", len(bare_engine(model, options).generate("hello", use_tqdm=False)), count(code))
        return
    if kind.endswith("kernels"):
        points = [*scenario.all_kinds(), "mlp_act", "z"] if kind == "stream-kernels" else None
        with mia.Session(model, points=points, **options):
            print(count(code))
        return
    with mia.Session(model, points=scenario.all_kinds(), **options) as session:
        outcomes = scenario.run(session, scenario.requests(session))
        row, logprob = scenario.compare(outcomes, tiny.load(Path(model)).double(), session.tapped)
        print(f"errors {row} {logprob}")


if __name__ == "__main__":
    main(*sys.argv[1:])
