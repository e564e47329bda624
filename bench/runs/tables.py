"""Tables of training runs: each row is read as generously as can be, predicted, or answered with why not.

The columns are those of `data/reported_runs.csv`; others are ignored, and any but those that say what ran may be empty.
"""

import csv
import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bench.runs.architectures import infer
from bench.runs.transformers import Run, Transformer, work_of
from fsdp_compile.config import read_text
from fsdp_compile.explain.predict import Priced, price
from fsdp_compile.explain.prediction import Prediction, Setting
from fsdp_compile.passes.cost.hardware import Hardware, device, devices, link

REPORTED = Path(__file__).parent / "data" / "reported_runs.csv"
COMPOSER_MOVES = 1.8
"""How many times the bytes of their operators Composer's blocks move: at this, eager kernels of the reported runs reach
0.7 of the bandwidth, as they do elsewhere (python -m bench fit). What moves the rest is not known."""

Row = Mapping[str, str]


@dataclass(frozen=True)
class RunPrediction:
    """What a row would take, or the error that says why it cannot be predicted."""

    row: Row
    prediction: Prediction | None = None
    error: str | None = None

    @property
    def tok_s_gpu(self) -> float | None:
        return self.prediction.tokens_per_second if self.prediction else None

    @property
    def peak_gib(self) -> float | None:
        return self.prediction.memory.peak / 2**30 if self.prediction else None

    @property
    def fits(self) -> bool | None:
        return self.prediction.fits if self.prediction else None

    @property
    def reported(self) -> float | None:
        """Tokens per second and GPU that the row itself gives, if it does."""
        try:
            value = float(self.row.get("tok_s_gpu") or "nan")
        except ValueError:
            return None
        return value if math.isfinite(value) and value > 0 else None

    @property
    def relative_error(self) -> float | None:
        return None if self.tok_s_gpu is None or self.reported is None else self.tok_s_gpu / self.reported - 1


