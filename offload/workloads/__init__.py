"""Training tasks that need no download, shared by the demo, the benchmark, tuning and the tests.

Each is a ``Workload``: ``build(seed)`` gives a model, ``batches(n, seed)`` its data, ``step(model,
batch)`` a loss. The language models train on the sources of Python's standard library, the vision
model on scenes that are drawn as they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from offload.workloads.base import Batch, BlockWrapper, TrainableModel, Workload
from offload.workloads.gpt import GPT, GPTConfig, gpt_workload
from offload.workloads.llama import Llama, LlamaConfig, llama_workload
from offload.workloads.vision import UNet, VisionConfig, vision_workload

__all__ = [
    "GPT",
    "PRESETS",
    "Batch",
    "BlockWrapper",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "TrainableModel",
    "UNet",
    "VisionConfig",
    "Workload",
    "gpt_workload",
    "llama_workload",
    "preset",
    "vision_workload",
]

_GPT_TINY = GPTConfig(layers=3, width=64, heads=4, length=64, rows=2, vocabulary=256)
_LONG_TINY = LlamaConfig(
    layers=3, width=64, heads=4, kv_heads=2, hidden=176, length=128, rows=1, vocabulary=256
)
_VISION_TINY = VisionConfig(size=64, rows=2, width=8, levels=3)
_DEMO = GPTConfig(layers=6, width=384, heads=6, length=512, rows=8, vocabulary=256)
_DEMO_QUICK = GPTConfig(layers=4, width=192, heads=3, length=256, rows=8, vocabulary=256)

PRESETS: Mapping[str, Callable[[], Workload]] = MappingProxyType(
    {
        "gpt": partial(gpt_workload, "gpt", GPTConfig()),
        "long": partial(llama_workload, "long", LlamaConfig()),
        "vision": partial(vision_workload, "vision", VisionConfig()),
        "demo": partial(gpt_workload, "demo", _DEMO),
        "demo-quick": partial(gpt_workload, "demo-quick", _DEMO_QUICK),
        "gpt-tiny": partial(gpt_workload, "gpt-tiny", _GPT_TINY),
        "long-tiny": partial(llama_workload, "long-tiny", _LONG_TINY),
        "vision-tiny": partial(vision_workload, "vision-tiny", _VISION_TINY),
    }
)


def preset(name: str) -> Workload:
    """A workload by its name.

    Args:
        name: ``"gpt"``, ``"long"`` and ``"vision"`` are for benchmarks (seconds a step on two
            cores, 0.7 to 1 GB of activations), ``"demo"`` and ``"demo-quick"`` train a GPT on
            characters, the ``-tiny`` ones take milliseconds and serve tests.

    Raises:
        ValueError: there is no such workload; the message lists them.

    Example:
        >>> preset("gpt-tiny").summary
        'GPT, 3 layers, d 64, T 64, B 2, vocabulary 256'
    """
    if name not in PRESETS:
        raise ValueError(f"no workload is called {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]()
