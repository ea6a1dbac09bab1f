// Which tokens a row attends to (model spec 5.3). A row whose prefix fits the budget sees all of it.
uint complete_pools(uint pos, uint kpool) { return (pos + 1u) / kpool; }
bool sees_all(uint pos, uint budget, uint kpool) { return pos + 1u <= budget + kpool - 1u; }
uint seen(uint pos, uint budget, uint kpool) { return sees_all(pos, budget, kpool) ? pos + 1u : budget + (pos + 1u) % kpool; }