@dataclass(frozen=True)
class Case:
    """What a row says: a transformer, in a setting, on hardware."""

    model: Transformer
    setting: Setting
    hardware: Hardware

    @property
    def run(self) -> Run:
        setting = self.setting
        width = 4 if setting.precision == "fp32" else 2
        dtype = {"fp32": "float32", "fp16": "float16", "amp_fp16": "float16"}.get(setting.precision, "bfloat16")
        compiled, loss = setting.compiled, setting.compiles_loss
        return Run(setting.batch, setting.sequence, setting.checkpointing, compiled, loss, width, dtype)

    def priced(self, hardware: Hardware | None = None) -> Priced:
        """Its seconds and bytes, on other hardware if that is given."""
        return Priced(work_of(self.model, self.run), self.setting, hardware or self.hardware)


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV file, with names of columns in lower case.

    Raises:
        ValueError: it cannot be read, has no header, or no rows.
    """
    try:
        reader = csv.DictReader(io.StringIO(read_text(Path(path)).lstrip("\ufeff")))
        given = reader.fieldnames or ()
        names = [(name or "").strip().lower() for name in given]
        rows = [{name: row[each] or "" for name, each in zip(names, given, strict=True)} for row in reader]
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}: expected a CSV file of runs, found {error}") from None
    if "model" not in names or not rows:
        found = ", ".join(names) or "nothing"
        raise ValueError(f"{path}: expected a header with a column 'model', and rows, found {found}")
    return rows


def predict_runs(path: str | Path, hardware: Hardware | None = None) -> list[RunPrediction]:
    """A prediction for each row of a file, or why there is none; on `hardware`, or by the column `device`."""
    made = []
    for row in read_rows(path):
        try:
            case = case_of(row, hardware)
            made.append(RunPrediction(row, price(work_of(case.model, case.run), case.setting, case.hardware)))
        except (ValueError, ArithmeticError) as error:
            made.append(RunPrediction(row, error=str(error)))
    return made


def case_of(row: Row, hardware: Hardware | None = None) -> Case:
    """What a row says; on `hardware`, or by the column `device`. ValueError names a column that cannot be read."""
    row = {name: value or "" for name, value in row.items()}
    sequence = _int(row, "seq", least=1)
    world = _int(row, "gpus", least=1)
    names = {"parameters": "params", "layers": "layers", "hidden": "hidden", "heads": "heads",
             "kv_heads": "kv_heads", "inner": "ffn", "vocabulary": "vocab"}  # fmt: skip
    sizes = {field: _optional(row, column) for field, column in names.items()}
    system = row.get("system", "").lower()
    model = infer(row.get("model", ""), sizes, sequence)
    if "composer" in system or "foundry" in system:  # the loss is one kernel, and eager kernels move more
        model = replace(model, fused_loss=True, moves=COMPOSER_MOVES)
    strategy, shard_size = _strategy(row.get("sharding", ""), system)
    used = hardware or _device(row.get("device", ""))
    setting = Setting(
        world_size=world,
        batch=_optional(row, "micro_batch") or 1,
        sequence=sequence,
        strategy=strategy,
        checkpointing=_checkpointing(row.get("act_ckpt", "")),
        accumulation=_optional(row, "grad_accum") or 1,
        precision=_precision(row.get("precision", ""), system),
        optimizer="adamw",
        runtime="fsdp2",
        clip=True,
        hardware=used.name,
        shard_size=shard_size,
        compiled="compile" in system or ("fms" in system and "eager" not in system),
        reduce_dtype="float32" if "fsdp2" in system or "titan" in system else None,
    )
    return Case(model, setting, _with_network(used, row))


_MOST = {"layers": 1e4, "gpus": 1e7, "seq": 1e9, "micro_batch": 1e6, "grad_accum": 1e6}  # beyond these, a mistake


def _optional(row: Row, column: str) -> int | None:
    """A whole number, such as 12, 12.0, 12,000 or 6.7B; None where there is none."""
    text = (row.get(column) or "").strip().lower().replace(",", "").replace("_", "")
    if text in ("", "-", "nan", "none", "n/a", "na", "?"):
        return None
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e\+?[0-9]+)?)([kmbt]?)", text)
    value = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2]] if match else math.nan
    most = _MOST.get(column, 1e16)
    if not 0 <= value <= most:
        raise ValueError(f"{column}: expected a number from 0 to {most:.0e}, found {row[column]!r}")
    if column == "seq" and match is not None and match[2] == "k":
        value = float(match[1]) * 1024
    return round(value)


def _int(row: Row, column: str, least: int) -> int:
    value = _optional(row, column)
    if value is None or value < least:
        raise ValueError(f"{column}: expected a number of at least {least}, found {row.get(column, '')!r}")
    return value


def _checkpointing(text: str) -> str:
    words = re.sub(r"[\s_\-()/:=]+", " ", text.strip().lower())
    if words in ("", "none", "no", "false", "off", "0", "nan"):
        return "none"
    if fraction := re.search(r"\b1 ([0-9]+)\b", words) if "/" in text else None:
        return f"selective {fraction[1]}"
    if match := re.search(r"\b0?\.([0-9]+)\b", words):
        return f"selective {max(1, round(1 / float('0.' + match[1])))}"
    if "op" in words.split() or words in ("selective", "sac"):
        return "selective op"
    if match := re.search(r"\b([0-9]+)\b", words):
        return f"selective {match[1]}" if int(match[1]) > 1 else "full"
    if any(word in words for word in ("full", "true", "yes", "on", "all", "block", "layer")):
        return "full"
    raise ValueError(f"act_ckpt: expected none, full, selective op or selective N, found {text!r}")


def _precision(text: str, system: str) -> str:
    words = text.strip().lower()
    if "8" in words or "float8" in system or "fp8" in system:
        return "fp8"
    if any(word in words for word in ("bf16", "bfloat16", "mixed")) or not words:
        return "amp_bf16" if "amp" in words else "bf16"
    if any(word in words for word in ("fp16", "float16", "half")):
        return "amp_fp16" if "amp" in words else "fp16"
    if any(word in words for word in ("32", "single")):
        return "fp32"
    raise ValueError(f"precision: expected bf16, amp_bf16, fp16, fp8 or fp32, found {text!r}")


def _strategy(text: str, system: str) -> tuple[str, int | None]:
    """The strategy, and how many ranks store a copy, if it says that."""
    words = re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
    parallel = re.search(r"\b(tp|pp|cp|ep) ?([0-9]+)\b", words) or re.search(r"\b(tp|pp|cp)() ?(?=\b)", words)
    if parallel and parallel[2] not in ("1",):
        raise ValueError(f"sharding: expected data parallelism alone, found {text!r}")
    size = re.search(r"(?:hsdp|hybrid(?: shard)?)[a-z ]*([0-9]+)$", words)
    if "hybrid" in words or "hsdp" in words:
        zero2 = "zero2" in words or "grad" in words
        return "_HYBRID_SHARD_ZERO2" if zero2 else "HYBRID_SHARD", int(size[1]) if size else None
    if any(word in words for word in ("grad op", "zero2", "zero 2", "shard grad")):
        return "SHARD_GRAD_OP", None
    if any(word in words for word in ("no shard", "ddp", "replicate")):
        return "NO_SHARD", None
    if words in ("", "full", "zero3", "zero 3", "1d") or "full shard" in words or words.startswith("fsdp"):
        return "FULL_SHARD", None
    raise ValueError(f"sharding: expected FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or NO_SHARD, found {text!r}")


def _device(text: str) -> Hardware:
    """The hardware of the longest name whose words are all in `text`; of GPUs of several sizes, the usual one."""
    words = re.sub(r"[^a-z0-9]+", " ", text.lower())
    words = " ".join(re.sub(r"^(\d+)(?:gb|gib|g)$", r"\1", word) for word in words.split())
    words = re.sub(r"\b(h100|h200|a100|b200|gb200|mi300x)(?:sxm\d?|pcie|nvl)\b", r"\1", words)
    joined = re.sub(r"\bmi300\b", "mi300x", words).split()
    known = devices()
    named = [name for name in known if set(name.lower().split("-")) <= set(joined)]
    if named:
        return known[max(named, key=len)]
    usual = next((word for word in joined if word in ("a100", "h100")), None)
    if usual:
        return known["h100-96-500w"] if usual == "h100" and "96" in joined else device(usual)
    raise ValueError(f"device: expected one of {', '.join(known)}, found {text!r}")


def _with_network(hardware: Hardware, row: Row) -> Hardware:
    """The hardware with the adapters that the row's source names, in Gb/s of a node."""
    text = " ".join(row.get(column) or "" for column in ("network", "interconnect", "source"))
    match = re.search(r"\b([0-9]+) ?gbps", text.lower())
    if match is None:
        return hardware
    per_rank = int(match[1]) / hardware.ranks_per_node
    if per_rank in (100, 200, 400, 800):
        return replace(hardware, network=link(f"ib{per_rank:.0f}"))
    usual = link("ib400")
    return replace(hardware, network=replace(usual, bandwidth=usual.bandwidth * per_rank / 400))
