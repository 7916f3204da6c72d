"""What the ranks have measured, kept by the one that chooses: another plan can be found from it without measuring again.

Invariant: a survey is a value. Its plans follow from it, what devices take longer than their profiles say, and the memory that they have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from qsync_fx.allocator.answer import Answer, Note, NoteKind
from qsync_fx.allocator.finding import find_plan
from qsync_fx.allocator.judging.judge import Judged, judged
from qsync_fx.distributed.adapting.links import Probe
from qsync_fx.distributed.hosts import FLAT, Links
from qsync_fx.plan import ClusterPlan
from qsync_fx.plan.gradient_codecs import between_nodes
from qsync_fx.predictor.replay.cluster import Cluster
from qsync_fx.predictor.replay.cluster_parts import Device
from qsync_fx.profiling.profile import Profile

CODECS: Final = "codecs"
"""The note of a plan that says which codecs there were to choose from."""


@dataclass(frozen=True)
class Survey:
    """
    Attributes:
        ranks: the class of each rank.
        profiles: of each class, that of its slowest rank, which speaks for it.
        wishes: of the user, as `qsync_fx.find_plan` takes them.
        batches: of each class, samples of that rank in a step, where that is known.
        links: which ranks share nodes, where they are told apart.
    """

    ranks: tuple[str, ...]
    profiles: Mapping[str, Profile] = field(repr=False)
    wishes: Mapping[str, Any]
    batches: Mapping[str, int] = field(default_factory=dict)
    links: Links = FLAT

    @classmethod
    def of(
        cls,
        ranks: Sequence[str],
        profiles: Sequence[Profile],
        wishes: Mapping[str, Any],
        samples: Sequence[int],
        links: Links = FLAT,
    ) -> Survey:
        """Returns the survey of ranks that each have measured themselves, with so many samples in a step; 0 where that is not known."""
        slowest: dict[str, Profile] = {}
        batches: dict[str, int] = {}
        for name, profile, batch in zip(ranks, profiles, samples, strict=True):
            if name not in slowest or _seconds(profile) > _seconds(slowest[name]):
                slowest[name], batches[name] = profile, batch
        known = {name: batch for name, batch in batches.items() if batch}
        return cls(tuple(ranks), slowest, wishes, known, links)

    def answer(
        self,
        slowdowns: Mapping[str, float] = MappingProxyType({}),
        memory: Mapping[str, float] | None = None,
        links: Sequence[tuple[int, float]] = (),
    ) -> Answer:
        """Returns what `qsync_fx.find_plan` finds.

        Args:
            slowdowns: by class, what everything takes longer than its profile says.
            memory: by class, the bytes that a step may take, in the place of what the user wished; None for that.
            links: bytes and seconds of all-reduces, in the place of those that profiles hold; none for these.

        Raises:
            QSyncError: no plan keeps the limits.
        """
        counts = Counter(self.ranks)
        devices = {
            name: Device(counts[name], slowdown=slowdowns.get(name, 1.0), batch=self.batches.get(name))
            for name in self.profiles
        }
        wishes = {**self.wishes} if memory is None else {**self.wishes, "memory": memory}
        profiles = {name: _linked(profile, links) for name, profile in self.profiles.items()}
        # Its links are what the profiles measured.
        found = find_plan(profiles, Cluster(devices, nodes=self.links.nodes), **wishes)
        return replace(found, notes=(*found.notes, Note(NoteKind.UNEVEN))) if self.links.uneven else found


@dataclass(frozen=True, init=False, repr=False, eq=False)
class FoundPlan(ClusterPlan):
    """The plan that ranks have found for themselves, with what it was found from.

    Attributes:
        survey: what was measured, on the rank that chooses; None on the others.
        answer: what the plan was made of, there.

    It equals the plan without them; nothing of them is saved or pickled.
    """

    survey: Survey | None
    answer: Answer | None

    def __init__(self, plan: ClusterPlan, survey: Survey | None = None, answer: Answer | None = None) -> None:
        super().__init__(plan.classes, plan.devices, plan.ranks, plan.notes, plan.codecs)
        object.__setattr__(self, "survey", survey)
        object.__setattr__(self, "answer", answer)

    @classmethod
    def of(cls, answer: Answer, survey: Survey) -> FoundPlan:
        """Returns the plan of an answer, with the class of each rank in its table."""
        notes = {"answer": str(answer)}
        if answer.problem.coding is not None:
            notes[CODECS] = " ".join(answer.problem.coding.codecs)
            notes |= Probe.of(answer.problem.cluster).notes()
            if (size := survey.links.nodes.ranks) > 1:
                notes |= between_nodes(size, survey.links.in_a_row)
        plan = ClusterPlan(answer.to_plans(), ranks=survey.ranks, notes=notes, codecs=answer.codecs)
        return cls(plan, survey, answer)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClusterPlan):
            return NotImplemented
        mine, theirs = ((one.classes, one.devices, one.ranks, one.codecs) for one in (self, other))
        return mine == theirs

    __hash__ = ClusterPlan.__hash__


def under(plans: Answer, now: Answer) -> Judged:
    """Returns what the plans of one answer cost where things are as in another."""
    return judged(now.problem, plans.plans, plans.judged.codecs)


def _linked(profile: Profile, links: Sequence[tuple[int, float]]) -> Profile:
    """Returns a profile with other all-reduces, where there are any."""
    if not links:
        return profile
    return replace(profile, collectives=[replace(one, seconds=list(links)) for one in profile.collectives])


def _seconds(profile: Profile) -> float:
    return sum(sum(step) for step in profile.runs[0].steps) / len(profile.runs[0].steps)
