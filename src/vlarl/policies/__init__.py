"""Policies: models that sample decisions, behind one contract."""
