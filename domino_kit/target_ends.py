"""The target's embedding and output head, read from its files without building the target."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from domino_kit.fingerprint import INDEX_NAME, LAYER, WEIGHTS_NAME, read_weight_map
from domino_kit.products import product
from domino_kit.target import check_scaling

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
"""How the names of the two tensors end, whatever part of a model they belong to."""

PLAIN = (torch.float32, torch.bfloat16, torch.float16)
SCALED_IN_CODE = "gemma"
"""Part of the model types whose code scales embeddings without a field of the config."""


@dataclass(frozen=True)
class StoredEnds:
    """A target of which only the ends are in process (:class:`~domino_kit.target.TargetEnds`)."""

    embedding: nn.Embedding
    head: nn.Linear
    text_config: Any
    layer_ids: list[int]

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.head.out_features

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.head.in_features

    @property
    def device(self) -> torch.device:
        """Where both lie."""
        return self.embedding.weight.device

    @property
    def num_bytes(self) -> int:
        """Memory of both, once if they are tied."""
        return sum(w.nbytes for w in {self.embedding.weight, self.head.weight})

    def embed(self, token_ids: Tensor) -> Tensor:
        """Raw embeddings ``[..., D]``."""
        return self.embedding(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output logits ``[..., V]`` of normed hidden rows."""
        return product(hidden, self.head.weight)


def read_ends(
    name: str,
    config: Any,
    layer_ids: Sequence[int],
    dtype: torch.dtype,
    device: str,
    *,
    embedding_name: str | None = None,
    head_name: str | None = None,
) -> StoredEnds:
    """Embedding and head ``[V, D]`` of a model's folder or hub name, in ``dtype``, without gradients.

    ``config`` is :func:`~domino_kit.target_config.read_target_config`'s. Without full names, the
    tensors are found by :data:`EMBEDDING` and :data:`HEAD`. Of a sharded model on the hub, only the
    files that hold them are fetched. Raises ``ValueError`` in one sentence if they cannot be found,
    are quantised or do not fit the config.
    """
    text = config.get_text_config()
    check_scaling(text)
    if SCALED_IN_CODE in text.model_type:
        raise ValueError(
            f"target {name!r} is of the family {text.model_type}, which scales its embeddings in "
            "its code; its ends cannot be read from files. Load it whole: target.load=whole."
        )
    files = _Files(name)
    first = files.find("embedding", EMBEDDING, embedding_name)
    assert first is not None, "an embedding is always needed"
    embedding = files.read(first)
    _check_size(name, first, embedding, text)
    last = files.find("head", HEAD, head_name, optional=_tied(config))
    head = embedding if last in (None, first) else files.read(last)
    if head.shape != embedding.shape:
        raise ValueError(
            f"target {name!r}: the output head {last} is {list(head.shape)}, but the embedding "
            f"{first} is {list(embedding.shape)}; they must be of one vocabulary and hidden size."
        )
    return _build(embedding, head, text, list(layer_ids), dtype, device)


def _tied(config: Any) -> bool:
    """Whether the embedding is the head where no head is stored: the config must be of one mind."""
    places = (config, config.get_text_config())
    said = [getattr(place, "tie_word_embeddings", None) for place in places]
    return any(said) and False not in said


def _check_size(name: str, tensor: str, embedding: Tensor, text: Any) -> None:
    """Raise ``ValueError`` if the embedding is not as large as the config says."""
    said = [getattr(text, "vocab_size", embedding.shape[0]), text.hidden_size]
    if list(embedding.shape) != said:
        raise ValueError(
            f"target {name!r}: {tensor} is {list(embedding.shape)}, but its config says {said} "
            "(vocab_size, hidden_size); files or config are another model's."
        )


def _build(
    embedding: Tensor,
    head: Tensor,
    text: Any,
    layer_ids: list[int],
    dtype: torch.dtype,
    device: str,
) -> StoredEnds:
    with torch.device("meta"):
        first = nn.Embedding(*embedding.shape)
        last = nn.Linear(head.shape[1], head.shape[0], bias=False)
    first.weight = nn.Parameter(embedding.to(device, dtype), requires_grad=False)
    last.weight = first.weight
    if head is not embedding:
        last.weight = nn.Parameter(head.to(device, dtype), requires_grad=False)
    return StoredEnds(first, last, text, layer_ids)


