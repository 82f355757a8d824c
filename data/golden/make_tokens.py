"""Writes the token ids that test_tokens expects, with Hugging Face's tokenizers:

    python3 -m venv ~/venv && ~/venv/bin/pip install tokenizers
    ~/venv/bin/python data/golden/make_tokens.py [vocab.bpe of GPT-2 [text...]]

tokens_text.json    the texts below
tokens_vocab.json   a vocabulary of 512 tokens, learned by
                    train_moe tokenize --train-vocab 512 on tiny Shakespeare (read, not written)
tokens_ids.json     ids of the texts with this vocabulary
tokens_gpt2.json    ids of the texts with GPT-2's

Special tokens in a text are ordinary text. Each further argument is a text of valid UTF-8, for which
its ids are compared with those in TEXT.ids (32 bits each), where that file is there.
"""
import array
import json
import os
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEXTS = [
    "a", " ", "\n", "Hello world", "First Citizen:\nBefore we proceed any further, hear me speak.",
    # white space
    "a  b", "a   b", "   a", "a   ", "  \n  \n\n  x", "\t\tif (x) {\n\t\t\treturn;\n\t\t}\n",
    " \t \n \r \x0b \x0c x", "\n\n\n\nend", "x\n \n y", "tab\tand  two", " " * 70 + "x", "\n" * 90,
    # contractions
    "I'm you're he's we've they'll I'd don't", "I'M YOU'RE HE'S", "'s 't 're", "x's'll've", "''''",
    "o'clock 'tis rock'n'roll", "it\u2019s don\u2019t",
    # line ends
    "one\r\ntwo\r\n\r\nthree\rfour\r\rfive \r\n six",
    # spaces beyond ASCII; U+180E, U+200B, U+2060 and U+FEFF are none
    "no\u00a0break\u00a0\u00a0space", "\u00a0a", "a \u00a0 b", "x\u0085y \u0085 z",
    "\u1680o\u2000\u2003\u200a\u2028\u2029\u202f\u205f\u3000p",
    "m\u180en \u180e o", "z\u200bw \u200b \u2060 \ufeff v", "\x1c\x1d\x1e\x1f u",
    "\u3000\u3000\u5168\u89d2\u3000\u7a7a\u767d",
    # digits and numbers
    "3.14159 1,000,000 0x1F 2nd 1st x2 2x", "\u0661\u0662\u0663 \u06f4\u06f5 \u0967\u0968\u0969",
    "\u00b2\u00b3\u00b9 \u00bd\u2153 \u2160\u2163 \u2460\u2473 \u3007\u3021 \U0001d7d8\U0001d7e1",
    "\uff11\uff12\uff13 a\u0663b",
    # scripts
    "\u0413\u0434\u0435 \u0436\u0435 \u0442\u044b, \u0431\u0440\u0430\u0442?",
    "\u1f18\u03bd \u1f00\u03c1\u03c7\u1fc7 \u1f26\u03bd \u1f41 \u03bb\u03cc\u03b3\u03bf\u03c2",
    "\u05d1\u05e8\u05d0\u05e9\u05d9\u05ea \u05d1\u05bc\u05b8\u05e8\u05b8\u05d0",
    "\u0641\u064a \u0627\u0644\u0628\u062f\u0621\u060c \u0643\u0627\u0646",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \uc548\ub155\ud558\uc138\uc694",
    "\u10d2\u10d0\u10db\u10d0\u10e0 \u0531\u0561\u0562 \u13a0\u13b4 \u1200\u1208",
    "na\u00efve caf\u00e9 cafe\u0301 \u00c5ngstr\u00f6m a\u0301\u0302\u0303 \u00df\u1e9e\ufb01",
    "\U00010400\U00010428 \U0001d49c\U0001d4d0 \U00020000\U0002a6d6",
    # emoji and other signs
    "\U0001f600\U0001f680 \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "\u2764\ufe0f \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd x\U0001f600y", "\u20ac5 \u00a37 \u00a59",
    "\u2014 \u2013 \u2026 \u00ab\u00a0oui\u00a0\u00bb \u201equoted\u201c", "a+b=c; x->y != z && !w",
    "http://example.org/a?b=c&d=%20#e", "_under_score__ *bold* `code` ~~~ ###", "\\n \\t \\\\ \"q\"",
    # control characters and the ends of planes
    "\x01\x02\x7f \u0080\u009f", "\ue000\uf8ff \ufffd\uffff \U0010ffff \U000e0001", "soft\u00adhyphen",
    # special tokens
    "<|endoftext|>", "a<|endoftext|>b <|endoftext|><|endoftext|>\n", "<|endoftext |> <s></s>",
    # long words
    "a" * 200, "ab" * 150, "the" * 60, "\u00e9" * 90, "!" * 130, "0123456789" * 15, "=-" * 70 + " x",
    "antidisestablishmentarianism Donaudampfschifffahrtsgesellschaftskapit\u00e4n",
]

here = os.path.dirname(os.path.abspath(__file__))


def write(name, value):
    lines = ",\n".join(json.dumps(x, separators=(",", ":")) for x in value)
    with open(os.path.join(here, name), "w", encoding="ascii", newline="\n") as f:
        f.write("[\n" + lines + "\n]\n")


def gpt2(path):
    """The vocabulary of a vocab.bpe: bytes in the order of their characters, merges, end of text."""
    with open(path, encoding="utf-8", newline="") as f:
        merges = [tuple(line.split(" ")) for line in f.read().splitlines()[1:] if line]
    own = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    tokens = [chr(b) for b in own] + [chr(256 + i) for i in range(256 - len(own))]
    tokens += [a + b for a, b in merges]
    t = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(tokens)}, merges=merges))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(["<|endoftext|>"])
    return t


def ids_of(t, text):
    t.encode_special_tokens = True
    ids = t.encode(text).ids
    assert t.decode(ids, skip_special_tokens=False) == text, text
    return ids


write("tokens_text.json", TEXTS)
own = Tokenizer.from_file(os.path.join(here, "tokens_vocab.json"))
write("tokens_ids.json", [ids_of(own, text) for text in TEXTS])
if len(sys.argv) > 1:
    theirs = gpt2(sys.argv[1])
    assert theirs.get_vocab_size() == 50257
    write("tokens_gpt2.json", [ids_of(theirs, text) for text in TEXTS])
for path in sys.argv[2:]:
    with open(path, encoding="utf-8", newline="") as f:
        text = f.read()
    for t, suffix in (own, ".ids"), (theirs, ".gpt2.ids"):
        if os.path.exists(path + suffix):
            found = array.array("I")
            with open(path + suffix, "rb") as f:
                found.frombytes(f.read())
            print(path, suffix, len(found), "tokens:", list(found) == ids_of(t, text))
