"""What a step costs: floating-point operations, counted from shapes, for the estimate of time.

A multiply-add counts as two operations; norms, activations, softmax and the optimizer are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from domino_kit.alignment import row_labels, valid_anchors
from domino_kit.config import DraftConfig
from domino_kit.target import Target
from domino_kit.train.dataset import Sample, collate


@dataclass(frozen=True)
class Operations:
    """Operations by purpose, each with its backward pass.

    ``target``: its pass over the text, without backward. ``draft``: context, block rows and head.
    ``vocabulary``: the products with the target's head and with the projector's last matrix.
    """

    target: float = 0.0
    draft: float = 0.0
    vocabulary: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.target + self.draft + self.vocabulary

    @property
    def trained(self) -> float:
        """All of it but the target's pass."""
        return self.draft + self.vocabulary


@dataclass(frozen=True)
class BatchShape:
    """A micro-batch: B samples padded to S tokens and N blocks, and the rows with a label.

    ``lengths`` are the samples' own: the target runs over each alone, without padding.
    """

    lengths: tuple[int, ...]
    anchors: int
    labelled: float

    @property
    def width(self) -> int:
        """S."""
        return max(self.lengths)


def batch_shape(samples: Sequence[Sample], num_anchors: int, config: DraftConfig) -> BatchShape:
    """The shape of a micro-batch; rows with a label are the mean over where anchors may be."""
    anchors, labelled = [0], 0.0
    for sample in samples:
        batch = collate([sample], "cpu")
        places = valid_anchors(batch.loss_mask)[0].nonzero().T
        anchors.append(min(num_anchors, places.shape[1]))
        _, supervised = row_labels(
            batch.input_ids, batch.loss_mask, places, config.block_size, config.shift_label
        )
        labelled += anchors[-1] * float(supervised.sum()) / max(1, places.shape[1])
    lengths = tuple(len(sample.input_ids) for sample in samples)
    return BatchShape(lengths, max(1, *anchors), labelled)


@dataclass(frozen=True)
class TargetCost:
    """What the target's pass costs, without its output head.

    ``weights``: elements of matrices that a token goes through; ``pairs``: operations for each
    pair of positions; ``states``: operations of linear-attention layers for each token.
    """

    weights: float
    pairs: float
    states: float

    @classmethod
    def of(cls, target: Target) -> "TargetCost":
        """Count a loaded target. Experts count by the share of them that a token goes through."""
        text, weights = target.text_config, 0.0
        experts, active = _experts(text)
        for name, parameter in target.decoder.named_parameters():
            if parameter.dim() > 1 and parameter is not target.embedding.weight:
                weights += parameter.numel() * (active / experts if ".experts." in name else 1)
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(target.layers)
        linear = list(kinds).count("linear_attention")
        heads = int(text.num_attention_heads)
        head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        states = 0.0
        if linear:  # read, correct and write the state of every value head
            state = text.linear_key_head_dim * text.linear_value_head_dim
            states = linear * 6.0 * text.linear_num_value_heads * state
        return cls(weights, (len(target.layers) - linear) * 4.0 * heads * head_dim, states)

    def operations(self, length: int) -> float:
        """A pass over one text of ``length`` tokens; causal attention sees half of all pairs."""
        pairs = length * (length + 1) / 2
        return (2 * self.weights + self.states) * length + self.pairs * pairs


def _experts(text: Any) -> tuple[int, int]:
    """Experts of a layer, and those that a token goes through; one of one without any."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        count = getattr(text, name, None)
        if count:
            return int(count), int(getattr(text, "num_experts_per_tok", count))
    return 1, 1


def batch_operations(
    shape: BatchShape, config: DraftConfig, target: TargetCost | None, *, teacher: bool = False
) -> Operations:
    """Operations of a micro-batch: forward and backward, without the optimizer.

    ``target`` is ``None`` where its features come from elsewhere; ``teacher`` if the target's own
    distribution is learnt too, which is one more product with its head.
    """
    encoded = 0.0 if target is None else sum(map(target.operations, shape.lengths))
    return Operations(
        encoded, draft_operations(shape, config), vocabulary_operations(shape, config, teacher)
    )


def draft_operations(shape: BatchShape, config: DraftConfig) -> float:
    """The draft without the vocabulary: backward is twice the forward pass, but once for ``fc`` and
    for the GRU's input product, whose inputs need no gradient. Every block is taken to see the
    whole context."""
    size, inner, depth = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    queries = config.num_attention_heads * config.head_dim
    keys = 2 * config.num_key_value_heads * config.head_dim
    batch, width = len(shape.lengths), shape.width
    rows = shape.anchors * config.block_size
    fusion = width * len(config.target_layer_ids) * size * size
    context = width * depth * size * keys
    layer = size * (queries + keys) + queries * size + 3 * size * inner
    attention = 2 * rows * (width + config.block_size) * queries
    total = 2 * fusion + 3 * (context + depth * (rows * layer + attention))
    if config.has_head:
        assert config.gru_hidden_dim is not None and config.emb_dim is not None
        state, rank = config.gru_hidden_dim, config.emb_dim
        total += rows * (2 * 3 * state * size + 3 * (3 * state * state + (size + state) * rank))
    return 2.0 * batch * total


def vocabulary_operations(shape: BatchShape, config: DraftConfig, teacher: bool) -> float:
    """Logits of labelled rows and what their gradient costs: the target's head is frozen, the
    projector's last matrix is not."""
    products = 2 * config.hidden_size + (config.hidden_size if teacher else 0)
    if config.has_head:
        assert config.emb_dim is not None
        products += 3 * config.emb_dim
    return 2.0 * shape.labelled * config.vocab_size * products
