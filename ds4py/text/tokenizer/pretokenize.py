"""How byte-level BPE vocabularies cut text into pieces before merging, by name.

Owns: the table from `tokenizer.ggml.pre` to split patterns. Refuses to know: vocabularies and
merges. Invariant: no piece is lost or changed by splitting, so that decoding gives the text back
(except for families that normalise Unicode, which say so in their rule).

The patterns are facts about how each family was trained: with another one the same text gives ids
that the model has never seen together.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, normalizers, pre_tokenizers

_log = logging.getLogger(__name__)

_CONTRACTIONS: Final = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2: Final = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_WORDS: Final = rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2: Final = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"

# Cased words: capitals and what follows them, as trained by GPT-4o and Tekken.
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD: Final = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT4O: Final = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+(?i:{_CONTRACTIONS})?|{_LEAD}{_UPPER}+{_LOWER}*(?i:{_CONTRACTIONS})?"
    rf"|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
)
_TEKKEN: Final = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_SYMBOLS}|{_SPACES}"
)

# DeepSeek V3: digits in threes, then runs of CJK, then the rest.
_DEEPSEEK3: Final = (
    r"\p{N}{1,3}",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{_SPACES}",
)

# DeepSeek V4 as ds4 cuts it: classes of bytes, docs/spec/deepseek4-model.md#pre-split, rules 1 to
# 8.
_PUNCT: Final = r"!-/:-@\[-`{-~"
_LETTERISH: Final = r"A-Za-z\x{80}-\x{10ffff}"
_BLANK: Final = r" \t\n\x0b\f\r"
_DEEPSEEK4: Final = (
    r"[0-9]{1,3}"
    r"|[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+"
    rf"|[{_PUNCT}][A-Za-z]+"
    rf"|[{_LETTERISH}]+"
    rf"|[^\r\n{_PUNCT}][{_LETTERISH}]+"
    rf"| ?[{_PUNCT}]+[\r\n]*"
    rf"|[{_BLANK}]*[\r\n]|[{_BLANK}]+(?=[{_BLANK}][{_PUNCT}{_LETTERISH}])|[{_BLANK}]+"
    r"|[\x00-\x{10ffff}]"
)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How one family cuts text.

    Args:
        patterns: Oniguruma expressions, applied one after another; each cuts the pieces of the one
            before into matches and what lies between them.
        nfc: Unicode is composed (NFC) first.
        whole_pieces: A piece that is a token as it stands is taken without merging.
        literal: In text without special tokens, user-defined tokens are not recognised either.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_pieces: bool = False
    literal: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Return the `tokenizers` object that splits and maps bytes to the GPT-2 alphabet."""
        splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, to_bytes])

    def normalizer(self) -> normalizers.Normalizer | None:
        """Return the `tokenizers` normalizer, if the family has one."""
        return normalizers.NFC() if self.nfc else None


_SINGLE_DIGITS: Final = SplitRule((r"\p{N}", _GPT2))
DEFAULT: Final = SplitRule((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

RULES: Final[dict[str, SplitRule]] = {
    "default": DEFAULT,
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais"), SplitRule((_GPT2,))),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _SINGLE_DIGITS
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3"), SplitRule((_LLAMA3,), whole_pieces=True)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), SplitRule((_LLAMA3,))),
    "qwen2": SplitRule((_QWEN2,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez"), SplitRule((_QWEN2,))),
    "falcon": SplitRule((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-4o", "llama4"), SplitRule((_GPT4O,))),
    "tekken": SplitRule((_TEKKEN,), whole_pieces=True),
    "deepseek-v3": SplitRule(_DEEPSEEK3),
    "joyai-llm": SplitRule((_DEEPSEEK4,), literal=True),
}
"""`tokenizer.ggml.pre` to rule."""


def split_rule(name: str) -> SplitRule:
    """Return the rule for a name; an unknown one is warned about and cut like "default"."""
    rule = RULES.get(name)
    if rule is None:
        _log.warning(
            "tokenizer.ggml.pre %r is not known (known: %s): text is cut as for 'default', "
            "so some token ids may differ from what the model was trained on",
            name,
            ", ".join(sorted(RULES)),
        )
    return rule or DEFAULT
