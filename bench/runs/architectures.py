"""Which transformer a row of a table means: by its name, its sizes, and how many parameters it has.

A name that is known gives what the row leaves out. Whatever the name is, the number of parameters decides: the sizes
that no column gives, vocabulary or width of the MLP, are solved so that the model has as many.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from bench.runs.transformers import Transformer

VOCABULARIES = (50257, 50277, 50280, 50304, 50368, 50432, 32000, 32768, 64000, 65024, 100352, 128256, 131072, 151936)


class UnknownModel(ValueError):
    """A row whose model cannot be inferred."""


def _family(family: str) -> Transformer:
    """What models of a family have in common."""
    gpt = Transformer(family, 0, 0, 0, 0, 0, 0, 50368)
    llama = replace(gpt, vocabulary=32000, gated=True, rms=True, fused_qkv=False, rotary=True, tied=False)
    return {
        "mpt": gpt,
        "gpt": replace(gpt, vocabulary=50257, norm_biases=True, biases=True),
        "neox": replace(gpt, vocabulary=50432, norm_biases=True, biases=True, rotary=True, tied=False),
        "falcon": replace(gpt, vocabulary=65024, norm_biases=True, rotary=True),
        "llama": llama,
        "qwen": replace(llama, vocabulary=151936),
        "gemma": replace(llama, vocabulary=256000, tied=True),
    }[family]


_FAMILIES = (  # the first pattern that a name has decides
    (r"mpt|mosaic", "mpt"),
    (r"neox|pythia", "neox"),
    (r"llama|mistral|mixtral|yi-|granite|olmo|vicuna|alpaca|deepseek|phi-?3", "llama"),
    (r"qwen", "qwen"),
    (r"gemma", "gemma"),
    (r"falcon", "falcon"),
    (r"gpt|opt|bloom|t5|bert", "gpt"),
)

# Pattern of a name; layers, width, heads, heads of keys, width of the MLP, vocabulary; family.
_KNOWN = (
    (r"mpt-?125m", (12, 768, 12, 12, 3072, 50368), "mpt"),
    (r"mpt-?350m", (24, 1024, 16, 16, 4096, 50368), "mpt"),
    (r"mpt-?760m", (24, 1536, 12, 12, 6144, 50368), "mpt"),
    (r"mpt-?1b", (24, 2048, 16, 16, 8192, 50368), "mpt"),
    (r"mpt-?3b", (32, 2560, 20, 20, 10240, 50368), "mpt"),
    (r"mpt-?7b", (32, 4096, 32, 32, 16384, 50368), "mpt"),
    (r"mpt-?13b", (40, 5120, 40, 40, 20480, 50368), "mpt"),
    (r"mpt-?30b", (48, 7168, 56, 56, 28672, 50368), "mpt"),
    (r"mpt-?70b", (64, 8192, 64, 64, 32768, 50368), "mpt"),
    (r"llama-?3(\.[0-9])?-?405b", (126, 16384, 128, 8, 53248, 128256), "llama"),
    (r"llama-?3(\.[0-9])?-?70b", (80, 8192, 64, 8, 28672, 128256), "llama"),
    (r"llama-?3(\.[0-9])?-?8b", (32, 4096, 32, 8, 14336, 128256), "llama"),
    (r"llama-?3(\.[0-9])?-?3b", (28, 3072, 24, 8, 8192, 128256), "llama"),
    (r"llama-?3(\.[0-9])?-?1b", (16, 2048, 32, 8, 8192, 128256), "llama"),
    (r"llama-?2?-?7b", (32, 4096, 32, 32, 11008, 32000), "llama"),
    (r"llama-?2?-?13b", (40, 5120, 40, 40, 13824, 32000), "llama"),
    (r"llama-?2?-?34b", (48, 8192, 64, 8, 22016, 32000), "llama"),
    (r"llama-?(1-)?(30|33)b", (60, 6656, 52, 52, 17920, 32000), "llama"),
    (r"llama-?(1-)?65b", (80, 8192, 64, 64, 22016, 32000), "llama"),
    (r"llama-?2?-?70b", (80, 8192, 64, 8, 28672, 32000), "llama"),
    (r"mistral-?7b", (32, 4096, 32, 8, 14336, 32000), "llama"),
    (r"qwen-?2(\.5)?-?7b", (28, 3584, 28, 4, 18944, 152064), "qwen"),
    (r"qwen-?2(\.5)?-?72b", (80, 8192, 64, 8, 29568, 152064), "qwen"),
    (r"qwen-?3-?8b", (36, 4096, 32, 8, 12288, 151936), "qwen"),
    (r"neox-?20b", (44, 6144, 64, 64, 24576, 50432), "neox"),
    (r"gpt-?3?-?175b", (96, 12288, 96, 96, 49152, 50257), "gpt"),
    (r"gpt-?1t", (128, 25600, 160, 160, 102400, 50257), "gpt"),
    (r"gpt-?2-?xl", (48, 1600, 25, 25, 6400, 50257), "gpt"),
    (r"gpt-?2-?large", (36, 1280, 20, 20, 5120, 50257), "gpt"),
    (r"gpt-?2-?medium", (24, 1024, 16, 16, 4096, 50257), "gpt"),
    (r"gpt-?2", (12, 768, 12, 12, 3072, 50257), "gpt"),
    (r"opt-?(6\.7|7)b", (32, 4096, 32, 32, 16384, 50272), "gpt"),
    (r"opt-?13b", (40, 5120, 40, 40, 20480, 50272), "gpt"),
)
_TIED = r"llama-?3\.2|llama-?3-?[13]b"  # of llamas, those whose output is the embedding


def infer(name: str, sizes: Mapping[str, int | None], sequence: int) -> Transformer:
    """The transformer that a row means.

    Args:
        name: of the model.
        sizes: what columns give: `parameters` and fields of `Transformer`.
        sequence: tokens of a sequence, as many as a table of learned positions has entries.
    """
    text = re.sub(r"[\s_/]+", "-", name.strip().lower())
    _, known, family = next((each for each in _KNOWN if re.search(each[0], text)), ("", None, None))
    family = family or next((each for pattern, each in _FAMILIES if re.search(pattern, text)), None)
    names = ("layers", "hidden", "heads", "kv_heads", "inner", "vocabulary")
    table = dict(zip(names, known, strict=True)) if known else {}
    given = {key: value for key, value in sizes.items() if value}
    layers, hidden = given.get("layers", table.get("layers")), given.get("hidden", table.get("hidden"))
    if layers is None or hidden is None:
        raise UnknownModel(f"layers, hidden: expected them for the model {name!r}, of which no sizes are known")
    if table and (table["layers"], table["hidden"]) != (layers, hidden):
        table = {}  # another model of that name
    heads = given.get("heads", table.get("heads") or max(1, hidden // 128))
    parameters = given.get("parameters") or _in_name(text)
    base = replace(
        _family(family or _guess(layers, hidden, parameters)),
        name=name, layers=layers, hidden=hidden, heads=heads, head=max(1, hidden // heads),
        tied=_family(family).tied or bool(re.search(_TIED, text)) if family else True,
    )  # fmt: skip
    exact = parameters is not None and not _is_rounded(parameters)
    candidates = list(_candidates(base, table, given, sequence, exact))
    best = candidates[0]
    if parameters and exact:
        best = min(candidates, key=lambda each: abs(each.parameters - parameters))
    tolerance = 0.12 if parameters and _is_rounded(parameters) else 0.02  # 7e9 may stand for 6.7e9
    if parameters and abs(best.parameters / parameters - 1) > tolerance:
        best = _solved(best, parameters)
    return best


def _is_rounded(parameters: int) -> bool:
    """Whether a number has two digits at most that are not 0, as in 7B and 6.7B."""
    return len(str(parameters).rstrip("0")) <= 2


def _in_name(text: str) -> int | None:
    """The number of parameters that a name says, such as 7e9 of "mpt-7b"."""
    match = re.search(r"(?<![\w.])([0-9]+(?:\.[0-9]+)?)([mbt])\b", text)
    return int(float(match[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[match[2]]) if match else None


def _guess(layers: int, hidden: int, parameters: int | None) -> str:
    """The family of a name that says nothing: as GPT if 12 layers x width^2 and a vocabulary are the parameters."""
    rest = (parameters or 0) - 12 * layers * hidden**2
    return "mpt" if not parameters or 20_000 < rest / hidden < 120_000 else "llama"


def _candidates(
    base: Transformer, table: Mapping[str, int], given: Mapping[str, int], sequence: int, exact: bool
) -> Iterator[Transformer]:
    """Transformers of these sizes, with what no column gives as such models have it."""
    heads = base.heads
    kv_heads = [given["kv_heads"]] if "kv_heads" in given else [table["kv_heads"]] if table else [heads]
    if not table and "kv_heads" not in given and base.gated and heads > 8 and heads % 8 == 0:
        kv_heads.append(8)
    usual = 4 * base.hidden if not base.gated else -(-int(8 * base.hidden / 3) // 256) * 256
    inner = given.get("inner", table.get("inner", usual))
    if "vocabulary" in given:
        vocabularies = [given["vocabulary"]]
    else:
        known = [table["vocabulary"]] if table else []
        vocabularies = [*known, base.vocabulary, *(VOCABULARIES if exact else ())]
    biases = (False, True) if not (base.biases or base.gated) else (base.biases,)
    for kv, vocabulary, positions, biased in product(
        kv_heads, vocabularies, (0,) if base.rotary else (0, sequence), biases
    ):
        yield replace(base, kv_heads=kv, inner=inner, vocabulary=vocabulary, positions=positions,
                      biases=biased, norm_biases=biased or base.norm_biases)  # fmt: skip


def _solved(model: Transformer, parameters: int) -> Transformer:
    """`model` with the vocabulary, or else the width of the MLP, at which it has so many parameters."""
    rest = parameters - replace(model, vocabulary=0).parameters
    vocabulary = rest // (model.hidden * (1 if model.tied else 2))
    if 1000 <= vocabulary <= 300_000 and not model.gated:
        return replace(model, vocabulary=vocabulary)
    matrices = (3 if model.gated else 2) * model.hidden * model.layers
    inner = (parameters - replace(model, inner=0).parameters) // matrices
    if not model.hidden // 4 <= inner <= 16 * model.hidden:
        raise UnknownModel(
            f"params: expected about {model.parameters:,}, as {model.layers} layers of width {model.hidden} have with "
            f"{model.vocabulary} entries of the vocabulary, found {parameters:,}"
        )
    return replace(model, inner=inner)
