"""Where routed experts live: on disk, being read, in RAM; budget, reads, heat."""

from __future__ import annotations

from glm53serve.experts.budget import experts_in_ram, open_store
from glm53serve.experts.files import ExpertFiles, ExpertReadError, Rates, model_copies
from glm53serve.experts.heat import Heat
from glm53serve.experts.store import ExpertStore
from glm53serve.experts.supply import Need, Ready, Supply, supply_of

__all__ = [
    "ExpertFiles", "ExpertReadError", "ExpertStore", "Heat", "Need", "Rates", "Ready", "Supply", "experts_in_ram", "model_copies", "open_store", "supply_of",
]  # fmt: skip
