"""Exact differential-privacy bounds on memorization and extraction, and the audits that miss them.

The companion package of the book that replicates *Memorization Is Not Extraction* (arXiv:2608.27782).
The exact theory (`tradeoff`, `bounds`, `priors`, `stats`, `mechanisms`, `games`) needs numpy and scipy only;
modules that touch language models, and the `ledger`, are imported by name and ask for their extra.
"""

from __future__ import annotations

__version__ = "0.1.0"
