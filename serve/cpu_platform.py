"""The CPU platform for SGLang: what its scheduler, cache and DFLASH worker need without a GPU.

Chosen with ``SGLANG_PLATFORM=domino_cpu``; ``domino serve`` sets it where no GPU is used. SGLang
imports this module while its own ``srt.utils`` is half imported, so everything else of SGLang is
imported where it is needed.
"""

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from domino_kit.serve.plugin import PLATFORM_NAME


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """An out-of-tree platform: SGLang asks it wherever it would otherwise assume CUDA.

    Not SGLang's own CPU route (``SGLANG_USE_CPU_ENGINE``), which needs kernels that no published
    wheel has. Capabilities stay at their defaults: no Triton, no graphs.
    """

    _enum = PlatformEnum.OOT

    def get_device(self, device_id: int = 0) -> str:
        """The device where ``--device`` is not given; a name, which is what resolution expects."""
        return "cpu"

    def init_backend(self) -> None:
        """Make the attention backend known, once in each process that runs a model."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from domino_kit.serve.attention import CpuAttention

        register_attention_backend(PLATFORM_NAME)(CpuAttention)

    def post_load_model(self, model: Any) -> None:
        """Target and draft alike: products that suit a few rows."""
        from domino_kit.serve.cpu_linear import use_fast_products

        use_fast_products(model)

    def get_default_attention_backend(self) -> str:
        return PLATFORM_NAME

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return self.get_default_attention_backend()

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return algorithm == "DFLASH" and backend == self.get_default_attention_backend()

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        if kind != "mha":
            return None
        from domino_kit.serve.cpu_cache import CpuKVPool

        return CpuKVPool

    def get_speculative_cache_locs_fn(self) -> Any:
        from domino_kit.serve.cpu_cache import gather_slots

        return gather_slots

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        if algorithm != "DFLASH":
            return None
        from domino_kit.serve.cpu_worker import CpuDFlashWorker

        return CpuDFlashWorker
