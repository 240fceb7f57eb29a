"""`adapters check`: what an adapter is and whether it would be served, found on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from adapters.adapter_files import TOKENIZER_FILES
from adapters.base_model import EMBEDDING, HEAD, BaseModelShape
from adapters.client import AdaptersClient, ClientError, Exit
from adapters.errors import InvalidAdapter
from adapters.layout import AdapterLayout, LowRank
from adapters.model_shape import UnknownModel, shape_of_files, shape_of_object
from adapters.peft_config import MAX_RANK
from adapters.precheck import precheck
from adapters.reader import lay_out, read_config
from adapters.standalone import lay_out_alone
from adapters.validation import digest_of_layout, has_effect
from adapters.weight_files import read_tensors
from adapters.weights_scan import scan_weights
from adapters.words import words_of


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check found in an adapter that is valid."""

    digest: bytes
    """Without a tokenizer of its own, which only a server can judge."""
    layout: AdapterLayout
    base_model: str | None
    """As the config names it."""
    against_base: bool
    """Whether it was laid against a base model, or only against itself."""
    effect: bool
    tokenizer_files: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(part.tensor.nbytes for part in self.layout.parts)

    def as_json(self) -> dict[str, Any]:
        """The report for programs."""
        return {
            "valid": True,
            "digest": self.digest.hex(),
            "base_model": self.base_model,
            "checked_against_base": self.against_base,
            "bytes": self.nbytes,
            "tensors": len(self.layout.parts),
            "target_modules": list(self.layout.target_modules),
            "vocab_size": self.layout.vocab_size or None,
            "invocation_tokens": list(self.layout.invocation_tokens),
            "tokenizer_files": list(self.tokenizer_files),
            "has_effect": self.effect,
            "modules": [
                {"module": row.module, "layers": row.layers, "rank": row.rank, "scale": row.scale,
                 "dtype": row.dtype, "extras": list(row.extras)}
                for row in rows_of(self.layout)
            ],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the report: a module with the layers where it is adapted alike."""

    module: str
    layers: list[int]
    """Empty for the embedding and lm_head."""
    rank: int | None
    scale: float | None
    dtype: str
    extras: tuple[str, ...]


def check_folder(folder: Path, shape: BaseModelShape | None, *, allow_zero: bool = False) -> CheckReport:
    """Checks the adapter in `folder` as an upload would be, against a base model's shape if there is one.

    Without one, everything is checked but that modules, layers and sizes are the base model's. Other files in
    the folder do not matter. Reads all weights. Raises `InvalidAdapter`.
    """
    precheck(folder)
    config, tensors = read_config(folder), read_tensors(folder)
    layout = lay_out_alone(config, tensors) if shape is None else lay_out(config, tensors, shape)
    scans = scan_weights(folder, [part.tensor for part in layout.parts], follow_links=True)
    effect = has_effect(layout, scans, layout.vocab_size if shape is None else shape.vocab_size)
    if not (effect or allow_zero):
        raise InvalidAdapter(
            "The adapter's update is zero in every module, so it would answer as the base model does; train "
            "it, or allow it with --allow-zero."
        )
    return CheckReport(
        digest=digest_of_layout(layout, scans, words_of(folder, own_tokenizer=False)),
        layout=layout,
        base_model=config.base_model,
        against_base=shape is not None,
        effect=effect,
        tokenizer_files=tuple(name for name in TOKENIZER_FILES if (folder / name).is_file()),
    )


def rows_of(layout: AdapterLayout) -> list[Row]:
    """The report's lines, in the order of the base model's modules."""
    rows: dict[tuple[object, ...], Row] = {}
    for (layer, module), update in layout.linear.items():
        row = _update_row(module, update)
        key = (module, row.rank, row.scale, row.dtype, row.extras)
        rows.setdefault(key, row).layers.append(layer)
    return [
        *sorted(rows.values(), key=lambda row: layout.target_modules.index(row.module)),
        *_end_rows(layout),
    ]


def _update_row(module: str, update: LowRank) -> Row:
    extras = [name for name, tensor in (("bias", update.bias), ("DoRA", update.magnitude)) if tensor]
    return Row(module, [], update.rank, update.scale, update.a.dtype, tuple(extras))


def _end_rows(layout: AdapterLayout) -> Iterator[Row]:
    for end, update, saved, tokens in (
        (EMBEDDING, layout.embedding, layout.saved_embedding, layout.embedding_tokens),
        (HEAD, layout.lm_head, layout.saved_lm_head, layout.lm_head_tokens),
    ):
        if update is not None:
            yield _update_row(end, update)
        if saved is not None:
            yield Row(end, [], None, None, saved.dtype, (f"whole weight, {saved.shape[0]} tokens",))
        if tokens is not None:
            extra = f"{len(tokens.indices)} trained tokens"
            yield Row(end, [], None, None, tokens.rows.dtype, (extra,))


def check(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="The adapter's folder.")
    ],
    model: Annotated[
        Path | None,
        typer.Option("--model", exists=True, help="Its base model: a Hugging Face folder or a GGUF file."),
    ] = None,
    url: Annotated[
        str, typer.Option("--url", help="Or a gateway, which tells what it serves.", show_default=False)
    ] = "",
    api_key: Annotated[
        str,
        typer.Option("--api-key", envvar="LORAPLEX_API_KEY", show_default=False, help="A key for --url."),
    ] = "",
    allow_zero: Annotated[
        bool, typer.Option("--allow-zero", help="Accept an adapter that changes nothing, as before training.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check an adapter without uploading it: exit code 0 if it would be served, 1 if not, and why.

    Without --model or --url it is checked against itself only: not whether it fits a base model. A tokenizer
    of its own is left to the upload.

    Example: adapters check ./pirate --model ./SmolLM2-135M-Instruct.gguf
    """
    shape = _base_shape(model, url, api_key)
    try:
        report = check_folder(folder, shape, allow_zero=allow_zero)
    except InvalidAdapter as error:
        if not as_json:
            raise
        fault = {"valid": False, "error": error.message, "field_or_tensor": error.field_or_tensor}
        typer.echo(json.dumps(fault, indent=2))
        raise typer.Exit(Exit.REFUSED) from None
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        _print(report)


def _base_shape(model: Path | None, url: str, api_key: str) -> BaseModelShape | None:
    if model is not None and url:
        raise ClientError("Give --model or --url, not both.", Exit.USAGE)
    try:
        if model is not None:
            return shape_of_files(model, max_lora_rank=MAX_RANK)
        if not url:
            return None
        if not api_key:
            raise ClientError("Give your API key with --api-key or LORAPLEX_API_KEY.", Exit.USAGE)
        with AdaptersClient(url, api_key) as client:
            return shape_of_object(client.base())
    except UnknownModel as error:
        raise ClientError(str(error), Exit.USAGE) from None


def _print(report: CheckReport) -> None:
    layout = report.layout
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("module", "layers", "rank", "scale", "dtype", "and"):
        table.add_column(heading, overflow="fold")
    for row in rows_of(layout):
        table.add_row(
            row.module,
            _ranges(row.layers),
            "" if row.rank is None else str(row.rank),
            "" if row.scale is None else f"{row.scale:g}",
            row.dtype,
            ", ".join(row.extras),
        )
    Console(highlight=False, markup=False, soft_wrap=True).print(table)
    notes = [f"{len(layout.parts)} tensors, {decimal(report.nbytes)}"]
    if layout.invocation_tokens:
        notes.append(f"activated by {len(layout.invocation_tokens)} tokens")
    if report.tokenizer_files:
        names = ", ".join(report.tokenizer_files)
        notes.append(f"tokenizer files, which only a server can judge: {names}")
    if not report.effect:
        notes.append("changes nothing")
    typer.echo("; ".join(notes))
    fits = "fits the base model" if report.against_base else "not checked against a base model"
    typer.echo(f"valid ({fits}); sha256:{report.digest.hex()}")


def _ranges(layers: list[int]) -> str:
    """0, 1, 2, 5 as ``0-2 5``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
