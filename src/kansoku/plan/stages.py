"""How layers fall on pipeline stages."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kansoku.plan.layout import LayoutColumns

__all__ = ["Stages", "even_chunks", "split_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Layers of the first, the fullest middle and the last stage, one value a layout."""

    first: NDArray[np.int64]
    middle: NDArray[np.int64]
    last: NDArray[np.int64]


def even_chunks(layers: int, columns: LayoutColumns) -> NDArray[np.bool_]:
    """Tell which layouts split the layers evenly.

    Either the layers divide into pp x vp chunks, or they do so with the embedding and the logits
    counted as one layer each (Llama 3.1 405B: 126 + 2; with one layer a chunk they stand alone), or
    there is one chunk a stage and the last stages take one layer fewer.
    """
    chunks = columns.pp * columns.vp
    with_ends = ((layers + 2) % chunks == 0) & (columns.pp > 1) & (columns.pp < layers)
    uneven = (columns.vp == 1) & (columns.pp < layers)
    return np.asarray((layers % chunks == 0) | with_ends | uneven, dtype=np.bool_)


def split_layers(layers: int, columns: LayoutColumns) -> Stages:
    """Return how many layers each kind of stage holds."""
    pp = columns.pp
    chunks = pp * columns.vp
    even = layers % chunks == 0
    with_ends = ~even & ((layers + 2) % chunks == 0) & (pp > 1)
    ceiling = -(-layers // pp)
    middle = np.where(with_ends, (layers + 2) // pp, ceiling)
    first = np.where(with_ends, middle - 1, ceiling)
    # Stages that get one layer fewer stand at the end, where the logits are.
    last = np.where(with_ends, middle - 1, np.where(even, ceiling, layers // pp))
    return Stages(first=first, middle=middle, last=last)
