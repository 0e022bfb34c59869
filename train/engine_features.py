"""Features out of a running SGLang server: one request a row, and what it says is checked."""

from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from domino_kit.fingerprint import json_hash, model_folder, target_fingerprints
from domino_kit.serve.features import feature_flags
from domino_kit.serve.server import ServerError
from domino_kit.train.cached_features import FeatureFacts
from domino_kit.train.dataset import Sample

REQUEST_SECONDS = 600


class EngineFeatures:
    """A row encoder that asks a server; each row is computed alone, whatever else it serves."""

    def __init__(self, url: str, wanted: FeatureFacts, device: torch.device) -> None:
        """``wanted`` says of which target, layers and type the rows must be."""
        self._url, self._wanted, self._device = url.rstrip("/").removesuffix("/v1"), wanted, device
        self._client = httpx.Client(base_url=self._url, timeout=REQUEST_SECONDS)

    def check_server(self, longest: int) -> None:
        """Ask how the server was started; ``longest`` is the longest row.

        Raises ``ServerError`` if it does not answer, ``ValueError`` if it serves something else.
        """
        try:
            said = self._client.get("/server_info").raise_for_status().json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise ServerError(f"features.url {self._url} does not answer: {reason}.") from None
        wanted = self._wanted
        facts: dict[str, tuple[Any, Any]] = {
            "enable_return_aux_hidden_states": (said.get("enable_return_aux_hidden_states"), True),
            "aux_hidden_state_capture": (said.get("aux_hidden_state_capture"), "dflash"),
            "return_aux_hidden_state_layer_ids": (
                said.get("return_aux_hidden_state_layer_ids"), list(wanted.layer_ids)
            ),
            "disable_radix_cache": (said.get("disable_radix_cache"), True),
            "dtype": (said.get("dtype"), wanted.dtype),
        }  # fmt: skip
        for name, (found, here) in facts.items():
            if found != here:
                raise ValueError(
                    f"features.url {self._url}: the server has {name} {found!r}, but this run "
                    f"needs {here!r}; start it with: {self._flags()}"
                )
        chunk = said.get("chunked_prefill_size")
        if chunk is not None and 0 < chunk < longest:
            raise ValueError(
                f"features.url {self._url}: the server cuts prompts after chunked_prefill_size "
                f"{chunk} tokens and would return a part of the longest row ({longest} tokens); "
                f"start it with: {self._flags()}"
            )
        self._check_weights(str(said.get("model_path")))

    def _flags(self) -> str:
        return " ".join([*feature_flags(self._wanted.layer_ids), "--dtype", self._wanted.dtype])

    def _check_weights(self, path: str) -> None:
        """Raise ``ValueError`` if the served model's files are here and are another target's."""
        folder: Path | None = model_folder(path)
        if folder is None or self._wanted.weights_hash is None:
            return  # on another machine: the shapes of every row are all that can be checked
        if json_hash(target_fingerprints(folder)) != self._wanted.weights_hash:
            raise ValueError(
                f"features.url {self._url} serves {path!r}, whose weights are not those of "
                f"target.name {self._wanted.target!r}; serve that target."
            )

    def __call__(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Features ``[S, layers*D]`` and last hidden rows ``[S, D]``, or ``[S, 0]`` if not wanted.

        Raises ``ServerError`` naming the row if the server refuses it, or saw or returns other rows.
        """
        body = {
            "input_ids": sample.input_ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_hidden_states": True,
            "return_prompt_token_ids": True,
        }
        try:
            response = self._client.post("/generate", json=body)
            answer = response.json() if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise ServerError(f"row {sample.row_id!r}: {self._url} failed: {reason}.") from None
        if answer is None:
            raise ServerError(
                f"row {sample.row_id!r} ({len(sample.input_ids)} tokens): {self._url} refused it: "
                f"{' '.join(response.text.split())[:300]}"
            )
        self._check_tokens(sample, answer)
        return self._split(sample, answer)

    def _check_tokens(self, sample: Sample, answer: dict[str, Any]) -> None:
        """Raise ``ServerError`` unless the server computed exactly this row's tokens."""
        meta = answer.get("meta_info", {})
        count, cached = meta.get("prompt_tokens"), meta.get("cached_tokens") or 0
        if count != len(sample.input_ids) or cached:
            raise ServerError(
                f"row {sample.row_id!r}: {self._url} saw {count} tokens, {cached} of them from a "
                f"cache; the row has {len(sample.input_ids)}, and none may be."
            )
        seen = answer.get("prompt_token_ids")
        if seen is not None and list(seen) != sample.input_ids:
            pairs = enumerate(zip(seen, sample.input_ids, strict=False))
            place = next((i for i, (found, own) in pairs if found != own), len(seen))
            raise ServerError(
                f"row {sample.row_id!r}: {self._url} saw other tokens, first at position {place}."
            )

    def _split(self, sample: Sample, answer: dict[str, Any]) -> tuple[Tensor, Tensor]:
        wanted, name = self._wanted, sample.row_id
        found = answer["meta_info"].get("hidden_states")
        if not found:
            raise ServerError(
                f"row {name!r}: {self._url} returned no hidden states; start it with: {self._flags()}"
            )
        try:  # of the prompt; those of the answer's tokens follow
            rows = torch.tensor(found[0], dtype=getattr(torch, wanted.dtype), device=self._device)
        except (ValueError, TypeError) as error:
            raise ServerError(f"row {name!r}: {self._url} returned no matrix: {error}.") from None
        size = len(wanted.layer_ids) * wanted.hidden_size
        widths = (
            (size + wanted.hidden_size,) if wanted.hidden else (size, size + wanted.hidden_size)
        )
        if rows.dim() != 2 or len(rows) != len(sample.input_ids) or rows.shape[1] not in widths:
            raise ServerError(
                f"row {name!r}: {self._url} returned hidden states of shape {list(rows.shape)}; "
                f"{len(sample.input_ids)} tokens need [{len(sample.input_ids)}, {widths[0]}]"
                + self._hint(rows, size)
            )
        features = rows[:, :size].contiguous()
        if not wanted.hidden:
            return features, features.new_empty(len(features), 0)
        return features, rows[:, size:].contiguous()

    def _hint(self, rows: Tensor, size: int) -> str:
        if self._wanted.hidden and rows.dim() == 2 and rows.shape[1] == size:
            return (
                ", with last hidden rows: start the server with DOMINO_KIT_LAST_HIDDEN=1 in an "
                "environment that has domino-kit, or set train.regress_steps=0."
            )
        return "."
