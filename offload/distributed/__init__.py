"""Distributed: the ranks of a group, their reports side by side and one decision for all.

ranks.py      least, median and most over the reports, and who holds up the others
agreement.py  one decision for all ranks, through the store by which they have met
"""

from offload.distributed.ranks import Figure, RankReports, Straggler, gather

__all__ = ["Figure", "RankReports", "Straggler", "gather"]
