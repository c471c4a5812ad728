"""transformers, with small random models: sentences of different lengths, compared with padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    BertConfig,
    BertForTokenClassification,
    ConvNextConfig,
    ConvNextForImageClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks.real.case import SINGLE, Case, lengths, model, padded

VOCABULARY, HIDDEN, TAGS = 100, 32, 7
LENGTHS = lengths(4, 19)
NEW_TOKENS = 8


def sentences(sizes: Sequence[int] = LENGTHS) -> list[Tensor]:
    return [torch.randint(3, VOCABULARY, (n,)) for n in sizes]


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross entropy of each sentence's tokens. A target of -100 is ignored."""
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return losses.sum(1) / (targets >= 0).sum(1)


@model("BERT tagger")
def bert() -> Case:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, num_labels=TAGS, max_position_embeddings=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    network = BertForTokenClassification(config)
    examples = [(words, words % TAGS) for words in sentences()]

    def one(example: Any) -> Tensor:
        words, tags = example
        return network(words[None], labels=tags[None]).loss

    def own(minibatch: Sequence[Any]) -> Tensor:
        words, mask = padded([words for words, _ in minibatch])
        tags, _ = padded([tags for _, tags in minibatch], -100)
        return token_losses(network(words, attention_mask=mask.long()).logits, tags)

    return Case(network, examples, one, own, cells=[network])


def language_model(network: Any) -> Case:
    """Makes a case that predicts next words. The model computes the loss."""

    def one(words: Tensor) -> Tensor:
        return network(words[None], labels=words[None], use_cache=False).loss

    def own(minibatch: Sequence[Tensor]) -> Tensor:
        words, mask = padded(minibatch)
        logits = network(words, attention_mask=mask.long()).logits
        return token_losses(logits[:, :-1], words.masked_fill(~mask, -100)[:, 1:])

    return Case(network, sentences(), one, own, tolerance=SINGLE, cells=[network])


def make_gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@model("GPT-2")
def gpt2() -> Case:
    return language_model(make_gpt2())


@model("Llama")
def llama() -> Case:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    return language_model(LlamaForCausalLM(config))


@model("T5")
def t5() -> Case:
    config = T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    network = T5ForConditionalGeneration(config)
    examples = list(zip(sentences(), sentences(lengths(3, 12)), strict=True))

    def one(example: Any) -> Tensor:
        source, target = example
        return network(input_ids=source[None], labels=target[None], use_cache=False).loss

    def own(minibatch: Sequence[Any]) -> Tensor:
        source, mask = padded([source for source, _ in minibatch])
        target, _ = padded([target for _, target in minibatch], -100)
        logits = network(input_ids=source, attention_mask=mask.long(), labels=target).logits
        return token_losses(logits, target)

    return Case(network, examples, one, own, cells=[network])


@model("GPT-2, greedy generation")
def generation() -> Case:
    network = make_gpt2().eval()
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}

    def one(words: Tensor) -> Tensor:
        return network.generate(
            words[None], attention_mask=torch.ones_like(words[None]), pad_token_id=0, **options
        )[0, -NEW_TOKENS:]

    def own(minibatch: Sequence[Tensor]) -> Tensor:
        words, mask = padded([words.flip(0) for words in minibatch])
        return network.generate(
            words.flip(1), attention_mask=mask.flip(1).long(), pad_token_id=0, **options
        )[:, -NEW_TOKENS:]

    return Case(network, sentences(lengths(4, 12, 16)), one, own, trains=False)


def images(network: Any, score: Callable[[Tensor], Tensor]) -> Case:
    """Makes a case with images of different sizes. The package batches only images of one size."""
    sizes = zip(lengths(3, 6, 16), lengths(2, 5, 16), strict=True)
    examples = [torch.randn(3, 16 * height, 16 * width) for height, width in sizes]

    def one(image: Tensor) -> Tensor:
        return score(network(image[None]).logits[0])

    return Case(network, examples, one, cells=[network])


@model("ConvNeXt, images of different sizes")
def convnext() -> Case:
    config = ConvNextConfig(hidden_sizes=[8, 16, 32], depths=[1, 1, 1], num_stages=3, num_labels=5)
    return images(ConvNextForImageClassification(config), lambda logits: -logits.log_softmax(-1)[0])


@model("SegFormer, images of different sizes")
def segformer() -> Case:
    config = SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[4, 2], hidden_sizes=[8, 16],
        patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
        decoder_hidden_size=16, num_labels=4, drop_path_rate=0.0, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0,
    )  # fmt: skip
    network = SegformerForSemanticSegmentation(config).eval()  # its head has a batch norm
    return images(network, lambda logits: -logits.log_softmax(0)[1].mean())
