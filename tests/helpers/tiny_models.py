"""Tiny Transformers with random weights, saved in the format of Hugging Face."""

from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = """
a an the film movie story actor plot scene is was feels looks very quite so good great fine witty warm
bad dull slow poor flat cold and but not never it this that one two three , . ! ? ' ##s ##ly ##ed ##ing
"""
LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)]

KINDS = {
    "bert": (transformers.BertConfig, {"max_position_embeddings": 40}),
    "roberta": (transformers.RobertaConfig, {"max_position_embeddings": 42, "pad_token_id": 1}),
    "distilbert": (transformers.DistilBertConfig, {"max_position_embeddings": 40}),
    "mpnet": (transformers.MPNetConfig, {"max_position_embeddings": 42}),
    "electra": (transformers.ElectraConfig, {"max_position_embeddings": 40, "embedding_size": 8}),
    "deberta": (
        transformers.DebertaV2Config,
        {
            "max_position_embeddings": 40,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "position_buckets": 16,
        },
    ),
    "modernbert": (
        transformers.ModernBertConfig,
        {"max_position_embeddings": 40, "local_attention": 8, "pad_token_id": 0}
        | dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1),
    ),
}


def tiny_tokenizer(kind: str):
    """Build a WordPiece tokenizer as in BERT, or for RoBERTa a byte-level one with spaces in its tokens."""
    pad_first = ["<s>", "<pad>"] if kind == "roberta" else ["[PAD]", "[CLS]"]
    special = [*pad_first, "[SEP]", "[UNK]"]
    begin, pad = ("<s>", "<pad>") if kind == "roberta" else ("[CLS]", "[PAD]")
    if kind == "roberta":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        # A letter after a space, which this tokenizer writes as Ġ, is one token with it.
        merges = [("Ġ", letter) for letter in LETTERS]
        pieces = [*special, *alphabet, *map("".join, merges)]
        vocabulary = {token: k for k, token in enumerate(pieces)}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        pieces = [*special, *WORDS.split(), *LETTERS, *(f"##{c}" for c in LETTERS)]
        vocabulary = {token: k for k, token in enumerate(dict.fromkeys(pieces))}
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.StripAccents()])
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"[^\w\s]"), "isolated")]
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A [SEP]",
        special_tokens=[(begin, vocabulary[begin]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token=begin, pad_token=pad, sep_token="[SEP]", unk_token="[UNK]"
    )


def without_special_tokens():
    """Return a BERT tokenizer that adds no special tokens, like the tokenizers of GPT."""
    tokenizer = tiny_tokenizer("bert")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    return tokenizer


def save_tiny(folder: Path, kind: str = "bert", seed: int = 0, **options) -> str:
    """Build a tiny model of the kind, save it with its tokenizer to the folder, and return the folder."""
    tokenizer = tiny_tokenizer(kind)
    config_class, sizes = KINDS[kind]
    narrow = (
        {"dim": 16, "hidden_dim": 32}
        if kind == "distilbert"
        else {"hidden_size": 16, "intermediate_size": 32}
    )
    heads = {"n_heads": 2, "n_layers": 2} if kind == "distilbert" else {}
    if kind != "distilbert":
        heads = {"num_attention_heads": 2, "num_hidden_layers": 2}
    config = config_class(vocab_size=len(tokenizer), **narrow, **heads, **sizes, **options)
    save_random(folder, config, seed)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_random(folder: Path, config: transformers.PretrainedConfig, seed: int) -> None:
    """Save a model with random weights as large as trained ones, so that all hidden states differ."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModel.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
