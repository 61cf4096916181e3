"""How much shorter outputs become for the model, and whether a fact is lost: over real outputs."""
