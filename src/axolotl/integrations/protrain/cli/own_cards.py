"""`plan --cards FILE`: cards that the table does not have, with its fields."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ..core.errors import ConfigError
from ..core.planner import cards
from ..offline.yaml_file import read_yaml

_Rate = Annotated[float, Field(ge=1, le=1e5)]
# what follows a colon is its memory
_Name = Annotated[str, Field(pattern="^[^:]*[A-Za-z0-9][^:]*$")]


class OwnCard(BaseModel):
    """Fields of `Gpu`; `reach` by its name in the table."""

    model_config = ConfigDict(extra="forbid", strict=True)

    mib: Annotated[int, Field(ge=1024, le=cards.MAX_GPU_GIB << 10)]
    tflops_16: _Rate
    tflops_32: _Rate
    memory_gb_s: _Rate
    pcie: Annotated[int, Field(ge=3, le=5)]
    tflops_tf32: _Rate = 0
    capability: Annotated[int, Field(ge=0, le=200)] = 0
    reach: Literal["RTX", "PASSIVE", "AMPERE", "HOPPER", "OTHERS"] = "OTHERS"
    nvlink_gb_s: Annotated[float, Field(ge=0, le=1e5)] = 0
    aliases: list[str] = []
    lanes: Annotated[int, Field(ge=8, le=16)] = 16
    one_memory: bool = False
    source: str = ""


def own_cards(file: Path) -> tuple[cards.Gpu, ...]:
    """Read cards by their names.

    Raises:
        ConfigError: Names the file and all that is wrong there.
    """
    try:
        found = TypeAdapter(dict[_Name, OwnCard]).validate_python(read_yaml(file))
    except ValidationError as error:
        faults = "; ".join(
            f"{' '.join(map(str, fault['loc']))}: {fault['msg']}"
            for fault in error.errors()
        )
        raise ConfigError(
            f"--cards {file}: {faults}. Write for example `My card: {{mib: 24564, "
            "tflops_16: 165.2, tflops_32: 82.6, memory_gb_s: 1008, pcie: 4}`; it may "
            f"have {', '.join([*OwnCard.model_fields][5:])} too."
        ) from error
    changed = {
        name: {
            "reach": getattr(cards, own.reach),
            "aliases": tuple(own.aliases),
            "tflops_tf32": own.tflops_tf32 or own.tflops_32,
            "source": own.source or str(file),
        }
        for name, own in found.items()
    }
    return tuple(
        cards.Gpu(name=name, **own.model_dump() | changed[name])
        for name, own in found.items()
    )
