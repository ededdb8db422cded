"""Which rank each file is: by distributedInfo, then file name, then the user's word."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["RankClaim", "RankVerdict", "missing_ranks", "resolve_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClaim:
    """What one file says of its rank."""

    file: str
    said: int | None
    """From distributedInfo."""
    named: int | None
    """From the file name."""
    given: int | None
    """From the user."""
    world_size: int | None


@dataclass(slots=True, kw_only=True)
class RankVerdict:
    """The rank taken for one file."""

    rank: int | None
    source: str | None
    problems: list[str] = field(default_factory=list)


def resolve_ranks(claims: Sequence[RankClaim]) -> list[RankVerdict]:
    """Return the rank of every file, with sentences on doubts, in the order of the claims.

    distributedInfo wins; but where it gives several files one rank and the file names tell them
    apart, the names win and every such file says so.
    """
    verdicts = [_first(claim) for claim in claims]
    counts = Counter(v.rank for v in verdicts if v.rank is not None)
    doubled = {rank for rank, count in counts.items() if count > 1}
    if not doubled:
        return verdicts
    named = [claim.named for claim in claims]
    if None not in named and len(set(named)) == len(named):
        for claim, verdict in zip(claims, verdicts, strict=True):
            if verdict.rank != claim.named or verdict.rank in doubled:
                verdict.problems.append(
                    f"distributedInfo says rank {claim.said} in {counts[claim.said]} files; the "
                    f"file name's rank {claim.named} is taken"
                    if claim.said in doubled
                    else f"distributedInfo says rank {claim.said}, the file name {claim.named} is "
                    "taken because other files share one rank"
                )
                verdict.rank, verdict.source = claim.named, "file name"
        return verdicts
    everyone = len(counts) == 1 and len(claims) > 1 and None not in {v.rank for v in verdicts}
    for claim, verdict in zip(claims, verdicts, strict=True):
        if verdict.rank not in doubled:
            continue
        if everyone:
            verdict.problems.append(
                f"all {len(claims)} files say rank {verdict.rank}; give --rank FILE=N to tell them "
                "apart"
            )
        else:
            others = [
                other.file
                for other, its in zip(claims, verdicts, strict=True)
                if its.rank == verdict.rank and other is not claim
            ]
            verdict.problems.append(f"rank {verdict.rank} is also in {', '.join(others)}")
    return verdicts


def _first(claim: RankClaim) -> RankVerdict:
    for rank, source in (
        (claim.said, "distributedInfo"),
        (claim.named, "file name"),
        (claim.given, "user"),
    ):
        if rank is not None:
            return RankVerdict(rank=rank, source=source)
    return RankVerdict(
        rank=None,
        source=None,
        problems=[
            "rank unknown: neither distributedInfo nor the file name tells; give --rank FILE=N"
        ],
    )


def missing_ranks(claims: Sequence[RankClaim], verdicts: Sequence[RankVerdict]) -> list[int] | None:
    """Return the ranks of the job that no file holds; None where the world size is unknown."""
    sizes = {claim.world_size for claim in claims if claim.world_size}
    if len(sizes) != 1:
        return None
    present = {verdict.rank for verdict in verdicts}
    size = sizes.pop()
    return [rank for rank in range(min(size, 1 << 20)) if rank not in present]