class _Files:
    """A model's safetensors files, whether in a folder or on the hub."""

    def __init__(self, name: str) -> None:
        """Raises ``ValueError`` if there are none."""
        self.name = name
        single = self._fetch(WEIGHTS_NAME)
        if single is not None:
            with self._open(single) as reader:
                self.file_of: dict[str, str] = dict.fromkeys(reader.keys(), WEIGHTS_NAME)
            return
        index = self._fetch(INDEX_NAME)
        if index is None:
            raise ValueError(
                f"target {name!r} has neither {WEIGHTS_NAME} nor {INDEX_NAME}; its embedding and "
                "head are read from safetensors files only."
            )
        self.file_of = read_weight_map(index)

    def find(self, what: str, suffix: str, given: str | None, optional: bool = False) -> str | None:
        """The name of a tensor, as ``given`` or by its ``suffix``; ``None`` only if ``optional``."""
        option = f"target.{what}_name"
        if given is not None:
            if given not in self.file_of:
                raise ValueError(
                    f"target {self.name!r} stores no tensor {given!r} ({option}){self._near(what)}."
                )
            return given
        # A layer for multi-token prediction may hold a copy of its own.
        found = [n for n in self._ending(suffix) if LAYER.match(n) is None]
        if len(found) > 1:
            raise ValueError(
                f"target {self.name!r} stores several tensors that could be its {what}: "
                f"{', '.join(found)}; name the language model's with {option}."
            )
        self._refuse_quantised(what, suffix, found)
        if found or optional:
            return found[0] if found else None
        tied = ", and its config does not say tie_word_embeddings in all parts"
        raise ValueError(
            f"target {self.name!r} stores no {suffix}{tied if what == 'head' else ''}"
            f"{self._near(what)}; name the tensor with {option}."
        )

    def _ending(self, suffix: str) -> list[str]:
        return sorted(n for n in self.file_of if n == suffix or n.endswith(f".{suffix}"))

    def _near(self, what: str) -> str:
        """Names outside of layers that could be meant, for a message."""
        word = "embed" if what == "embedding" else "head"
        near = sorted(n for n in self.file_of if word in n and LAYER.match(n) is None)
        return f" (it has {', '.join(near[:6])})" if near else ""

    def _refuse_quantised(self, what: str, suffix: str, found: list[str]) -> None:
        """Raise ``ValueError`` for scales or packed values beside a matrix, or a bias of the head."""
        stem = suffix.removesuffix(".weight")
        parts = [
            n
            for n in self.file_of
            if f".{n}".rpartition(".")[0].endswith(f".{stem}") and n not in found
            and LAYER.match(n) is None
        ]  # fmt: skip
        if any(n.endswith(".bias") for n in parts):
            raise ValueError(
                f"target {self.name!r} stores {', '.join(parts)}: its output head has a bias, which "
                "no draft format carries."
            )
        if parts:
            raise ValueError(
                f"target {self.name!r} stores its {what} quantised ({', '.join(sorted(parts))}); a "
                "draft reads its plain values. Use files that leave it unquantised, as most do."
            )

    def read(self, tensor: str) -> Tensor:
        """A matrix ``[V, D]`` as stored; ``ValueError`` naming the file or the tensor."""
        file = self._fetch(self.file_of[tensor])
        if file is None:
            raise ValueError(
                f"target {self.name!r} lacks the file {self.file_of[tensor]}, which holds {tensor}."
            )
        with self._open(file) as reader:
            found = reader.get_tensor(tensor)
        if found.dtype not in PLAIN or found.dim() != 2:
            raise ValueError(
                f"{file}: {tensor} is {str(found.dtype).removeprefix('torch.')} of shape "
                f"{list(found.shape)}; a draft needs a plain matrix in float32, bfloat16 or float16, "
                "so use files that leave it unquantised."
            )
        return found

    def _fetch(self, file: str) -> Path | None:
        """The path of one file, fetched for a hub name; ``None`` if there is none of that name."""
        folder = Path(self.name).expanduser()
        if folder.is_dir():
            return folder / file if (folder / file).is_file() else None
        from transformers.utils import cached_file

        try:
            found = cached_file(self.name, file, _raise_exceptions_for_missing_entries=False)
        except OSError as error:
            said = str(error).strip().splitlines()[0]
            raise ValueError(f"{file} of target {self.name!r} cannot be fetched: {said}") from None
        return None if found is None else Path(found)

    @contextmanager
    def _open(self, file: Path) -> Iterator[Any]:
        try:
            with safe_open(file, framework="pt") as reader:
                yield reader
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file} is not a readable safetensors file ({error}); copy or download it again."
            ) from None
